//! `fa3 export`: the folder's launcher passes to the driver what this library passes. A stand-in for the driver notes
//! both.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fa3_cuda::host::{Compiled, Device, Operation, Tensors, Workspace};
use fa3_sched::forward::SplitKeys;
use fa3_sched::{backward, forward};
use fa3_types::{BackwardSpec, Dtype, Mask, ProblemSpec, Sequences, Shape};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Ran, fa3_with};

/// Problems as options of the command.
const PROBLEMS: [&str; 4] = [
    "forward --batch 2 --seqlen 70 --heads 4 --heads-kv 2 --head-dim 64 --causal",
    "forward --seqlen-q 2 --heads 8 --heads-kv 1 --cache-seqlens 70,33 --page-size 16 --split-keys",
    "backward --seqlen 70 --heads 2 --head-dim 64",
    "backward --seqlen 70 --heads 2 --head-dim 256 --causal --deterministic --dtype f16",
];

/// The folder of a problem, with PTX and without machine code.
fn export(problem: &str, folder: &Path) -> Value {
    let words = format!("export {problem} -o {}", folder.display());
    let ran = fa3_with(&words, &[("PTXAS", "/nowhere/ptxas")]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    serde_json::from_str(&fs::read_to_string(folder.join("program.json")).unwrap()).unwrap()
}

/// The stand-in for libcuda, in a folder of its own.
fn driver(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/python/tests/stand_in_driver.c");
    let library = folder.join("libcuda.so.1");
    Ran::of(Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source)).succeeded();
    fs::copy(&library, folder.join("libcuda.so")).unwrap();
    folder.to_owned()
}

/// Compiles the launcher of a folder without warnings.
fn launcher(folder: &Path) -> Command {
    let executable = folder.join("launch");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&executable);
    Ran::of(compile.arg(folder.join("launch.c")).args(["-ldl", "-lm"])).succeeded();
    let mut launch = Command::new(executable);
    launch.arg(folder);
    launch
}

/// The result of `command` with the stand-in, and the notes of the stand-in.
fn noted(command: &mut Command, driver: &Path) -> (Ran, String) {
    let log = driver.join("log");
    let _ = fs::remove_file(&log);
    let ran = Ran::of(command.env("LD_LIBRARY_PATH", driver).env("STAND_IN_LOG", &log));
    let text = fs::read_to_string(log).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
    (ran, text)
}

#[test]
fn the_launcher_launches_what_this_library_launches() {
    let folder = TempDir::new().unwrap();
    let driver = driver(folder.path());
    for (index, problem) in PROBLEMS.iter().enumerate() {
        let exported = folder.path().join(index.to_string());
        let program = export(problem, &exported);
        let (ran, launched) = noted(&mut launcher(&exported), &driver);
        let mut ours = Command::new(env::current_exe().unwrap());
        ours.args(["export::launches_of_this_library", "--exact", "--ignored"])
            .env("PROBLEM", index.to_string());
        let (of_ours, expected) = noted(&mut ours, &driver);
        assert_eq!(of_ours.code, Some(0), "{}{}", of_ours.stdout, of_ours.stderr);
        assert_eq!(sorted(&launched), sorted(&expected), "{problem}");
        check_json(&program, &sorted(&launched).0);
        // The stand-in computes nothing, and its memory is 0.
        assert!(ran.code == Some(1) && ran.stdout.contains("WRONG"), "{ran:?}");
        for tensor in program["tensors"].as_array().unwrap() {
            if let Some(after) = tensor["after"].as_str() {
                fs::write(exported.join(after), vec![0; tensor["bytes"].as_u64().unwrap() as usize]).unwrap();
            }
        }
        let (ran, _) = noted(&mut launcher(&exported), &driver);
        assert!(ran.code == Some(0) && ran.stdout.contains(": right, 0 elements differ"), "{ran:?}");
    }
}

/// Compares program.json with what the stand-in noted of each launch.
fn check_json(program: &Value, launched: &[&str]) {
    let launches = program["launches"].as_array().unwrap();
    assert_eq!(launches.len(), launched.len());
    for (launch, noted) in launches.iter().zip(launched) {
        let words =
            |name: &str| launch[name].as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>();
        let (kernel, grid, block) = (launch["kernel"].as_str().unwrap(), words("grid"), words("block"));
        let smem = &launch["shared_memory"];
        let first = format!("launch {kernel} grid {} block {} smem {smem} ", grid.join(" "), block.join(" "));
        assert!(noted.starts_with(&first), "{first}: {noted}");
        let is_early = launch["programmatic_stream_serialization"] == true;
        assert_eq!(noted.contains(" attribute 6 1 "), is_early, "{noted}");
        let arguments = launch["arguments"].as_array().unwrap();
        let noted: Vec<&str> = noted.split(' ').collect();
        for (argument, noted) in arguments.iter().zip(&noted[noted.len() - arguments.len()..]) {
            let bytes = if let Some(number) = argument["u32"].as_u64() {
                (number as u32).to_le_bytes().to_vec()
            } else if let Some(number) = argument["f32"].as_f64() {
                (number as f32).to_le_bytes().to_vec()
            } else if let Some(number) = argument["u64"].as_u64() {
                number.to_le_bytes().to_vec()
            } else {
                let map = &argument["tensor_map"];
                let place = if map.is_null() { &argument["address"] } else { map };
                assert!(place["tensor"].is_u64() || place["workspace"].is_u64(), "{argument}");
                assert!(map.is_null() || map.as_object().unwrap().len() == 10, "{argument}");
                assert_eq!(noted.len(), if map.is_null() { 16 } else { 256 }, "{argument}: {noted}");
                continue;
            };
            let expected: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(*noted, expected, "{argument}");
        }
    }
}

#[test]
fn machine_code_is_there_if_ptxas_is() {
    let folder = TempDir::new().unwrap();
    let ran = fa3_with(&format!("export vector_add --n 64 -o {}", folder.path().display()), &[]);
    if ran.stderr.contains("there is no machine code") {
        println!("skipped: {}", ran.stderr);
        return;
    }
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(fs::read(folder.path().join("vector_add.cubin")).unwrap().starts_with(b"\x7fELF"));
}

#[test]
fn a_test_vector_that_takes_too_long_is_refused() {
    let folder = TempDir::new().unwrap();
    let words = format!("export forward --seqlen 4k --heads 32 -o {}", folder.path().join("f").display());
    let ran = fa3_with(&words, &[("PTXAS", "/nowhere/ptxas")]);
    assert!(ran.code == Some(2) && ran.stderr.contains("--no-test leaves it out"), "{ran:?}");
    assert!(!folder.path().join("f").exists());
}

/// Modules may be loaded in any order. Launches keep theirs.
fn sorted(log: &str) -> (Vec<&str>, Vec<&str>) {
    let (launches, mut others): (Vec<_>, Vec<_>) = log.lines().partition(|line| line.starts_with("launch "));
    others.sort_unstable();
    others.dedup();
    (launches, others)
}

/// Launches a problem of [`PROBLEMS`]. The test above runs it, with the stand-in as the driver.
#[test]
#[ignore = "needs a driver, and a test that reads what it launches"]
fn launches_of_this_library() {
    let shape = |batch, seqlen, heads, head_dim| Shape { batch, seqlen, heads, head_dim };
    let forward = |spec: ProblemSpec, options| launch::<forward::Plan>(&spec.validate().unwrap(), &options);
    let backward = |spec: ProblemSpec, options| {
        launch::<backward::Plan>(&BackwardSpec::contiguous(spec).validate().unwrap(), &options);
    };
    match env::var("PROBLEM").unwrap().as_str() {
        "0" => {
            let spec = ProblemSpec::dense(Dtype::Bf16, shape(2, 70, 4, 64), shape(2, 70, 2, 64));
            forward(spec.mask(Mask::Causal), forward::PlanOptions::default());
        }
        "1" => {
            let spec = ProblemSpec::dense(Dtype::Bf16, shape(2, 2, 8, 128), shape(9, 16, 1, 128));
            let options = forward::PlanOptions::default().split_keys(SplitKeys::Even);
            forward(spec.seqs_k(Sequences::paged(2, 5).used()), options);
        }
        "2" => {
            let spec = ProblemSpec::dense(Dtype::Bf16, shape(1, 70, 2, 64), shape(1, 70, 2, 64));
            backward(spec, backward::PlanOptions::default());
        }
        _ => {
            let spec = ProblemSpec::dense(Dtype::F16, shape(1, 70, 2, 256), shape(1, 70, 2, 256));
            backward(spec.mask(Mask::Causal), backward::PlanOptions::default().deterministic());
        }
    }
}

/// Launches a problem over memory that is allocated in the launcher's order: tensors, then the workspace.
fn launch<P: Operation>(problem: &P::Problem, options: &P::Options) {
    let device = Device::open(0).unwrap();
    let stream = device.default_stream();
    let compiled = Compiled::<P>::with(&device, problem, options).unwrap();
    let tensors = compiled.tensors();
    let mut memory: Vec<_> =
        tensors.map(|(name, bytes)| (name, device.alloc(bytes as usize).unwrap())).collect();
    let mut workspace = Workspace::new(&device, &stream, compiled.workspace_bytes()).unwrap();
    let tensors = memory.iter_mut();
    let tensors = tensors.fold(Tensors::default(), |tensors, (name, buffer)| tensors.output(name, buffer));
    compiled.run(&stream, tensors, &mut workspace).unwrap();
}
