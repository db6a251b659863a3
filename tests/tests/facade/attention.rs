//! Forward passes of the public API on the CPU.

use std::num::NonZeroU32;

use fa3::{Attention, Device, LseForm, Mask, Quantize, Quantized};
use fa3_types::{Dtype, ProblemSpec, Shape};
use half::f16;
use ndarray::{Array1, Array3, Array4, ArrayView4, Axis, Slice, array, concatenate};

use crate::wave;

#[test]
fn tensors_without_elements_are_legal() {
    for (batch, seqlen_q, seqlen_k) in [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)] {
        let q = Array4::from_elem((batch, seqlen_q, 2, 8), 1.0f32);
        let kv = Array4::from_elem((batch, seqlen_k, 1, 8), 1.0f32);
        let output = Attention::new(q.view(), kv.view(), kv.view()).causal().forward(&Device::Cpu).unwrap();
        assert_eq!(output.o, Array4::zeros((batch, seqlen_q, 2, 8)));
        assert!(output.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        assert_eq!(output.lse.dim(), (batch, 2, seqlen_q));
        let sinks = array![1.0, -2.0];
        let with = Attention::new(&q, &kv, &kv).sink(&sinks).forward(&Device::Cpu).unwrap();
        assert_eq!(with.o, output.o);
        assert!(with.lse.indexed_iter().all(|((_, head, _), &lse)| lse == sinks[head]));
    }
}

#[test]
fn tensors_without_elements_may_have_huge_extents() {
    // These arrays have a huge number of heads or of sequences. They are empty, because another extent is 0.
    for dims in [(1, 0, (1 << 31) - 1, 4), (1 << 30, 0, 1, 4)] {
        let x = Array4::<f32>::zeros(dims);
        let output = Attention::new(x.view(), x.view(), x.view()).forward(&Device::Cpu).unwrap();
        assert_eq!(output.o.dim(), dims);
    }
    let q = Array4::<f32>::zeros((0, 1 << 30, 1 << 25, 4));
    let (k, v) = (Array4::zeros((0, 4, 1 << 25, 4)), Array4::zeros((0, 4, 1 << 25, 512)));
    let error = Attention::new(q.view(), k.view(), v.view()).forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "o of shape (0, 1073741824, 33554432, 512) spans 2^63 bytes or more");
}

#[test]
fn a_bad_list_is_named() {
    let x = Array4::from_elem((1, 8, 1, 8), 1.0f32);
    let attention = Attention::new(x.view(), x.view(), x.view());
    let error = attention.clone().packed(&[0, 8], &[0, 5, 4]).problem().unwrap_err();
    assert_eq!(error.to_string(), "k and v: cu_seqlens falls from 5 to 4 at entry 2");
    let error = attention.seqused_q(&[9]).problem().unwrap_err();
    assert_eq!(error.to_string(), "q: seqused is 9 for sequence 0, outside 0 to 8");
}

/// LSE of every form follows from LSE with sinks and from LSE without. Rows 0 and 1 see no key.
#[test]
fn lse_has_every_form() {
    let [q, k] = [wave::<f32>((1, 5, 2, 8), 0.3), wave((1, 3, 1, 8), 0.5)];
    let sinks = array![0.5, f32::NEG_INFINITY];
    let without = Attention::new(&q, &k, &k).causal();
    let with = without.clone().sink(&sinks);
    let [without, default] = [&without, &with].map(|call| call.forward(&Device::Cpu).unwrap());
    for (base_two, without_sink, empty_is_infinite) in
        (0..8).map(|form| (form & 1 > 0, form & 2 > 0, form & 4 > 0))
    {
        let form = LseForm { base_two, without_sink, empty_is_infinite };
        let output = with.clone().lse_form(form).forward(&Device::Cpu).unwrap();
        assert_eq!(output.o, default.o);
        let of = if without_sink { &without.lse } else { &default.lse };
        for ((_, head, row), &lse) in of.indexed_iter() {
            let given = output.lse[[0, head, row]];
            let is_empty = row < 2 && (without_sink || head == 1);
            assert_eq!(given.is_infinite(), is_empty, "{form:?}, row {row}");
            let expected = match (is_empty, empty_is_infinite) {
                (true, true) => f32::INFINITY,
                (true, false) => f32::NEG_INFINITY,
                (false, _) => lse * if base_two { std::f32::consts::LOG2_E } else { 1.0 },
            };
            assert!(given == expected || (given - expected).abs() < 1e-6, "{form:?}: {given} {expected}");
        }
    }
}

/// Scores are scaled and capped; sinks are none. Codes have the scores of the numbers that they stand for.
#[test]
fn the_largest_score_of_a_row_is_a_result() {
    let [q, k] = [wave::<f16>((1, 5, 2, 16), 0.3), wave((1, 3, 1, 16), 0.5)];
    let sinks = array![9.0, f32::NEG_INFINITY];
    let attention = Attention::new(&q, &k, &k).causal().softmax_scale(0.7).softcap(2.0).sink(&sinks);
    let (output, largest) = attention.forward_with_max_logits(&Device::Cpu).unwrap();
    assert_eq!(output, attention.forward(&Device::Cpu).unwrap());
    for ((_, head, row), &found) in largest.indexed_iter() {
        let score = |key: usize| {
            let columns = (0..16).map(|at| q[[0, row, head, at]].to_f32() * k[[0, key, 0, at]].to_f32());
            2.0 * (0.7 * columns.sum::<f32>() / 2.0).tanh()
        };
        let expected = (0..(row + 1).saturating_sub(2)).map(score).fold(f32::NEG_INFINITY, f32::max);
        assert!(found == expected || (found - expected).abs() < 1e-5, "row {row}: {found} {expected}");
    }
    let [q, k] = [&q, &k].map(|x| Quantize::new(x).run(&Device::Cpu).unwrap());
    let (output, codes) =
        Attention::of_quantized(&q, &k, &k).causal().forward_with_max_logits(&Device::Cpu).unwrap();
    assert_eq!(output, Attention::of_quantized(&q, &k, &k).causal().forward(&Device::Cpu).unwrap());
    let [q, k] = [&q, &k].map(Quantized::dequantize);
    let exact = Attention::new(&q, &k, &k).causal().forward_with_max_logits(&Device::Cpu).unwrap();
    assert_eq!(codes, exact.1);
}

/// The first key of 5,000,001 has 2^22 times the weight of any other, and its value is 1, not 0.
#[test]
fn a_sequence_may_have_millions_of_keys() {
    const KEYS: usize = 5_000_001;
    let q = Array4::from_elem((1, 1, 1, 1), 22.0 * std::f32::consts::LN_2);
    let mut k = Array4::zeros((1, KEYS, 1, 1));
    k[[0, 0, 0, 0]] = 1.0;
    let output = Attention::new(&q, &k, &k).causal().forward(&Device::Cpu).unwrap();
    let sum = f64::from(1 << 22) + 5e6;
    assert!((f64::from(output.o[[0, 0, 0, 0]]) - f64::from(1 << 22) / sum).abs() < 1e-6);
    assert!((f64::from(output.lse[[0, 0, 0]]) - sum.ln()).abs() < 1e-5);
}

#[test]
fn every_query_head_has_a_sink() {
    let x = Array4::from_elem((1, 8, 4, 8), 1.0f32);
    let sinks = Array1::zeros(3);
    let error = Attention::new(&x, &x, &x).sink(&sinks).problem().unwrap_err();
    assert_eq!(error.to_string(), "sink has shape [3], expected [4]");
}

/// `qv` and Q act like one concatenated Q, and V and K like one K. Here each pair is a part of one array.
#[test]
fn latent_attention_has_the_bits_of_joined_columns() {
    let (joined_q, joined_k) = (wave::<f32>((2, 150, 6, 56), 0.3), wave::<f32>((2, 300, 2, 56), 0.5));
    let (qv, q) = joined_q.view().split_at(Axis(3), 40);
    let (v, k) = joined_k.view().split_at(Axis(3), 40);
    let sinks = array![1.0, -2.0, 0.5, f32::NEG_INFINITY, 0.0, 3.0];
    let both = [Attention::new(q, k, v).qv(qv), Attention::new(&joined_q, &joined_k, v)];
    let same = |both: [Attention<'_, f32>; 2]| {
        let [latent, joined] = both.map(|call| call.forward(&Device::Cpu).unwrap());
        assert_eq!(latent, joined);
    };
    same(both.clone());
    same(both.clone().map(|call| call.causal().softcap(3.0).sink(&sinks)));
    same(both.clone().map(|call| call.window(Some(20), Some(7)).softmax_scale(0.5)));
    same(both.clone().map(|call| call.causal().seqused_q(&[150, 9]).seqused_k(&[0, 290])));
    let [first_q, first_k] = [&joined_q, &joined_k].map(|x| first(x.view()));
    let [q, k, v, qv] = [q, k, v, qv].map(first);
    let packed = [Attention::new(q, k, v).qv(qv), Attention::new(first_q, first_k, v)];
    same(packed.map(|call| call.packed(&[0, 130, 150], &[0, 50, 300]).causal()));
}

/// The first entry of the batch in `x`.
fn first(x: ArrayView4<'_, f32>) -> ArrayView4<'_, f32> {
    x.slice_axis_move(Axis(0), Slice::from(..1))
}

#[test]
fn invalid_latent_attention_is_refused() {
    let [q, kv, qv] = [8, 16, 24].map(|columns| wave::<f16>((2, 5, 1, columns), 0.3));
    let call = Attention::new(&q, &q, &kv);
    let error = call.clone().qv(&qv).forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "qv has head_dim 24, expected 16");
    let latent = call.clone().qv(&kv);
    let output = latent.forward(&Device::Cpu).unwrap();
    let error = latent.backward(&Device::Cpu, &output, &kv).unwrap_err();
    assert_eq!(error.to_string(), "there are no gradients of attention with qv");
    let error = Attention::new(&kv, &kv, &kv).qv(&kv).fp8().forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "FP8 cannot compute attention with qv");
}

#[test]
fn strides_are_free() {
    let x = [0.3, 0.5, 0.7].map(|step| wave::<f32>((2, 5, 3, 8), step));
    let [q, k, v] = x.each_ref().map(|x| x.view());
    let attention = Attention::new(q, k, v).causal();
    let expected = attention.forward(&Device::Cpu).unwrap();
    // The same elements in other memory layouts: heads first, reversed, and as columns of a wider array.
    let heads_first = q.permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    let columns_first = q.permuted_axes([3, 2, 1, 0]).as_standard_layout().into_owned();
    let mut backwards = q.slice_axis(Axis(1), Slice::new(0, None, -1)).as_standard_layout().into_owned();
    backwards.invert_axis(Axis(1));
    let mut wider = Array4::zeros((2, 5, 3, 9));
    wider.slice_axis_mut(Axis(3), Slice::from(..8)).assign(&q);
    for q in [
        heads_first.view().permuted_axes([0, 2, 1, 3]),
        columns_first.view().permuted_axes([3, 2, 1, 0]),
        backwards.view(),
        wider.slice_axis(Axis(3), Slice::from(..8)),
    ] {
        assert_ne!(q.strides(), x[0].strides());
        let other = Attention::new(q, k, v).causal();
        assert_eq!(other.problem().unwrap().q(), attention.problem().unwrap().q());
        assert_eq!(other.forward(&Device::Cpu).unwrap(), expected);
    }
    // Q, K and V side by side in one tensor, as a fused projection writes them.
    let qkv = concatenate(Axis(2), &[q, k, v]).unwrap();
    let part = |i: usize| qkv.slice_axis(Axis(2), (3 * i..3 * i + 3).into());
    let beside = Attention::new(part(0), part(1), part(2)).causal();
    assert_eq!(beside.forward(&Device::Cpu).unwrap(), expected);
    let one = x[1].slice_axis(Axis(0), Slice::from(..1));
    let broadcast = Attention::new(q, one.broadcast(k.dim()).unwrap(), v).forward(&Device::Cpu).unwrap();
    assert_eq!(broadcast.o.len_of(Axis(0)), 2);
}

/// Inputs are columns of wider tensors whose other columns are NaN.
#[test]
fn neighbours_reach_nothing() {
    for head_dim in [1, 3, 7, 8, 33] {
        let x = [0.3, 0.5, 0.7].map(|step| wave::<f32>((2, 5, 3, head_dim), step));
        let wider = x.each_ref().map(|x| {
            let mut wider = Array4::from_elem((2, 5, 3, head_dim + 2), f32::NAN);
            wider.slice_axis_mut(Axis(3), Slice::from(1..1 + head_dim)).assign(x);
            wider
        });
        let columns = wider.each_ref().map(|x| x.slice_axis(Axis(3), Slice::from(1..1 + head_dim)));
        let [expected, given] = [x.each_ref().map(|x| x.view()), columns].map(|[q, k, v]| {
            let attention = Attention::new(q, k, v).causal();
            let output = attention.forward(&Device::Cpu).unwrap();
            (attention.backward(&Device::Cpu, &output, v).unwrap(), output)
        });
        assert_eq!(given, expected);
        assert!(given.1.o.iter().all(|x| x.is_finite()));
    }
}

/// The number of threads decides how tiles share blocks. Long sequences use split-KV.
#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for (seqlen_q, seqlen_k) in [(700, 300), (2, 9000)] {
        let (q, kv) = (wave::<f32>((1, seqlen_q, 4, 8), 0.3), wave::<f32>((1, seqlen_k, 2, 8), 0.5));
        let attention = Attention::new(q.view(), kv.view(), kv.view()).causal();
        let [one, three] = [1, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| attention.forward(&Device::Cpu).unwrap())
        });
        assert_eq!(one, three);
    }
}

#[test]
fn results_go_into_arrays_of_the_callers() {
    let x = wave::<f32>((2, 5, 3, 8), 0.3);
    let attention = Attention::new(x.view(), x.view(), x.view()).causal().seqused_q(&[5, 2]);
    let expected = attention.forward(&Device::Cpu).unwrap();
    let mut o = Array4::from_elem((2, 3, 5, 8), f32::NAN);
    let mut lse = Array3::from_elem((2, 3, 5), f32::NAN);
    let heads_first = o.view_mut().permuted_axes([0, 2, 1, 3]);
    attention.forward_into(&Device::Cpu, heads_first, lse.view_mut()).unwrap();
    assert_eq!(o.permuted_axes([0, 2, 1, 3]), expected.o);
    assert_eq!(lse, expected.lse);
    let mut o = Array4::zeros((2, 3, 5, 8));
    let error = attention.forward_into(&Device::Cpu, o.view_mut(), lse.view_mut()).unwrap_err();
    assert_eq!(error.to_string(), "the array for o has shape [2, 3, 5, 8], expected [2, 5, 3, 8]");
}

/// The intervals that are equivalent to another mask, for 2 sequences of 40 rows and 50 keys.
fn as_intervals(mask: Mask) -> Array4<i32> {
    let [q, k] = [40, 50].map(|seqlen| Shape { batch: 1, seqlen, heads: 1, head_dim: 8 });
    let problem = ProblemSpec::dense(Dtype::F32, q, k).mask(mask).known().unwrap();
    Array4::from_shape_fn((1, 1, 40, 2), |(_, _, row, bound)| {
        let sees = |key: &usize| problem.allows([0, 0, row], *key);
        match bound {
            0 => (0..50).find(sees).unwrap_or(7) as i32,
            _ => (0..50).rfind(sees).map_or(7, |key| key as i32 + 1),
        }
    })
}

#[test]
fn intervals_have_the_bits_of_the_mask_that_they_say() {
    let [q, dout] = [0.3, 0.7].map(|step| wave::<f32>((2, 40, 4, 16), step));
    let kv = wave::<f32>((2, 50, 2, 16), 0.5);
    let chunk = Mask::chunk(NonZeroU32::new(12).unwrap());
    for mask in [Mask::None, Mask::Causal, Mask::window(Some(9), Some(3)), chunk] {
        let one = as_intervals(mask);
        // All heads share the intervals. Each interval has two parts, and in odd rows the second part comes first.
        let two = Array4::from_shape_fn((2, 4, 40, 4), |(_, _, row, bound)| {
            let [start, end] = [0, 1].map(|bound| one[[0, 0, row, bound]]);
            let middle = (start + end) / 2;
            [start, middle, middle, end][(bound + 2 * (row % 2)) % 4]
        });
        let call = Attention::new(&q, &kv, &kv);
        let expected = call.clone().mask(mask);
        let output = expected.forward(&Device::Cpu).unwrap();
        let gradients = expected.backward(&Device::Cpu, &output, &dout).unwrap();
        for intervals in [&one, &two] {
            let call = call.clone().intervals(intervals);
            assert_eq!(call.forward(&Device::Cpu).unwrap(), output, "{mask}");
            let output = call.forward(&Device::Cpu).unwrap();
            assert_eq!(call.backward(&Device::Cpu, &output, &dout).unwrap(), gradients, "{mask}");
            // Beside a causal mask they intersect.
            let [call, expected] = [call, expected.clone()].map(Attention::causal);
            let output = call.forward(&Device::Cpu).unwrap();
            assert_eq!(output, expected.forward(&Device::Cpu).unwrap(), "{mask}");
            let of_expected =
                expected.backward(&Device::Cpu, &expected.forward(&Device::Cpu).unwrap(), &dout);
            assert_eq!(call.backward(&Device::Cpu, &output, &dout).unwrap(), of_expected.unwrap(), "{mask}");
        }
    }
}

#[test]
fn intervals_are_those_of_the_call() {
    let x = wave::<f32>((2, 40, 4, 16), 0.3);
    let intervals = Array4::from_shape_fn((1, 1, 40, 2), |(.., bound)| [3, 30][bound]);
    let call = Attention::new(&x, &x, &x);
    let few = intervals.slice_axis(Axis(2), Slice::from(1..));
    let error = call.clone().intervals(few).problem().unwrap_err();
    assert_eq!(
        error.to_string(),
        "intervals have shape [1, 1, 39, 2], expected (2 or 1, 4 or 1, 40, 2 or 4)"
    );
    // Of the keys from 3 on, the first sequence has none, and the second has one.
    let in_part = call.clone().intervals(&intervals).seqused_k(&[3, 4]).forward(&Device::Cpu).unwrap();
    let [first, second] = [0, 1].map(|index| in_part.lse.index_axis(Axis(0), index));
    assert!(first.iter().all(|lse| *lse == f32::NEG_INFINITY) && second.iter().all(|lse| lse.is_finite()));

    let output = call.clone().intervals(&intervals).forward(&Device::Cpu).unwrap();
    let mut other = intervals.clone();
    other[[0, 0, 20, 1]] = 31;
    let error = call.intervals(&other).backward(&Device::Cpu, &output, &x).unwrap_err();
    let expected = "the output belongs to a call with bound 30 as number 41 of the intervals, this call has bound 31 \
                    as number 41 of the intervals";
    assert_eq!(error.to_string(), expected);
}
