//! Checks, JSON reports and gradients of `fa3 run`.

use std::fs;

use fa3::{Attention, Device, OutputGradients};
use half::f16;
use ndarray::{Array1, Array3, Array4};
use safetensors::Dtype;
use serde_json::Value;

use crate::fa3;
use crate::run::{Tensor, args, file, qkv, read, wave, write};

fn tensors(x: &[Array4<f16>; 3]) -> Vec<Tensor> {
    ["q", "k", "v"].into_iter().zip(x).map(|(name, x)| Tensor::f16(name, x)).collect()
}

fn bytes(x: &Array4<f16>) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The file may contain expected results or not.
#[test]
fn all_results_are_judged_where_that_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    write(&input, &tensors(&qkv(50)));
    let unasked = fa3(&args(&["run"], &[&input])).succeeded();
    assert!(
        unasked.contains("\n  check   none, nothing is expected of these tensors; --check asks"),
        "{unasked}"
    );
    let asked = fa3(&args(&["run", "--causal", "--check"], &[&input])).succeeded();
    assert!(asked.contains("\n  o       max error ") && asked.contains("\n  lse     max error "), "{asked}");
    assert!(!asked.contains("  file    "), "{asked}");
    let both = fa3(&args(&["run", "--check", "--no-check"], &[&input]));
    assert!(both.stderr.contains("'--check' cannot be used with '--no-check'"), "{both:?}");
}

/// NaN and infinities are reported, with and without a check.
#[test]
fn numbers_that_are_none_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let mut x = qkv::<f16>(50);
    x[2][[0, 49, 1, 3]] = f16::NAN;
    x[2][[0, 49, 1, 4]] = f16::INFINITY;
    write(&input, &tensors(&x));
    // Two of four query heads have NaN in these columns of each row.
    let stdout = fa3(&args(&["run", "--check"], &[&input])).succeeded();
    assert!(stdout.contains(", 100 NaN, 100 inf\n"), "{stdout}");
}

#[test]
fn reports_for_programs() {
    let folder = tempfile::tempdir().unwrap();
    let (input, json) = (file(&folder, "in.safetensors"), file(&folder, "report.json"));
    let [a, b] = ["a.", "b."].map(|prefix| {
        let x = qkv(50);
        ["q", "k", "v"].into_iter().zip(x).map(move |(name, x)| Tensor::f16(&format!("{prefix}{name}"), &x))
    });
    write(&input, &a.into_iter().chain(b).collect::<Vec<_>>());
    let stdout = fa3(&args(&["run", "--check", "--backward", "--json", "-"], &[&input])).succeeded();
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let calls = report["calls"].as_array().unwrap();
    assert_eq!([&calls[0]["prefix"], &calls[1]["prefix"]], ["a.", "b."]);
    for call in calls {
        assert!(call["time"]["seconds"].as_f64().unwrap() > 0.0, "{call}");
        assert_eq!(call["results"][0]["nan"], 0);
        assert!(call["check"]["holds"] == true && call["backward"]["check"]["holds"] == true, "{call}");
        assert!(call["check"]["oracle"][0]["allowed"].as_f64().unwrap() > 0.0, "{call}");
    }
    // The reason for the absence of a GPU is printed once.
    assert!(calls[1]["device"]["not_on_a_gpu"].is_null());
    let text = fa3(&args(&["run", "--json"], &[&json, &input])).succeeded();
    assert!(text.matches("not on a gpu").count() <= 1 && text.ends_with("report.json\n"), "{text}");
    let written: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert!(written["calls"][1]["check"].is_null());
    let output = file(&folder, "out.safetensors");
    fa3(&args(&["run", "--json", "-", "-o"], &[&output, &input]))
        .refused("--json - prints JSON and nothing else");

    let quantize = ["quantize", "--tensor", "a.q", "--json", "-"];
    let report: Value = serde_json::from_str(&fa3(&args(&quantize, &[&input])).succeeded()).unwrap();
    assert_eq!(report["scales"]["shape"], serde_json::json!([1, 4, 1]));
    assert!(report["error"]["relative_rms"].as_f64().unwrap() < 0.05, "{report}");
}

/// Gradients equal the library's, with and without expected gradients in the file.
#[test]
fn gradients() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(50);
    let attention = Attention::new(x[0].view(), x[1].view(), x[2].view()).causal();
    let forward = attention.forward(&Device::Cpu).unwrap();
    let dout = wave::<f16>([1, 50, 4, 16], 0.3);
    let dlse = Array3::from_shape_fn((1, 4, 50), |(_, h, s)| (h + s) as f32 / 64.0);
    let check = |others: Vec<Tensor>, of: OutputGradients<'_, f16>, said: &str| {
        write(&input, &tensors(&x).into_iter().chain(others).collect::<Vec<_>>());
        let words = ["run", "--device", "cpu", "--causal", "--check", "--backward", "-o"];
        let stdout = fa3(&args(&words, &[&output, &input])).succeeded();
        assert!(stdout.contains(said), "{stdout}");
        assert_eq!(stdout.matches("allowed").count(), 5, "{stdout}");
        let expected = attention.backward(&Device::Cpu, &forward, of).unwrap();
        let written = read(&output);
        assert_eq!(
            written.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(),
            ["dk", "dq", "dv", "lse", "o"]
        );
        for (index, expected) in [&expected.dk, &expected.dq, &expected.dv].into_iter().enumerate() {
            assert_eq!(written[index].2, expected.shape());
            assert_eq!(written[index].3, bytes(expected));
        }
    };
    let ones = Array4::from_elem([1, 50, 4, 16], f16::ONE);
    check(Vec::new(), ones.view().into(), "\n  backward of dO = 1, dLSE = 0\n");
    for name in ["do", "dout"] {
        let said = format!("\n  backward of dO = {name}, dLSE = 0\n");
        check(vec![Tensor::f16(name, &dout)], dout.view().into(), &said);
    }
    let mut both = OutputGradients::from(dout.view());
    both.dlse = Some(dlse.view());
    let tensors = vec![Tensor::f16("do", &dout), Tensor::f32("dlse", &[4, 50], dlse.iter().copied())];
    check(tensors, both, "\n  backward of dO = do, dLSE = dlse\n");
}

/// Results with the file's sinks equal the library's, are judged, and are written with the sinks' gradient.
#[test]
fn sinks() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f16>(50);
    let sink = Array1::from_vec(vec![-1.0, 0.5, f32::NEG_INFINITY, 3.0]);
    let flat = |name: &str, x: &Array4<f16>| Tensor::new(name, Dtype::F16, &x.shape()[1..], bytes(x));
    let check = |attention: &Attention<'_, f16>, tensors: Vec<Tensor>, options: &[&str]| {
        let expected = attention.forward(&Device::Cpu).unwrap();
        let dout = Array4::from_elem([1, 50, 4, 16], f16::ONE);
        let gradients = attention.backward(&Device::Cpu, &expected, dout.view()).unwrap();
        write(
            &input,
            &tensors.into_iter().chain([Tensor::f32("sink", &[4], sink.clone())]).collect::<Vec<_>>(),
        );
        let words = [&["run", "--device", "cpu", "--check", "--backward"], options, &["-o"]].concat();
        let stdout = fa3(&args(&words, &[&output, &input])).succeeded();
        assert_eq!(stdout.matches("allowed").count(), 6, "{stdout}");
        let [_, dq, dsink, _, lse, o] = read(&output).try_into().unwrap();
        assert_eq!((dsink.0.as_str(), &dsink.2), ("dsink", &vec![4]));
        let floats = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(dsink.3, floats(gradients.dsink.unwrap().as_slice().unwrap()));
        assert_eq!(lse.3, floats(expected.lse.as_slice().unwrap()));
        assert_eq!((dq.3, o.3), (bytes(&gradients.dq), bytes(&expected.o)));
    };
    let [q, k, v] = x.each_ref().map(|x| x.view());
    check(&Attention::new(q, k, v).sink(sink.view()).causal(), tensors(&x), &["--causal"]);
    let cu_seqlens = [0, 17, 50];
    let packed = ["q", "k", "v"].into_iter().zip(&x).map(|(name, x)| flat(name, x)).collect();
    let lists = ["--cu-seqlens-q", "0,17,50"];
    let attention = Attention::new(q, k, v).sink(sink.view());
    check(&attention.packed(&cu_seqlens, &cu_seqlens), packed, &lists);
}

/// Results with the file's `qv` equal the library's and are judged, dense and packed.
#[test]
fn latent_attention() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let [q, k, v] = qkv::<f16>(50);
    let qv = wave::<f16>([1, 50, 4, 16], 1.3);
    let named = [("q", &q), ("k", &k), ("v", &v), ("qv", &qv)];
    let check = |attention: &Attention<'_, f16>, tensors: Vec<Tensor>, options: &[&str]| {
        let expected = attention.forward(&Device::Cpu).unwrap();
        write(&input, &tensors);
        let words = [&["run", "--device", "cpu", "--check"], options, &["-o"]].concat();
        let stdout = fa3(&args(&words, &[&output, &input])).succeeded();
        assert!(stdout.contains(" with qv ") && stdout.matches("allowed").count() == 2, "{stdout}");
        let [_, o] = read(&output).try_into().unwrap();
        assert_eq!(o.3, bytes(&expected.o));
    };
    let dense = named.map(|(name, x)| Tensor::f16(name, x)).into();
    check(&Attention::new(&q, &k, &v).qv(&qv).causal(), dense, &["--causal"]);
    let flat = |(name, x): (&str, &Array4<f16>)| Tensor::new(name, Dtype::F16, &x.shape()[1..], bytes(x));
    let cu_seqlens = [0, 17, 50];
    let packed = Attention::new(&q, &k, &v).qv(&qv).packed(&cu_seqlens, &cu_seqlens);
    check(&packed, named.map(flat).into(), &["--cu-seqlens-q", "0,17,50"]);

    write(&input, &named.map(|(name, x)| Tensor::f16(name, x)));
    fa3(&args(&["run", "--backward"], &[&input])).refused("there are no gradients of attention with qv");
    let narrow = wave::<f16>([1, 50, 4, 8], 0.3);
    write(&input, &[("q", &q), ("k", &k), ("v", &v), ("qv", &narrow)].map(|(name, x)| Tensor::f16(name, x)));
    fa3(&args(&["run"], &[&input])).refused("qv has head_dim 8, expected 16");
}

#[test]
fn gradients_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let input = file(&folder, "in.safetensors");
    let refused = |others: Vec<Tensor>, why: &str| {
        write(&input, &tensors(&qkv(50)).into_iter().chain(others).collect::<Vec<_>>());
        fa3(&args(&["run", "--backward"], &[&input])).refused(why);
    };
    let narrow = wave::<f16>([1, 50, 4, 8], 0.3);
    refused(vec![Tensor::f16("do", &narrow)], "do has shape [1, 50, 4, 8], expected [1, 50, 4, 16]");
    refused(vec![Tensor::f32("do", &[1, 50, 4, 16], vec![0.0; 3200])], "do is F32, expected F16 like q");
    refused(
        vec![Tensor::f32("dlse", &[1, 50, 4], vec![0.0; 200])],
        "dlse has shape [1, 50, 4], expected [1, 4, 50]",
    );
    let codes = |name| Tensor::new(name, Dtype::F8_E4M3, &[1, 8, 1, 16], vec![0; 128]);
    write(&input, &[codes("q"), codes("k"), codes("v")]);
    fa3(&args(&["run", "--backward"], &[&input]))
        .refused("q is F8_E4M3, expected F32, F16 or BF16 with --backward");
    let npy = file(&folder, "x.npy");
    fa3(&args(&["run", "--backward"], &[&npy, &npy, &npy])).refused("--backward is for safetensors input");
}
