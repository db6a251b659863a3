//! The C library, as C and Python call it. Needs a C compiler, and for a part of the tests Python or a GPU.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

// Cargo builds the libraries because this test uses the crate.
use fa3_c as _;

/// The folder of the libraries, which is the folder of this executable.
fn libraries() -> PathBuf {
    let executable = env::current_exe().expect("a running test has a path");
    executable.parent().expect("it lies in a folder").to_owned()
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The output of a command, which must succeed.
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Compiles a program against the header without warnings, links it with `library`, and returns what it prints.
fn run(program: &str, library: &str, arguments: &[&str]) -> String {
    run_with(program, library, arguments, Path::new("/nowhere"))
}

/// [`run`], with the driver in this folder, if a driver is there.
fn run_with(program: &str, library: &str, arguments: &[&str], driver: &Path) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let executable = folder.path().join("program");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]).arg(source("include"));
    compile.arg(source(program)).arg(libraries().join(library)).arg("-o").arg(&executable);
    printed(compile.args(["-lm", "-lpthread", "-ldl"]));
    let others = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let search = format!("{}:{}:{others}", driver.display(), libraries().display());
    printed(Command::new(executable).args(arguments).env("LD_LIBRARY_PATH", search))
}

#[test]
fn the_example_runs() {
    let printed = run("examples/attention.c", "libfa3_c.so", &[]);
    let numbers = printed.split(['=', ',', '\n']).filter_map(|word| word.trim().parse::<f64>().ok());
    let numbers: Vec<f64> = numbers.collect();
    assert!(numbers.len() == 3 && numbers[0] == numbers[1], "{printed}");
}

#[test]
fn calls_on_the_cpu() {
    assert_eq!(run("tests/calls.c", "libfa3_c.so", &["cpu"]), "ok\n");
}

/// The static library has the same functions.
#[test]
fn calls_of_the_static_library() {
    assert_eq!(run("tests/calls.c", "libfa3_c.a", &["cpu"]), "ok\n");
}

#[test]
fn calls_on_a_gpu() {
    let printed = run("tests/calls.c", "libfa3_c.so", &["gpu"]);
    assert!(printed == "ok\n" || printed.starts_with("skipped: "), "{printed}");
    print!("{printed}");
}

/// Plans and launches for a GPU, with a stand-in for the driver that computes nothing.
#[test]
fn calls_of_a_stand_in_for_a_gpu() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let driver = source("../bindings/python/tests/stand_in_driver.c");
    let library = folder.path().join("libcuda.so.1");
    printed(Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(driver));
    fs::copy(&library, folder.path().join("libcuda.so")).expect("the folder can be written");
    assert_eq!(run_with("tests/calls.c", "libfa3_c.so", &["gpu", "refusals"], folder.path()), "ok\n");
}

#[test]
fn calls_from_python() {
    let library = libraries().join("libfa3_c.so");
    match Command::new("python3").arg("--version").output() {
        Err(error) => println!("skipped: no python3: {error}"),
        Ok(_) => {
            let printed = printed(Command::new("python3").arg(source("examples/attention.py")).arg(library));
            assert_eq!(printed, "[4.0, 7.0, 0.0, 1.3863]\n");
        }
    }
}
