//! `fa3 run` with bad input: one line on stderr, exit code 2, no file changed.

use std::fs;

use crate::files::{Folder, Tensor, encoded};
use crate::{command, fa3, fa3_with};
use safetensors::Dtype::{self, F8_E5M2, F16, F32, F64, I32, I64, U8};

/// An earlier output.
const BEFORE: &str = "an earlier output";

/// Computes a call in the folder.
const RUN: &str = "run in.safetensors -o out.safetensors";

/// A folder with an input and an earlier output.
fn case(input: impl AsRef<[u8]>) -> Folder {
    let folder = Folder::new();
    folder.write("in.safetensors", input);
    folder.write("out.safetensors", BEFORE);
    folder
}

/// Asserts that the call with these options is refused, and that no file is changed.
#[track_caller]
fn refused(folder: &Folder, options: &str, why: &str) {
    folder.fa3(&format!("{RUN} {options}")).refused(why);
    untouched(folder);
}

#[track_caller]
fn untouched(folder: &Folder) {
    assert_eq!(folder.text("out.safetensors"), BEFORE);
    assert_eq!(folder.count(), 2);
}

/// A name, a type and a shape.
type Zeros<'a> = (&'a str, Dtype, &'a [usize]);

/// A file of zero-filled tensors.
fn zeros(tensors: &[Zeros<'_>]) -> Vec<u8> {
    let tensors = tensors.iter().map(|&(name, dtype, shape)| Tensor::zeros(name, dtype, shape));
    encoded(&tensors.collect::<Vec<_>>())
}

/// Zero-filled tensors q, k and v.
fn qkv(q: (Dtype, &[usize]), k: (Dtype, &[usize]), v: (Dtype, &[usize])) -> Folder {
    case(zeros(&[("q", q.0, q.1), ("k", k.0, k.1), ("v", v.0, v.1)]))
}

const DENSE: (Dtype, &[usize]) = (F16, &[1, 6, 2, 8]);
const PACKED: (Dtype, &[usize]) = (F16, &[6, 2, 8]);

/// Valid Q, K and V beside `others`.
fn beside(others: &[Zeros<'_>]) -> Folder {
    let good = ["q", "k", "v"].map(|name| (name, DENSE.0, DENSE.1));
    case(zeros(&[&good, others].concat()))
}

#[test]
fn files_that_are_none() {
    let good = zeros(&["q", "k", "v"].map(|name| (name, F32, &[1, 2, 1, 4][..])));
    for length in (0..good.len()).step_by(7).chain([good.len() - 1]) {
        refused(&case(&good[..length]), "", "in.safetensors is not a whole safetensors file: ");
    }
    for file in [b"these are just words, and more of them".to_vec(), [&good, b"x".as_slice()].concat()] {
        refused(&case(file), "", "is not a whole safetensors file");
    }
    let folder = Folder::new();
    folder.fa3(RUN).refused("in.safetensors: No such file");
    folder.fa3("run .").refused("cannot read");
}

#[test]
fn names_that_are_missing() {
    let folder = case(zeros(&["a.q", "a.k"].map(|name| (name, F16, DENSE.1))));
    for (options, why) in [
        ("", "has no tensors q, k and v, with or without a prefix; it holds a.k, a.q"),
        ("--prefix a.", "has no tensor a.v; it holds a.k, a.q"),
        ("--prefix b.", "has no tensor b.q"),
        ("--q a.q --k other", "has no tensor other"),
    ] {
        refused(&folder, options, why);
    }
    refused(&case(zeros(&[])), "", "it holds nothing");
    let folder = case(zeros(&[("a\n\x1b[31m'q", F16, DENSE.1)]));
    refused(&folder, "", r"it holds a\n\u{1b}[31m'q (--q");
}

#[test]
fn shapes_that_disagree() {
    fn of(shape: &[usize]) -> (Dtype, &[usize]) {
        (F16, shape)
    }
    let huge = of(&[0, 1 << 40, 1 << 40, 8]);
    let lists = "--cu-seqlens-q 0,6";
    for ([q, k, v], options, why) in [
        ([of(&[6, 16]), DENSE, DENSE], "", "q has shape [6, 16], expected (batch, "),
        ([PACKED; 3], "", "q has shape [6, 2, 8], expected (batch, "),
        ([DENSE; 3], lists, "q has shape [1, 6, 2, 8], expected (total, heads, head_dim)"),
        ([PACKED, DENSE, PACKED], lists, "k has shape [1, 6, 2, 8], expected (total, heads, head_dim)"),
        ([DENSE, DENSE, of(&[1, 5, 2, 8])], "", "q, k, v: v has seqlen 5, expected 6"),
        ([DENSE, of(&[1, 6, 2, 16]), DENSE], "", "k has head_dim 16, expected 8"),
        ([of(&[1, 6, 3, 8]), DENSE, DENSE], "", "heads_q 3 is not a multiple of heads_kv 2"),
        ([of(&[1, 6, 0, 8]), DENSE, DENSE], "", "q has heads 0"),
        ([of(&[1, 6, 2, 12]), DENSE, DENSE], "", "q, k, v: k has head_dim 8, expected 12"),
        ([of(&[2, 6, 2, 8]), DENSE, DENSE], "", "q, k, v: k has batch 1, expected 2"),
        ([huge; 3], "", "q of shape [0, 1099511627776, "),
        ([huge; 3], "--layout bhsd", "q of shape [0, 1099511627776, "),
    ] {
        refused(&qkv(q, k, v), options, why);
    }
}

/// Files of a few hundred bytes claim to hold 2^31 - 1 heads, 2^30 sequences, or inputs with a result of impossible
/// size.
#[test]
fn huge_tensors_without_elements() {
    let many_heads: &[usize] = &[1, 0, (1 << 31) - 1, 4];
    let many_sequences: &[usize] = &[1 << 30, 0, 1, 4];
    for shape in [many_heads, many_sequences] {
        let folder = case(zeros(&["q", "k", "v", "o"].map(|name| (name, F32, shape))));
        let stdout = folder.fa3("run in.safetensors --causal").succeeded();
        assert!(stdout.contains("\n  o       max error 0, "), "{stdout}");
    }
    let (q, k, v): (&[usize], &[usize], &[usize]) =
        (&[0, 1 << 30, 1 << 25, 4], &[0, 4, 1 << 25, 4], &[0, 4, 1 << 25, 512]);
    let why = "q, k, v: o of shape (0, 1073741824, 33554432, 512) spans 2^63 bytes or more";
    refused(&qkv((F32, q), (F32, k), (F32, v)), "", why);
}

#[test]
fn long_names_are_cut() {
    let [q, k, v] = ["q", "k", "v"].map(|name| "n".repeat(100_000) + name);
    let short = "n".repeat(60) + "... (100001 characters)";
    let folder = case(zeros(&[(&q, I32, &[1]), (&k, I32, &[1])]));
    refused(&folder, "", &format!("it holds {short}, {short} (--q"));
    let folder = case(zeros(&[(&q, I32, &[1]), (&k, I32, &[1]), (&v, I32, &[1])]));
    refused(&folder, "", &format!("{short} is I32, expected "));
}

#[test]
fn types_that_do_not_fit() {
    for ([q, k, v], why) in [
        ([F16, F32, F16], "k is F32, expected F16 like q"),
        ([F32, F32, F16], "v is F16, expected F32 like q"),
        ([F64; 3], "q is F64, expected F32, F16, BF16 or F8_E4M3"),
        ([U8; 3], "q is U8, expected F32, F16, BF16 or F8_E4M3"),
        ([I32; 3], "q is I32"),
    ] {
        refused(&qkv((q, DENSE.1), (k, DENSE.1), (v, DENSE.1)), "", why);
    }
}

#[test]
fn invalid_numbers() {
    let folder = beside(&[]);
    for number in ["NaN", "inf", "0", "-1"] {
        let why = format!("q, k, v: softmax scale {number} is outside 1e-18 to 1e18");
        refused(&folder, &format!("--scale {number}"), &why);
        refused(
            &folder,
            &format!("--softcap {number}"),
            &format!("soft cap {number} is outside 1e-18 to 1e18"),
        );
    }
    for (options, why) in [
        ("--scale 1e300", "softmax scale 1e300 is outside"),
        ("--softcap -1e-30", "soft cap -1e-30 is outside"),
        ("--seqused-q 7", "seqused is 7 for sequence 0, outside 0 to 6"),
        ("--seqused-k -1", "k and v: seqused is -1 for sequence 0, outside 0 to 6"),
    ] {
        refused(&folder, options, why);
    }
    let packed = qkv(PACKED, PACKED, PACKED);
    for (options, why) in [
        ("--cu-seqlens-q 1,6", "cu_seqlens starts at 1"),
        ("--cu-seqlens-q 0,7", "cu_seqlens ends at 7, past the 6 rows of q"),
        ("--cu-seqlens-q 0,4,2", "cu_seqlens falls from 4 to 2"),
        ("--cu-seqlens-q 0,-1", "cu_seqlens falls from 0 to -1"),
        ("--cu-seqlens-q 0,6 --cu-seqlens-k 0,3,6", "the number of sequences is 1 in q and 2 in k"),
        ("--cu-seqlens-k 0,6", "cu_seqlens_k is there and cu_seqlens_q is not"),
    ] {
        refused(&packed, options, why);
    }
    let longer = qkv(PACKED, (F16, &[9, 2, 8]), (F16, &[9, 2, 8]));
    let why = "cu_seqlens_q is there and cu_seqlens_k is not, and q has 6 rows and k 9";
    refused(&longer, "--cu-seqlens-q 0,6", why);
    refused(&longer, "--cu-seqlens-q 0,2k --cu-seqlens-k 0,9", "cu_seqlens ends at 2048, past the 6");
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
        fa3(words).misused(why);
    }
}

#[test]
fn a_mistyped_verb_has_a_suggestion() {
    for (given, verb) in [("run1", "run"), ("pla", "plan"), ("sism", "sim"), ("quantise", "quantize")] {
        fa3(given).misused(&format!("'{verb}'"));
    }
    assert!(!fa3("attend").stderr.contains("similar"));
}

#[test]
fn shells_complete_verbs_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let stdout = fa3(&format!("completions {shell}")).succeeded();
        assert!(stdout.contains("quantize") && stdout.contains("hadamard"), "{stdout}");
    }
}

#[test]
fn every_verb_has_the_version() {
    let stdout = fa3("run --version").succeeded();
    assert!(stdout.contains(env!("CARGO_PKG_VERSION")), "{stdout}");
}

/// With stacks larger than the address space, no thread can start.
#[test]
fn threads_that_cannot_be_made() {
    for words in ["run x", "sim vector_add", "accuracy --quick", "archive x", "doctor", "quantize x.npy"] {
        let ran = fa3_with(words, &[("RUST_MIN_STACK", "1000000000000000000")]);
        ran.refused("cannot start threads: ");
    }
}

#[test]
fn tensors_beside_q_k_and_v() {
    for (name, dtype, shape, why) in [
        ("o", F32, &[1, 6, 2, 9][..], "o has shape [1, 6, 2, 9], expected [1, 6, 2, 8]"),
        ("lse", F32, &[1, 6, 2], "lse has shape [1, 6, 2], expected [1, 2, 6]"),
        ("o", I32, &[1, 6, 2, 8], "o is I32, expected F64, F32, F16 or BF16"),
        ("o", F8_E5M2, &[1, 6, 2, 8], "o is F8_E5M2, expected F64, F32, F16 or BF16"),
        ("sink", F32, &[2, 1], "sink has shape [2, 1], expected [2]"),
        ("sink", I32, &[2], "sink is I32, expected F64, F32, F16 or BF16"),
        ("seqused_q", U8, &[1], "seqused_q is U8, expected I32 or I64"),
        ("seqused_k", F32, &[1], "seqused_k is F32, expected I32 or I64"),
        ("seqused_k", I64, &[1, 1], "seqused_k has shape [1, 1], expected a list"),
        ("cu_seqlens_q", I64, &[0], "has shape [1, 6, 2, 8], expected (total"),
    ] {
        refused(&beside(&[(name, dtype, shape)]), "", why);
    }
}

/// The second call of a file is bad: nothing is written for the first one.
#[test]
fn one_bad_call_of_two() {
    let good = ["a.q", "a.k", "a.v", "b.q", "b.k"].map(|name| (name, F16, DENSE.1));
    let tensors = [&good, [("b.v", F16, &[1, 5, 2, 8][..])].as_slice()].concat();
    refused(&case(zeros(&tensors)), "", "b.q, b.k, b.v: v has seqlen 5, expected 6");
}

#[test]
fn outputs_that_cannot_be() {
    let folder = beside(&[]);
    for (words, why) in [
        ("in.safetensors -o missing/out.safetensors", "there is no folder"),
        ("in.safetensors -o o.npy", "o.npy must be named .safetensors, like the input"),
        ("in.safetensors -o o --lse lse", "--lse is for .npy files"),
        ("in.safetensors -o out.safetensors --lse ./out.safetensors", "are the same file"),
        ("in.safetensors -o ./in.safetensors", "in.safetensors: it is an input"),
        (
            "in.safetensors in.safetensors",
            "expected one safetensors file or three .npy files (q, k, v), got 2",
        ),
        ("in.safetensors -o -", "cannot write to stdout, where the report goes"),
        ("-", "cannot read -: stdin is /dev/stdin"),
    ] {
        folder.fa3(&format!("run {words}")).refused(why);
    }
    untouched(&folder);
}

/// By redirection, /dev/stdout may be a file to which other programs write as well.
#[cfg(unix)]
#[test]
fn stdout_is_not_replaced() {
    let folder = beside(&[]);
    folder.write("log", "before\n");
    let stdout = fs::OpenOptions::new().append(true).open(folder.path("log")).unwrap();
    let mut command = command("run in.safetensors -o /dev/stdout");
    let ran = command.current_dir(folder.path("")).stdout(stdout).output().unwrap();
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    assert_eq!(folder.text("log"), "before\n");
}

/// A .npy file of zeros with this header.
fn npy(header: &str, data: usize) -> Vec<u8> {
    let len = (header.len() as u32).to_le_bytes();
    [b"\x93NUMPY\x02\x00".as_slice(), &len, header.as_bytes(), &vec![0; data]].concat()
}

/// A good .npy file.
fn good_npy() -> Vec<u8> {
    npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 2, 8)}", 384)
}

#[test]
fn npy_files() {
    let (folder, good, shape) = (Folder::new(), good_npy(), "(1, 6, 2, 8)");
    let described = |descr: &str, shape: &str, data: usize| {
        npy(&format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"), data)
    };
    let fortran = "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 6, 2, 8)}";
    folder.write("good.npy", &good);
    let run = |k: &[u8], options: &str| {
        folder.write("k.npy", k);
        folder.fa3(&format!("run good.npy k.npy good.npy {options}"))
    };
    for k in [&good, &npy(fortran, 384)] {
        assert_eq!(run(k, "").code, Some(0));
    }
    for (k, why) in [
        (b"words".to_vec(), "k.npy is not a .npy file: it does not begin with "),
        (described("words", shape, 384), "k.npy is not a .npy file: its header is no dict of "),
        (described("'<f8'", shape, 768), "k.npy holds '<f8', expected f4 or f2, as x.astype('f4') gives"),
        (
            described("'<f4'", shape, 383),
            "holds 383 bytes of data, expected 384 for F32 of shape [1, 6, 2, 8]",
        ),
        (
            described("'<f4'", shape, 385),
            "holds 385 bytes of data, expected 384 for F32 of shape [1, 6, 2, 8]",
        ),
        (described("'<f2'", shape, 192), "k.npy is F16, expected F32 like "),
        (described("'<f4'", "(96,)", 384), "k.npy has shape [96], expected (batch, "),
        (described("'<f4'", "(96L,)", 384), "k.npy has shape [96], expected (batch, "),
        (described("[('x', '<f4')]", shape, 384), "k.npy holds records, expected f4 or f2"),
        (described(&"[".repeat(1 << 20), shape, 384), "k.npy holds records, expected f4 or f2"),
        (
            [b"\x93NUMPY\x02\x00".as_slice(), &[0xFF; 4]].concat(),
            "k.npy has a header of 4294967295 bytes, more than 16777216",
        ),
    ] {
        run(&k, "-o out.npy").refused(why);
    }
    for length in (0..good.len()).step_by(23) {
        run(&good[..length], "-o out.npy").refused("k.npy ");
    }
    folder.fa3("run good.npy missing.npy good.npy -o out.npy").refused("cannot read missing.npy");
    assert_eq!(folder.count(), 2);
}

#[test]
fn npy_options() {
    let folder = Folder::new();
    folder.write("good.npy", good_npy());
    for (options, why) in [
        ("good.npy good.npy --prefix a.", "--prefix is for safetensors input"),
        ("good.npy good.npy -o x.safetensors", "must be named .npy"),
        ("good.npy good.npy -o out.npy --lse x.safetensors", "must be named .npy"),
        ("good.npy good.npy -o out.npy --lse ./out.npy", "are the same file"),
        ("good.npy good.npy -o out.npy --lse ./good.npy", "good.npy: it is an input"),
        ("", "good.npy is one .npy file, expected three of them (q, k, v)"),
    ] {
        folder.fa3(&format!("run good.npy {options}")).refused(why);
    }
    assert_eq!(folder.bytes("good.npy"), good_npy());
    assert_eq!(folder.count(), 1);
}
