use clap::{CommandFactory, Parser};
use fa3_cuda::kernels::KernelSpec;
use fa3_cuda::kernels::ladder;

use super::*;

#[derive(Parser)]
struct Verb {
    /// An option of the command.
    #[arg(long, global = true, default_value_t = 0)]
    seed: u32,
    #[command(subcommand)]
    kernel: KernelArgs,
}

fn parsed(words: &str) -> Result<KernelArgs, clap::Error> {
    Verb::try_parse_from(format!("verb {words}").split_whitespace()).map(|verb| verb.kernel)
}

fn program(words: &str) -> Result<Program<Kernel>, OperationError> {
    parsed(words).unwrap_or_else(|error| panic!("{words}: {error}")).program()
}

#[test]
fn every_kernel_has_its_name() {
    for spec in ladder::Spec::ALL {
        let dtype = if spec.elem() == fa3_ir::Elem::F16 { "--dtype f16" } else { "" };
        let words = format!("{} {dtype}", spec.name());
        assert_eq!(program(&words).unwrap().steps[0].kernel, spec.kernel(), "{words}");
    }
    for name in ["forward", "fwd"] {
        assert_eq!(program(name).unwrap().steps[0].kernel.name, "fwd");
    }
    for name in ["backward", "bwd"] {
        assert_eq!(names(name), ["bwd_stats", "bwd_dkv"]);
    }
    assert_eq!(names("backward --seqlen 5k"), ["bwd_stats", "bwd_dkv", "bwd_round"]);
    assert_eq!(names("backward --head-dim 256"), ["bwd_stats", "bwd_dkv", "bwd_dq"]);
}

/// Asserts that each of these options changes the program of `base`, each in another way, and that in pairs they give a
/// sound program, or are refused with an error that `may_fail` allows. The parser may refuse pairs, too.
#[track_caller]
fn count(base: &str, options: &[impl AsRef<str>], may_fail: fn(&OperationError) -> bool) {
    let mut seen = vec![program(base).unwrap()];
    for (index, first) in options.iter().map(AsRef::as_ref).enumerate() {
        let changed = program(&format!("{base} {first}")).unwrap();
        assert!(!seen.contains(&changed), "{base} {first} changes nothing");
        assert_eq!(changed.check(), Ok(()), "{base} {first}");
        seen.push(changed);
        for second in options[index + 1..].iter().map(AsRef::as_ref) {
            let Ok(verb) = parsed(&format!("{base} {first} {second}")) else { continue };
            match verb.program() {
                Ok(program) => assert_eq!(program.check(), Ok(()), "{verb}"),
                Err(error) => assert!(may_fail(&error), "{verb}: {error}"),
            }
        }
    }
}

fn names(words: &str) -> Vec<String> {
    program(words).unwrap().steps.into_iter().map(|step| step.kernel.name).collect()
}

/// Pairs of a kernel's options at their limits: arguments and grid fit the kernel, and every value takes effect.
#[test]
fn every_option_is_used_up_to_its_limits() {
    for (kernel, options) in [
        ("vector_add", "n 1 2147483648"),
        ("row_softmax", "rows 1 1048576, cols 1 1048576"),
        ("tile_copy", "rows 1 1048576, cols 8 1048576, swizzle 64 32"),
        ("transpose", "rows 8 1048576, cols 8 1048576"),
        ("gemm_simple", "m 1 1048576, n 2 1048576, k 8 1048576"),
        ("gemm_pipeline", "m 1 1048576, n 2 1048576, k 8 1048576"),
        ("gemm", "m 1 1048576, n 8 1048576, k 8 1048576, ctas 1 2"),
        ("gemm_cluster", "m 1 1048576, n 8 1048576, k 8 1048576, ctas 2"),
        ("gemm_split_k", "m 1 1048576, n 4 1048576, k 8 1048576, splits 1 1048576"),
        ("gemm_fp8", "m 1 1048576, n 8 1048576, k 16 1048576, ctas 1 2"),
    ] {
        let options = options.split(", ").flat_map(|option| {
            let (name, values) = option.split_once(' ').unwrap();
            values.split(' ').map(move |value| format!("--{name} {value}"))
        });
        let may_fail: fn(&OperationError) -> bool = match kernel {
            "row_softmax" => |error| matches!(error, OperationError::Elements { .. }),
            _ => |_| false,
        };
        count(kernel, &options.collect::<Vec<_>>(), may_fail);
    }
}

/// The options that describe a problem, for both passes.
const PROBLEM: [&str; 12] = [
    "--batch 2",
    "--heads 4",
    "--heads-kv 1",
    "--seqlen-q 128",
    "--seqlen-k 300",
    "--head-dim 64",
    "--head-dim-v 64",
    "--dtype f16",
    "--causal",
    "--window 100,20",
    "--softcap 30",
    "--softmax-scale 0.5",
];

/// The options that describe a problem and its plan, alone and in pairs.
#[test]
fn every_option_of_the_forward_pass_counts() {
    let plan =
        ["--seqlen 1k", "--pipeline serial", "--ping-pong off", "--loads consumers", "--scheduler dynamic"];
    count("forward", &[&PROBLEM[..], &plan, &["--score exp2(s)+k"]].concat(), |error| {
        matches!(error, OperationError::Plan(_))
    });
    let many = |sms: &str| program(&format!("forward --seqlen 4k {sms}")).unwrap().steps[0].grid;
    assert_eq!((many("--sms 3"), many("--sms 5")), ([3, 1, 1], [5, 1, 1]));
    let cluster =
        |words: &str| program(&format!("forward --sms 4 {words}")).unwrap().steps[0].kernel.launch.cluster;
    assert_eq!((cluster("--seqlen 4k"), cluster("--seqlen 4k --clusters off")), (2, 1));
    assert_eq!((cluster("--seqlen 512"), cluster("--seqlen 512 --clusters on")), (1, 2));
}

/// The options that describe a cache, alone and in pairs.
#[test]
fn every_option_of_a_cache_counts() {
    let options = [
        "--page-size 16",
        "--cache-leftpad 3,0",
        "--seqlen-new 2",
        "--seqlen-new 3 --rotary-dim 32",
        "--seqlen-new 3 --rotary-dim 32 --rotary-interleaved",
        "--seqlen-q 2",
        "--split-keys",
        "--heads-kv 1",
        "--dtype f16",
    ];
    let base = "forward --cache-seqlens 50,20";
    count(base, &options, |error| matches!(error, OperationError::CachePlan(_)));
    assert!(program(base).unwrap() != program("forward --cache-seqlens 50,20,20").unwrap());
    assert_eq!(names(&format!("{base} --split-keys")), ["fwd", "merge"]);
    assert_eq!(names(&format!("{base} --seqlen-new 1")), ["append", "schedule", "fwd"]);
}

#[test]
fn every_option_of_the_backward_pass_counts() {
    // With this many keys, dQ is added in any order.
    let long = "backward --seqlen 5k";
    for option in [&PROBLEM[..], &["--deterministic", "--score exp2(s)+k"]].concat() {
        count(long, &[option], |_| false);
    }
    let many = |sms: &str| program(&format!("{long} --causal {sms}")).unwrap().steps[1].grid;
    assert!(many("--sms 3") != many("--sms 5"));
}

#[test]
fn what_was_typed_is_the_kernel_alone() {
    let both = parsed("fwd --window=-1,20 --causal").unwrap();
    assert_eq!(both.to_string(), "forward --causal --window -1,20");
    let kernel = parsed("--seed 3 fwd --window=-1,20 --head-dim 64 --seed 4 --dtype f16").unwrap();
    assert_eq!(kernel.to_string(), "forward --head-dim 64 --dtype f16 --window -1,20");
    let cache = parsed("forward --cache-seqlens 1k,7 --cache-leftpad 1,2 --split-keys").unwrap();
    assert_eq!(cache.to_string(), "forward --cache-seqlens 1k,7 --cache-leftpad 1,2 --split-keys");
    assert_eq!(parsed("gemm --ctas 1 --m 7").unwrap().to_string(), "gemm --m 7 --ctas 1");
    assert_eq!(parsed("forward --causal").unwrap().to_string(), "forward --causal");
    assert_eq!(parsed("forward --score s*2").unwrap().to_string(), "forward --score 's*2'");
    assert_eq!(parsed("gemm").unwrap().to_string(), "gemm");
}

#[test]
fn problems_that_are_none() {
    for (words, why) in [
        ("row_softmax --rows 1000000 --cols 5000", "1000000 x 5000 elements are more than 4294967295"),
        ("forward --seqlen 0", "nothing is to be computed: bf16 batch 1"),
        ("forward --heads-kv 3", "heads_q 2 is not a multiple of heads_kv 3"),
        ("forward --dtype f32", "the forward kernels take f16, bf16 and e4m3, not f32"),
        ("forward --cache-seqlens 5,9 --cache-leftpad 1", "--cache-leftpad has 1 numbers, --cache-seqlens 2"),
        (
            "forward --cache-seqlens 5,9 --cache-leftpad 1,10",
            "--cache-leftpad has 10 rows for sequence 1, of which 9 are in use",
        ),
        (
            "forward --cache-seqlens 5,9 --seqlen-new 1 --rotary-dim 24",
            "rotary_dim 24 is not a positive multiple of 16 up to head_dim 128",
        ),
        ("forward --cache-seqlens 5,9 --heads-kv 3", "heads_q 2 is not a multiple of heads_kv 3"),
        ("backward --seqlen 0", "nothing is to be computed: bf16 batch 1"),
        ("backward --dtype e4m3", "there are no gradients of attention with q, k and v of e4m3"),
        ("backward --dtype f32", "the backward kernels take f16 and bf16"),
    ] {
        let said = program(words).unwrap_err().to_string();
        assert!(said.starts_with(why), "{words}: {said}");
    }
    for words in ["--batch 3", "--seqlen 7", "--seqlen-k 7", "--split-keys --pipeline serial", "--v-channels"]
    {
        let refused = parsed(&format!("forward --cache-seqlens 5,9 {words}"));
        assert!(refused.is_err_and(|error| error.to_string().contains("cannot be used with")), "{words}");
    }
    for words in ["--page-size 16", "--cache-leftpad 1", "--seqlen-new 1", "--rotary-dim 32"] {
        assert!(parsed(&format!("forward {words}")).is_err(), "{words}");
    }
}

#[test]
fn the_command_line_makes_sense() {
    Verb::command().debug_assert();
}
