//! `fa3 run` as a command: tensors in layouts and types that need conversion.

use fa3::{Attention, Device};
use ndarray::Array4;
use safetensors::Dtype;

use crate::files::{Folder, Tensor, bytes, qkv};

/// The same call with heads before rows, without a batch, and in f64 gives the same results in the layout of the
/// inputs.
#[test]
fn layouts_and_types_are_named() {
    let (folder, x) = (Folder::new(), qkv::<f32>(50));
    let result = Attention::new(&x[0], &x[1], &x[2]).forward(&Device::Cpu).unwrap();
    let run = |names: [&str; 3], dims: &[usize], order: [usize; 4], options: &str| {
        let tensor = |(name, x): (&str, &Array4<f32>)| {
            let x = x.view().permuted_axes(order).mapv(f64::from);
            let shape = match options.contains("fused") {
                true => [&x.shape()[..2], &[x.shape()[2] * x.shape()[3]]].concat(),
                false => x.shape()[4 - dims.len()..].to_vec(),
            };
            Tensor::of(name, &x).shaped(&shape)
        };
        folder.put("in.safetensors", &names.into_iter().zip(&x).map(tensor).collect::<Vec<_>>());
        let words = format!("run --device cpu --dtype f32 {options} -o out.safetensors in.safetensors");
        folder.fa3(&words).succeeded();
        let o = folder.get("out.safetensors").pop().unwrap();
        let expected = bytes(result.o.view().permuted_axes(order).iter());
        assert_eq!((o.shape.as_slice(), o.bytes == expected), (dims, true), "{options}");
        o.name
    };
    let (rows_first, plain) = ([0, 1, 2, 3], ["q", "k", "v"]);
    run(plain, &[1, 4, 50, 16], [0, 2, 1, 3], "--layout bhsd");
    run(plain, &[50, 4, 16], rows_first, "--layout shd");
    run(plain, &[4, 50, 16], [0, 2, 1, 3], "--layout hsd");
    run(plain, &[1, 50, 64], rows_first, "--layout fused --heads 4");
    run(plain, &[1, 50, 64], rows_first, "--layout fused --head-dim 16");
    for (options, why) in [
        ("--layout fused", "--layout fused takes --heads, of Q, or --head-dim"),
        ("--heads 4", "--heads is for --layout fused"),
        ("--layout fused --heads 3", "q has 64 columns, not a multiple of heads 3"),
        ("--layout fused --heads 1", "k has 32 columns, not a multiple of head_dim 64"),
        ("--layout fused --head-dim 0", "q has 64 columns, not a multiple of head_dim 0"),
    ] {
        folder.fa3(&format!("run {options} in.safetensors")).refused(why);
    }
    let names = ["a.q_proj", "a.k_proj", "a.v_proj"];
    let name = run(names, &[1, 50, 4, 16], rows_first, "--q q_proj --k k_proj --v v_proj");
    assert_eq!(name, "a.o");
}

/// Files in another order of dimensions, read in the default order, are either calls with more heads than rows, or
/// invalid.
#[test]
fn other_layouts_are_guessed() {
    let zeros = |dtype, shapes: [&[usize]; 3]| {
        Folder::with(&[0, 1, 2].map(|index| Tensor::zeros(["q", "k", "v"][index], dtype, shapes[index])))
    };
    let note = "note: there are fewer rows than heads; if heads come before rows, --layout bhsd says so\n";
    let ran = zeros(Dtype::F32, [&[1, 4, 50, 16]; 3]).fa3("run --device cpu in.safetensors");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), note));
    let shapes: [&[usize]; 3] = [&[1, 4, 50, 16], &[1, 4, 60, 16], &[1, 4, 60, 16]];
    zeros(Dtype::F32, shapes)
        .fa3("run in.safetensors")
        .refused("not a multiple of heads_kv 60; if heads come before rows, --layout bhsd");
    zeros(Dtype::F64, [&[1, 2, 1, 16]; 3])
        .fa3("run in.safetensors")
        .refused("q is F64, expected F32, F16, BF16 or F8_E4M3, as --dtype f32 makes of it");
}
