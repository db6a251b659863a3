//! `fa3 run` with good input.

use std::process::Stdio;

use crate::files::{Folder, Number, Tensor, bytes, named, qkv, tensors, wave};
use crate::{command, fa3};
use fa3::{Attention, Device, Scalar, ScoreFunction, ScoreTable};
use fa3_quant::E4m3;
use fa3_ref::{Forward, Inputs, oracle};
use half::{bf16, f16};
use ndarray::{Array1, Array4, Axis};
use safetensors::Dtype;

/// The oracle's results.
fn expected(attention: &Attention<'_, f16>, [q, k, v]: &[Array4<f16>; 3]) -> Forward<f64> {
    let problem = attention.problem().unwrap();
    oracle::forward(&Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap())
}

#[test]
fn results_are_compared_printed_and_written() {
    let x = qkv::<f16>(50);
    let attention = Attention::new(&x[0], &x[1], &x[2]);
    let attention = attention.window(Some(20), Some(0)).softmax_scale(0.5).softcap(3.0);
    let Forward { o, lse } = expected(&attention, &x);
    let folder = Folder::with(&[tensors(&x), vec![Tensor::of("o", &o), Tensor::of("lse", &lse)]].concat());

    let options = "--device cpu --window 20,0 --scale 0.5 --softcap 3 --threads 1 -o out.safetensors";
    let stdout = folder.fa3(&format!("run {options} in.safetensors")).succeeded();
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
    let expected = [Tensor::of("lse", &result.lse), Tensor::of("o", &result.o)];
    assert_eq!(folder.get("out.safetensors"), expected);
    assert_eq!(folder.count(), 2);
}

#[test]
fn scores_are_replaced_by_a_function() {
    let x = qkv::<f16>(50);
    let heads = x[0].len_of(Axis(2));
    let slopes: Vec<f32> = (0..heads).map(|head| 0.5 / (head + 1) as f32).collect();
    let table = ScoreTable::new(&[heads], slopes.clone()).unwrap();
    let function = ScoreFunction::parse("s + slope[h] * (k - q)", [("slope", table.into())]).unwrap();
    let attention = Attention::new(&x[0], &x[1], &x[2]).causal().score(function);
    let folder = Folder::with(&tensors(&x));
    let slopes = slopes.iter().map(f32::to_string).collect::<Vec<_>>().join(",");
    let options =
        format!("--device cpu --causal --check --backward -o out.safetensors --table slope={slopes}");
    let stdout = folder.fa3(&format!("run in.safetensors {options} --score s+slope[h]*(k-q)")).succeeded();
    assert_eq!(stdout.lines().next().unwrap(), attention.problem().unwrap().to_string());
    let result = attention.forward(&Device::Cpu).unwrap();
    assert_eq!(
        folder.get("out.safetensors")[3..],
        [Tensor::of("lse", &result.lse), Tensor::of("o", &result.o)]
    );
    let refused = |score| folder.fa3(&format!("run in.safetensors {options} --score {score}"));
    refused("s+slope").refused("slope in the score expression is a table, expected a number");
}

/// The file's o and lse were computed without a mask, so that correct results with a mask differ from them.
#[test]
fn the_oracle_decides_and_the_file_is_a_second_opinion() {
    let x = qkv::<f16>(50);
    let Forward { o, lse } = expected(&Attention::new(&x[0], &x[1], &x[2]), &x);
    for only in [Tensor::of("o", &o), Tensor::of("lse", &lse)] {
        let folder = Folder::with(&[tensors(&x), vec![only]].concat());
        folder.fa3("run in.safetensors").succeeded();
        let stdout = folder.fa3("run in.safetensors --causal -o out.safetensors").succeeded();
        let count = |text: &str| stdout.matches(text).count();
        assert_eq!((count(" DIFFERS by up to "), count("BREAKS THE ERROR LAW")), (1, 0), "{stdout}");
        assert!(stdout.contains("\n          is it of another mask, scale or soft cap?"), "{stdout}");
        assert!(folder.path("out.safetensors").exists());
        let unchecked = folder.fa3("run in.safetensors --causal --no-check").succeeded();
        assert!(unchecked.ends_with("\n  check   none, because of --no-check\n"), "{unchecked}");
    }
}

/// `o` and `lse` belong to `q`, `k` and `v`: results of tensors with other names are not compared with them.
#[test]
fn tensors_of_other_names_have_other_results() {
    let x = qkv::<f16>(50);
    let Forward { o, lse } = expected(&Attention::new(&x[0], &x[1], &x[2]), &x);
    let others = vec![Tensor::of("other", &x[1]), Tensor::of("o", &o), Tensor::of("lse", &lse)];
    let folder = Folder::with(&[tensors(&x), others].concat());
    assert!(folder.fa3("run in.safetensors").succeeded().contains("\n  lse     max error"));
    let other = folder.fa3("run in.safetensors --k other").succeeded();
    assert!(other.contains("nothing is expected of these tensors"), "{other}");
}

/// The file has activations of a real model, with attention that another program computed in f64.
#[test]
fn real_activations() {
    let words = concat!("run ", env!("CARGO_MANIFEST_DIR"), "/../data/minilm_layer5.safetensors");
    let stdout = fa3(words).succeeded();
    for part in [
        "f16 batch 1 seqlen 512 x 512 heads 3/3 head_dim 32",
        "\n  o       max error",
        "\n  lse     max error",
    ] {
        assert!(stdout.contains(part), "{stdout}");
    }
    assert_eq!(stdout.matches("\n  file    ").count(), 2);
}

#[test]
fn an_expected_lse_in_another_order_is_recognised() {
    let x = qkv::<f16>(50);
    let lse = expected(&Attention::new(&x[0], &x[1], &x[2]), &x).lse;
    let mislabelled = Tensor::of("lse", &lse.view().permuted_axes([0, 2, 1])).shaped(lse.shape());
    let folder = Folder::with(&[tensors(&x), vec![mislabelled]].concat());
    let stdout = folder.fa3("run in.safetensors").succeeded();
    assert!(stdout.contains("read as (batch, seqlen, heads)"), "{stdout}");
}

#[test]
fn every_type_gives_the_librarys_result() {
    fn check<T: Scalar<Output: Number> + Number>() {
        let x = qkv::<T>(33);
        let folder = Folder::with(&tensors(&x));
        folder.fa3("run in.safetensors --device cpu --causal -o out.safetensors").succeeded();
        let o = Attention::new(&x[0], &x[1], &x[2]).causal().forward(&Device::Cpu).unwrap().o;
        assert_eq!(folder.get("out.safetensors")[1], Tensor::of("o", &o));
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
    check::<E4m3>();
}

/// e4m3 results are compared with the oracle by the error law of the output's precision.
#[test]
fn eight_bits_are_judged_as_bf16() {
    let x = qkv::<E4m3>(70);
    let problem = Attention::new(&x[0], &x[1], &x[2]).problem().unwrap();
    let [q, k, v] = x.each_ref().map(|x| x.mapv(E4m3::to_f32));
    let o = oracle::forward(&Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap()).o;
    let folder = Folder::with(&[tensors(&x), vec![Tensor::of("o", &o)]].concat());
    assert!(folder.fa3("run in.safetensors").succeeded().starts_with("e4m3 batch 1 seqlen 70 x 70"));
}

/// Packed sequences give the results of separate calls, for lists from the file or from the command line.
#[test]
fn packed_sequences() {
    let (folder, x) = (Folder::new(), qkv::<f32>(50));
    let mut packed: Vec<Tensor> = tensors(&x).into_iter().map(Tensor::packed).collect();
    let check = |tensors: &[Tensor], options: &str| {
        folder.put("in.safetensors", tensors);
        folder.fa3(&format!("run --causal {options} -o out.safetensors in.safetensors")).succeeded();
        let [lse, o] = folder.get("out.safetensors").try_into().unwrap();
        assert_eq!((&lse.shape, &o.shape), (&vec![4, 50], &vec![50, 4, 16]));
        for rows in [0..17, 17..50] {
            let [q, k, v] = x.each_ref().map(|x| x.slice_axis(Axis(1), rows.clone().into()));
            let alone = Attention::new(q, k, v).causal().forward(&Device::Cpu).unwrap();
            assert_eq!(o.bytes[rows.start * 4 * 16 * 4..rows.end * 4 * 16 * 4], bytes(&alone.o));
            let lse_alone = alone.lse.index_axis(Axis(0), 0);
            let head3 = &lse.bytes[(150 + rows.start) * 4..(150 + rows.end) * 4];
            assert_eq!(head3, bytes(lse_alone.row(3)));
        }
    };
    check(&packed, "--cu-seqlens-q 0,17,50");
    check(&packed, "--cu-seqlens-q 0,17,50 --cu-seqlens-k 0,17,50");
    packed.push(Tensor::of("cu_seqlens_q", &Array1::from_vec(vec![0i64, 17, 50])));
    check(&packed, "");
    // The command line's list replaces the file's list, and seqused ends before a sequence's end.
    let words = "run --cu-seqlens-q 0,50 --seqused-k 10 -o out.safetensors in.safetensors";
    folder.fa3(words).succeeded();
    let short = Attention::new(&x[0], &x[1], &x[2]).packed(&[0, 50], &[0, 50]).seqused_k(&[10]);
    assert_eq!(folder.get("out.safetensors")[1].bytes, bytes(&short.forward(&Device::Cpu).unwrap().o));
}

#[test]
fn prefixes_and_names() {
    let x = qkv::<f16>(20);
    let calls = [["b.q", "b.k", "b.v"], ["a.q", "a.k", "a.v"], ["query", "key", "value"]];
    let folder = Folder::with(&calls.map(|names| named(names, &x)).concat());
    for (options, stdout, names) in [
        ("", "a.  f16 batch", &["a.lse", "a.o", "b.lse", "b.o"][..]),
        ("--prefix b.", "b.  f16 batch", &["b.lse", "b.o"]),
        ("--q query --k key --v value", "f16 batch", &["lse", "o"]),
        ("--prefix a. --q b.q", "a.  f16", &["a.lse", "a.o"]),
    ] {
        let ran = folder.fa3(&format!("run {options} -o out.safetensors in.safetensors")).succeeded();
        assert!(ran.starts_with(stdout), "{ran}");
        let written = folder.get("out.safetensors");
        assert_eq!(written.iter().map(|tensor| &tensor.name).collect::<Vec<_>>(), names);
    }
}

/// A .npy file as specified in `numpy.lib.format`, padded to 64 bytes.
fn npy(descr: &str, shape: &str, data: Vec<u8>) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:117}\n");
    [b"\x93NUMPY\x01\x00\x76\x00".as_slice(), header.as_bytes(), &data].concat()
}

#[test]
fn npy_files() {
    let (folder, x) = (Folder::new(), qkv::<f16>(40));
    folder.write("q.npy", npy("<f2", "(1, 40, 4, 16)", bytes(&x[0])));
    let big = x[1].iter().flat_map(|x| x.to_be_bytes()).collect();
    folder.write("k.npy", npy(">f2", "(1, 40, 2, 16)", big));
    folder.write("v.npy", npy("<f2", "(1, 40, 2, 16)", bytes(&x[2])));
    folder.fa3("run --causal -o o.npy --lse lse.npy q.npy k.npy v.npy").succeeded();

    let result = Attention::new(&x[0], &x[1], &x[2]).causal().forward(&Device::Cpu).unwrap();
    assert_eq!(folder.bytes("o.npy"), npy("<f2", "(1, 40, 4, 16, )", bytes(&result.o)));
    assert_eq!(folder.bytes("lse.npy"), npy("<f4", "(1, 4, 40, )", bytes(&result.lse)));
}

/// A reader that closes the pipe (`| head`) stops neither the computation nor the output.
#[test]
fn a_closed_stdout_is_no_failure() {
    let folder = Folder::with(&tensors(&qkv::<f16>(20)));
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command("run in.safetensors -o out.safetensors");
    command.current_dir(folder.path("")).stdout(writer).stderr(Stdio::piped());
    let ran = command.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!((ran.status.code(), ran.stderr.as_slice()), (Some(0), b"".as_slice()));
    assert_eq!(folder.get("out.safetensors").len(), 2);
}

/// Codes that the command wrote are multiplied by their scales of any granularity, and unused scales are reported.
#[test]
fn scales_of_codes_are_used_or_told() {
    let x = wave::<f16>([1, 200, 2, 16], 0.7);
    let folder = Folder::with(&[Tensor::of("x", &x)]);
    let written_o = || {
        let tensors = folder.get("out.safetensors");
        tensors.into_iter().find(|tensor| tensor.name == "o").unwrap().bytes
    };
    let exact = Attention::new(&x, &x, &x).forward(&Device::Cpu).unwrap().o;
    for scaling in ["--block-rows 64", "--heads 1", "--one-scale", "--channels"] {
        let quantize = format!("quantize --device cpu {scaling} -o codes.safetensors in.safetensors");
        folder.fa3(&quantize).succeeded();
        let run =
            "run --device cpu --check --q codes --k codes --v codes -o out.safetensors codes.safetensors";
        folder.fa3(run).succeeded();
        let o = written_o();
        let o = o.chunks_exact(2).map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
        let most = o.zip(&exact).map(|(o, x)| (o - x.to_f32()).abs()).fold(0.0, f32::max);
        assert!(most < 0.1, "{scaling}: {most}");
    }
    let with = |others: &[Tensor]| {
        let one = Array4::from_elem([1, 4, 2, 16], E4m3::from_f32(1.0));
        folder.put("in.safetensors", &[&tensors(&[one.clone(), one.clone(), one]), others].concat());
    };
    let of_heads = |name: &str| Tensor::of(name, &Array1::from_vec(vec![0.5f32, 2.0])).shaped(&[1, 2]);
    with(&[of_heads("v_descale"), of_heads("v_scale")]);
    let ran = folder.fa3("run --device cpu -o out.safetensors in.safetensors");
    let note = "note: in.safetensors has v_scale, which no call takes\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), note));
    let o = written_o();
    assert_eq!([&o[..2], &o[32..34]], [0.5, 2.0].map(|x| bf16::from_f32(x).to_le_bytes()));
    with(&[Tensor::zeros("k_descale", Dtype::F32, &[3, 5])]);
    let why = "k_descale has shape [3, 5], expected scales of heads";
    folder.fa3("run --device cpu in.safetensors").refused(why);
}
