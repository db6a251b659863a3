//! `fa3 kernels`, `ir`, `ptx` and `doctor` as commands.

use fa3_cuda::host::is_driver_present;
use fa3_cuda::kernels::KernelSpec;
use fa3_cuda::kernels::shipped::{Shipped, shipped};
use fa3_cuda::kernels::{fwd, ladder};
use fa3_ir::{Elem, ptx};
use fa3_sched::DeviceLimits;
use fa3_sched::forward::Plan;
use fa3_types::{Dtype, ProblemSpec, Shape};
use serde_json::{Value, json};

use crate::{Ran, fa3, fa3_with};

fn words(text: &str) -> Ran {
    fa3(&text.split_whitespace().collect::<Vec<_>>())
}

#[test]
fn prints_are_the_librarys() {
    let shape = Shape { batch: 1, seqlen: 200, heads: 2, head_dim: 128 };
    let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate().unwrap();
    let forward = fwd::program(&Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap());
    let ladder = ladder::Spec::ALL.map(|spec| {
        let dtype = if spec.elem() == Elem::F16 { " --dtype f16" } else { "" };
        (format!("{}{dtype}", spec.name()), spec.kernel())
    });
    let forward = ("forward --causal".to_owned(), forward.steps[0].kernel.kernel());
    for (name, kernel) in ladder.into_iter().chain([forward]) {
        let print = |verb: &str| words(&format!("{verb} {name}")).succeeded();
        // Source lines are relative to the compiler's folder, which is the same for both.
        assert_eq!(print("ir"), kernel.to_string(), "{name}");
        assert_eq!(print("ptx"), ptx::emit(&kernel).unwrap().text, "{name}");
        assert_eq!(print("ptx --annotate"), ptx::emit_annotated(&kernel).unwrap().text, "{name}");
    }
}

/// By hand: A is 100 x 72 and B 136 x 72 with two bytes, C 100 x 136 with four. The tiles are 64 x 64 and 128 x 64, and
/// C's tiles are stored as panels of 128 bytes. K has two tiles, one per split.
#[test]
fn a_launch_as_json() {
    let text = words("ptx gemm_split_k --m 100 --n 136 --k 72 --splits 9 --dtype f16 --json").succeeded();
    let mut launch: Value = serde_json::from_str(&text).unwrap();
    let ptx = launch["ptx"].take();
    assert!(ptx.as_str().unwrap().contains(".visible .entry gemm_split_k("));
    let tensor = |array: u32, dims: [u32; 2], stride: u32, tile: [u32; 2], elem: &str| {
        json!({ "tensor": {
            "array": array, "dims": dims, "strides": [stride], "box": tile, "elem": elem, "swizzle": 128
        }})
    };
    let array = |name: &str, elem: &str, shape: [u32; 2], used: &str| json!({ "name": name, "elem": elem, "shape": shape, "use": used });
    let expected = json!({
        "ptx": null,
        "entry": "gemm_split_k",
        "threads": 128,
        "smem": launch["smem"].as_u64().unwrap(),
        "cluster": 1,
        "grid": [2, 2, 2],
        "arrays": [
            array("a", "f16", [100, 72], "input"),
            array("b", "f16", [136, 72], "input"),
            array("c", "f32", [100, 136], "sum"),
        ],
        "args": [
            tensor(0, [72, 100], 144, [64, 64], "f16"),
            tensor(1, [72, 136], 144, [64, 128], "f16"),
            { "u32": 72 },
            tensor(2, [136, 100], 544, [32, 64], "f32"),
            { "u32": 64 },
        ],
    });
    assert_eq!(launch, expected);

    let text = words("ptx vector_add --n 300 --json").succeeded();
    let launch: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(launch["args"], json!([{ "pointer": 0 }, { "pointer": 1 }, { "pointer": 2 }, { "u32": 300 }]));
    assert_eq!((&launch["grid"], &launch["smem"]), (&json!([2, 1, 1]), &json!(0)));
    let launch: Value =
        serde_json::from_str(&words("ptx tile_copy --swizzle none --json").succeeded()).unwrap();
    assert_eq!(launch["args"][0]["tensor"]["swizzle"], 0);
    assert_eq!(launch["arrays"][1]["use"], "output");
    let launch: Value = serde_json::from_str(&words("ptx gemm_cluster --json").succeeded()).unwrap();
    assert_eq!(launch["cluster"], 2);
}

#[test]
fn kernels_that_are_none_are_refused() {
    for verb in ["ir", "ptx", "sass", "sim"] {
        let refused = |text: &str, why: &str| {
            let ran = words(&format!("{verb} {text}"));
            assert!(
                ran.code == Some(2) && ran.stderr.contains(why),
                "{verb} {text}, expected {why:?}: {ran:?}"
            );
        };
        refused("gem", "unrecognized subcommand 'gem'");
        refused("gemm --rows 8", "unexpected argument '--rows'");
        refused("gemm --n 12", "'12' for '--n <N>': expected a multiple of 8 from 8 to 1048576");
        refused("gemm --m -1", "'-1' for '--m <N>': expected a whole number from 1 to 1048576");
        refused("gemm --m x", "'x' for '--m <N>': expected a whole number from 1 to 1048576");
        refused("gemm_cluster --ctas 3", "'3' for '--ctas <N>': expected a multiple of 2 from 2 to 1048576");
        refused("gemm --dtype e4m3", "'e4m3' for '--dtype <TYPE>': expected bf16 or f16");
        refused("gemm_fp8 --dtype bf16", "unexpected argument '--dtype'");
        refused(
            "tile_copy --swizzle 16",
            "'16' for '--swizzle <BYTES>'\n  [possible values: 128, 64, 32, none]",
        );
        refused(
            "forward --pipeline two",
            "'two' for '--pipeline <HOW>'\n  [possible values: serial, paired, two-stage, three-stage]",
        );
        refused("forward --window 5", "expected two whole numbers L,R from -1 to 2^32 - 1, as in 256,0");
        refused("forward --dtype int8", "'int8' for '--dtype <TYPE>': expected f32, f16, bf16 or e4m3");
        words(&format!("{verb} forward --heads-kv 3")).refused("heads_q 2 is not a multiple of heads_kv 3");
        words(&format!("{verb} row_softmax --rows 100000 --cols 100000"))
            .refused("100000 x 100000 elements are more than 4294967295");
        for usage in ["", "gemm gemm", "gemm --size 8", "gemm --m", "gemm --m 8 --m 16"] {
            assert_eq!(words(&format!("{verb} {usage}")).code, Some(2), "{verb} {usage}");
        }
    }
}

/// One row for every kernel of the ladder, with the numbers that need no compiler.
#[test]
fn kernels_are_listed_without_a_compiler() {
    let stdout = fa3_with(&["kernels"], &[("PTXAS", "/no/such/ptxas")]).succeeded();
    let (table, rest) = stdout.split_once("\n\n").unwrap();
    assert!(rest.starts_with("skipped: no ptxas: there is no /no/such/ptxas; "), "{rest}");
    assert!(
        rest.contains("`pip download --no-deps nvidia-cuda-nvcc`") && rest.lines().count() == 1,
        "{rest}"
    );
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split("  ").collect()).collect();
    let rows =
        rows.iter().map(|row| row.iter().map(|cell| cell.trim()).filter(|cell| !cell.is_empty()).collect());
    let rows: Vec<Vec<&str>> = rows.collect();
    let ladder: Vec<Shipped> = shipped().filter(|shipped| shipped.name.starts_with("ladder/")).collect();
    assert_eq!(rows.len(), 1 + ladder.len());
    for (row, shipped) in rows[1..].iter().zip(&ladder) {
        let smem = shipped.kernel().smem.bytes().to_string();
        assert_eq!((row[0], row[3], row.len()), (&*shipped.name, &*smem, rows[0].len()));
        assert!(row[9..].iter().all(|cell| *cell == "-"), "{row:?}");
    }
    let gemm = rows.iter().find(|row| row[0] == "ladder/gemm/f16").unwrap();
    assert_eq!(gemm[1..3], ["producer 40, consumer 232", "384"]);
}

#[test]
fn kernels_are_chosen_by_parts_of_their_names() {
    let part = "fwd/bf16/d128/192x80x3/none";
    let stdout = fa3_with(&["kernels", part], &[("PTXAS", "/no/such/ptxas")]).succeeded();
    let listed = stdout.lines().skip(1).map_while(|line| line.split_whitespace().next());
    let listed: Vec<&str> = listed.collect();
    let named: Vec<String> =
        shipped().map(|shipped| shipped.name).filter(|name| name.contains(part)).collect();
    assert!(listed.len() > 4);
    assert_eq!(listed, named);
    words("kernels fwd/fp64")
        .refused("no kernel's name contains fwd/fp64: names are such as ladder/vector_add/f32 and fwd/");
}

#[test]
fn a_driver_that_is_not_there_compiles_nothing() {
    if is_driver_present() {
        println!("skipped: this machine has a driver");
        return;
    }
    words("kernels --gpu").refused("no nvidia driver: libcuda cannot be loaded");
}

/// The compiler's remarks decide the exit code. This fake compiler always prints the same remarks.
#[cfg(unix)]
#[test]
fn verdicts_of_a_compiler() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let kernels = |says: &str, code: i32| {
        let path = folder.path().join(format!("ptxas{code}{}", says.len()));
        let script = format!(
            "#!/bin/sh\n[ $1 = --version ] && echo 'tools, release 9.9, V9.9.1' && exit 0\n\
             : > \"$4\"; cat >&2 <<'END'\n{says}\nEND\nexit {code}\n"
        );
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        fa3_with(&["kernels"], &[("PTXAS", path.to_str().unwrap())])
    };
    let properties = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    let used = "ptxas info    : Used 77 registers, used 0 barriers";
    let clean = kernels(&format!("{properties}\n{used}"), 0).succeeded();
    assert!(clean.contains("\nptxas 9.9.1 (/"), "{clean}");
    assert!(clean.lines().filter(|line| line.contains("  77       0      0 ")).count() >= 10, "{clean}");

    let spilled =
        kernels(&format!("    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n{used}"), 0);
    assert_eq!((spilled.code, spilled.stderr.as_str()), (Some(1), ""));
    assert!(spilled.stdout.contains("  77      16      0 "), "{}", spilled.stdout);

    let warned = kernels(&format!("ptxas info    : (C7510) Potential loss\n{properties}\n{used}"), 0);
    assert_eq!(warned.code, Some(1));
    assert!(warned.stdout.contains("\nladder/vector_add/f32: C7510: Potential loss\n"), "{}", warned.stdout);

    kernels("ptxas fatal   : no", 255).refused("ptxas rejects kernel vector_add: ptxas fatal   : no");
}

/// Runs with the installed compiler.
#[test]
fn no_kernel_spills_or_is_warned_of() {
    let stdout = words("kernels").succeeded();
    if stdout.contains("skipped: no ptxas") {
        println!("skipped: no ptxas");
    } else {
        assert!(stdout.contains("\nptxas "), "{stdout}");
    }
}

#[test]
fn the_doctor_is_never_at_a_loss() {
    let stdout = fa3_with(&["doctor"], &[("PTXAS", "/no/such/ptxas")]).succeeded();
    let version = env!("CARGO_PKG_VERSION");
    let start = format!("fa3      {version}\nptxas    no ptxas: there is no /no/such/ptxas; ");
    assert!(stdout.starts_with(&start), "{stdout}");
    assert!(
        stdout.contains("\nattention  cpu (") && stdout.contains("\nkernels    simulator        yes\n"),
        "{stdout}"
    );
    if is_driver_present() {
        println!("skipped: this machine has a driver");
        return;
    }
    let end = "\nattention  gpu 0            no nvidia driver: libcuda cannot be loaded\n";
    assert!(
        stdout.contains("\ndriver   no nvidia driver: libcuda cannot be loaded\n") && stdout.ends_with(end),
        "{stdout}"
    );
}
