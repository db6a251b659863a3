//! Gradients of the public API on the CPU.

use fa3::{Attention, Device, Gradients, Output, OutputGradients, Scalar};
use fa3_types::Dtype;
use half::f16;
use ndarray::{Array1, Array3, Array4, Axis, Slice, array};

use crate::wave;

/// A call of 4 query heads that share 2 KV heads, and the gradients of its output.
struct Given<T> {
    qkv: [Array4<T>; 3],
    dout: Array4<T>,
    dlse: Array3<f32>,
}

impl<T: Scalar<Output = T>> Given<T> {
    fn new(batch: usize, [seqlen_q, seqlen_k]: [usize; 2], [head_dim, head_dim_v]: [usize; 2]) -> Given<T> {
        let q = wave((batch, seqlen_q, 4, head_dim), 0.3);
        let k = wave((batch, seqlen_k, 2, head_dim), 0.5);
        let v = wave((batch, seqlen_k, 2, head_dim_v), 0.7);
        let dlse =
            Array3::from_shape_fn((batch, 4, seqlen_q), |(b, h, s)| ((5 * b + 3 * h + s) as f32).cos());
        Given { qkv: [q, k, v], dout: wave((batch, seqlen_q, 4, head_dim_v), 0.9), dlse }
    }

    fn attention(&self) -> Attention<'_, T> {
        let [q, k, v] = self.qkv.each_ref().map(|x| x.view());
        Attention::new(q, k, v)
    }

    fn both(&self) -> OutputGradients<'_, T> {
        OutputGradients::new(&self.dout).dlse(&self.dlse)
    }
}

/// LSE of a fully masked row equals the sink, so dLSE of the row is part of the sink's gradient.
#[test]
fn sinks_of_rows_without_keys() {
    let given = Given::<f32>::new(2, [3, 0], [8, 4]);
    let sinks = array![1.0, 2.0, f32::NEG_INFINITY, -60.0];
    let attention = given.attention().sink(&sinks);
    let output = attention.forward(&Device::Cpu).unwrap();
    assert!(output.lse.indexed_iter().all(|((_, head, _), &lse)| lse == sinks[head]));
    let gradients = attention.backward(&Device::Cpu, &output, given.both()).unwrap();
    let sum = |head: usize| given.dlse.index_axis(Axis(1), head).sum();
    let dsink = gradients.dsink.unwrap();
    assert!((0..4).all(|head| (dsink[head] - if head == 2 { 0.0 } else { sum(head) }).abs() < 1e-6));
}

#[test]
fn a_sink_of_minus_infinity_is_none() {
    let mut given = Given::<f16>::new(1, [70, 40], [16, 8]);
    given.dlse.fill(f32::NAN);
    given.dlse.slice_axis_mut(Axis(2), Slice::from(30..)).fill(0.5);
    let sinks = Array1::from_elem(4, f32::NEG_INFINITY);
    let [without, with] = [given.attention().causal(), given.attention().causal().sink(&sinks)];
    let [expected, output] = [&without, &with].map(|call| call.forward(&Device::Cpu).unwrap());
    assert_eq!(output, expected);
    let expected = without.backward(&Device::Cpu, &expected, given.both()).unwrap();
    let mut gradients = with.backward(&Device::Cpu, &output, given.both()).unwrap();
    assert_eq!(gradients.dsink, Some(Array1::zeros(4)));
    gradients.dsink = None;
    assert_eq!(gradients, expected);
}

/// A sink of +inf has the whole weight. So O and its gradients are 0, and the sink's gradient is the sum of dLSE.
#[test]
fn an_infinite_sink_has_all_weight() {
    let given = Given::<f32>::new(2, [3, 5], [8, 4]);
    let sinks = Array1::from_elem(4, f32::INFINITY);
    let attention = given.attention().sink(&sinks);
    let output = attention.forward(&Device::Cpu).unwrap();
    assert!(output.o.iter().all(|&o| o == 0.0) && output.lse.iter().all(|&lse| lse == f32::INFINITY));
    let Gradients { dq, dk, dv, dsink, .. } =
        attention.backward(&Device::Cpu, &output, given.both()).unwrap();
    assert!([dq, dk, dv].iter().flatten().all(|&x| x == 0.0));
    let expected = (0..4).map(|head| given.dlse.index_axis(Axis(1), head).sum());
    assert!(dsink.iter().flatten().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6));
}

/// Compares gradients with central differences of φ = Σ dO ∘ O + Σ dLSE ∘ LSE, computed by the forward pass.
#[test]
fn gradients_are_the_slopes_of_the_forward_pass() {
    let mut given = Given::<f32>::new(1, [5, 6], [4, 8]);
    let call = |given: &Given<f32>| {
        let attention = given.attention().causal().softcap(1.5);
        let output = attention.forward(&Device::Cpu).unwrap();
        let gradients = attention.backward(&Device::Cpu, &output, given.both()).unwrap();
        let phi = |x: f32, gradient: &f32| f64::from(x) * f64::from(*gradient);
        let of_o = output.o.iter().zip(&given.dout).map(|(&o, dout)| phi(o, dout)).sum::<f64>();
        let of_lse = output.lse.iter().zip(&given.dlse).map(|(&lse, dlse)| phi(lse, dlse)).sum::<f64>();
        (of_o + of_lse, gradients)
    };
    let Gradients { dq, dk, dv, .. } = call(&given).1;
    for (tensor, gradient) in [dq, dk, dv].into_iter().enumerate() {
        for (at, &expected) in gradient.indexed_iter() {
            let x = given.qkv[tensor][at];
            let mut phi = |step: f32| {
                given.qkv[tensor][at] = x + step;
                call(&given).0
            };
            let slope = (phi(0.01) - phi(-0.01)) / 0.02;
            given.qkv[tensor][at] = x;
            assert!((slope - f64::from(expected)).abs() < 2e-3, "{tensor} {at:?}: {slope} {expected}");
        }
    }
}

#[test]
fn strides_are_free() {
    let given = Given::<f32>::new(2, [5, 7], [8, 4]);
    let attention = given.attention();
    let output = attention.forward(&Device::Cpu).unwrap();
    let expected = attention.backward(&Device::Cpu, &output, given.both()).unwrap();
    let [q, k, v] = given.qkv.each_ref().map(|x| x.view().reversed_axes().as_standard_layout().into_owned());
    let [q, k, v] = [&q, &k, &v].map(|x| x.view().reversed_axes());
    let o = output.o.reversed_axes().as_standard_layout().into_owned();
    let output = Output::new(o.reversed_axes(), output.lse);
    let mut backwards =
        given.dout.slice_axis(Axis(1), Slice::new(0, None, -1)).as_standard_layout().into_owned();
    backwards.invert_axis(Axis(1));
    let gradients = OutputGradients::new(&backwards).dlse(&given.dlse);
    let given = Attention::new(q, k, v).backward(&Device::Cpu, &output, gradients).unwrap();
    assert_eq!(given, expected);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let given = Given::<f32>::new(3, [140, 300], [16, 16]);
    let attention = given.attention().causal();
    let output = attention.forward(&Device::Cpu).unwrap();
    let [one, three] = [1, 3].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| attention.backward(&Device::Cpu, &output, given.both()).unwrap())
    });
    assert_eq!(one, three);
    assert_eq!(one, attention.deterministic().backward(&Device::Cpu, &output, given.both()).unwrap());
}

#[test]
fn tensors_without_elements_are_legal() {
    for (batch, lens) in [(0, [4, 4]), (2, [0, 4]), (2, [4, 0]), (2, [0, 0])] {
        let given = Given::<f32>::new(batch, lens, [8, 4]);
        let output = given.attention().forward(&Device::Cpu).unwrap();
        let gradients = given.attention().backward(&Device::Cpu, &output, given.both()).unwrap();
        let zeros = given.qkv.each_ref().map(|x| Array4::zeros(x.dim()));
        assert_eq!([gradients.dq, gradients.dk, gradients.dv], zeros);
    }
    // These arrays have a huge number of heads or of sequences. They are empty, because another extent is 0.
    for dims in [(1, 0, (1 << 31) - 1, 4), (1 << 30, 0, 1, 4)] {
        let x = Array4::<f32>::zeros(dims);
        let attention = Attention::new(x.view(), x.view(), x.view());
        let output = attention.forward(&Device::Cpu).unwrap();
        assert_eq!(attention.backward(&Device::Cpu, &output, x.view()).unwrap().dk.dim(), dims);
    }
}

/// Rows 0 and 1 of 5 rows see no key and contribute to no gradient.
#[test]
fn rows_without_keys_have_no_part() {
    let mut given = Given::<f32>::new(1, [5, 3], [8, 4]);
    let gradients = |given: &Given<f32>| {
        let attention = given.attention().causal();
        let output = attention.forward(&Device::Cpu).unwrap();
        attention.backward(&Device::Cpu, &output, given.both()).unwrap()
    };
    let expected = gradients(&given);
    assert!(expected.dq.slice_axis(Axis(1), Slice::from(..2)).iter().all(|&x| x == 0.0));
    given.dlse.slice_axis_mut(Axis(2), Slice::from(..2)).fill(f32::NAN);
    given.dout.slice_axis_mut(Axis(1), Slice::from(..2)).fill(f32::NAN);
    given.qkv[0].slice_axis_mut(Axis(1), Slice::from(..2)).fill(f32::NAN);
    assert_eq!(gradients(&given), expected);
}

#[test]
fn nan_is_no_error() {
    let mut given = Given::<f32>::new(1, [5, 7], [8, 4]);
    given.dout[[0, 2, 1, 3]] = f32::NAN;
    let output = given.attention().forward(&Device::Cpu).unwrap();
    let gradients = given.attention().backward(&Device::Cpu, &output, given.dout.view()).unwrap();
    for ((_, row, head, _), x) in gradients.dq.indexed_iter() {
        assert_eq!(x.is_nan(), (row, head) == (2, 1));
    }
    for ((_, _, head, _), x) in gradients.dk.indexed_iter() {
        assert_eq!(x.is_nan(), head == 0);
    }
    for ((_, _, head, column), x) in gradients.dv.indexed_iter() {
        assert_eq!(x.is_nan(), (head, column) == (0, 3));
    }
}

#[test]
fn arrays_of_another_shape_are_named() {
    let given = Given::<f32>::new(2, [5, 7], [8, 4]);
    let output = given.attention().forward(&Device::Cpu).unwrap();
    let refused = |attention: Attention<'_, f32>, output: &Output<f32>, of: OutputGradients<'_, f32>| {
        attention.backward(&Device::Cpu, output, of).unwrap_err().to_string()
    };
    let long = Array4::zeros((2, 6, 4, 4));
    let error = refused(given.attention(), &output, long.view().into());
    assert_eq!(error, "dout has shape [2, 6, 4, 4], expected [2, 5, 4, 4]");
    let transposed = given.dlse.view().permuted_axes([0, 2, 1]);
    let error = refused(given.attention(), &output, given.both().dlse(transposed));
    assert_eq!(error, "dlse has shape [2, 5, 4], expected [2, 4, 5]");
    let other = Output::new(Array4::zeros((2, 5, 2, 4)), output.lse.clone());
    let error = refused(given.attention(), &other, given.both());
    assert_eq!(error, "o has shape [2, 5, 2, 4], expected [2, 5, 4, 4]");
    let other = Output::new(output.o.clone(), Array3::zeros((1, 4, 5)));
    let error = refused(given.attention(), &other, given.both());
    assert_eq!(error, "lse has shape [1, 4, 5], expected [2, 4, 5]");
    let error = refused(given.attention().softcap(0.0), &output, given.both());
    assert_eq!(error, "soft cap 0 is outside 1e-18 to 1e18");
}

/// An array (batch, seqlen, heads, head_dim), padded with zeros along head_dim to a size that kernels support.
fn with_zeros(x: &Array4<f32>) -> Array4<f32> {
    let (batch, seqlen, heads, head_dim) = x.dim();
    let mut wide =
        Array4::zeros((batch, seqlen, heads, head_dim.next_multiple_of(Dtype::F32.row_multiple())));
    wide.slice_axis_mut(Axis(3), Slice::from(..head_dim)).assign(x);
    wide
}

/// Calls on a GPU are padded with zeros. The padded problem has the same results, and zeros in the padding.
#[test]
fn a_padded_call_has_the_same_results() {
    for (head_dim, head_dim_v) in [(1, 1), (7, 3), (33, 64), (64, 33), (100, 255)] {
        let [q, k] = [0.3, 0.5].map(|step| wave::<f32>((1, 20, 2, head_dim), step));
        let v = wave::<f32>((1, 20, 2, head_dim_v), 0.7);
        let call = Attention::new(&q, &k, &v).causal();
        let rows = [&q, &k, &v].map(with_zeros);
        let scale = call.problem().unwrap().padded().softmax_scale().natural();
        let padded = Attention::new(&rows[0], &rows[1], &rows[2]).causal().softmax_scale(scale);
        let [expected, output] = [&call, &padded].map(|call| call.forward(&Device::Cpu).unwrap());
        let gradients = call.backward(&Device::Cpu, &expected, &v).unwrap();
        let of_padded = padded.backward(&Device::Cpu, &output, &rows[2]).unwrap();
        let near = |x: &Array4<f32>, y: &Array4<f32>| {
            let y = with_zeros(y);
            assert_eq!(x.dim(), y.dim());
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-5), "{head_dim} {head_dim_v}");
        };
        near(&output.o, &expected.o);
        near(&of_padded.dq, &gradients.dq);
        near(&of_padded.dk, &gradients.dk);
        near(&of_padded.dv, &gradients.dv);
    }
}
