//! `fa3 bench` and `fa3 tune` as commands without a GPU.

use crate::{assert_needs_a_gpu, fa3};

#[test]
fn without_a_gpu_it_says_so_and_writes_nothing() {
    assert_needs_a_gpu(&["bench", "bench --device 1", "bench --ablation --dtype bf16", "tune --head-dim 64"]);
}

/// Invalid settings are refused before a GPU is looked for.
#[test]
fn settings_that_are_none_are_refused() {
    fa3(&["bench", "--head-dim", "96"]).refused("2048 columns are no whole number of heads with head_dim 96");
    fa3(&["tune", "--head-dim", "96"]).refused("2048 columns are no whole number of heads with head_dim 96");
    fa3(&["bench", "--head-dim", "4,64", "--heads", "2"]).refused("head_dim 4, mask none, seqlen 512: ");
    fa3(&["bench", "--seqlen", "0"])
        .refused("there is nothing to compute with batch 16384, heads 32, head_dim 64, mask none, seqlen 0");
    fa3(&["bench", "--json", "/no/such/folder/a.json"]).refused("there is no folder /no/such/folder");
    for (options, why) in [
        ("--ablation --head-dim 64", "cannot be used with"),
        ("--ablation --svg a.svg", "cannot be used with"),
        ("--batch 1 --tokens 1k", "cannot be used with"),
        ("--window 5", "expected two whole numbers L,R"),
        ("--dtype e4m3", "'e4m3' for '--dtype <TYPE>': expected bf16 or f16"),
        ("--ablation --causal", "cannot be used with"),
        ("--ablation --softcap 30", "cannot be used with"),
        ("--rounds 0", "0 is not in 1..=10000"),
        ("--slice-ms -3", "expected milliseconds from 0"),
        ("--device cpu", "expected gpu or the number of one"),
    ] {
        let words: Vec<&str> = std::iter::once("bench").chain(options.split_whitespace()).collect();
        let ran = fa3(&words);
        assert!(ran.code == Some(2) && ran.stderr.contains(why), "{options}: {ran:?}");
    }
}
