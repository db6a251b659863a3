//! `fa3 quantize` as a command.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Ran, fa3};
use fa3_quant::{
    Channels, Granularity, Incoherent, Preparation, Quantized, Rope, RopeStyle, Rotation, RowPositions,
    ndarray,
};
use fa3_types::SequenceRows;
use half::{bf16, f16};
use ndarray::Array4;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

const DIMS: [usize; 4] = [2, 150, 3, 48];

/// A temporary folder with an input.
struct Case {
    folder: tempfile::TempDir,
    input: PathBuf,
}

impl Case {
    fn new(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("in.safetensors");
        let view = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
        fs::write(&input, safetensors::serialize([(name, view)], None).unwrap()).unwrap();
        Case { folder, input }
    }

    fn zeros(dtype: Dtype, shape: &[usize]) -> Case {
        Case::new("x", dtype, shape, &vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
    }

    fn f32(x: &Array4<f32>) -> Case {
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        Case::new("x", Dtype::F32, x.shape(), &bytes)
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out.safetensors")
    }

    fn quantize(&self, options: &[&str]) -> Ran {
        let [input, output] = [&self.input, &self.output()].map(|path| path.to_str().unwrap().to_owned());
        fa3(&[&["quantize", &input, "-o", &output], options].concat())
    }

    #[track_caller]
    fn refused(&self, options: &[&str], why: &str) {
        self.quantize(options).refused(why);
        assert_eq!(fs::read_dir(self.folder.path()).unwrap().count(), 1);
    }
}

fn wave() -> Array4<f32> {
    let mut x = 0.0;
    Array4::from_shape_simple_fn(DIMS, || {
        x += 0.7;
        3.0 * f32::sin(x)
    })
}

/// Asserts that codes and scales equal fa3-quant's, with these shapes.
#[track_caller]
fn check(output: &Path, expected: &Quantized, scales_shape: [usize; 3]) {
    let bytes = fs::read(output).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 2);
    let codes = tensors.tensor("codes").unwrap();
    assert_eq!((codes.dtype(), codes.shape()), (Dtype::F8_E4M3, expected.codes().shape()));
    let bits: Vec<u8> = expected.codes().iter().map(|code| code.to_bits()).collect();
    assert!(codes.data() == bits);
    let scales = tensors.tensor("scales").unwrap();
    assert_eq!((scales.dtype(), scales.shape()), (Dtype::F32, scales_shape.as_slice()));
    let values: Vec<u8> = expected.scales().values().iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(scales.data(), values);
}

#[test]
fn results_are_those_of_fa3_quant() {
    let (x, sequences) = (wave(), SequenceRows::dense(2, 150));
    let rounded = x.mapv(|x| bf16::from_f32(x).to_f32());
    let mixed = Incoherent::new(48, 9);
    let table = Rope::new(RopeStyle::HalfSplit, 32, 500.0).unwrap().table(170);
    let rotation = Rotation { table: &table, positions: RowPositions::First(&[20, 20]) };
    let preparation = Preparation::new(Granularity::Block { rows: 64 }).rotation(rotation).incoherent(&mixed);
    let case = Case::f32(&x);
    let rope = ["--rope", "halves", "--rotary-dim", "32", "--rope-base", "500", "--first-position", "20"];
    let others = ["--hadamard", "9", "--block-rows", "64", "--dtype", "bf16", "--device", "cpu"];
    let stdout = case.quantize(&[rope, others].concat()).succeeded();
    check(&case.output(), &preparation.quantize(rounded.view(), &sequences).unwrap(), [2, 3, 3]);

    let lines: Vec<&str> = stdout.lines().collect();
    let what = "bf16 (2, 150, 3, 48), half-split rotary embedding of 32, Hadamard, a scale for each 64 rows";
    assert_eq!(lines[0], what);
    let starts = ["  device  cpu (", "  time    ", "  scales  18 from ", "  error   ", "wrote "];
    assert_eq!(lines.len(), 1 + starts.len(), "{stdout}");
    for (line, start) in lines[1..].iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
    let error = lines[4].trim_start_matches("  error   ").trim_end_matches(" relative rms");
    // The error of 3 mantissa bits.
    assert!((0.01..0.04).contains(&error.parse::<f64>().unwrap()), "{error}");
}

/// The whole row rotates, from position 0, and the scale is known.
#[test]
fn defaults_and_a_given_scale() {
    let (x, sequences) = (wave().mapv(f16::from_f32), SequenceRows::dense(2, 150));
    let exact = x.mapv(f16::to_f32);
    let table = Rope::new(RopeStyle::Interleaved, 48, 10_000.0).unwrap().table(150);
    let rotation = Rotation { table: &table, positions: RowPositions::First(&[0, 0]) };
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let case = Case::new("k", Dtype::F16, &DIMS, &bytes);
    let stdout = case.quantize(&["--tensor", "k", "--rope", "interleaved", "--scale", "0.01"]).succeeded();
    let expected = Preparation::with_scale(0.01).rotation(rotation).quantize(exact.view(), &sequences);
    check(&case.output(), &expected.unwrap(), [1, 1, 1]);
    assert!(stdout.contains("\n  scales  1e-2, given\n"), "{stdout}");

    let plain = Preparation::new(Granularity::Block { rows: 128 });
    case.quantize(&["--tensor", "k"]).succeeded();
    check(&case.output(), &plain.quantize(exact.view(), &sequences).unwrap(), [2, 3, 2]);
}

/// Per-head, per-tensor and per-channel scales. Per-channel scales come with means.
#[test]
fn scales_in_a_pass_before() {
    let (x, sequences) = (wave().mapv(f16::from_f32), SequenceRows::dense(2, 150));
    let exact = x.mapv(f16::to_f32);
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let case = Case::new("v", Dtype::F16, &DIMS, &bytes);
    let granularities =
        [("--heads 1", Granularity::Head, [2, 3, 1]), ("--one-scale", Granularity::Tensor, [1, 1, 1])];
    for (option, granularity, shape) in granularities {
        let options: Vec<&str> = option.split(' ').chain(["--tensor", "v", "--device", "cpu"]).collect();
        case.quantize(&options).succeeded();
        let expected = Preparation::new(granularity).quantize(exact.view(), &sequences);
        check(&case.output(), &expected.unwrap(), shape);
    }
    let stdout = case.quantize(&["--tensor", "v", "--device", "cpu", "--channels"]).succeeded();
    assert!(stdout.starts_with("f16 (2, 150, 3, 48), a scale and a mean for each channel\n"), "{stdout}");
    let bytes = fs::read(case.output()).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let channels = Channels::of(exact.view());
    for (name, numbers) in [("scales", channels.scale()), ("mean", channels.mean())] {
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[2, 3, 48][..]));
        let values: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(tensor.data(), values, "{name}");
    }
    let codes = channels.quantize(exact.view()).unwrap();
    let bits: Vec<u8> = codes.codes().iter().map(|code| code.to_bits()).collect();
    assert_eq!(tensors.tensor("codes").unwrap().data(), bits);
    let refused = case.quantize(&["--tensor", "v", "--heads", "2"]);
    refused.refused("v: a scale for each 2 heads, of which the tensor has 3");
}

#[test]
fn npy_files() {
    let x = wave().mapv(f16::from_f32);
    let case = Case::zeros(Dtype::F16, &[1, 1, 1, 16]);
    let dict = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 150, 3, 48), }\n";
    let input = case.folder.path().join("x.npy");
    let data: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let header = [b"\x93NUMPY\x01\x00".as_slice(), &(dict.len() as u16).to_le_bytes(), dict.as_bytes()];
    fs::write(&input, [header.concat(), data].concat()).unwrap();
    let (input, output) = (input.to_str().unwrap(), case.output());
    fa3(&["quantize", input, "-o", output.to_str().unwrap()]).succeeded();
    let expected = Preparation::new(Granularity::Block { rows: 128 });
    let expected = expected.quantize(x.mapv(f16::to_f32).view(), &SequenceRows::dense(2, 150)).unwrap();
    check(&output, &expected, [2, 3, 2]);
    fa3(&["quantize", input, "--tensor", "x"])
        .refused("--tensor is for safetensors input, not for .npy files");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let case = Case::f32(&wave());
    case.refused(&[], "x is F32, expected F16 or BF16; --dtype bf16 or --dtype f16 rounds it");
    case.refused(&["--tensor", "q"], "in.safetensors has no tensor q; it holds x");
    let half = ["--dtype", "f16"];
    let refused = |options: &[&str], why| case.refused(&[half.as_slice(), options].concat(), why);
    refused(&["--block-rows", "32"], "x: scales of blocks of 32 rows, expected 64 or 128");
    refused(&["--scale", "-1"], "x: the scale -1 is outside 2^-64 to 2^64");
    refused(&["--rope", "halves", "--rotary-dim", "64"], "x: rotary_dim 64 is not a positive multiple of 16");
    refused(&["--rope", "halves", "--rope-base", "-1"], "rotary base -1 is not positive and finite");
    let ran = case.quantize(&["--dtype", "f16", "--device", "1000"]);
    assert!(ran.stderr.starts_with("error: no "), "no gpu, or no such one: {ran:?}");
    let npy = case.folder.path().join("out.npy");
    let input = case.input.to_str().unwrap();
    fa3(&["quantize", input, "-o", npy.to_str().unwrap()])
        .refused("codes and scales go into one safetensors");
    fa3(&["quantize", input, "-o", input]).refused("it is an input");
    fa3(&["quantize", "-"]).refused("cannot read -");

    let zeros = |dtype, shape: &[usize], why| Case::zeros(dtype, shape).refused(&[], why);
    zeros(Dtype::F16, &[6, 2, 16], "x has shape [6, 2, 16], expected (batch, seqlen, heads, head_dim)");
    zeros(Dtype::F16, &[1, 0, 2, 16], "x of shape [1, 0, 2, 16] has no elements");
    zeros(Dtype::F16, &[1, 4, 2, 24], "x: ");
    zeros(Dtype::F16, &[1, 4, 1, 272], "x: x has head_dim 272, not a multiple of 16 up to 256");
    zeros(Dtype::I32, &[1, 4, 1, 16], "x is I32, expected F32, F16 or BF16");
    zeros(Dtype::U8, &[1, 4, 1, 16], "x is U8, expected F32, F16 or BF16");
}

/// Such a table would fill the memory, and options of a rotation have no effect without one.
#[test]
fn invalid_options() {
    let case = Case::zeros(Dtype::F16, &[1, 4, 1, 16]);
    for options in [
        ["--rope", "halves", "--first-position", "1048577"].as_slice(),
        &["--rope", "halves", "--rotary-dim", "24"],
        &["--rope", "half"],
        &["--first-position", "1"],
        &["--scale", "1", "--block-rows", "64"],
    ] {
        let ran = case.quantize(options);
        assert!(ran.code == Some(2) && ran.stderr.starts_with("error: "), "{ran:?}");
    }
}
