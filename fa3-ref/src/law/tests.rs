use super::*;
use fa3_types::{Dtype, ProblemSpec, Shape};
use half::bf16;
use ndarray::array;

fn check(x: f32, oracle: f64, bound: f64) -> Result<Satisfied, Box<Violation>> {
    check_array("o", array![0.5f32, x].view(), array![0.5, oracle].view(), bound, "replay")
}

#[test]
fn the_bound_adds_its_terms() {
    let oracle = array![0.5, 1.0];
    let baseline = array![0.5f32, 1.125];
    // In f32, 1 + 0.3 - 0.3 is exact to about 6e-8.
    let bound = bound(oracle.view(), baseline.view(), Precision::F32, 0.0, 0.5);
    assert!((0.75..0.75 + 1e-6).contains(&bound), "{bound}");
    let overflow = array![f32::INFINITY, f32::NAN];
    assert!(super::bound(oracle.view(), overflow.view(), Precision::F32, 0.0, 0.0) < 1e-6);
}

/// One row and one key of three query heads with sinks. With these numbers the baseline's roundings cancel in dK.
#[test]
fn roundings_that_do_not_cancel_are_no_fault() {
    let kv = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 8 };
    let q = Shape { heads: 3, ..kv };
    let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).softcap(3.0).sink().known().unwrap();
    let mut angle = 329.0f32;
    let [q, k, v, dout] = [q, kv, kv, q].map(|shape| {
        Array4::from_shape_simple_fn(shape.dims(), || {
            angle += 0.7;
            bf16::from_f32(2.0 * angle.sin())
        })
    });
    let sinks = array![0.5, -1.0, 1.5];
    let qkv = [q.view(), k.view(), v.view()];
    let inputs = Inputs::with_sink(&problem, qkv, Some(sinks.view())).unwrap();
    let law = BackwardLaw::new(&inputs, dout.view(), Precision::Bf16).unwrap();
    let baseline = standard::backward(&inputs, dout.view(), Precision::Bf16).unwrap();
    let squares = oracle::backward_sums(&inputs, dout.view()).unwrap().squares;
    let off_by = |roots: f64| {
        let off = squares.dk.mapv(|square| roots * Precision::Bf16.unit_roundoff() * square.sqrt());
        let dk = (&law.oracle.dk + &off).mapv(|x| Precision::Bf16.round(x as f32));
        check_array("dk", dk.view(), law.oracle.dk.view(), law.bounds[1], "")
    };
    let by_baseline = bound(law.oracle.dk.view(), baseline.dk.view(), Precision::Bf16, 0.0, 1e-4);
    let right = off_by(1.0).unwrap();
    assert!(right.norms.max > 3.0 * by_baseline, "{} {by_baseline}", right.norms.max);
    assert!(off_by(4.0).is_err(), "{:?}", law.bounds);
    assert!(law.check(&baseline, "").is_ok());
}

/// One key has all the weight but that of a sink, and the baseline happens to be exact. O is off by as much as e4m3
/// rounds a P, and then by three times as much.
#[test]
fn one_weight_in_e4m3_may_be_rounded() {
    let shape = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 8 };
    let problem = ProblemSpec::dense(Dtype::F32, shape, shape).sink().known().unwrap();
    let (x, sinks) = (Array4::from_elem(shape.dims(), 0.5f32), array![-1.0]);
    let inputs = Inputs::with_sink(&problem, [x.view(); 3], Some(sinks.view())).unwrap();
    let exact = oracle::forward(&inputs).o.mapv(|o| o as f32);
    let squares = oracle::forward_squares(&inputs);
    assert!(squares.iter().zip(&exact).all(|(square, o)| (square.sqrt() - f64::from(*o)).abs() < 1e-6));
    let law = ForwardLaw::new(&inputs, Precision::F32);
    let law = law.with_baseline(&inputs, exact.view(), Precision::F32, &squares);
    let off_by = |share: f32| law.check_o(exact.mapv(|o| o * (1.0 + share)).view(), "");
    assert!(off_by(1.0 / 16.0).is_ok());
    assert!(off_by(3.0 / 16.0).is_err());
}

/// With the usual number of terms and elements, the baseline decides the bound.
#[test]
fn many_roundings_do_not_loosen_the_law() {
    let of_rows = Shape { batch: 1, seqlen: 128, heads: 2, head_dim: 64 };
    let of_keys = Shape { heads: 1, ..of_rows };
    let mut random = 1u32;
    let [q, k, v, dout] = [of_rows, of_keys, of_keys, of_rows].map(|shape| {
        Array4::from_shape_simple_fn(shape.dims(), || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            bf16::from_f32((random >> 8) as f32 / 4_194_304.0 - 2.0)
        })
    });
    let spec = ProblemSpec::dense(Dtype::Bf16, of_rows, of_keys);
    // Under a causal mask the first row sees one key.
    for (spec, most) in [(spec.clone(), 0.5), (spec.causal(), 1.2)] {
        let problem = spec.known().unwrap();
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let Gradients { dq, dk, dv, .. } = standard::backward(&inputs, dout.view(), Precision::Bf16).unwrap();
        let BackwardSums { gradients: oracle, squares, .. } =
            oracle::backward_sums(&inputs, dout.view()).unwrap();
        let parts = [(dq, oracle.dq, squares.dq), (dk, oracle.dk, squares.dk), (dv, oracle.dv, squares.dv)];
        for (baseline, oracle, squares) in parts {
            let error = ErrorNorms::of(&baseline, &oracle).max;
            let root = largest(squares.iter().map(|square| square.sqrt()));
            let roundings = Precision::Bf16.unit_roundoff() * root;
            assert!(roundings < most * error, "{problem}: {roundings} {error}");
        }
    }
}

#[test]
fn atol_grows_with_the_rounding() {
    let oracle = array![0.1, -0.7, 1.3];
    let [f32, f16, bf16] = [Precision::F32, Precision::F16, Precision::Bf16].map(|p| atol(oracle.view(), p));
    assert!(f32 < 1e-6 && f16 > 1e-4 && f16 < 4e-3 && bf16 > f16 && bf16 < 4e-2, "{f32} {f16} {bf16}");
}

#[test]
fn a_violation_tells_what_where_and_how_to_replay() {
    let satisfied = check(1.125, 1.0, 0.25).unwrap();
    assert_eq!((satisfied.norms.max, satisfied.bound, satisfied.ratio), (0.125, 0.25, 0.5));
    let violation = check(1.5, 1.0, 0.25).unwrap_err();
    assert_eq!(violation.first, Worst { index: vec![1], given: 1.5, expected: 1.0 });
    assert!(violation.to_string().ends_with("replay: replay"), "{violation}");
}

#[test]
fn the_first_of_several_violations_is_named() {
    let zeros = array![[0.0, 0.0], [0.0, 0.0]];
    let x = array![[0.0f32, 1.0], [3.0, 0.0]];
    let violation = check_array("dq", x.view(), zeros.view(), 0.5, "").unwrap_err();
    assert_eq!(violation.first.index, [0, 1]);
    assert_eq!(violation.norms.worst.unwrap().index, [1, 0]);
}

#[test]
fn special_values_must_agree_whatever_the_bound() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert!(check(nan, f64::NAN, 0.0).is_ok() && check(inf, f64::INFINITY, 0.0).is_ok());
    for (x, expected) in [(nan, 0.0), (0.0, f64::NAN), (inf, 0.0), (0.0, f64::NEG_INFINITY)] {
        assert!(check(x, expected, 1e30).is_err(), "{x} {expected}");
    }
}

#[test]
fn a_tolerance_of_lse_is_relative_and_absolute() {
    let tolerance = LseTolerance { relative: 0.01, absolute: 0.5 };
    let check = |x: f32| check_lse_within(tolerance, array![x].view(), array![10.0].view(), "");
    assert!(check(10.59).is_ok() && check(9.41).is_ok());
    let Violation { bound, .. } = *check(10.61).unwrap_err();
    assert_eq!(bound, 0.51);
}

#[test]
fn lse_is_judged_relative_to_its_size() {
    let oracle = array![0.0, 1000.0, f64::NEG_INFINITY];
    let judge = |x: [f32; 3]| check_lse(array![x[0], x[1], x[2]].view(), oracle.view(), "").is_ok();
    assert!(judge([0.9e-5, 1000.0 + 0.9e-2, f32::NEG_INFINITY]));
    assert!(!judge([1.1e-5, 1000.0, f32::NEG_INFINITY]));
    assert!(!judge([0.0, 1000.0 + 1.1e-2, f32::NEG_INFINITY]));
    assert!(!judge([0.0, 1000.0, -1e30]));
}
