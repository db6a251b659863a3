//! `fa3 bench` and `fa3 tune` as commands, where there is no GPU.

use crate::{assert_needs_a_gpu, fa3};

#[test]
fn without_a_gpu_it_says_so_and_writes_nothing() {
    assert_needs_a_gpu(&[
        "bench",
        "bench --device 1",
        "bench --ablation --dtype bf16",
        "bench decode",
        "bench latent",
        "bench --mix all",
        "bench --mix odd --backward",
        "tune --head-dim 64",
    ]);
}

/// The CPU computes packed sequences: both passes, of a mix and of a file.
#[test]
fn mixes_are_measured_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let [lengths, json] = ["lengths.txt", "a.json"].map(|name| folder.path().join(name));
    std::fs::write(&lengths, "5 0 70\n30").unwrap();
    let few = "--head-dim 32 --heads 2 --heads-kv 1 --causal --cpu --rounds 2 --slice-ms 0";
    let run = |options: &str| {
        let words = format!("bench {options} {few}");
        fa3(&words.split_whitespace().collect::<Vec<_>>()).succeeded()
    };
    let text = run("--mix 3x40,90+2x7");
    assert!(
        text.contains("Forward pass over packed sequences, bf16; TFLOP/s, medians of 2 rounds"),
        "{text}"
    );
    assert!(
        text.contains("head_dim  heads  mask     3x40  90+2x7") && text.contains("2 of 2 results are right")
    );
    let (lengths, json) = (lengths.to_str().unwrap(), json.to_str().unwrap());
    let text = run(&format!("--lengths {lengths} --backward --dtype f16 --json {json}"));
    assert!(
        text.contains("Backward pass over packed sequences, f16") && text.contains("lengths.txt"),
        "{text}"
    );
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let cell = &report["cells"][0];
    assert_eq!((&cell["sequences"], &cell["tokens"]), (&4.into(), &105.into()));
    assert!(cell["tflops"].as_f64().unwrap() > 0.0 && report["machine"]["threads"].as_u64().unwrap() > 0);
    fa3(&["bench", "--lengths", "/no/such/file"]).refused("/no/such/file: ");
}

/// Before any GPU is looked for.
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
        ("--head-dim 64 decode", "cannot be used with"),
        ("decode --page-size 0", "expected a whole number from 1"),
        ("decode --seqlen-new 3 --seqlen-k 2", "3 new tokens are more than the 2 keys of a sequence"),
        ("latent --seqlen-new 3 --seqlen-k 2", "3 new tokens are more than the 2 keys of a sequence"),
        ("latent --page-size 0", "expected a whole number from 1"),
        ("latent --heads 0", "there is nothing to compute with batch 1, seqlen 1 x 1024, heads 0"),
        ("--mix zipf --seqlen 1k", "cannot be used with"),
        ("--mix zipf --lengths a.txt", "cannot be used with"),
        ("--mix 3x", "expected all, zipf, odd, or lengths such as 8192+64x128"),
        ("--mix 0", "a mix has 1 to 16777216 rows"),
        ("--backward", "were not provided"),
        ("--cpu", "were not provided"),
        ("--mix zipf --deterministic", "were not provided"),
        ("--mix zipf --cpu --device 0", "cannot be used with"),
    ] {
        let words: Vec<&str> = std::iter::once("bench").chain(options.split_whitespace()).collect();
        let ran = fa3(&words);
        assert!(ran.code == Some(2) && ran.stderr.contains(why), "{options}: {ran:?}");
    }
}
