//! `fa3 run` with good input.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::fa3;
use fa3::{Attention, Device, Scalar};
use fa3_quant::E4m3;
use fa3_ref::{Forward, Inputs, oracle};
use half::{bf16, f16};
use ndarray::{Array4, Axis};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// A tensor to write to a file.
pub(crate) struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor { name: name.into(), dtype, shape: shape.into(), bytes }
    }

    pub(crate) fn f32(name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Tensor {
        Tensor::new(name, Dtype::F32, shape, values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    pub(crate) fn f16(name: &str, x: &Array4<f16>) -> Tensor {
        Tensor::new(name, Dtype::F16, x.shape(), x.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    pub(crate) fn f64(name: &str, shape: &[usize], values: impl IntoIterator<Item = f64>) -> Tensor {
        Tensor::new(name, Dtype::F64, shape, values.into_iter().flat_map(f64::to_le_bytes).collect())
    }
}

pub(crate) fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
        (tensor.name.as_str(), view)
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Name, dtype, shape and bytes of each tensor of a file, sorted by name.
pub(crate) fn read(path: &Path) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = tensors
        .iter()
        .map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

pub(crate) fn wave<T: Scalar>(dims: [usize; 4], step: f32) -> Array4<T> {
    let mut x = 0.0;
    Array4::from_shape_simple_fn(dims, || {
        x += step;
        T::from_f32(2.0 * f32::sin(x))
    })
}

pub(crate) fn qkv<T: Scalar>(seqlen: usize) -> [Array4<T>; 3] {
    [(4, 0.7), (2, 0.9), (2, 1.1)].map(|(heads, step)| wave([1, seqlen, heads, 16], step))
}

pub(crate) fn file(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    folder.path().join(name)
}

pub(crate) fn args<'a>(words: &[&'a str], paths: &[&'a Path]) -> Vec<&'a OsStr> {
    let words = words.iter().map(|&word| OsStr::new(word));
    words.chain(paths.iter().map(|path| path.as_os_str())).collect()
}

/// The oracle's results as tensors.
fn expected(attention: &Attention<'_, f16>, [q, k, v]: &[Array4<f16>; 3]) -> [Tensor; 2] {
    let problem = attention.problem().unwrap();
    let Forward { o, lse } = oracle::forward(&Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap());
    [Tensor::f64("o", o.shape(), o.iter().copied()), Tensor::f64("lse", lse.shape(), lse.iter().copied())]
}

#[test]
fn results_are_compared_printed_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(50);
    let attention = Attention::new(x[0].view(), x[1].view(), x[2].view())
        .window(Some(20), Some(0))
        .softmax_scale(0.5)
        .softcap(3.0);
    let [o, lse] = expected(&attention, &x);
    let [q, k, v] = [Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2])];
    write(&input, &[q, k, v, o, lse]);

    let options = ["--window", "20,0", "--scale", "0.5", "--softcap", "3", "--threads", "1", "-o"];
    let options = [&["run", "--device", "cpu"], options.as_slice()].concat();
    let stdout = fa3(&args(&options, &[&output, &input])).succeeded();
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines[0], attention.problem().unwrap().to_string());
    assert_eq!(lines[1], "  device  cpu (1 thread)");
    let starts = [
        "  time    ",
        "  o       rms ",
        "  check   ",
        "  o       max error ",
        "  lse     max error ",
        "  file    o agrees, ",
        "  file    lse agrees, ",
        "wrote ",
    ];
    assert_eq!(lines.len(), 2 + starts.len());
    for (line, start) in lines[2..].iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }

    let result = attention.forward(&Device::Cpu).unwrap();
    let o = result.o.iter().flat_map(|x| x.to_le_bytes()).collect();
    let lse = result.lse.iter().flat_map(|x| x.to_le_bytes()).collect();
    let expected = [
        ("lse".to_owned(), Dtype::F32, vec![1, 4, 50], lse),
        ("o".to_owned(), Dtype::F16, vec![1, 50, 4, 16], o),
    ];
    assert_eq!(read(&output), expected);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

/// The file's o and lse were computed without a mask, so that correct results with a mask differ from them.
#[test]
fn the_oracle_decides_and_the_file_is_a_second_opinion() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(50);
    let tensors = || vec![Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2])];
    let [o, lse] = expected(&Attention::new(x[0].view(), x[1].view(), x[2].view()), &x);
    for only in [o, lse] {
        let mut all = tensors();
        all.push(only);
        write(&input, &all);
        fa3(&args(&["run"], &[&input])).succeeded();
        let _ = fs::remove_file(&output);
        let stdout = fa3(&args(&["run", "--causal", "-o"], &[&output, &input])).succeeded();
        let count = |text: &str| stdout.matches(text).count();
        assert_eq!((count(" DIFFERS by up to "), count("BREAKS THE ERROR LAW")), (1, 0), "{stdout}");
        assert!(stdout.contains("\n          is it of another mask, scale or soft cap?"), "{stdout}");
        assert!(output.exists());
        let unchecked = fa3(&args(&["run", "--causal", "--no-check"], &[&input])).succeeded();
        assert!(unchecked.ends_with("\n  check   none, because of --no-check\n"), "{unchecked}");
    }
    write(&input, &tensors());
    assert!(fa3(&args(&["run"], &[&input])).succeeded().contains("nothing is expected of these tensors"));
}

/// `o` and `lse` belong to `q`, `k` and `v`: results of tensors with other names are not compared with them.
#[test]
fn tensors_of_other_names_have_other_results() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let x = qkv::<f16>(50);
    let [o, lse] = expected(&Attention::new(x[0].view(), x[1].view(), x[2].view()), &x);
    let [q, k, v] = [Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2])];
    write(&input, &[q, k, v, Tensor::f16("other", &x[1]), o, lse]);
    assert!(fa3(&args(&["run"], &[&input])).succeeded().contains("\n  lse     max error"));
    let other = fa3(&args(&["run", "--k", "other"], &[&input])).succeeded();
    assert!(other.contains("nothing is expected of these tensors"), "{other}");
}

/// Writing to a symbolic link writes to its target.
#[cfg(unix)]
#[test]
fn links_stay_links() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output, link] = ["in.safetensors", "out.safetensors", "link"].map(|name| file(&folder, name));
    let x = qkv::<f16>(20);
    write(&input, &[Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2])]);
    fs::write(&output, "").unwrap();
    std::os::unix::fs::symlink(&output, &link).unwrap();
    fa3(&args(&["run", "-o"], &[&link, &input])).succeeded();
    assert!(link.is_symlink());
    assert_eq!(read(&output).len(), 2);
}

/// Activations of a real model, with attention that another program computed in f64.
#[test]
fn real_activations() {
    let input = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/minilm_layer5.safetensors"));
    let stdout = fa3(&args(&["run"], &[input])).succeeded();
    assert!(stdout.contains("f16 batch 1 seqlen 512 x 512 heads 3/3 head_dim 32"), "{stdout}");
    assert!(stdout.contains("\n  o       max error") && stdout.contains("\n  lse     max error"), "{stdout}");
    assert_eq!(stdout.matches("\n  file    ").count(), 2);
}

#[test]
fn an_expected_lse_in_another_order_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let x = qkv::<f16>(50);
    let problem = Attention::new(x[0].view(), x[1].view(), x[2].view()).problem().unwrap();
    let Forward { lse, .. } =
        oracle::forward(&Inputs::new(&problem, x[0].view(), x[1].view(), x[2].view()).unwrap());
    let heads_last = lse.view().permuted_axes([0, 2, 1]);
    let mislabelled = Tensor::f64("lse", lse.shape(), heads_last.iter().copied());
    write(&input, &[Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2]), mislabelled]);
    let stdout = fa3(&args(&["run"], &[&input])).succeeded();
    assert!(stdout.contains("read as (batch, seqlen, heads)"), "{stdout}");
}

#[test]
fn every_type_gives_the_librarys_result() {
    fn check<T: Scalar>(
        stored: Dtype,
        output: Dtype,
        bytes: fn(&T) -> Vec<u8>,
        out: fn(&T::Output) -> Vec<u8>,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (input, written) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
        let [q, k, v] = qkv::<T>(33);
        let tensor =
            |name, x: &Array4<T>| Tensor::new(name, stored, x.shape(), x.iter().flat_map(bytes).collect());
        write(&input, &[tensor("q", &q), tensor("k", &k), tensor("v", &v)]);
        fa3(&args(&["run", "--device", "cpu", "--causal", "-o"], &[&written, &input])).succeeded();
        let o = Attention::new(q.view(), k.view(), v.view()).causal().forward(&Device::Cpu).unwrap().o;
        let expected = ("o".to_owned(), output, vec![1, 33, 4, 16], o.iter().flat_map(out).collect());
        assert_eq!(read(&written)[1], expected);
    }
    check::<f32>(Dtype::F32, Dtype::F32, |x| x.to_le_bytes().into(), |x| x.to_le_bytes().into());
    check::<f16>(Dtype::F16, Dtype::F16, |x| x.to_le_bytes().into(), |x| x.to_le_bytes().into());
    check::<bf16>(Dtype::BF16, Dtype::BF16, |x| x.to_le_bytes().into(), |x| x.to_le_bytes().into());
    check::<E4m3>(Dtype::F8_E4M3, Dtype::BF16, |x| vec![x.to_bits()], |x| x.to_le_bytes().into());
}

/// e4m3 compared with the oracle, by the error law of the output's precision.
#[test]
fn eight_bits_are_judged_as_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let [q, k, v] = qkv::<E4m3>(70);
    let problem = Attention::new(q.view(), k.view(), v.view()).problem().unwrap();
    let [q32, k32, v32] = [&q, &k, &v].map(|x| x.mapv(E4m3::to_f32));
    let inputs = Inputs::new(&problem, q32.view(), k32.view(), v32.view()).unwrap();
    let o = oracle::forward(&inputs).o;
    let tensor = |name, x: &Array4<E4m3>| {
        Tensor::new(name, Dtype::F8_E4M3, x.shape(), x.iter().map(|x| x.to_bits()).collect())
    };
    write(
        &input,
        &[tensor("q", &q), tensor("k", &k), tensor("v", &v), Tensor::f64("o", o.shape(), o.iter().copied())],
    );
    assert!(fa3(&args(&["run"], &[&input])).succeeded().starts_with("e4m3 batch 1 seqlen 70 x 70"));
}

/// Packed sequences give the results of separate calls, for lists from the file or from the command line.
#[test]
fn packed_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f32>(50);
    let packed = |name: &str, x: &Array4<f32>| Tensor::f32(name, &x.shape()[1..], x.iter().copied());
    let mut tensors = vec![packed("q", &x[0]), packed("k", &x[1]), packed("v", &x[2])];
    write(&input, &tensors);
    let check = |options: &[&str]| {
        fa3(&args(&[&["run", "--causal"], options, &["-o"]].concat(), &[&output, &input])).succeeded();
        let [lse, o] = read(&output).try_into().unwrap();
        assert_eq!((&lse.2, &o.2), (&vec![4, 50], &vec![50, 4, 16]));
        for rows in [0..17, 17..50] {
            let [q, k, v] = x.each_ref().map(|x| x.slice_axis(Axis(1), rows.clone().into()));
            let alone = Attention::new(q, k, v).causal().forward(&Device::Cpu).unwrap();
            let bytes: Vec<u8> = alone.o.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(o.3[rows.start * 4 * 16 * 4..rows.end * 4 * 16 * 4], bytes);
            let lse_alone = alone.lse.index_axis(Axis(0), 0);
            let head3: Vec<u8> = lse_alone.row(3).iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(lse.3[(150 + rows.start) * 4..(150 + rows.end) * 4], head3);
        }
    };
    check(&["--cu-seqlens-q", "0,17,50"]);
    check(&["--cu-seqlens-q", "0,17,50", "--cu-seqlens-k", "0,17,50"]);

    let list = |values: [i64; 3]| values.into_iter().flat_map(i64::to_le_bytes).collect();
    tensors.push(Tensor::new("cu_seqlens_q", Dtype::I64, &[3], list([0, 17, 50])));
    write(&input, &tensors);
    check(&[]);
    // The command line's list replaces the file's list, and seqused ends before a sequence's end.
    fa3(&args(&["run", "--cu-seqlens-q", "0,50", "--seqused-k", "10", "-o"], &[&output, &input])).succeeded();
    let [q, k, v] = x.each_ref().map(|x| x.view());
    let short =
        Attention::new(q, k, v).packed(&[0, 50], &[0, 50]).seqused_k(&[10]).forward(&Device::Cpu).unwrap();
    let bytes: Vec<u8> = short.o.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(read(&output)[1].3, bytes);
}

#[test]
fn prefixes_and_names() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(20);
    let call = |names: [&str; 3]| [0, 1, 2].map(|i| Tensor::f16(names[i], &x[i]));
    let calls = [call(["b.q", "b.k", "b.v"]), call(["a.q", "a.k", "a.v"]), call(["query", "key", "value"])];
    write(&input, &calls.into_iter().flatten().collect::<Vec<_>>());
    let names = |options: &[&str], stdout: &str| {
        let ran = fa3(&args(&[&["run"], options, &["-o"]].concat(), &[&output, &input])).succeeded();
        assert!(ran.starts_with(stdout), "{ran}");
        read(&output).into_iter().map(|(name, ..)| name).collect::<Vec<_>>()
    };
    assert_eq!(names(&[], "a.  f16 batch"), ["a.lse", "a.o", "b.lse", "b.o"]);
    assert_eq!(names(&["--prefix", "b."], "b.  f16 batch"), ["b.lse", "b.o"]);
    assert_eq!(names(&["--q", "query", "--k", "key", "--v", "value"], "f16 batch"), ["lse", "o"]);
    assert_eq!(names(&["--prefix", "a.", "--q", "b.q"], "a.  f16"), ["a.lse", "a.o"]);
}

/// A .npy file as specified in `numpy.lib.format`, padded to 64 bytes.
fn npy(descr: &str, shape: &str, data: Vec<u8>) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:117}\n");
    [b"\x93NUMPY\x01\x00\x76\x00".as_slice(), header.as_bytes(), &data].concat()
}

#[test]
fn npy_files() {
    let folder = tempfile::tempdir().unwrap();
    let [q, k, v, o, lse] = ["q.npy", "k.npy", "v.npy", "o.npy", "lse.npy"].map(|name| file(&folder, name));
    let x = qkv::<f16>(40);
    let little = |x: &Array4<f16>| x.iter().flat_map(|x| x.to_le_bytes()).collect();
    fs::write(&q, npy("<f2", "(1, 40, 4, 16)", little(&x[0]))).unwrap();
    let big = x[1].iter().flat_map(|x| x.to_be_bytes()).collect();
    fs::write(&k, npy(">f2", "(1, 40, 2, 16)", big)).unwrap();
    fs::write(&v, npy("<f2", "(1, 40, 2, 16)", little(&x[2]))).unwrap();
    let words = ["run", "--causal", "-o", o.to_str().unwrap(), "--lse", lse.to_str().unwrap()];
    fa3(&args(&words, &[&q, &k, &v])).succeeded();

    let result =
        Attention::new(x[0].view(), x[1].view(), x[2].view()).causal().forward(&Device::Cpu).unwrap();
    assert_eq!(fs::read(&o).unwrap(), npy("<f2", "(1, 40, 4, 16, )", little(&result.o)));
    let written = result.lse.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(fs::read(&lse).unwrap(), npy("<f4", "(1, 4, 40, )", written));
}

/// A reader that closes the pipe (`| head`) stops neither the computation nor the output.
#[test]
fn a_closed_stdout_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(20);
    write(&input, &[Tensor::f16("q", &x[0]), Tensor::f16("k", &x[1]), Tensor::f16("v", &x[2])]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_fa3"));
    command.args(args(&["run", "-o"], &[&output, &input])).stdout(writer).stderr(Stdio::piped());
    let ran = command.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!((ran.status.code(), ran.stderr.as_slice()), (Some(0), b"".as_slice()));
    assert_eq!(read(&output).len(), 2);
}

/// Codes that the command wrote are multiplied by their scales of any granularity, and unused scales are reported.
#[test]
fn scales_of_codes_are_used_or_told() {
    let folder = tempfile::tempdir().unwrap();
    let [input, codes, out] =
        ["in", "codes", "out"].map(|name| file(&folder, &format!("{name}.safetensors")));
    let x = wave::<f16>([1, 200, 2, 16], 0.7);
    write(&input, &[Tensor::f16("x", &x)]);
    let exact = Attention::new(&x, &x, &x).forward(&Device::Cpu).unwrap().o;
    for scaling in [&["--block-rows", "64"][..], &["--heads", "1"], &["--one-scale"], &["--channels"]] {
        let quantize = [&["quantize", "--device", "cpu"], scaling, &["-o"]].concat();
        fa3(&args(&quantize, &[&codes, &input])).succeeded();
        let run = ["run", "--device", "cpu", "--check", "--q", "codes", "--k", "codes", "--v", "codes", "-o"];
        fa3(&args(&run, &[&out, &codes])).succeeded();
        let o = read(&out).into_iter().find(|tensor| tensor.0 == "o").unwrap().3;
        let o = o.chunks_exact(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
        let most = o.zip(&exact).map(|(o, x)| (o - x.to_f32()).abs()).fold(0.0, f32::max);
        assert!(most < 0.1, "{scaling:?}: {most}");
    }
    let code = |name: &str| Tensor::new(name, Dtype::F8_E4M3, &[1, 4, 2, 16], vec![0x38; 4 * 2 * 16]);
    let of_heads = |name: &str| Tensor::f32(name, &[1, 2], [0.5, 2.0]);
    write(&input, &[code("q"), code("k"), code("v"), of_heads("v_descale"), of_heads("v_scale")]);
    let ran = fa3(&args(&["run", "--device", "cpu", "-o"], &[&out, &input]));
    let note = "in.safetensors has v_scale, which no call takes\n";
    assert!(ran.code == Some(0) && ran.stderr.starts_with("note: ") && ran.stderr.ends_with(note), "{ran:?}");
    let o = read(&out).into_iter().find(|tensor| tensor.0 == "o").unwrap().3;
    assert_eq!([&o[..2], &o[32..34]], [0.5, 2.0].map(|x| bf16::from_f32(x).to_le_bytes()));
    write(&input, &[code("q"), code("k"), code("v"), Tensor::f32("k_descale", &[3, 5], [1.0; 15])]);
    fa3(&args(&["run", "--device", "cpu"], &[&input]))
        .refused("k_descale has shape [3, 5], expected scales of heads");
}
