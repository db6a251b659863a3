//! `fa3 sim` as a command.

use fa3_cuda::kernels::ladder;

use crate::files::Folder;
use crate::{Ran, fa3};

fn sim(args: &str) -> Ran {
    fa3(&format!("sim {args}"))
}

/// The output without elapsed times.
fn timeless(stdout: &str) -> String {
    let (before, last) = stdout.trim_end().rsplit_once('\n').unwrap();
    let (runs, rest) = last.split_once(" in ").unwrap();
    let (seconds, verdict) = rest.split_once(" s, ").unwrap();
    assert!(seconds.parse::<f64>().unwrap() >= 0.0);
    format!("{before}\n{runs}, {verdict}")
}

/// Runs each launch under three schedules: no kernel breaks a rule, and all results are right.
fn run_right<'a>(launches: impl IntoIterator<Item = &'a str>) {
    for launch in launches {
        for policy in ["eager --mode skeleton", "lazy --mode fast", "random --mode exact"] {
            let ran = sim(&format!("{launch} --policy {policy}"));
            if launch.contains("--split-keys") && policy.contains("skeleton") {
                ran.refused("--mode skeleton has no floating point, by which CTAs find their shares of keys");
                continue;
            }
            let stdout = ran.succeeded();
            let (_, verdict) = stdout.rsplit_once(" s, no rule broken, results ").unwrap_or_default();
            let expected =
                if policy.contains("skeleton") { "not computed\n" } else { "right (off by at most " };
            assert!(verdict.starts_with(expected), "{launch} {policy}: {stdout}");
        }
    }
}

/// Plain arithmetic judges the ladder's kernels.
#[test]
fn kernels_of_the_ladder_run() {
    run_right(ladder::Spec::ALL.map(ladder::Spec::name));
}

/// A simulation that would take hours is refused at once.
#[test]
fn hours_are_refused() {
    sim("forward --seqlen 100k")
        .refused("takes about 3 hours: shorter sequences, fewer heads, fewer --seeds or");
    sim("backward --seqlen 100k --seeds 100 --mode skeleton").refused("and --long runs it");
}

/// The error law judges attention.
#[test]
fn attention_runs() {
    run_right([
        "forward",
        "forward --causal --seqlen-q 100 --seqlen-k 300 --heads-kv 1 --scheduler dynamic",
        "forward --causal --cache-seqlens 90,0,33 --page-size 16 --seqlen-q 3 --heads-kv 1 --split-keys --sms 3",
        "forward --cache-seqlens 90,40 --cache-leftpad 9,0 --seqlen-q 70 --head-dim 64 --window 50,0",
        "forward --causal --cache-seqlens 30,0,9 --seqlen-new 2 --seqlen-q 2 --page-size 8 --rotary-dim 128",
        "forward --dtype f16 --causal --cache-seqlens 15,40 --page-size 8 --seqlen-new 3 --seqlen-q 3 --head-dim 64 \
         --rotary-dim 32 --rotary-interleaved --split-keys --sms 2",
        "forward --qv --causal --seqlen-q 20 --seqlen-k 150 --heads-kv 1 --head-dim 64 --head-dim-v 512",
        "forward --qv --cache-seqlens 90,0,33 --page-size 16 --heads 6 --heads-kv 1 --head-dim 64 --head-dim-v 256 \
         --split-keys --sms 3",
        "forward --dtype e4m3 --head-dim 64 --causal",
        "forward --causal --head-dim 64 --score s+slope[h]*(k-q) --table slope=0.5,0.25",
        "forward --dtype e4m3 --head-dim 64 --heads-kv 1 --v-transposed --v-channels",
        "backward --seqlen-q 100 --seqlen-k 150 --heads-kv 1 --head-dim 64 --causal",
        "backward --dtype f16 --heads 1 --seqlen-q 70 --seqlen-k 1100 --head-dim 64",
    ]);
}

/// There are three tiles of 64 x 64. Each has a load and a store of 64 x 64 x 2 bytes.
#[test]
fn a_run_is_a_function_of_its_options() {
    let run = |args: &str| timeless(&sim(args).succeeded());
    let stdout = run("tile_copy --rows 60 --cols 136 --seed 7");
    let expected = "\
tile_copy, 3 x 1 x 1 ctas of 128 threads

Counted with seed 7:
warp instructions  ";
    assert!(stdout.starts_with(expected), "{stdout}");
    for part in ["\nTMA loads          3 (24576 bytes)\n", "\nTMA stores         3 (24576 bytes)\n"] {
        assert!(stdout.contains(part), "{part} is not in {stdout}");
    }
    let right = "\n1 run, no rule broken, results right (off by at most 0 % of what computing in f32 and one rounding \
                 of the result may cost)";
    assert!(stdout.ends_with(right), "{stdout}");
    assert_eq!(stdout, run("tile_copy --rows 60 --cols 136 --seed 7 --seeds 1 --policy random --mode exact"));
    let many = run("tile_copy --rows 60 --cols 136 --seed 7 --seeds 20 --mode skeleton");
    assert!(many.ends_with("\n20 runs, no rule broken, results not computed"), "{many}");
    let last = run("tile_copy --seed 18446744073709551615 --seeds 2 --mode fast");
    assert!(last.contains("Counted with seed 18446744073709551615:"), "{last}");
}

/// Timelines are written on request, with a whole number of cycles. Without a timeline no cycles are printed.
#[test]
fn timelines_are_models() {
    let folder = Folder::new();
    let plain = "sim gemm --m 128 --n 256 --k 512 --policy lazy --mode skeleton --seed 3";
    let stdout = folder.fa3(&format!("{plain} --trace trace.json --svg picture.svg")).succeeded();
    for part in ["gemm: ", " cycles (model, not measurement)\ncta 0 tensor core ", "wrote trace.json\n"] {
        assert!(stdout.contains(part), "{part} is not in {stdout}");
    }
    let svg = folder.text("picture.svg");
    for part in ["<svg ", "consumer 2", "A Bᵀ, product "] {
        assert!(svg.contains(part), "{svg}");
    }
    assert!(folder.json("trace.json")["traceEvents"].as_array().unwrap().len() > 100);
    assert!(!fa3(plain).succeeded().contains("cycles"));
    // The forward pass has two products, whichever source lines begin them.
    folder.fa3("sim forward --mode skeleton --svg forward.svg").succeeded();
    let svg = folder.text("forward.svg");
    assert_eq!(products(&svg), ["Q Kᵀ, product 64 x 128 x 16", "P V, product 64 x 128 x 16"]);
    folder.fa3(&format!("{plain} --svg none/picture.svg")).refused("there is no folder");
}

/// The products in a picture's legend.
fn products(svg: &str) -> Vec<&str> {
    let texts = svg.split('>').filter_map(|text| text.strip_suffix("</text"));
    texts.filter(|text| text.contains(", product 64 x ")).collect()
}

/// The launch with the most products is drawn, or the launch that an option selects.
#[test]
fn each_step_of_the_backward_pass_can_be_drawn() {
    let folder = Folder::new();
    let drawn = |options: &str| {
        let words = format!("sim {options} --mode skeleton --policy eager --svg picture.svg");
        (folder.fa3(&words).succeeded(), folder.text("picture.svg"))
    };
    let added = "backward --heads 1 --seqlen-q 128 --seqlen-k 256";
    let (_, svg) = drawn(added);
    let s = ["K Qᵀ, product 64 x 64 x 16", "V dOᵀ, product 64 x 64 x 16"];
    let gradients =
        ["Pᵀ dO, product 64 x 128 x 16", "dSᵀ Q, product 64 x 128 x 16", "dS K, product 64 x 128 x 16"];
    assert_eq!(products(&svg), [&s[..], &gradients].concat());
    // The warps that load, that add, and that wait for the additions of other CTAs.
    for warp in ["producer, warp 1<", "producer, warp 2<", "producer, warp 4<", "consumer 2<"] {
        assert!(svg.contains(warp), "{warp}");
    }
    let wide = "backward --heads 1 --seqlen 256 --head-dim 256";
    assert!(drawn(wide).0.contains("\nbwd_dkv: "));
    let (stdout, svg) = drawn(&format!("{wide} --step bwd_dq"));
    assert!(stdout.contains("\nbwd_dq: "), "{stdout}");
    let dq = ["Q Kᵀ, product 64 x 64 x 16", "dO Vᵀ, product 64 x 64 x 16", "dS K, product 64 x 256 x 16"];
    assert_eq!(products(&svg), dq);
    sim(&format!("{added} --step bwd_dq --svg picture.svg"))
        .refused("there is no step bwd_dq: the kernels are bwd_stats, bwd_dkv");
    sim(&format!("{added} --step bwd_dkv")).refused("--step bwd_dkv says what is drawn");
}

/// The command's help refers to the kernels' help, which lists the options' values.
#[test]
fn options_say_what_they_take() {
    for verb in ["sim", "ir", "ptx", "sass"] {
        let help = |kernel: &str| {
            let text = fa3(&format!("{verb} {kernel} --help")).succeeded();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        for (kernel, part) in [
            ("", "KERNEL --help explains the options of one"),
            ("forward", "--dtype <TYPE> f16, bf16 or e4m3 [default: bf16]"),
            ("forward", "- producer: A warpgroup"),
            ("forward", "- dynamic: Drawn by"),
            ("forward", "[possible values: off, on]"),
            ("gemm", "Elements of A and B: bf16 or f16"),
            ("tile_copy", "[possible values: 128, 64, 32, none]"),
        ] {
            assert!(help(kernel).contains(part), "{part} is not in the help of {verb} {kernel}");
        }
    }
}

#[test]
fn runs_that_are_none_are_refused() {
    sim("vector_add --n 2000000000").refused("24000000000 bytes of buffers are more than the 268435456");
    for usage in ["--policy late", "--mode half", "--seeds 0", "--seeds 1000001", "--seed -1", "--seed x"] {
        sim(&format!("vector_add {usage}")).misused("");
    }
}
