//! `fa3 quantize` as a command.

use crate::files::{Folder, Tensor};
use fa3_quant::{
    Channels, Granularity, Incoherent, Preparation, Quantized, Rope, RopeStyle, Rotation, RowPositions,
    ndarray,
};
use fa3_types::SequenceRows;
use half::{bf16, f16};
use ndarray::{Array1, Array4};
use safetensors::Dtype;

const DIMS: [usize; 4] = [2, 150, 3, 48];

/// Quantizes a file's tensor in the folder.
const QUANTIZE: &str = "quantize in.safetensors -o out.safetensors";

fn wave() -> Array4<f32> {
    let mut x = 0.0;
    Array4::from_shape_simple_fn(DIMS, || {
        x += 0.7;
        3.0 * f32::sin(x)
    })
}

/// The wave in f16, and these numbers as f32.
fn halves() -> (Array4<f16>, Array4<f32>) {
    let x = wave().mapv(f16::from_f32);
    let exact = x.mapv(f16::to_f32);
    (x, exact)
}

/// Asserts that codes and scales equal fa3-quant's, with these shapes.
#[track_caller]
fn check(folder: &Folder, expected: &Quantized, scales_shape: [usize; 3]) {
    let scales = Array1::from_vec(expected.scales().values().to_vec());
    let expected =
        [Tensor::of("codes", expected.codes()), Tensor::of("scales", &scales).shaped(&scales_shape)];
    assert!(folder.get("out.safetensors") == expected);
}

#[test]
fn results_are_those_of_fa3_quant() {
    let (x, sequences) = (wave(), SequenceRows::dense(2, 150));
    let rounded = x.mapv(|x| bf16::from_f32(x).to_f32());
    let mixed = Incoherent::new(48, 9);
    let table = Rope::new(RopeStyle::HalfSplit, 32, 500.0).unwrap().table(170);
    let rotation = Rotation { table: &table, positions: RowPositions::First(&[20, 20]) };
    let preparation = Preparation::new(Granularity::Block { rows: 64 }).rotation(rotation).incoherent(&mixed);
    let folder = Folder::with(&[Tensor::of("x", &x)]);
    let rope = "--rope halves --rotary-dim 32 --rope-base 500 --first-position 20";
    let others = "--hadamard 9 --block-rows 64 --dtype bf16 --device cpu";
    let stdout = folder.fa3(&format!("{QUANTIZE} {rope} {others}")).succeeded();
    check(&folder, &preparation.quantize(rounded.view(), &sequences).unwrap(), [2, 3, 3]);

    let lines: Vec<&str> = stdout.lines().collect();
    let what = "bf16 (2, 150, 3, 48), half-split rotary embedding of 32, Hadamard, a scale for each 64 rows";
    assert_eq!(lines[0], what);
    let starts = ["  device  cpu (", "  time    ", "  scales  18 from ", "  error   ", "wrote "];
    assert_eq!(lines.len(), 1 + starts.len(), "{stdout}");
    for (line, start) in lines[1..].iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
    let error = lines[4].trim_start_matches("  error   ").trim_end_matches(" relative rms");
    // This is the error of 3 mantissa bits.
    assert!((0.01..0.04).contains(&error.parse::<f64>().unwrap()), "{error}");
}

/// The whole row rotates, from position 0, and the scale is known.
#[test]
fn defaults_and_a_given_scale() {
    let ((x, exact), sequences) = (halves(), SequenceRows::dense(2, 150));
    let table = Rope::new(RopeStyle::Interleaved, 48, 10_000.0).unwrap().table(150);
    let rotation = Rotation { table: &table, positions: RowPositions::First(&[0, 0]) };
    let folder = Folder::with(&[Tensor::of("k", &x)]);
    let words = format!("{QUANTIZE} --tensor k");
    let stdout = folder.fa3(&format!("{words} --rope interleaved --scale 0.01")).succeeded();
    let expected = Preparation::with_scale(0.01).rotation(rotation).quantize(exact.view(), &sequences);
    check(&folder, &expected.unwrap(), [1, 1, 1]);
    assert!(stdout.contains("\n  scales  1e-2, given\n"), "{stdout}");

    let plain = Preparation::new(Granularity::Block { rows: 128 });
    folder.fa3(&words).succeeded();
    check(&folder, &plain.quantize(exact.view(), &sequences).unwrap(), [2, 3, 2]);
}

/// Per-head, per-tensor and per-channel scales. Per-channel scales come with means.
#[test]
fn scales_in_a_pass_before() {
    let ((x, exact), sequences) = (halves(), SequenceRows::dense(2, 150));
    let folder = Folder::with(&[Tensor::of("v", &x)]);
    let words = format!("{QUANTIZE} --tensor v --device cpu");
    for (option, granularity, shape) in
        [("--heads 1", Granularity::Head, [2, 3, 1]), ("--one-scale", Granularity::Tensor, [1, 1, 1])]
    {
        folder.fa3(&format!("{words} {option}")).succeeded();
        let expected = Preparation::new(granularity).quantize(exact.view(), &sequences);
        check(&folder, &expected.unwrap(), shape);
    }
    let stdout = folder.fa3(&format!("{words} --channels")).succeeded();
    assert!(stdout.starts_with("f16 (2, 150, 3, 48), a scale and a mean for each channel\n"), "{stdout}");
    let channels = Channels::of(exact.view());
    let codes = channels.quantize(exact.view()).unwrap();
    let [scales, mean] = [("scales", channels.scale()), ("mean", channels.mean())]
        .map(|(name, numbers)| Tensor::of(name, numbers).shaped(&[2, 3, 48]));
    assert!(folder.get("out.safetensors") == [Tensor::of("codes", codes.codes()), mean, scales]);
    folder
        .fa3(&format!("{QUANTIZE} --tensor v --heads 2"))
        .refused("v: a scale for each 2 heads, of which the tensor has 3");
}

#[test]
fn npy_files() {
    let ((x, exact), folder) = (halves(), Folder::new());
    let dict = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 150, 3, 48), }\n";
    let header = [b"\x93NUMPY\x01\x00".as_slice(), &(dict.len() as u16).to_le_bytes(), dict.as_bytes()];
    folder.write("x.npy", [header.concat(), Tensor::of("x", &x).bytes].concat());
    folder.fa3("quantize x.npy -o out.safetensors").succeeded();
    let expected = Preparation::new(Granularity::Block { rows: 128 });
    let expected = expected.quantize(exact.view(), &SequenceRows::dense(2, 150)).unwrap();
    check(&folder, &expected, [2, 3, 2]);
    folder.fa3("quantize x.npy --tensor x").refused("--tensor is for safetensors input, not for .npy files");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = Folder::with(&[Tensor::of("x", &wave())]);
    for (options, why) in [
        ("", "x is F32, expected F16 or BF16; --dtype bf16 or --dtype f16 rounds it"),
        ("--tensor q", "in.safetensors has no tensor q; it holds x"),
        ("--dtype f16 --block-rows 32", "x: scales of blocks of 32 rows, expected 64 or 128"),
        ("--dtype f16 --scale -1", "x: the scale -1 is outside 2^-64 to 2^64"),
        ("--dtype f16 --rope halves --rotary-dim 64", "x: rotary_dim 64 is not a positive multiple of 16"),
        ("--dtype f16 --rope halves --rope-base -1", "rotary base -1 is not positive and finite"),
        // There is no GPU, or no GPU 1000.
        ("--dtype f16 --device 1000", "no "),
    ] {
        folder.fa3(&format!("{QUANTIZE} {options}")).refused(why);
    }
    for (words, why) in [
        ("in.safetensors -o out.npy", "codes and scales go into one safetensors"),
        ("in.safetensors -o in.safetensors", "it is an input"),
        ("-", "cannot read -"),
    ] {
        folder.fa3(&format!("quantize {words}")).refused(why);
    }
    assert_eq!(folder.count(), 1);

    for (dtype, shape, why) in [
        (Dtype::F16, &[6, 2, 16][..], "x has shape [6, 2, 16], expected (batch, seqlen, heads, head_dim)"),
        (Dtype::F16, &[1, 0, 2, 16], "x of shape [1, 0, 2, 16] has no elements"),
        (Dtype::F16, &[1, 4, 2, 24], "x: "),
        (Dtype::F16, &[1, 4, 1, 272], "x: x has head_dim 272, not a multiple of 16 up to 256"),
        (Dtype::I32, &[1, 4, 1, 16], "x is I32, expected F32, F16 or BF16"),
        (Dtype::U8, &[1, 4, 1, 16], "x is U8, expected F32, F16 or BF16"),
    ] {
        let folder = Folder::with(&[Tensor::zeros("x", dtype, shape)]);
        folder.fa3(QUANTIZE).refused(why);
        assert_eq!(folder.count(), 1);
    }
}

/// A table of too many positions would fill the memory. Options of a rotation have no effect without a rotation.
#[test]
fn invalid_options() {
    let folder = Folder::with(&[Tensor::zeros("x", Dtype::F16, &[1, 4, 1, 16])]);
    for options in [
        "--rope halves --first-position 1048577",
        "--rope halves --rotary-dim 24",
        "--rope half",
        "--first-position 1",
        "--scale 1 --block-rows 64",
    ] {
        folder.fa3(&format!("{QUANTIZE} {options}")).misused("");
    }
}
