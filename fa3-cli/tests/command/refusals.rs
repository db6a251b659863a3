//! `fa3 run` with bad input: one line on stderr, exit code 2, no file changed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{fa3, fa3_with};
use safetensors::Dtype::{self, F8_E5M2, F16, F32, F64, I32, I64, U8};
use safetensors::tensor::TensorView;

/// A temporary folder with an input and an earlier output.
struct Case {
    folder: tempfile::TempDir,
    input: PathBuf,
    output: PathBuf,
}

const BEFORE: &str = "an earlier output";

impl Case {
    fn new(input: &[u8]) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let (input_path, output) =
            (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
        fs::write(&input_path, input).unwrap();
        fs::write(&output, BEFORE).unwrap();
        Case { folder, input: input_path, output }
    }

    #[track_caller]
    fn refused(&self, options: &[&str], why: &str) {
        let [input, output] = [&self.input, &self.output].map(|path| path.to_str().unwrap());
        fa3(&[&["run", input, "-o", output], options].concat()).refused(why);
        self.untouched();
    }

    #[track_caller]
    fn untouched(&self) {
        assert_eq!(fs::read_to_string(&self.output).unwrap(), BEFORE);
        assert_eq!(fs::read_dir(self.folder.path()).unwrap().count(), 2);
    }
}

/// A file of zero-filled tensors.
fn zeros(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape), bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Zero-filled tensors q, k and v.
fn qkv(q: (Dtype, &[usize]), k: (Dtype, &[usize]), v: (Dtype, &[usize])) -> Case {
    Case::new(&zeros(&[("q", q.0, q.1), ("k", k.0, k.1), ("v", v.0, v.1)]))
}

const DENSE: (Dtype, &[usize]) = (F16, &[1, 6, 2, 8]);
const PACKED: (Dtype, &[usize]) = (F16, &[6, 2, 8]);

/// Valid Q, K and V beside `others`.
fn beside(others: &[(&str, Dtype, &[usize])]) -> Case {
    let good = ["q", "k", "v"].map(|name| (name, DENSE.0, DENSE.1));
    Case::new(&zeros(&[&good, others].concat()))
}

#[test]
fn files_that_are_none() {
    let good = zeros(&[("q", F32, &[1, 2, 1, 4]), ("k", F32, &[1, 2, 1, 4]), ("v", F32, &[1, 2, 1, 4])]);
    for length in (0..good.len()).step_by(7).chain([good.len() - 1]) {
        Case::new(&good[..length]).refused(&[], "in.safetensors is not a whole safetensors file: ");
    }
    Case::new(b"these are just words, and more of them").refused(&[], "is not a whole safetensors file");
    Case::new(&[&good, b"x".as_slice()].concat()).refused(&[], "is not a whole safetensors file");
    let case = Case::new(&good);
    fs::remove_file(&case.input).unwrap();
    let ran = fa3(&["run", case.input.to_str().unwrap()]);
    ran.refused("in.safetensors: No such file");
    fa3(&["run", case.folder.path().to_str().unwrap()]).refused("cannot read");
}

#[test]
fn names_that_are_missing() {
    let case = Case::new(&zeros(&[("a.q", F16, &[1, 6, 2, 8]), ("a.k", F16, &[1, 6, 2, 8])]));
    case.refused(&[], "has no tensors q, k and v, with or without a prefix; it holds a.k, a.q");
    case.refused(&["--prefix", "a."], "has no tensor a.v; it holds a.k, a.q");
    case.refused(&["--prefix", "b."], "has no tensor b.q");
    case.refused(&["--q", "a.q", "--k", "other"], "has no tensor other");
    Case::new(&zeros(&[])).refused(&[], "it holds nothing");
    let case = Case::new(&zeros(&[("a\n\x1b[31m'q", F16, &[1, 6, 2, 8])]));
    case.refused(&[], r"it holds a\n\u{1b}[31m'q (--q");
}

#[test]
fn shapes_that_disagree() {
    qkv((F16, &[6, 16]), DENSE, DENSE).refused(&[], "q has shape [6, 16], expected (batch, ");
    qkv(PACKED, PACKED, PACKED).refused(&[], "q has shape [6, 2, 8], expected (batch, ");
    let lists = ["--cu-seqlens-q", "0,6"];
    qkv(DENSE, DENSE, DENSE).refused(&lists, "q has shape [1, 6, 2, 8], expected (total, heads, head_dim)");
    qkv(PACKED, DENSE, PACKED).refused(&lists, "k has shape [1, 6, 2, 8], expected (total, heads, head_dim)");
    qkv(DENSE, DENSE, (F16, &[1, 5, 2, 8])).refused(&[], "q, k, v: v has seqlen 5, expected 6");
    qkv(DENSE, (F16, &[1, 6, 2, 16]), DENSE).refused(&[], "k has head_dim 16, expected 8");
    qkv((F16, &[1, 6, 3, 8]), DENSE, DENSE).refused(&[], "heads_q 3 is not a multiple of heads_kv 2");
    qkv((F16, &[1, 6, 0, 8]), DENSE, DENSE).refused(&[], "q has heads 0");
    qkv((F16, &[1, 6, 2, 12]), DENSE, DENSE).refused(&[], "q, k, v: k has head_dim 8, expected 12");
    qkv((F16, &[2, 6, 2, 8]), DENSE, DENSE).refused(&[], "q, k, v: k has batch 1, expected 2");
    let huge: &[usize] = &[0, 1 << 40, 1 << 40, 8];
    qkv((F16, huge), (F16, huge), (F16, huge)).refused(&[], "q of shape [0, 1099511627776, ");
}

/// A few hundred bytes that claim to hold 2^31 heads, 2^30 sequences, or inputs with a result of impossible size.
#[test]
fn huge_tensors_without_elements() {
    let many_heads: &[usize] = &[1, 0, (1 << 31) - 1, 4];
    let many_sequences: &[usize] = &[1 << 30, 0, 1, 4];
    for shape in [many_heads, many_sequences] {
        let case = Case::new(&zeros(&["q", "k", "v", "o"].map(|name| (name, F32, shape))));
        let stdout = fa3(&["run", case.input.to_str().unwrap(), "--causal"]).succeeded();
        assert!(stdout.contains("\n  o       max error 0, "), "{stdout}");
    }
    let (q, k, v): (&[usize], &[usize], &[usize]) =
        (&[0, 1 << 30, 1 << 25, 4], &[0, 4, 1 << 25, 4], &[0, 4, 1 << 25, 512]);
    let why = "q, k, v: o of shape (0, 1073741824, 33554432, 512) spans 2^63 bytes or more";
    qkv((F32, q), (F32, k), (F32, v)).refused(&[], why);
}

#[test]
fn long_names_are_cut() {
    let long = "n".repeat(100_000);
    let case = Case::new(&zeros(&[(&format!("{long}q"), I32, &[1]), (&format!("{long}k"), I32, &[1])]));
    let short = "n".repeat(60) + "... (100001 characters)";
    case.refused(&[], &format!("it holds {short}, {short} (--q"));
    let [q, k, v] = ["q", "k", "v"].map(|name| format!("{long}{name}"));
    let case = Case::new(&zeros(&[(&q, I32, &[1]), (&k, I32, &[1]), (&v, I32, &[1])]));
    case.refused(&[], &format!("{short} is I32, expected "));
}

#[test]
fn types_that_do_not_fit() {
    let of = |dtype| (dtype, DENSE.1);
    qkv(DENSE, of(F32), DENSE).refused(&[], "k is F32, expected F16 like q");
    qkv(of(F32), of(F32), DENSE).refused(&[], "v is F16, expected F32 like q");
    qkv(of(F64), of(F64), of(F64)).refused(&[], "q is F64, expected F32, F16, BF16 or F8_E4M3");
    qkv(of(U8), of(U8), of(U8)).refused(&[], "q is U8, expected F32, F16, BF16 or F8_E4M3");
    qkv(of(I32), of(I32), of(I32)).refused(&[], "q is I32");
}

#[test]
fn invalid_numbers() {
    let case = beside(&[]);
    for (scale, shown) in [("NaN", "NaN"), ("inf", "inf"), ("0", "0"), ("-1", "-1")] {
        case.refused(
            &["--scale", scale],
            &format!("q, k, v: softmax scale {shown} is outside 1e-18 to 1e18"),
        );
        case.refused(&["--softcap", scale], &format!("soft cap {shown} is outside 1e-18 to 1e18"));
    }
    case.refused(&["--scale", "1e300"], "softmax scale 1e300 is outside");
    case.refused(&["--softcap", "-1e-30"], "soft cap -1e-30 is outside");
    case.refused(&["--seqused-q", "7"], "seqused is 7 for sequence 0, outside 0 to 6");
    let ran = fa3(&["run", case.input.to_str().unwrap(), "--seqused-k", "-1"]);
    assert_eq!(ran.stderr, "error: k and v: seqused is -1 for sequence 0, outside 0 to 6\n");
    let packed = qkv(PACKED, PACKED, PACKED);
    for (list, why) in [
        ("1,6", "cu_seqlens starts at 1"),
        ("0,7", "cu_seqlens ends at 7, past the 6 rows of q"),
        ("0,4,2", "cu_seqlens falls from 4 to 2"),
        ("0,-1", "cu_seqlens falls from 0 to -1"),
    ] {
        packed.refused(&["--cu-seqlens-q", list], why);
    }
    packed.refused(
        &["--cu-seqlens-q", "0,6", "--cu-seqlens-k", "0,3,6"],
        "the number of sequences is 1 in q and 2 in k",
    );
    let alone = fa3(&["run", packed.input.to_str().unwrap(), "--cu-seqlens-k", "0,6"]);
    assert_eq!(alone.stderr, "error: cu_seqlens_k is there and cu_seqlens_q is not\n");
    let longer = qkv(PACKED, (F16, &[9, 2, 8]), (F16, &[9, 2, 8]));
    longer.refused(
        &["--cu-seqlens-q", "0,6"],
        "cu_seqlens_q is there and cu_seqlens_k is not, and q has 6 rows and k 9",
    );
    longer
        .refused(&["--cu-seqlens-q", "0,2k", "--cu-seqlens-k", "0,9"], "cu_seqlens ends at 2048, past the 6");
}

/// The option's parser refuses negative numbers, and gives the reason.
#[test]
fn numbers_below_0_are_values() {
    for (words, why) in [
        ("run x --threads -1", "invalid value '-1' for '--threads <N>'"),
        ("run x --device -1", "expected auto, cpu, gpu or the number of a gpu"),
        ("sim forward --seed -1", "invalid value '-1' for '--seed <"),
        ("plan --seqlen -5", "expected a number such as 512 or 16k"),
    ] {
        let ran = fa3(&words.split(' ').collect::<Vec<_>>());
        assert!(ran.code == Some(2) && ran.stderr.contains(why), "{ran:?}");
    }
}

#[test]
fn a_mistyped_verb_has_a_suggestion() {
    for (given, verb) in [("run1", "run"), ("pla", "plan"), ("sism", "sim"), ("quantise", "quantize")] {
        let ran = fa3(&[given]);
        assert!(ran.code == Some(2) && ran.stderr.contains(&format!("'{verb}'")), "{ran:?}");
    }
    assert!(!fa3(&["attend"]).stderr.contains("similar"));
}

#[test]
fn shells_complete_verbs_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let stdout = fa3(&["completions", shell]).succeeded();
        assert!(stdout.contains("quantize") && stdout.contains("hadamard"), "{stdout}");
    }
}

#[test]
fn every_verb_has_the_version() {
    let stdout = fa3(&["run", "--version"]).succeeded();
    assert!(stdout.contains(env!("CARGO_PKG_VERSION")), "{stdout}");
}

/// Stacks larger than the address space: no thread can start.
#[test]
fn threads_that_cannot_be_made() {
    let case = beside(&[]);
    let ran = fa3_with(&["run", case.input.to_str().unwrap()], &[("RUST_MIN_STACK", "1000000000000000000")]);
    ran.refused("cannot start threads: ");
}

#[test]
fn tensors_beside_q_k_and_v() {
    beside(&[("o", F32, &[1, 6, 2, 9])]).refused(&[], "o has shape [1, 6, 2, 9], expected [1, 6, 2, 8]");
    beside(&[("lse", F32, &[1, 6, 2])]).refused(&[], "lse has shape [1, 6, 2], expected [1, 2, 6]");
    beside(&[("o", I32, &[1, 6, 2, 8])]).refused(&[], "o is I32, expected F64, F32, F16 or BF16");
    beside(&[("o", F8_E5M2, &[1, 6, 2, 8])]).refused(&[], "o is F8_E5M2, expected F64, F32, F16 or BF16");
    beside(&[("sink", F32, &[2, 1])]).refused(&[], "sink has shape [2, 1], expected [2]");
    beside(&[("sink", I32, &[2])]).refused(&[], "sink is I32, expected F64, F32, F16 or BF16");
    beside(&[("seqused_q", U8, &[1])]).refused(&[], "seqused_q is U8, expected I32 or I64");
    beside(&[("seqused_k", F32, &[1])]).refused(&[], "seqused_k is F32, expected I32 or I64");
    beside(&[("seqused_k", I64, &[1, 1])]).refused(&[], "seqused_k has shape [1, 1], expected a list");
    beside(&[("cu_seqlens_q", I64, &[0])]).refused(&[], "has shape [1, 6, 2, 8], expected (total");
}

/// The second call of a file is bad: nothing is written for the first one.
#[test]
fn one_bad_call_of_two() {
    let odd: &[usize] = &[1, 5, 2, 8];
    let [a, b] = [["a.q", "a.k", "a.v"], ["b.q", "b.k", "b.v"]];
    let mut tensors: Vec<_> = a.iter().chain(&b).map(|&name| (name, F16, DENSE.1)).collect();
    tensors[5].2 = odd;
    Case::new(&zeros(&tensors)).refused(&[], "b.q, b.k, b.v: v has seqlen 5, expected 6");
}

#[test]
fn outputs_that_cannot_be() {
    let case = beside(&[]);
    let input = case.input.to_str().unwrap();
    let inside = |name: &str| case.folder.path().join(name).to_str().unwrap().to_owned();
    fa3(&["run", input, "-o", &inside("missing/out.safetensors")]).refused("there is no folder");
    fa3(&["run", input, "-o", &inside("")]).refused("it exists and is not a file");
    fa3(&["run", input, "-o", &inside("o.npy")]).refused("o.npy must be named .safetensors, like the input");
    fa3(&["run", input, "-o", &inside("o"), "--lse", &inside("lse")]).refused("--lse is for .npy files");
    let output = case.output.to_str().unwrap();
    fa3(&["run", input, "-o", output, "--lse", &inside("./out.safetensors")]).refused("are the same file");
    fa3(&["run", input, "-o", &inside("./in.safetensors")]).refused("in.safetensors: it is an input");
    fa3(&["run", input, input]).refused("expected one safetensors file or three .npy files (q, k, v), got 2");
    case.untouched();
    fa3(&["run", input, "-o", &inside("new/")]).refused("new/: it is the name of a folder");
    fa3(&["run", input, "-o", "-"]).refused("cannot write to stdout, where the report goes");
    fa3(&["run", "-"]).refused("cannot read -: stdin is /dev/stdin");
    for (file, folder) in [("/dev/null", "/dev"), ("/proc/o.safetensors", "/proc")] {
        if Path::new(folder).exists() {
            fa3(&["run", input, "-o", file])
                .refused(&format!("{file}: it leads to {folder}, where there are no"));
        }
    }
}

/// /dev/stdout may be a file by redirection, to which other programs write as well.
#[cfg(unix)]
#[test]
fn stdout_is_not_replaced() {
    let case = beside(&[]);
    let log = case.folder.path().join("log");
    fs::write(&log, "before\n").unwrap();
    let stdout = fs::OpenOptions::new().append(true).open(&log).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_fa3"));
    let ran =
        command.args(["run", case.input.to_str().unwrap(), "-o", "/dev/stdout"]).stdout(stdout).output();
    let ran = ran.unwrap();
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    assert_eq!(fs::read_to_string(&log).unwrap(), "before\n");
}

/// A .npy file of zeros with this header.
fn npy(header: &str, data: usize) -> Vec<u8> {
    let len = (header.len() as u32).to_le_bytes();
    [b"\x93NUMPY\x02\x00".as_slice(), &len, header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn npy_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let write = |name: &str, descr: &str, shape: &str, data: usize| {
        let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n");
        fs::write(path(name), npy(&header, data)).unwrap();
    };
    let shape = "(1, 6, 2, 8)";
    write("good.npy", "'<f4'", shape, 384);
    write("double.npy", "'<f8'", shape, 768);
    write("short.npy", "'<f4'", shape, 383);
    write("long.npy", "'<f4'", shape, 385);
    write("half.npy", "'<f2'", shape, 192);
    write("flat.npy", "'<f4'", "(96,)", 384);
    write("wraps.npy", "'<f4'", "(4294967296, 4294967296, 2, 8)", 0);
    write("empty.npy", "'<f4'", "(0, 4294967296, 4294967296, 8)", 0);
    write("records.npy", "[('x', '<f4')]", shape, 384);
    write("nested.npy", &"[".repeat(1 << 20), shape, 384);
    write("words.npy", "words", shape, 384);
    write("python2.npy", "'<f4'", "(96L,)", 384);
    fs::write(path("header.npy"), [b"\x93NUMPY\x02\x00".as_slice(), &[0xFF; 4]].concat()).unwrap();
    let fortran = "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 6, 2, 8)}";
    fs::write(path("fortran.npy"), npy(fortran, 384)).unwrap();
    fs::write(path("none.npy"), "words").unwrap();
    let good = path("good.npy");
    let run = |k: &str, options: &[&str]| fa3(&[&["run", &good, &path(k), &good], options].concat());
    assert_eq!(run("good.npy", &[]).code, Some(0));
    assert_eq!(run("fortran.npy", &[]).code, Some(0));
    let files = fs::read_dir(folder.path()).unwrap().count();
    let output = path("out.npy");
    for (k, why) in [
        ("missing.npy", "cannot read "),
        ("none.npy", "none.npy is not a .npy file: it does not begin with "),
        ("words.npy", "words.npy is not a .npy file: its header is no dict of "),
        ("double.npy", "double.npy holds '<f8', expected f4 or f2, as x.astype('f4') gives"),
        ("short.npy", "holds 383 bytes of data, expected 384 for F32 of shape [1, 6, 2, 8]"),
        ("long.npy", "holds 385 bytes of data, expected 384 for F32 of shape [1, 6, 2, 8]"),
        ("half.npy", "half.npy is F16, expected F32 like "),
        ("flat.npy", "flat.npy has shape [96], expected (batch, "),
        ("wraps.npy", "has shape [4294967296, 4294967296, 2, 8], more elements than can be addressed"),
        ("empty.npy", "has shape [0, 4294967296, 4294967296, 8], more elements than can be addressed"),
        ("records.npy", "records.npy holds records, expected f4 or f2"),
        ("nested.npy", "nested.npy holds records, expected f4 or f2"),
        ("header.npy", "header.npy has a header of 4294967295 bytes, more than 16777216"),
        ("python2.npy", "python2.npy has shape [96], expected (batch, "),
    ] {
        run(k, &["-o", &output]).refused(why);
    }
    let bytes = fs::read(&good).unwrap();
    for length in (0..bytes.len()).step_by(23) {
        fs::write(path("cut.npy"), &bytes[..length]).unwrap();
        run("cut.npy", &["-o", &output]).refused("cut.npy ");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), files + 1);
}

#[test]
fn npy_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (good, output) = (path("good.npy"), path("out.npy"));
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 2, 8)}";
    fs::write(&good, npy(header, 384)).unwrap();
    let run = |options: &[&str]| fa3(&[&["run", &good, &good, &good], options].concat());
    run(&["--prefix", "a."]).refused("--prefix is for safetensors input");
    run(&["-o", &path("x.safetensors")]).refused("must be named .npy");
    run(&["-o", &output, "--lse", &path("x.safetensors")]).refused("must be named .npy");
    run(&["-o", &output, "--lse", &path("./out.npy")]).refused("are the same file");
    run(&["-o", &output, "--lse", &path("./good.npy")]).refused("good.npy: it is an input");
    fa3(&["run", &good]).refused("good.npy is one .npy file, expected three of them (q, k, v)");
    assert_eq!(fs::read(&good).unwrap(), npy(header, 384));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
