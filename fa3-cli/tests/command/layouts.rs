//! `fa3 run` as a command: tensors in layouts and types that need conversion.

use fa3::{Attention, Device};
use ndarray::Array4;

use crate::fa3;
use crate::run::{Tensor, args, file, qkv, read, write};

/// The same call with heads before rows, without a batch, and in f64 gives the same results in the layout of the
/// inputs.
#[test]
fn layouts_and_types_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (file(&folder, "in.safetensors"), file(&folder, "out.safetensors"));
    let x = qkv::<f32>(50);
    let result = Attention::new(x[0].view(), x[1].view(), x[2].view()).forward(&Device::Cpu).unwrap();
    let run = |names: [&str; 3], dims: &[usize], order: [usize; 4], options: &[&str]| {
        let tensor = |(name, x): (&str, &Array4<f32>)| {
            let x = x.view().permuted_axes(order);
            let fused = || [&x.shape()[..2], &[x.shape()[2] * x.shape()[3]]].concat();
            let shape = match options.contains(&"fused") {
                true => fused(),
                false => x.shape()[4 - dims.len()..].to_vec(),
            };
            Tensor::f64(name, &shape, x.iter().copied().map(f64::from))
        };
        write(&input, &names.into_iter().zip(&x).map(tensor).collect::<Vec<_>>());
        let options = [&["run", "--device", "cpu", "--dtype", "f32"], options, &["-o"]].concat();
        fa3(&args(&options, &[&output, &input])).succeeded();
        let o: Vec<u8> = result.o.view().permuted_axes(order).iter().flat_map(|x| x.to_le_bytes()).collect();
        let (name, _, shape, bytes) = read(&output).pop().unwrap();
        assert_eq!((shape.as_slice(), bytes == o), (dims, true), "{options:?}");
        name
    };
    run(["q", "k", "v"], &[1, 4, 50, 16], [0, 2, 1, 3], &["--layout", "bhsd"]);
    run(["q", "k", "v"], &[50, 4, 16], [0, 1, 2, 3], &["--layout", "shd"]);
    run(["q", "k", "v"], &[4, 50, 16], [0, 2, 1, 3], &["--layout", "hsd"]);
    run(["q", "k", "v"], &[1, 50, 64], [0, 1, 2, 3], &["--layout", "fused", "--heads", "4"]);
    run(["q", "k", "v"], &[1, 50, 64], [0, 1, 2, 3], &["--layout", "fused", "--head-dim", "16"]);
    for (options, message) in [
        ("--layout fused", "--layout fused takes --heads, of Q, or --head-dim"),
        ("--heads 4", "--heads is for --layout fused"),
        ("--layout fused --heads 3", "q has 64 columns, not a multiple of heads 3"),
        ("--layout fused --heads 1", "k has 32 columns, not a multiple of head_dim 64"),
        ("--layout fused --head-dim 0", "q has 64 columns, not a multiple of head_dim 0"),
    ] {
        let options: Vec<&str> = ["run"].into_iter().chain(options.split(' ')).collect();
        fa3(&args(&options, &[&input])).refused(message);
    }
    let named = ["--q", "q_proj", "--k", "k_proj", "--v", "v_proj"];
    let name = run(["a.q_proj", "a.k_proj", "a.v_proj"], &[1, 50, 4, 16], [0, 1, 2, 3], &named);
    assert_eq!(name, "a.o");
    // Read in the default layout, the file is another call with more heads than rows, or is invalid.
    let note = "note: there are fewer rows than heads; if heads come before rows, --layout bhsd says so\n";
    write(&input, &["q", "k", "v"].map(|name| Tensor::f32(name, &[1, 4, 50, 16], vec![0.5; 3200])));
    let ran = fa3(&args(&["run", "--device", "cpu"], &[&input]));
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), note));
    let q = Tensor::f32("q", &[1, 4, 50, 16], vec![0.5; 3200]);
    let [k, v] = ["k", "v"].map(|name| Tensor::f32(name, &[1, 4, 60, 16], vec![0.5; 3840]));
    write(&input, &[q, k, v]);
    fa3(&args(&["run"], &[&input]))
        .refused("not a multiple of heads_kv 60; if heads come before rows, --layout bhsd");
    write(&input, &["q", "k", "v"].map(|name| Tensor::f64(name, &[1, 2, 1, 16], vec![0.5; 32])));
    fa3(&args(&["run"], &[&input]))
        .refused("q is F64, expected F32, F16, BF16 or F8_E4M3, as --dtype f32 makes of it");
}
