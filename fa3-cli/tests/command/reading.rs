//! Input files and pipes: how much of them is read. Devices are refused.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use crate::files::Folder;
use crate::{Ran, command, fa3};

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

/// Runs the command in the folder with an address space of at most `kib` KiB.
#[cfg(target_os = "linux")]
fn fa3_within(kib: u32, folder: &Folder, words: &str) -> Ran {
    let script = format!("ulimit -v {kib}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_fa3")]).args(words.split_whitespace());
    Ran::of(command.current_dir(folder.path("")).stdin(Stdio::null()))
}

/// Makes in.safetensors a sparse file that begins with `header` and has `bytes` more.
#[cfg(target_os = "linux")]
fn sparse(folder: &Folder, header: &[u8], bytes: u64) {
    folder.write("in.safetensors", header);
    let file = fs::OpenOptions::new().write(true).open(folder.path("in.safetensors")).unwrap();
    file.set_len(header.len() as u64 + bytes).unwrap();
}

/// Runs the command with `input` at its stdin, followed by zeros without end if `endless`.
#[cfg(unix)]
fn fa3_fed(input: Vec<u8>, endless: bool) -> Ran {
    let (reader, mut stdin) = std::io::pipe().unwrap();
    let feeder = std::thread::spawn(move || {
        let mut fed = stdin.write_all(&input);
        while endless && fed.is_ok() {
            fed = stdin.write_all(&[0; 1 << 16]);
        }
    });
    // The command owns the reader and is dropped here, so that the feeder's next write fails and the feeder ends.
    let ran = Ran::of(command("run /dev/stdin").stdin(reader));
    feeder.join().unwrap();
    ran
}

/// The command reads 24 KiB of a file of 4 GiB, and has 1 GB of memory.
#[cfg(target_os = "linux")]
#[test]
fn of_a_large_file_only_what_is_asked_for() {
    let (folder, others) = (Folder::new(), 1 << 32);
    sparse(&folder, &qkv(others), 3 * BYTES as u64 + others);
    let stdout = fa3_within(1_000_000, &folder, "run in.safetensors --threads 2").succeeded();
    assert!(stdout.starts_with("f16 batch 1 seqlen 64 x 64 heads 2/2 head_dim 32"), "{stdout}");
    fa3_within(1_000_000, &folder, "quantize in.safetensors --tensor k").succeeded();
    folder.fa3("run in.safetensors --q w").refused("w is U8, expected F32, F16, BF16 or F8_E4M3");
}

/// The sparse file has tensors of 1 GiB, and the command has 500 MB of memory.
#[cfg(target_os = "linux")]
#[test]
fn out_of_memory_is_a_sentence() {
    let folder = Folder::new();
    let tensor = r#"{"q": {"dtype": "F16", "shape": [1, 4096, 1024, 128], "data_offsets": [0, 1073741824]}}"#;
    sparse(&folder, &header(tensor), 1 << 30);
    for words in ["run in.safetensors --q q --k q --v q --threads 2", "quantize in.safetensors --tensor q"] {
        let ran = fa3_within(500_000, &folder, words);
        ran.refused("out of memory: the system has no 1073741824 bytes more");
    }
}

/// A device may be endless.
#[cfg(target_os = "linux")]
#[test]
fn devices_and_folders_are_not_read() {
    let folder = Folder::new();
    std::os::unix::fs::symlink("/dev/zero", folder.path("zero.npy")).unwrap();
    for device in ["/dev/zero", "/dev/full", folder.path("").to_str().unwrap()] {
        for verb in ["run", "quantize", "accuracy --input"] {
            let why = format!("cannot read {device}: it is neither a file nor a pipe");
            fa3(&format!("{verb} {device}")).refused(&why);
        }
    }
    for words in ["run zero.npy zero.npy zero.npy", "quantize zero.npy"] {
        folder.fa3(words).refused("zero.npy: it is neither a file nor a pipe");
    }
}

/// Reading stops at the end that the header states, whether or not the pipe ends there.
#[cfg(unix)]
#[test]
fn a_pipe_is_read_as_far_as_it_says() {
    let whole = [qkv(8), vec![0; 3 * BYTES + 8]].concat();
    for endless in [false, true] {
        let stdout = fa3_fed(whole.clone(), endless).succeeded();
        assert!(stdout.starts_with("f16 batch 1 seqlen 64 x 64 heads 2/2 head_dim 32"), "{stdout}");
    }
    let part = &whole[..whole.len() - 18];
    let why = format!("/dev/stdin ends after {} of the {BYTES} bytes of v", BYTES - 10);
    fa3_fed(part.to_vec(), false).refused(&why);
    fa3_fed(Vec::new(), true).refused("no JSON of tensors");
    fa3_fed(b"y\n".repeat(100), false).refused("its header would have ");
}

#[test]
fn headers_that_lie() {
    let folder = Folder::new();
    let refused = |bytes: &[u8], why: &str| {
        folder.write("x.safetensors", bytes);
        let why = format!("x.safetensors is not a whole safetensors file: {why}");
        folder.fa3("run x.safetensors").refused(&why);
    };
    let tensor = |shape: &str, end: u64| {
        header(&format!(r#"{{"q": {{"dtype": "U8", "shape": [{shape}], "data_offsets": [0, {end}]}}}}"#))
    };
    let (long, no_json) = (u64::MAX.to_le_bytes(), "its header is no JSON of tensors: ");
    refused(&long[..7], "it has 7 bytes, and 8 say how long its header is");
    refused(&long, "its header would have 18446744073709551615 bytes, more than 100000000");
    refused(&100_000_000u64.to_le_bytes(), "it ends after 0 of the 100000000 bytes of its header");
    let most = u64::MAX;
    for text in [
        header("{"),
        header(&"[".repeat(1 << 20)),
        tensor("9", 8),
        tensor("4294967296, 4294967296, 2", 0),
        tensor(&most.to_string(), most),
    ] {
        refused(&text, no_json);
    }
    for end in [9, most / 8] {
        let text = tensor(&end.to_string(), end);
        let length = text.len() as u64;
        refused(&text, &format!("it has {length} bytes, {} by its header", end + length));
    }
}

/// A file may contain texts of any length.
#[test]
fn long_shapes_are_cut() {
    let folder = Folder::new();
    let tensors = ["q", "k", "v", "x"].map(|name| {
        let ones = "1,".repeat(99_999);
        format!(r#""{name}": {{"dtype": "F16", "shape": [{ones}0], "data_offsets": [0, 0]}}"#)
    });
    folder.write("x.safetensors", header(&format!("{{{}}}", tensors.join(","))));
    for words in ["run", "run --cu-seqlens-q 0,1", "quantize", "accuracy --input"] {
        let why = " has shape [1, 1, 1, 1, 1, 1, 1, 1, ... (100000 extents)], expected ";
        folder.fa3(&format!("{words} x.safetensors")).refused(why);
    }
}

/// Names may contain invisible characters, or characters that reverse the text around them. Every message escapes them.
#[test]
fn names_cannot_play_tricks() {
    let folder = Folder::new();
    let name = "a\u{202E}b\u{200B}c\u{2066}d\u{FEFF}e\u{61C}\u{1B}";
    let shown = r"a\u{202e}b\u{200b}c\u{2066}d\u{feff}e\u{61c}\u{1b}";
    let (input, output) = (format!("{name}.safetensors"), format!("{name}.out"));
    let start = &name[..name.len() - 1];
    let empty =
        format!(r#"{{"{start}'ä e\u0301": {{"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}}}"#);
    folder.write(&input, header(&empty));
    let held = shown.strip_suffix(r"\u{1b}").unwrap();
    let why = "has no tensors q, k and v, with or without a prefix; it holds";
    let why = format!("{shown}.safetensors {why} {held}'ä e\u{301} (");
    folder.fa3(&format!("run {input}")).refused(&why);
    folder.write(&input, [qkv(0), vec![0; 3 * BYTES]].concat());
    let stdout = folder.fa3(&format!("run {input} -o {output}")).succeeded();
    assert!(stdout.ends_with(&format!("{shown}.out\n")), "{stdout}");
}
