//! `fa3 plan` as a command.

use crate::files::Folder;
use crate::{Ran, fa3};
use fa3_sched::forward::{OrderComparison, OrderTable, Plan, PlanOptions, SplitKeys};
use fa3_sched::{DeviceLimits, backward, cached};
use fa3_types::{
    AppendRotary, BackwardSpec, CachedSpec, Dtype, Mask, Problem, ProblemSpec, RopeStyle, SequenceBase,
    SequenceRows, Sequences, Shape, TensorDesc,
};
use serde_json::Value;

fn plan(args: &str) -> Ran {
    fa3(&format!("plan {args}"))
}

/// Asserts that the command prints the library's plan and comparison.
#[track_caller]
fn prints(args: &str, problem: &Problem, limits: &DeviceLimits) {
    let stdout = plan(args).succeeded();
    let expected = Plan::new(problem, limits).unwrap().to_string();
    assert!(stdout.starts_with(&expected), "{stdout}\nexpected\n{expected}");
    let orders = OrderTable(vec![OrderComparison::new(problem, limits).unwrap().unwrap()]).to_string();
    assert!(stdout.ends_with(&format!("{orders}\n")), "{stdout}\nexpected\n{orders}");
}

#[test]
fn options_make_the_problem() {
    let limits = DeviceLimits::h100_sxm();
    let q = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
    let causal = ProblemSpec::dense(Dtype::Bf16, q, q).causal().validate().unwrap();
    prints("--batch 4 --seqlen 4096 --heads 8 --head-dim 128 --causal", &causal, &limits);

    let (q, kv) =
        (Shape { batch: 1, seqlen: 300, ..q }, Shape { batch: 1, seqlen: 900, heads: 2, head_dim: 128 });
    let window = Mask::Window { left: Some(64), right: None };
    let spec = ProblemSpec::dense(Dtype::F16, q, kv).head_dim_v(64).mask(window);
    let args = "--seqlen 300 --seqlen-k 900 --heads 8 --heads-kv 2 --head-dim 128 --head-dim-v 64 \
                --dtype f16 --window 64,-1 --sms 20";
    prints(args, &spec.clone().validate().unwrap(), &limits.sms(20.try_into().unwrap()));
    let both = args.replace("--seqlen 300", "--seqlen-q 300");
    prints(&both, &spec.validate().unwrap(), &limits.sms(20.try_into().unwrap()));
}

/// Every example in the help of these commands runs, without the files that it would write.
#[test]
fn the_examples_run() {
    for (verb, count) in [("plan", 7), ("ir", 3), ("ptx", 3), ("sim", 10), ("kernels", 2), ("doctor", 2)] {
        let help = fa3(&format!("{verb} --help")).succeeded();
        let examples: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  fa3 ")).collect();
        assert_eq!(examples.len(), count, "{help}");
        for example in examples {
            let words = example.split_whitespace().take_while(|word| !["--svg", ">"].contains(word));
            let stdout = fa3(&words.collect::<Vec<_>>().join(" ").replace('\'', "")).succeeded();
            assert!(!stdout.contains("on the CPU only"), "{example}: {stdout}");
        }
    }
}

/// Options appear in the plan. Other orders are compared only for the library's own plans.
#[test]
fn plans_can_be_changed() {
    let stdout = |more: &str| plan(&format!("--seqlen 8k --heads 16 --head-dim 128 {more}")).succeeded();
    assert!(stdout("").contains("QK and PV issued together") && stdout("").contains("Makespan by order"));
    let changed = stdout("--pipeline serial --ping-pong off");
    assert!(!changed.contains("QK and PV issued together") && !changed.contains("ping-pong"), "{changed}");
    assert!(!changed.contains("Makespan by order"), "{changed}");
    let folder = Folder::new();
    folder.fa3("plan --seqlen 8k --heads 16 --head-dim 128 --loads consumers --svg plan.svg").succeeded();
    assert!(folder.path("plan.svg").exists());
    plan("--seqlen 64 --heads 1 --head-dim 128 --dtype e4m3 --pipeline three-stage")
        .refused("products are serial or paired");
}

/// Attention over a cache, and an append before it.
#[test]
fn caches_have_plans() {
    let limits = DeviceLimits::h100_sxm().sms(20.try_into().unwrap());
    let q = Shape { batch: 3, seqlen: 4, heads: 16, head_dim: 128 };
    // The sequences have 5, 1 and 3 pages. One page is unused.
    let kv = Shape { batch: 10, seqlen: 64, heads: 1, head_dim: 128 };
    let sequences = Sequences::paged(3, 5).used();
    let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).causal().seqs_k(sequences);
    let args = "--cache-seqlens 300,10,140 --page-size 64 --seqlen-q 4 --heads 16 --heads-kv 1 --head-dim 128 \
                --causal --sms 20";
    for (more, options) in
        [("", PlanOptions::default()), ("--split-keys", PlanOptions::default().split_keys(SplitKeys::Even))]
    {
        let problem = spec.clone().validate().unwrap();
        let expected = Plan::with(&problem, &limits, &options).unwrap();
        assert_eq!(plan(&format!("{args} {more}")).succeeded(), format!("{expected}\n"));
        let new = TensorDesc::contiguous(Dtype::Bf16, Shape { heads: 1, seqlen: 2, ..q });
        let rotary = AppendRotary {
            style: RopeStyle::HalfSplit,
            rotary_dim: 64,
            table: Dtype::F32,
            table_rows: 302,
            base: SequenceBase::Used,
        };
        let cached = CachedSpec::new(spec.clone(), [new, new], Sequences::dense(3, 2)).rotary(rotary);
        let expected = cached::Plan::with(&cached.validate().unwrap(), &limits, &options).unwrap();
        let stdout = plan(&format!("{args} {more} --seqlen-new 2 --rotary-dim 64")).succeeded();
        assert_eq!(stdout, format!("{expected}\n"));
    }
    let report = |more: &str| plan(&format!("{args} --json - {more}")).json();
    let shared = report("--split-keys");
    assert_eq!((&shared["heads_of_a_tile"], &shared["positions_of_a_tile"]), (&16.into(), &4.into()));
    let appending = report("--seqlen-new 2");
    let append = &appending["append"];
    assert_eq!((&append["keys"]["rows"], &append["queries"]), (&6.into(), &Value::Null));
    assert_eq!(appending["attention"]["sequences"], 3);
    plan(&format!("{args} --svg x.svg")).refused("lengths are data, which kernels find on the device");
    let stdout = plan("--cache-seqlens 50 --heads 1 --head-dim 64 --dtype f32").succeeded();
    assert!(stdout.starts_with("computed on the CPU only, because "), "{stdout}");
    plan(&format!("{args} --seqlen-new 2 --rotary-dim 64 --dtype e4m3"))
        .refused("rows of e4m3 cannot be rotated");
    assert_eq!(plan(&format!("{args} --backward")).code, Some(2));
}

#[test]
fn the_backward_pass_has_plans() {
    let shape = Shape { batch: 2, seqlen: 5000, heads: 16, head_dim: 128 };
    let forward = ProblemSpec::dense(Dtype::Bf16, shape, Shape { heads: 4, ..shape }).causal();
    let problem = BackwardSpec::contiguous(forward).validate().unwrap();
    let limits = DeviceLimits::h100_sxm().sms(20.try_into().unwrap());
    let args = "--batch 2 --seqlen 5000 --heads 16 --heads-kv 4 --head-dim 128 --causal --sms 20 --backward";
    let options = backward::PlanOptions::default();
    for (more, options) in [("", options), ("--deterministic", options.deterministic())] {
        let expected = backward::Plan::with(&problem, &limits, &options).unwrap();
        assert_eq!(plan(&format!("{args} {more}")).succeeded(), format!("{expected}\n"));
    }
    let base = "--heads 4 --head-dim 64 --backward";
    let stdout = plan(&format!("{base} --cu-seqlens-q 0,100,1100")).succeeded();
    assert!(stdout.contains("bytes for 2 sequences, which kernels write before\n"), "{stdout}");
    assert_eq!(
        plan(&format!("{base} --seqlen 64 --dtype f32")).succeeded(),
        "computed on the CPU only, because the backward kernels take f16 and bf16 tensors of one type, not f32 with an \
         output of f32\n"
    );
    plan(&format!("{base} --seqlen 64 --dtype e4m3"))
        .refused("there are no gradients of attention with q, k and v of e4m3");
    for more in ["--pipeline serial", "--scheduler one"] {
        assert_eq!(plan(&format!("{base} --seqlen 64 {more}")).code, Some(2), "{more}");
    }
    assert_eq!(plan("--heads 4 --head-dim 64 --seqlen 64 --deterministic").code, Some(2));
}

/// The picture has a panel for each kernel with matrix products. Without a schedule, the command says why.
#[test]
fn the_backward_pass_has_a_picture() {
    let base = "plan --seqlen 1000 --heads 4 --causal --backward --svg plan.svg";
    for (more, panels) in [("--head-dim 64", 1), ("--head-dim 256", 2)] {
        let folder = Folder::new();
        folder.fa3(&format!("{base} {more}")).succeeded();
        let picture = folder.text("plan.svg");
        assert_eq!(picture.matches(" of the bound, CTAs busy ").count(), panels, "{picture}");
    }
    let (folder, why) = (Folder::new(), "there is no schedule to draw: the backward kernels");
    folder.fa3(&format!("{base} --head-dim 64 --dtype f32")).refused(why);
    assert_eq!(folder.count(), 0);
}

/// The report goes to a file beside the text, or alone to stdout.
#[test]
fn reports_for_programs() {
    let folder = Folder::new();
    for (verb, key) in [
        ("plan --seqlen 4k --heads 8 --head-dim 128 --causal", "/registers/entry"),
        ("plan --seqlen 64 --heads 4 --head-dim 64 --dtype f32", "/cpu_only"),
        ("plan --seqlen 64 --heads 4 --head-dim 64 --backward", "/dkv/smem_bytes"),
        ("plan --seqlen 64 --heads 4 --head-dim 256 --backward", "/dq/smem_bytes"),
        ("sim tile_copy --seeds 3", "/steps/0/tma_loads/bytes"),
        ("kernels vector_add", "/kernels/0/threads"),
        ("doctor", "/runs/0/runs"),
    ] {
        let printed = fa3(&format!("{verb} --json -")).json();
        assert!(printed.pointer(key).is_some_and(|value| !value.is_null()), "{verb}: {printed}");
        let stdout = folder.fa3(&format!("{verb} --json report.json")).succeeded();
        let is_text = serde_json::from_str::<Value>(&stdout).is_err();
        assert!(stdout.ends_with("report.json\n") && is_text, "{stdout}");
        // The elapsed time differs.
        let [written, printed] = [folder.json("report.json"), printed].map(|x| x.as_object().unwrap().len());
        assert_eq!(written, printed);
    }
    plan("--seqlen 64 --heads 4 --head-dim 64 --json - --svg x.svg")
        .refused("--json - prints JSON and nothing else");
}

/// The device lists the tiles of packed sequences: the plan prints only what is known in advance.
#[test]
fn packed_sequences() {
    let args = "--heads 4 --head-dim 64 --causal --cu-seqlens-q 0,100,1100 --cu-seqlens-k 0,7,900";
    let (rows_q, rows_k) = ([0, 100, 1100], [0, 7, 900]);
    let [rows_q, rows_k] = [rows_q, rows_k].map(|starts| SequenceRows::packed(&starts).unwrap());
    let problem = ProblemSpec::packed(Dtype::Bf16, (4, 4), 64, &rows_q, &rows_k).causal().validate().unwrap();
    let expected = Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap().to_string();
    assert!(expected.contains("by a table of 2 sequences"), "{expected}");
    assert_eq!(plan(args).succeeded(), format!("{expected}\n"));
    assert_eq!(plan(&format!("{args} --json -")).json()["sequences"], 2);
    plan(&format!("{args} --svg x.svg")).refused("lengths are data, which kernels find on the device");
}

/// Each panel has a bar for each split, or for each tile: 24 tiles of few keys are whole, and CTAs share the others.
#[test]
fn the_picture_of_split_kv() {
    let folder = Folder::new();
    let heads = "--heads 32 --heads-kv 8 --head-dim 128 --split-keys --svg plan.svg";
    folder.fa3(&format!("plan --cache-seqlens 32k,1k,1k,64 {heads}")).succeeded();
    let text = folder.text("plan.svg");
    for part in ["split-KV: 37 blocks", "whole tiles: 513 blocks", "CTA, 32 of 132 used"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    // New rows count, and rows of left padding do not. Dense sequences are equally long, and packed ones are not.
    for (lengths, longest) in [
        ("--cache-seqlens 4000,80 --cache-leftpad 100,0 --seqlen-new 4", 62),
        ("--seqlen-q 1 --seqlen-k 4000 --batch 2", 64),
        ("--cu-seqlens-q 0,1,2 --cu-seqlens-k 0,100,4000", 62),
    ] {
        folder.fa3(&format!("plan {lengths} {heads}")).succeeded();
        let text = folder.text("plan.svg");
        assert!(text.contains(&format!("whole tiles: {longest} blocks")), "{lengths}: {text}");
    }
}

/// No plan is printed without a kernel for it.
#[test]
fn what_only_the_cpu_computes_is_said_so() {
    let folder = Folder::new();
    let no_tile = "the forward kernels have no tile for head_dim 64 and head_dim_v 512: of FP8 they take up to 256 and \
                   256";
    for (options, why) in [
        ("--seqlen 64 --dtype f32", "the forward kernels take f16, bf16 and e4m3, not f32"),
        ("--seqlen 64 --dtype e4m3 --head-dim-v 512", no_tile),
    ] {
        let words = format!("--heads 4 --head-dim 64 {options}");
        assert_eq!(plan(&words).succeeded(), format!("computed on the CPU only, because {why}\n"));
        let why = format!("there is no schedule to draw: {why}");
        folder.fa3(&format!("plan {words} --svg plan.svg")).refused(&why);
        assert_eq!(folder.count(), 0);
    }
    // On a GPU, rows of host arrays are padded.
    let stdout = plan("--seqlen 64 --heads 4 --head-dim 100").succeeded();
    let padded = "padded     q has head_dim 100, not a multiple of 8 as bf16 needs (16-byte rows): arrays of the host are \
                  padded for a GPU\nproblem    bf16 batch 1 seqlen 64 x 64 heads 4/4 head_dim 104 ";
    assert!(stdout.starts_with(padded), "{stdout}");
}

#[test]
fn nothing_to_do_is_a_plan() {
    let folder = Folder::new();
    let stdout = folder.fa3("plan --seqlen 0 --heads 8 --head-dim 128 --svg plan.svg").succeeded();
    assert!(stdout.contains("tiles      0") && !stdout.contains("Makespan"), "{stdout}");
    let text = folder.text("plan.svg");
    assert!(text.contains("planned: no tiles") && !text.contains("of the bound"), "{text}");
}

/// The only tile fills the picture, and the axis has its end.
#[test]
fn one_tile_is_a_picture() {
    let folder = Folder::new();
    folder.fa3("plan --seqlen 1 --heads 1 --head-dim 64 --svg plan.svg").succeeded();
    let text = folder.text("plan.svg");
    assert_eq!(text.lines().filter(|line| *line == "2").count(), 2, "{text}");
    for part in ["each tile visits 1 block; the line", "planned: 2 blocks", "CTA, 1 of 132 used"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

/// The picture shows the schedule. Unless tiles are left out, each panel has a bar for each of the 1024 tiles.
#[test]
fn the_picture() {
    let folder = Folder::new();
    let drawn = |more: &str| {
        folder.fa3(&format!("plan --seqlen 4096 --heads 8 --head-dim 128 {more} --svg plan.svg")).succeeded()
    };
    let stdout = drawn("--batch 4 --causal");
    assert!(stdout.ends_with("wrote plan.svg\n"), "{stdout}");
    let svg = folder.text("plan.svg");
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    let (background, shades) = (1, 32);
    assert_eq!(svg.matches("<rect ").count(), background + shades + 2 * 1024);
    // The picture's panels show the printed plan and the linear order.
    let shape = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate().unwrap();
    let planned =
        Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap().dense().unwrap().simulate().length();
    assert!((136..157).contains(&planned), "{planned}");
    for text in ["batch 4 seqlen 4096", &format!("planned: {planned} blocks"), "linear: 157 blocks"] {
        assert!(svg.contains(text), "{text}");
    }
    // There are many more tiles than can be drawn, on one CTA up to many more CTAs than pixels.
    for sms in [1, 132, 4096] {
        drawn(&format!("--batch 100 --causal --sms {sms}"));
        let bytes = folder.bytes("plan.svg").len();
        assert!((20_000..500_000).contains(&bytes), "{bytes} bytes for {sms} SMs");
    }
    assert_eq!(folder.count(), 1);
}

#[test]
fn bad_problems_are_refused() {
    let (base, folder) = ("--heads 8 --head-dim 128", Folder::new());
    for (options, why) in [
        ("--seqlen 64 --heads-kv 3", "heads_q 8 is not a multiple of heads_kv 3"),
        ("--seqlen 4294967296", "q has seqlen 4294967296, more than 2147483647"),
        ("--cu-seqlens-q 0,5,3", "cu_seqlens falls from 5 to 3"),
        ("--seqlen 100000000 --batch 100000", "tiles are too many to number"),
        ("--seqlen 64 --svg missing/plan.svg", "there is no folder"),
        ("--seqlen 1000000 --batch 101 --svg plan.svg", "more than the 4194304 that are simulated"),
    ] {
        folder.fa3(&format!("plan {base} {options}")).refused(why);
    }
    assert_eq!(folder.count(), 0);
    let odd = plan("--heads 8 --head-dim 127 --seqlen 64").succeeded();
    assert!(odd.contains("q has head_dim 127, not a multiple of 8 as bf16 needs (16-byte rows)"), "{odd}");
    assert!(!plan(&format!("{base} --seqlen 1000000 --batch 101")).succeeded().contains("Makespan"));
    for usage in
        ["--seqlen 64 --window 5", "--seqlen 64 --sms 0", "--seqlen x", "--seqlen 4 --dtype int4", ""]
    {
        plan(&format!("{base} {usage}")).misused("");
    }
}

#[test]
fn help_has_examples() {
    let help = fa3("--help").succeeded();
    let (_, verbs) = help.split_once("Commands:\n").unwrap();
    let verbs = verbs.lines().take_while(|line| !line.is_empty());
    let verbs: Vec<&str> = verbs.filter_map(|line| line.split_whitespace().next()).collect();
    let expected = "run quantize accuracy bench reproduce tune plan kernels ir ptx export vector sass sim archive doctor completions help";
    assert_eq!(verbs.join(" "), expected);
    assert_eq!(fa3("--version").succeeded(), format!("fa3 {}\n", env!("CARGO_PKG_VERSION")));
}
