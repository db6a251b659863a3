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
    let names = |words: &str| -> Vec<String> {
        program(words).unwrap().steps.into_iter().map(|step| step.kernel.name).collect()
    };
    for name in ["backward", "bwd"] {
        assert_eq!(names(name), ["bwd_stats", "bwd_dkv"]);
    }
    assert_eq!(names("backward --seqlen 5k"), ["bwd_stats", "bwd_dkv", "bwd_round"]);
    assert_eq!(names("backward --head-dim 256"), ["bwd_stats", "bwd_dkv", "bwd_dq"]);
}

/// Pairs of a kernel's options at their limits: arguments and grid fit the kernel, and every value takes effect.
#[test]
fn every_option_is_used_up_to_its_limits() {
    let sizes =
        |n: u32, k: u32| vec![("m", vec![1, 1 << 20]), ("n", vec![n, 1 << 20]), ("k", vec![k, 1 << 20])];
    let with = |mut options: Vec<(&'static str, Vec<u32>)>, name, values: [u32; 2]| {
        options.push((name, values.to_vec()));
        options
    };
    let matrix = |rows, cols| vec![("rows", vec![rows, 1 << 20]), ("cols", vec![cols, 1 << 20])];
    let cases = [
        ("vector_add", vec![("n", vec![1, 1 << 31])]),
        ("row_softmax", matrix(1, 1)),
        ("tile_copy", with(matrix(1, 8), "swizzle", [64, 32])),
        ("transpose", matrix(8, 8)),
        ("gemm_simple", sizes(2, 8)),
        ("gemm_pipeline", sizes(2, 8)),
        ("gemm", with(sizes(8, 8), "ctas", [1, 2])),
        ("gemm_cluster", with(sizes(8, 8), "ctas", [2, 2])),
        ("gemm_split_k", with(sizes(4, 8), "splits", [1, 1 << 20])),
        ("gemm_fp8", with(sizes(8, 16), "ctas", [1, 2])),
    ];
    for (kernel, options) in cases {
        let plain = program(kernel).unwrap();
        let chosen = options.iter().flat_map(|(name, values)| values.iter().map(move |value| (name, value)));
        let chosen: Vec<String> = chosen.map(|(name, value)| format!("--{name} {value}")).collect();
        for (index, first) in chosen.iter().enumerate() {
            let changed = program(&format!("{kernel} {first}")).unwrap();
            assert!(changed != plain, "{kernel} {first} changes nothing");
            for second in &chosen[index + 1..] {
                let Ok(verb) = parsed(&format!("{kernel} {first} {second}")) else { continue };
                match verb.program() {
                    Ok(program) => assert_eq!(program.check(), Ok(()), "{verb}"),
                    Err(OperationError::Elements { .. }) => assert_eq!(kernel, "row_softmax"),
                    Err(error) => panic!("{verb}: {error}"),
                }
            }
        }
    }
}

/// The options that describe a problem and its plan, alone and in pairs.
#[test]
fn every_option_of_the_forward_pass_counts() {
    let words = [
        "--batch 2",
        "--heads 4",
        "--heads-kv 1",
        "--seqlen 1k",
        "--seqlen-q 128",
        "--seqlen-k 300",
        "--head-dim 64",
        "--head-dim-v 64",
        "--dtype f16",
        "--causal",
        "--window 100,20",
        "--softcap 30",
        "--softmax-scale 0.5",
        "--pipeline serial",
        "--ping-pong off",
        "--loads consumers",
        "--scheduler dynamic",
    ];
    let plain = program("forward").unwrap();
    for (index, first) in words.iter().enumerate() {
        assert!(program(&format!("forward {first}")).unwrap() != plain, "{first} changes nothing");
        for second in &words[index + 1..] {
            let Ok(verb) = parsed(&format!("forward {first} {second}")) else { continue };
            match verb.program() {
                Ok(program) => assert_eq!(program.check(), Ok(()), "{verb}"),
                Err(OperationError::Plan(_)) => {}
                Err(error) => panic!("{verb}: {error}"),
            }
        }
    }
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
    let words = [
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
    let mut seen = vec![program(base).unwrap(), program("forward --cache-seqlens 50,20,20").unwrap()];
    assert!(seen[0] != seen[1]);
    for (index, first) in words.iter().enumerate() {
        let changed = program(&format!("{base} {first}")).unwrap();
        assert!(!seen.contains(&changed), "{first} changes nothing");
        seen.push(changed);
        for second in &words[index + 1..] {
            let Ok(verb) = parsed(&format!("{base} {first} {second}")) else { continue };
            match verb.program() {
                Ok(program) => assert_eq!(program.check(), Ok(()), "{verb}"),
                Err(OperationError::CachePlan(_)) => {}
                Err(error) => panic!("{verb}: {error}"),
            }
        }
    }
    let names = |words: &str| -> Vec<String> {
        program(words).unwrap().steps.into_iter().map(|step| step.kernel.name).collect()
    };
    assert_eq!(names(&format!("{base} --split-keys")), ["fwd", "merge"]);
    assert_eq!(names(&format!("{base} --seqlen-new 1")), ["append", "schedule", "fwd"]);
}

#[test]
fn every_option_of_the_backward_pass_counts() {
    let words = [
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
        "--deterministic",
    ];
    // Enough keys for dQ additions in any order.
    let long = "backward --seqlen 5k";
    let plain = program(long).unwrap();
    for word in words {
        let changed = program(&format!("{long} {word}")).unwrap();
        assert!(changed != plain, "{word} changes nothing");
        assert_eq!(changed.check(), Ok(()), "{word}");
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
    assert_eq!(parsed("gemm").unwrap().to_string(), "gemm");
}

#[test]
fn problems_that_are_none() {
    let said = |words: &str| program(words).unwrap_err().to_string();
    assert_eq!(
        said("row_softmax --rows 1000000 --cols 5000"),
        "1000000 x 5000 elements are more than 4294967295"
    );
    assert!(said("forward --seqlen 0").starts_with("nothing is to be computed: bf16 batch 1"));
    assert_eq!(said("forward --heads-kv 3"), "heads_q 2 is not a multiple of heads_kv 3");
    assert_eq!(said("forward --dtype f32"), "the forward kernels take f16, bf16 and e4m3, not f32");
    let cache = |words: &str| said(&format!("forward --cache-seqlens 5,9 {words}"));
    assert_eq!(cache("--cache-leftpad 1"), "--cache-leftpad has 1 numbers, --cache-seqlens 2");
    let sentence = "--cache-leftpad has 10 rows for sequence 1, of which 9 are in use";
    assert_eq!(cache("--cache-leftpad 1,10"), sentence);
    let sentence = "rotary_dim 24 is not a positive multiple of 16 up to head_dim 128";
    assert_eq!(cache("--seqlen-new 1 --rotary-dim 24"), sentence);
    assert_eq!(cache("--heads-kv 3"), "heads_q 2 is not a multiple of heads_kv 3");
    for words in ["--batch 3", "--seqlen 7", "--seqlen-k 7", "--split-keys --pipeline serial", "--v-channels"]
    {
        let refused = parsed(&format!("forward --cache-seqlens 5,9 {words}"));
        assert!(refused.is_err_and(|error| error.to_string().contains("cannot be used with")), "{words}");
    }
    for words in ["--page-size 16", "--cache-leftpad 1", "--seqlen-new 1", "--rotary-dim 32"] {
        assert!(parsed(&format!("forward {words}")).is_err(), "{words}");
    }
    assert!(said("backward --seqlen 0").starts_with("nothing is to be computed: bf16 batch 1"));
    assert!(
        said("backward --dtype e4m3")
            .starts_with("there are no gradients of attention with q, k and v of e4m3")
    );
    assert!(said("backward --dtype f32").starts_with("the backward kernels take f16 and bf16"));
}

#[test]
fn the_command_line_makes_sense() {
    Verb::command().debug_assert();
}
