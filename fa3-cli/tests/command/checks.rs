//! Checks, JSON reports and gradients of `fa3 run`.

use fa3::{Attention, Device, OutputGradients};
use half::f16;
use ndarray::{Array1, Array3, Array4};
use safetensors::Dtype;
use serde_json::json;

use crate::files::{Folder, Tensor, bytes, named, qkv, tensors, wave};

/// The file may contain expected results or not.
#[test]
fn all_results_are_judged_where_that_is_asked_for() {
    let folder = Folder::with(&tensors(&qkv::<f16>(50)));
    let unasked = folder.fa3("run in.safetensors").succeeded();
    let said = "\n  check   none, nothing is expected of these tensors; --check asks";
    assert!(unasked.contains(said), "{unasked}");
    let asked = folder.fa3("run --causal --check in.safetensors").succeeded();
    assert!(asked.contains("\n  o       max error ") && asked.contains("\n  lse     max error "), "{asked}");
    assert!(!asked.contains("  file    "), "{asked}");
    folder.fa3("run --check --no-check in.safetensors").misused("'--check' cannot be used with '--no-check'");
}

/// NaN and infinities are reported, with and without a check.
#[test]
fn numbers_that_are_none_are_counted() {
    let mut x = qkv::<f16>(50);
    x[2][[0, 49, 1, 3]] = f16::NAN;
    x[2][[0, 49, 1, 4]] = f16::INFINITY;
    // Two of four query heads have NaN in these columns of each row.
    let stdout = Folder::with(&tensors(&x)).fa3("run --check in.safetensors").succeeded();
    assert!(stdout.contains(", 100 NaN, 100 inf\n"), "{stdout}");
}

#[test]
fn reports_for_programs() {
    let x = qkv::<f16>(50);
    let folder = Folder::with(&[named(["a.q", "a.k", "a.v"], &x), named(["b.q", "b.k", "b.v"], &x)].concat());
    let printed = |words: &str| folder.fa3(&format!("{words} --json - in.safetensors")).json();
    let report = printed("run --check --backward");
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
    let text = folder.fa3("run --json report.json in.safetensors").succeeded();
    assert!(text.matches("not on a gpu").count() <= 1 && text.ends_with("report.json\n"), "{text}");
    assert!(folder.json("report.json")["calls"][1]["check"].is_null());
    folder
        .fa3("run --json - -o out.safetensors in.safetensors")
        .refused("--json - prints JSON and nothing else");

    let report = printed("quantize --tensor a.q");
    assert_eq!(report["scales"]["shape"], json!([1, 4, 1]));
    assert!(report["error"]["relative_rms"].as_f64().unwrap() < 0.05, "{report}");
}

/// Gradients equal the library's, with and without expected gradients in the file.
#[test]
fn gradients() {
    let (folder, x) = (Folder::new(), qkv::<f16>(50));
    let attention = Attention::new(&x[0], &x[1], &x[2]).causal();
    let forward = attention.forward(&Device::Cpu).unwrap();
    let dout = wave::<f16>([1, 50, 4, 16], 0.3);
    let dlse = Array3::from_shape_fn((1, 4, 50), |(_, h, s)| (h + s) as f32 / 64.0);
    let check = |others: &[Tensor], of: OutputGradients<'_, f16>, said: &str| {
        folder.put("in.safetensors", &[&tensors(&x), others].concat());
        let words = "run --device cpu --causal --check --backward -o out.safetensors in.safetensors";
        let stdout = folder.fa3(words).succeeded();
        assert!(stdout.contains(&format!("\n  backward of {said}\n")), "{stdout}");
        assert_eq!(stdout.matches("allowed").count(), 5, "{stdout}");
        let expected = attention.backward(&Device::Cpu, &forward, of).unwrap();
        let [dk, dq, dv, lse, o] = folder.get("out.safetensors").try_into().unwrap();
        let expected = [expected.dq, expected.dk, expected.dv];
        assert_eq!([dq, dk, dv].as_slice(), named(["dq", "dk", "dv"], &expected));
        assert_eq!([lse.name, o.name], ["lse", "o"]);
    };
    let ones = Array4::from_elem([1, 50, 4, 16], f16::ONE);
    check(&[], ones.view().into(), "dO = 1, dLSE = 0");
    for name in ["do", "dout"] {
        check(&[Tensor::of(name, &dout)], dout.view().into(), &format!("dO = {name}, dLSE = 0"));
    }
    let mut both = OutputGradients::from(dout.view());
    both.dlse = Some(dlse.view());
    let given = [Tensor::of("do", &dout), Tensor::of("dlse", &dlse).shaped(&[4, 50])];
    check(&given, both, "dO = do, dLSE = dlse");
}

/// Runs a file's call, which must be judged in `judged` tensors, and have the library's O. Returns the tensors written.
#[track_caller]
fn written(
    attention: &Attention<'_, f16>,
    tensors: &[Tensor],
    options: &str,
    judged: usize,
) -> Vec<(String, Vec<u8>)> {
    let folder = Folder::with(tensors);
    let words = format!("run --device cpu --check {options} -o out.safetensors in.safetensors");
    let stdout = folder.fa3(&words).succeeded();
    assert_eq!(stdout.matches("allowed").count(), judged, "{stdout}");
    let written = folder.get("out.safetensors").into_iter().map(|tensor| (tensor.name, tensor.bytes));
    let written: Vec<_> = written.collect();
    let o = attention.forward(&Device::Cpu).unwrap().o;
    assert_eq!(written.last(), Some(&("o".to_owned(), bytes(&o))));
    written
}

/// Results with the file's sinks equal the library's, are judged, and are written with the sinks' gradient.
#[test]
fn sinks() {
    let x = qkv::<f16>(50);
    let sink = Array1::from_vec(vec![-1.0, 0.5, f32::NEG_INFINITY, 3.0]);
    let attention = Attention::new(&x[0], &x[1], &x[2]).sink(sink.view());
    let dense = [tensors(&x), vec![Tensor::of("sink", &sink)]].concat();
    let packed: Vec<Tensor> =
        dense[..3].iter().cloned().map(Tensor::packed).chain([dense[3].clone()]).collect();
    for (attention, tensors, options) in [
        (attention.clone().causal(), dense, "--backward --causal"),
        (attention.packed(&[0, 17, 50], &[0, 17, 50]), packed, "--backward --cu-seqlens-q 0,17,50"),
    ] {
        let [_, dq, dsink, _, lse, _] = written(&attention, &tensors, options, 6).try_into().unwrap();
        let expected = attention.forward(&Device::Cpu).unwrap();
        let dout = Array4::from_elem([1, 50, 4, 16], f16::ONE);
        let gradients = attention.backward(&Device::Cpu, &expected, dout.view()).unwrap();
        assert_eq!(dsink, ("dsink".to_owned(), bytes(&gradients.dsink.unwrap())));
        assert_eq!((lse.1, dq.1), (bytes(&expected.lse), bytes(&gradients.dq)));
    }
}

/// Results with the file's `qv` equal the library's and are judged, dense and packed.
#[test]
fn latent_attention() {
    let (x, qv) = (qkv::<f16>(50), wave::<f16>([1, 50, 4, 16], 1.3));
    let with = |qv: &Array4<f16>| [tensors(&x), vec![Tensor::of("qv", qv)]].concat();
    let attention = Attention::new(&x[0], &x[1], &x[2]).qv(&qv);
    assert_eq!(written(&attention.clone().causal(), &with(&qv), "--causal", 2).len(), 2);
    let packed: Vec<Tensor> = with(&qv).into_iter().map(Tensor::packed).collect();
    written(&attention.packed(&[0, 17, 50], &[0, 17, 50]), &packed, "--cu-seqlens-q 0,17,50", 2);

    let folder = Folder::with(&with(&qv));
    assert!(folder.fa3("run in.safetensors").succeeded().contains(" with qv "));
    folder.fa3("run --backward in.safetensors").refused("there are no gradients of attention with qv");
    folder.put("in.safetensors", &with(&wave([1, 50, 4, 8], 0.3)));
    folder.fa3("run in.safetensors").refused("qv has head_dim 8, expected 16");
}

#[test]
fn gradients_that_cannot_be() {
    let zeros = |name, dtype, shape: &[usize]| Tensor::zeros(name, dtype, shape);
    for (other, why) in [
        (zeros("do", Dtype::F16, &[1, 50, 4, 8]), "do has shape [1, 50, 4, 8], expected [1, 50, 4, 16]"),
        (zeros("do", Dtype::F32, &[1, 50, 4, 16]), "do is F32, expected F16 like q"),
        (zeros("dlse", Dtype::F32, &[1, 50, 4]), "dlse has shape [1, 50, 4], expected [1, 4, 50]"),
    ] {
        let folder = Folder::with(&[tensors(&qkv::<f16>(50)), vec![other]].concat());
        folder.fa3("run --backward in.safetensors").refused(why);
    }
    let folder = Folder::with(&["q", "k", "v"].map(|name| zeros(name, Dtype::F8_E4M3, &[1, 8, 1, 16])));
    folder
        .fa3("run --backward in.safetensors")
        .refused("q is F8_E4M3, expected F32, F16 or BF16 with --backward");
    folder.fa3("run --backward x.npy x.npy x.npy").refused("--backward is for safetensors input");
}
