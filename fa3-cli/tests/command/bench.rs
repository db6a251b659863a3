//! `fa3 bench` and `fa3 tune` as commands without a GPU.

use fa3_cuda::host::is_driver_present;

use crate::fa3;
use crate::files::Folder;

/// Commands that need a GPU report that there is none, and write nothing.
#[test]
fn without_a_gpu_it_says_so_and_writes_nothing() {
    if is_driver_present() {
        println!("skipped: there is a driver");
        return;
    }
    let folder = Folder::new();
    for command in [
        "bench",
        "bench --device 1",
        "bench --dtype e4m3 --head-dim 256",
        "bench --ablation --dtype bf16",
        "tune --head-dim 64",
        "accuracy --quick --gpu",
        "kernels --gpu",
    ] {
        let ran = folder.fa3(&format!("{command} --json a.json"));
        assert_eq!(ran.stdout, "", "{command}");
        ran.refused("no nvidia driver: libcuda cannot be loaded");
        assert_eq!(folder.count(), 0, "{command}");
    }
}

/// Invalid settings are refused before a GPU is looked for.
#[test]
fn settings_that_are_none_are_refused() {
    let no_heads = "2048 columns are no whole number of heads with head_dim 96";
    for (command, why) in [
        ("bench --head-dim 96", no_heads),
        ("tune --head-dim 96", no_heads),
        ("bench --head-dim 4,64 --heads 2", "head_dim 4, mask none, seqlen 512: "),
        ("bench --ablation --dtype e4m3", "--ablation has forms of bf16 and f16 kernels, not of e4m3"),
        ("bench --json /no/such/folder/a.json", "there is no folder /no/such/folder"),
    ] {
        fa3(command).refused(why);
    }
    for (options, why) in [
        ("--ablation --head-dim 64", "cannot be used with"),
        ("--ablation --svg a.svg", "cannot be used with"),
        ("--ablation --causal", "cannot be used with"),
        ("--ablation --softcap 30", "cannot be used with"),
        ("--dtype f32", "'f32' for '--dtype <TYPE>': expected bf16, f16 or e4m3"),
        ("--rounds 0", "0 is not in 1..=10000"),
        ("--slice-ms -3", "expected milliseconds from 0"),
        ("--device cpu", "expected gpu or the number of one"),
    ] {
        fa3(&format!("bench {options}")).misused(why);
    }
}
