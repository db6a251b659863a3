//! Input files and pipes: how much of them is read. Devices are refused.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Ran, fa3};

/// A safetensors file's header.
fn header(json: &str) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

/// The header of F16 tensors q, k and v of shape (1, 64, 2, 32), followed by a tensor of `others` bytes.
fn qkv(others: u64) -> Vec<u8> {
    let tensor = |(index, name): (usize, &str)| {
        let (begin, end) = (index * BYTES, (index + 1) * BYTES);
        format!(r#""{name}": {{"dtype": "F16", "shape": [1, 64, 2, 32], "data_offsets": [{begin}, {end}]}}"#)
    };
    let tensors: Vec<String> = ["q", "k", "v"].into_iter().enumerate().map(tensor).collect();
    let (begin, end) = (3 * BYTES, 3 * BYTES as u64 + others);
    let other = format!(r#""w": {{"dtype": "U8", "shape": [{others}], "data_offsets": [{begin}, {end}]}}"#);
    header(&format!("{{{}, {other}}}", tensors.join(", ")))
}

/// Bytes of each of q, k and v.
const BYTES: usize = 64 * 2 * 32 * 2;

fn file(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    folder.path().join(name)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs the command with an address space of at most `kib` KiB.
#[cfg(target_os = "linux")]
fn fa3_within(kib: u32, args: &[&str]) -> Ran {
    let script = format!("ulimit -v {kib}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_fa3")]).args(args);
    Ran::of(command.stdin(Stdio::null()).output().unwrap())
}

/// Runs the command with `input` at its stdin, followed by zeros without end if `endless`.
#[cfg(unix)]
fn fa3_fed(args: &[&str], input: Vec<u8>, endless: bool) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fa3"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || {
        let mut fed = stdin.write_all(&input);
        while endless && fed.is_ok() {
            fed = stdin.write_all(&[0; 1 << 16]);
        }
    });
    let ran = Ran::of(child.wait_with_output().unwrap());
    feeder.join().unwrap();
    ran
}

/// The command reads 24 KiB of a file of 4 GiB, and has 1 GB of memory.
#[cfg(target_os = "linux")]
#[test]
fn of_a_large_file_only_what_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "large.safetensors");
    let others = 1 << 32;
    let header = qkv(others);
    fs::write(&input, &header).unwrap();
    let sparse = fs::OpenOptions::new().write(true).open(&input).unwrap();
    sparse.set_len(header.len() as u64 + 3 * BYTES as u64 + others).unwrap();
    let stdout = fa3_within(1_000_000, &["run", text(&input), "--threads", "2"]).succeeded();
    assert!(stdout.starts_with("f16 batch 1 seqlen 64 x 64 heads 2/2 head_dim 32"), "{stdout}");
    fa3_within(1_000_000, &["quantize", text(&input), "--tensor", "k"]).succeeded();
    fa3(&["run", text(&input), "--q", "w"]).refused("w is U8, expected F32, F16, BF16 or F8_E4M3");
}

/// Tensors of 1 GiB in a sparse file of zeros, and 500 MB of memory for the command.
#[cfg(target_os = "linux")]
#[test]
fn out_of_memory_is_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let tensor = r#"{"q": {"dtype": "F16", "shape": [1, 4096, 1024, 128], "data_offsets": [0, 1073741824]}}"#;
    fs::write(&input, header(tensor)).unwrap();
    let sparse = fs::OpenOptions::new().write(true).open(&input).unwrap();
    sparse.set_len(header(tensor).len() as u64 + (1 << 30)).unwrap();
    let input = text(&input);
    for args in [
        ["run", input, "--q", "q", "--k", "q", "--v", "q", "--threads", "2"].as_slice(),
        &["quantize", input, "--tensor", "q"],
    ] {
        fa3_within(500_000, args).refused("out of memory: the system has no 1073741824 bytes more");
    }
}

/// A device may be endless.
#[cfg(target_os = "linux")]
#[test]
fn devices_and_folders_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let link = file(&folder, "zero.npy");
    std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
    for device in ["/dev/zero", "/dev/full", text(folder.path())] {
        for verb in [["run"].as_slice(), &["quantize"], &["accuracy", "--input"]] {
            let ran = fa3(&[verb, &[device]].concat());
            ran.refused(&format!("cannot read {device}: it is neither a file nor a pipe"));
        }
    }
    fa3(&["run", text(&link), text(&link), text(&link)]).refused("zero.npy: it is neither a file nor a pipe");
    fa3(&["quantize", text(&link)]).refused("zero.npy: it is neither a file nor a pipe");
}

/// Reading stops at the end that the header states, whether or not the pipe ends there.
#[cfg(unix)]
#[test]
fn a_pipe_is_read_as_far_as_it_says() {
    let whole = [qkv(8), vec![0; 3 * BYTES + 8]].concat();
    let run = ["run", "/dev/stdin"];
    for endless in [false, true] {
        let stdout = fa3_fed(&run, whole.clone(), endless).succeeded();
        assert!(stdout.starts_with("f16 batch 1 seqlen 64 x 64 heads 2/2 head_dim 32"), "{stdout}");
    }
    let part = &whole[..whole.len() - 18];
    fa3_fed(&run, part.to_vec(), false)
        .refused(&format!("/dev/stdin ends after {} of the {BYTES} bytes of v", BYTES - 10));
    fa3_fed(&run, Vec::new(), true).refused("no JSON of tensors");
    fa3_fed(&run, b"y\n".repeat(100), false).refused("its header would have ");
}

#[test]
fn headers_that_lie() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "x.safetensors");
    let refused = |bytes: &[u8], why: &str| {
        fs::write(&input, bytes).unwrap();
        fa3(&["run", text(&input)]).refused(&format!("x.safetensors is not a whole safetensors file: {why}"));
    };
    let long = u64::MAX.to_le_bytes();
    refused(&long[..7], "it has 7 bytes, and 8 say how long its header is");
    refused(&long, "its header would have 18446744073709551615 bytes, more than 100000000");
    refused(&100_000_000u64.to_le_bytes(), "it ends after 0 of the 100000000 bytes of its header");
    refused(&header("{"), "its header is no JSON of tensors: ");
    refused(&header(&"[".repeat(1 << 20)), "its header is no JSON of tensors: ");
    let tensor = |shape: &str, end: u64| {
        header(&format!(r#"{{"q": {{"dtype": "U8", "shape": [{shape}], "data_offsets": [0, {end}]}}}}"#))
    };
    let length = tensor("9", 9).len();
    refused(&tensor("9", 9), &format!("it has {length} bytes, {} by its header", length + 9));
    refused(&tensor("9", 8), "its header is no JSON of tensors: ");
    refused(&tensor("4294967296, 4294967296, 2", 0), "its header is no JSON of tensors: ");
    let most = u64::MAX;
    let length = tensor(&most.to_string(), most).len();
    refused(&tensor(&most.to_string(), most), "its header is no JSON of tensors: ");
    let most = most / 8;
    assert_eq!(tensor(&most.to_string(), most).len(), length - 2);
    refused(
        &tensor(&most.to_string(), most),
        &format!("it has {} bytes, {} by", length - 2, most + length as u64 - 2),
    );
}

/// A file may contain texts of any length.
#[test]
fn long_shapes_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "x.safetensors");
    let tensors = ["q", "k", "v", "x"].map(|name| {
        let ones = "1,".repeat(99_999);
        format!(r#""{name}": {{"dtype": "F16", "shape": [{ones}0], "data_offsets": [0, 0]}}"#)
    });
    fs::write(&input, header(&format!("{{{}}}", tensors.join(",")))).unwrap();
    for args in [
        ["run", text(&input)].as_slice(),
        &["run", text(&input), "--cu-seqlens-q", "0,1"],
        &["quantize", text(&input)],
        &["accuracy", "--input", text(&input)],
    ] {
        fa3(args).refused(" has shape [1, 1, 1, 1, 1, 1, 1, 1, ... (100000 extents)], expected ");
    }
}

/// Names may contain invisible characters, or characters that reverse the text around them. Every message escapes them.
#[test]
fn names_cannot_play_tricks() {
    let folder = tempfile::tempdir().unwrap();
    let name = "a\u{202E}b\u{200B}c\u{2066}d\u{FEFF}e\u{61C}\u{1B}";
    let shown = r"a\u{202e}b\u{200b}c\u{2066}d\u{feff}e\u{61c}\u{1b}";
    let input = file(&folder, &format!("{name}.safetensors"));
    let empty = format!(
        r#"{{"{}'ä e\u0301": {{"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}}}"#,
        &name[..name.len() - 1]
    );
    fs::write(&input, header(&empty)).unwrap();
    let ran = fa3(&["run", text(&input)]);
    let held = shown.strip_suffix(r"\u{1b}").unwrap();
    ran.refused(&format!("{shown}.safetensors has no tensors q, k and v, with or without a prefix; it holds {held}'ä e\u{301} ("));
    fs::write(&input, [qkv(0), vec![0; 3 * BYTES]].concat()).unwrap();
    let output = file(&folder, &format!("{name}.out"));
    let stdout = fa3(&["run", text(&input), "-o", text(&output)]).succeeded();
    assert!(stdout.ends_with(&format!("{shown}.out\n")), "{stdout}");
}
