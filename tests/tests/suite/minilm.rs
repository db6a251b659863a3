//! Activations of a real model: layer 5 of all-MiniLM-L6-v2 over 512 tokens of English text. O and LSE were computed in
//! float64 by other software.

use std::path::Path;

use fa3_ref::norms::ErrorNorms;
use fa3_ref::oracle;
use fa3_tests::{Case, Dist, Judge, Ledger, Poison, Values, engines};
use fa3_types::{Dtype, ProblemSpec, Shape};
use half::f16;
use ndarray::{Array3, Array4};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// The numbers of a tensor of f16 or f32.
fn f32s(tensor: &TensorView<'_>) -> Vec<f32> {
    let data = tensor.data();
    if tensor.dtype() == safetensors::Dtype::F16 {
        return data.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect();
    }
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "the file has f16 and f32 only");
    data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn engines_agree_with_an_independent_float64_computation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/minilm_layer5.safetensors");
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let shape = Shape { batch: 1, seqlen: 512, heads: 3, head_dim: 32 };
    let array = |name| Array4::from_shape_vec(shape.dims(), f32s(&file.tensor(name).unwrap())).unwrap();
    let (o, lse) =
        (array("o"), Array3::from_shape_vec([1, 3, 512], f32s(&file.tensor("lse").unwrap())).unwrap());
    let problem = ProblemSpec::dense(Dtype::F16, shape, shape).known().unwrap();
    let [q, k, v] = ["q", "k", "v"].map(array);
    let values = Values { q, k, v, dout: Array4::zeros(shape.dims()), qv: None, sink: None };

    // The file has f32, off by up to half an ulp: 2⁻²⁴ of the largest number. Two float64 results differ by far less.
    let expected = oracle::forward(&values.inputs(&problem));
    let o_error = ErrorNorms::of(&o, &expected.o);
    let lse_error = ErrorNorms::of(&lse, &expected.lse);
    println!("oracle against the file: o {o_error}; lse {lse_error}");
    for error in [o_error, lse_error] {
        assert!(error.max <= 1.01 * f64::powi(2.0, -24) * error.max_expected, "{error}");
    }

    let case = Case { name: "minilm".into(), problem, dist: Dist::Normal, poison: Poison::None, seed: 0 };
    let judge = Judge::new(&case, &values);
    let mut ledger = Ledger::default();
    for engine in engines() {
        ledger.enter(&engine.name(), &case, engine.forward(&case, &values), |answer| {
            judge.forward(engine.arithmetic(&case), &answer, "cargo test -p fa3-tests --test suite minilm::")
        });
    }
    println!("{ledger}");
    ledger.close();
    assert_eq!(ledger.idle(), ["fp8 emulator 128", "fp8 emulator 64"], "f16 is no code of e4m3");
}
