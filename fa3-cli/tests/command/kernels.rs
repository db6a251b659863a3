//! `fa3 kernels`, `ir`, `ptx` and `doctor` as commands.

use fa3_cuda::Archive;
use fa3_cuda::host::is_driver_present;
use fa3_cuda::kernels::KernelSpec;
use fa3_cuda::kernels::shipped::{Shipped, shipped};
use fa3_cuda::kernels::{fwd, ladder};
use fa3_ir::{Elem, ptx};
use fa3_sched::DeviceLimits;
use fa3_sched::forward::Plan;
use fa3_types::{Dtype, ProblemSpec, Shape};
use serde_json::json;

use crate::files::Folder;
use crate::{fa3, fa3_with};

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
        let print = |verb: &str| fa3(&format!("{verb} {name}")).succeeded();
        // Source lines are relative to the compiler's folder, which is the same for both.
        assert_eq!(print("ir"), kernel.to_string(), "{name}");
        assert_eq!(print("ptx"), ptx::emit(&kernel).unwrap().text, "{name}");
        assert_eq!(print("ptx --annotate"), ptx::emit_annotated(&kernel).unwrap().text, "{name}");
    }
}

/// The numbers are computed by hand. A is 100 x 72 and B is 136 x 72, with elements of two bytes. C is 100 x 136, with
/// elements of four bytes. The tiles are 64 x 64 and 128 x 64, and C's tiles are stored as panels of 128 bytes. K has
/// two tiles, one per split.
#[test]
fn a_launch_as_json() {
    let launch = |words: &str| fa3(&format!("ptx {words} --json")).json();
    let mut split = launch("gemm_split_k --m 100 --n 136 --k 72 --splits 9 --dtype f16");
    let ptx = split["ptx"].take();
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
        "smem": split["smem"].as_u64().unwrap(),
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
    assert_eq!(split, expected);

    let sum = launch("vector_add --n 300");
    assert_eq!(sum["args"], json!([{ "pointer": 0 }, { "pointer": 1 }, { "pointer": 2 }, { "u32": 300 }]));
    assert_eq!((&sum["grid"], &sum["smem"]), (&json!([2, 1, 1]), &json!(0)));
    let copy = launch("tile_copy --swizzle none");
    assert_eq!(
        (&copy["args"][0]["tensor"]["swizzle"], &copy["arrays"][1]["use"]),
        (&json!(0), &json!("output"))
    );
    assert_eq!(launch("gemm_cluster")["cluster"], 2);
}

#[test]
fn kernels_that_are_none_are_refused() {
    for verb in ["ir", "ptx", "sass", "sim"] {
        for (kernel, why) in [
            ("gem", "unrecognized subcommand 'gem'"),
            ("gemm --rows 8", "unexpected argument '--rows'"),
            ("gemm --n 12", "'12' for '--n <N>': expected a multiple of 8 from 8 to 1048576"),
            ("gemm --m -1", "'-1' for '--m <N>': expected a whole number from 1 to 1048576"),
            ("gemm --m x", "'x' for '--m <N>': expected a whole number from 1 to 1048576"),
            ("gemm_cluster --ctas 3", "'3' for '--ctas <N>': expected a multiple of 2 from 2 to 1048576"),
            ("gemm --dtype e4m3", "'e4m3' for '--dtype <TYPE>': expected bf16 or f16"),
            ("gemm_fp8 --dtype bf16", "unexpected argument '--dtype'"),
            (
                "tile_copy --swizzle 16",
                "'16' for '--swizzle <BYTES>'\n  [possible values: 128, 64, 32, none]",
            ),
            ("forward --pipeline two", "[possible values: serial, paired, two-stage, three-stage]"),
            ("forward --pipeline two", "'two' for '--pipeline <HOW>'\n"),
            ("forward --window 5", "expected two whole numbers L,R from -1 to 2^32 - 1, as in 256,0"),
            ("forward --dtype int4", "'int4' for '--dtype <TYPE>': expected f32, f16, bf16, e4m3 or int8"),
        ] {
            fa3(&format!("{verb} {kernel}")).misused(why);
        }
        fa3(&format!("{verb} forward --heads-kv 3")).refused("heads_q 2 is not a multiple of heads_kv 3");
        for usage in ["", "gemm gemm", "gemm --size 8", "gemm --m", "gemm --m 8 --m 16"] {
            assert_eq!(fa3(&format!("{verb} {usage}")).code, Some(2), "{verb} {usage}");
        }
    }
}

/// Hides an installed compiler.
const NO_PTXAS: [(&str, &str); 1] = [("PTXAS", "/no/such/ptxas")];

/// The table has one row for every kernel of the ladder, with the numbers that need no compiler.
#[test]
fn kernels_are_listed_without_a_compiler() {
    let stdout = fa3_with("kernels", &NO_PTXAS).succeeded();
    let (table, rest) = stdout.split_once("\n\n").unwrap();
    assert!(rest.starts_with("skipped: no ptxas: there is no /no/such/ptxas; "), "{rest}");
    let wheel = "`pip download --no-deps nvidia-cuda-nvcc`";
    assert!(rest.contains(wheel) && rest.lines().count() == 1, "{rest}");
    let rows =
        table.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect());
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
    let stdout = fa3_with(&format!("kernels {part}"), &NO_PTXAS).succeeded();
    let listed: Vec<&str> = stdout.lines().skip(1).map_while(|line| line.split_whitespace().next()).collect();
    let named = shipped().map(|shipped| shipped.name).filter(|name| name.contains(part));
    assert!(listed.len() > 4);
    assert_eq!(listed, named.collect::<Vec<_>>());
    fa3("kernels fwd/fp64")
        .refused("no kernel's name contains fwd/fp64: names are such as ladder/vector_add/f32 and fwd/");
}

/// The compiler's remarks decide the exit code. This fake compiler always prints the same remarks.
#[cfg(unix)]
#[test]
fn verdicts_of_a_compiler() {
    let folder = Folder::new();
    let kernels = |says: &str, code: i32| {
        let name = format!("ptxas{code}{}", says.len());
        let ptxas = folder.tool(&name, &format!(": > \"$4\"; cat >&2 <<'END'\n{says}\nEND\nexit {code}"));
        fa3_with("kernels", &[("PTXAS", &ptxas)])
    };
    let properties = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
    let used = "ptxas info    : Used 77 registers, used 0 barriers";
    let clean = kernels(&format!("{properties}\n{used}"), 0).succeeded();
    assert!(clean.contains("\nptxas 9.9.1 (/"), "{clean}");
    assert!(clean.lines().filter(|line| line.contains("  77       0      0 ")).count() >= 10, "{clean}");

    let spills = "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads";
    let spilled = kernels(&format!("{spills}\n{used}"), 0);
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
    let stdout = fa3("kernels").succeeded();
    if stdout.contains("skipped: no ptxas") {
        println!("skipped: no ptxas");
    } else {
        assert!(stdout.contains("\nptxas "), "{stdout}");
    }
}

#[test]
fn the_doctor_is_never_at_a_loss() {
    let stdout = fa3_with("doctor", &NO_PTXAS).succeeded();
    let version = env!("CARGO_PKG_VERSION");
    let start = format!("fa3      {version}\nptxas    no ptxas: there is no /no/such/ptxas; ");
    assert!(stdout.starts_with(&start), "{stdout}");
    for part in ["\nattention  cpu (", "\nkernels    simulator        yes\n"] {
        assert!(stdout.contains(part), "{stdout}");
    }
    if is_driver_present() {
        println!("skipped: this machine has a driver");
        return;
    }
    let end = "\nattention  gpu 0            no nvidia driver: libcuda cannot be loaded\n";
    let driver = "\ndriver   no nvidia driver: libcuda cannot be loaded\n";
    assert!(stdout.contains(driver) && stdout.ends_with(end), "{stdout}");
}

/// An archive has the machine code that the compiler wrote, and its remarks decide the exit code.
#[cfg(unix)]
#[test]
fn archives_of_kernels() {
    let folder = Folder::new();
    let archive = |ptxas: &str| {
        let words = format!("archive {}", folder.path("kernels.sm_90a").display());
        fa3_with(&words, &[("PTXAS", ptxas)])
    };
    let says = |spills: u32| {
        format!(
            "    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\nptxas info    : Used 77 registers"
        )
    };
    archive("/no/such/ptxas").refused("no ptxas: there is no /no/such/ptxas");
    assert_eq!(folder.count(), 0);
    let spills = folder.tool("spills", &format!("cp \"$5\" \"$4\"; cat >&2 <<'END'\n{}\nEND", says(4)));
    let stdout = archive(&spills).succeeded();
    assert!(stdout.contains("\nfwd: 77 registers, 4 bytes spill stores, 0 bytes"), "{stdout}");
    let written = Archive::open(&folder.path("kernels.sm_90a")).unwrap();
    assert!(stdout.contains(&format!("\n{} kernels, ", written.kernels())), "{stdout}");
    for spec in fa3_cuda::kernels::usual().step_by(20) {
        let ptx = ptx::emit(&spec.kernel()).unwrap();
        assert_eq!(written.find(&ptx).as_deref(), Some(ptx.text.as_bytes()));
    }
    let doctor =
        |name: &str| fa3_with(&format!("doctor --archive {}", folder.path(name).display()), &NO_PTXAS);
    let stdout = doctor("kernels.sm_90a").succeeded();
    assert!(stdout.contains(&format!("\narchive  {} kernels (/", written.kernels())), "{stdout}");
    let broken = doctor("spills");
    assert_eq!(broken.code, Some(1));
    let line = "\nkernels    archive          broken: ";
    assert!(
        broken.stdout.contains(line) && broken.stdout.contains("spills is no archive"),
        "{}",
        broken.stdout
    );

    let says = says(0) + "\nptxas info    : (C7510) Potential loss";
    let warned = archive(&folder.tool("warns", &format!(": > \"$4\"; cat >&2 <<'END'\n{says}\nEND")));
    assert_eq!(warned.code, Some(1));
    assert!(warned.stdout.contains("\nfwd: 77 registers, C7510: Potential loss\n"), "{}", warned.stdout);
}
