//! FP8 attention on the CPU.

use fa3::{Attention, Device, Error, Fp8, Output, Quantize, Quantized, Rope, RopeStyle, RopeTable, Scaling};
use half::bf16;
use ndarray::{Array4, Axis, Slice};

fn wave(dims: (usize, usize, usize, usize), step: usize) -> Array4<bf16> {
    Array4::from_shape_fn(dims, |(b, s, h, d)| {
        bf16::from_f32(((7 * b + step * s + 5 * h + 3 * d) as f32).sin())
    })
}

#[test]
fn eight_bits_are_near_sixteen() {
    let (q, k) = (wave((2, 300, 4, 64), 3), wave((2, 260, 2, 64), 5));
    let v = wave((2, 260, 2, 32), 11);
    let attention = Attention::new(q.view(), k.view(), v.view()).causal().softcap(20.0);
    let exact = attention.forward(&Device::Cpu).unwrap();
    let norm = |x: &Array4<f32>| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    let of = |output: &Output<bf16>| output.o.mapv(|x| x.to_f32());
    let plain = attention.clone().fp8().forward(&Device::Cpu).unwrap();
    let mixed = attention.clone().fp8().hadamard(3).forward(&Device::Cpu).unwrap();
    for fp8 in [&plain, &mixed] {
        let error = norm(&(of(fp8) - of(&exact))) / norm(&of(&exact));
        assert!((0.001..0.1).contains(&error), "{error}");
        assert!((&fp8.lse - &exact.lse).iter().all(|error| error.abs() < 0.1 || error.is_nan()));
    }
    assert_ne!(plain.o, mixed.o);
    assert_ne!(mixed, attention.fp8().hadamard(4).forward(&Device::Cpu).unwrap());
}

/// V is around 4. Rounding with a block scale leaves 2 bits for the differences from 4. With per-channel scales, only
/// the differences from the channel's mean are rounded.
#[test]
fn channels_of_v_keep_what_it_has_in_common() {
    let (q, k) = (wave((2, 300, 4, 64), 3), wave((2, 260, 2, 64), 5));
    let v = wave((2, 260, 2, 32), 11).mapv(|x| bf16::from_f32(4.0 + x.to_f32()));
    let attention = Attention::new(q.view(), k.view(), v.view()).causal();
    let exact = attention.forward(&Device::Cpu).unwrap();
    let error = |fp8: Fp8<'_, bf16>| {
        let output = fp8.forward(&Device::Cpu).unwrap();
        let squares = output.o.iter().zip(&exact.o).map(|(x, y)| (x.to_f32() - y.to_f32()).powi(2));
        (squares.sum::<f32>() / exact.o.len() as f32).sqrt()
    };
    let [blocks, channels] = [error(attention.clone().fp8()), error(attention.fp8().v_channels())];
    assert!(channels < blocks / 2.0, "{channels} {blocks}");
}

/// A packed sequence has the same bits as in a problem of its own, whatever the rows around it contain.
#[test]
fn packed_sequences_are_computed_alone() {
    let ends: [[i32; 4]; 2] = [[0, 130, 130, 160], [0, 140, 150, 300]];
    let (mut q, mut kv) = (wave((1, 170, 2, 32), 3), wave((1, 310, 1, 32), 5));
    for (x, end) in [(&mut q, 160), (&mut kv, 300)] {
        x.slice_axis_mut(Axis(1), Slice::from(end..)).fill(bf16::NAN);
    }
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(200);
    fn of<'a>(attention: Attention<'a, bf16>, table: &'a RopeTable) -> Output<bf16> {
        attention.causal().fp8().rotary(table).hadamard(1).forward(&Device::Cpu).unwrap()
    }
    let pack = of(Attention::new(&q, &kv, &kv).packed(&ends[0], &ends[1]), &table);
    for i in 0..3 {
        let rows = |side: usize| Slice::from(ends[side][i] as isize..ends[side][i + 1] as isize);
        let (q, kv) = (q.slice_axis(Axis(1), rows(0)), kv.slice_axis(Axis(1), rows(1)));
        let alone = of(Attention::new(q, kv, kv), &table);
        assert_eq!(pack.o.slice_axis(Axis(1), rows(0)), alone.o);
        assert_eq!(pack.lse.slice_axis(Axis(2), rows(0)), alone.lse);
    }
    assert!(pack.o.slice_axis(Axis(1), Slice::from(160..)).iter().all(|o| o.to_f32() == 0.0));
}

/// If all positions shift by the same number, scores do not change. If only the positions of K shift, O changes.
#[test]
fn rows_are_rotated_by_their_positions() {
    let (q, kv) = (wave((1, 100, 2, 64), 3), wave((1, 120, 2, 64), 5));
    let table = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0).unwrap().table(200);
    let fp8 = Attention::new(q.view(), kv.view(), kv.view()).fp8();
    let of = |fp8: Fp8<'_, bf16>| fp8.forward(&Device::Cpu).unwrap().o.mapv(|x| x.to_f32());
    let norm = |x: &Array4<f32>| x.iter().map(|x| x * x).sum::<f32>().sqrt();
    let rotated = of(fp8.clone().rotary(&table).first_positions(20, 0));
    let moved = of(fp8.clone().rotary(&table).first_positions(60, 40));
    let apart = of(fp8.clone().rotary(&table));
    let [moved, apart] = [moved, apart].map(|o| norm(&(o - &rotated)) / norm(&rotated));
    assert!(moved < 0.05 && apart > 3.0 * moved, "{moved} {apart}");
    let error = fp8.first_positions(1, 0).problem().unwrap_err();
    assert_eq!(error, Error::PositionsWithoutRotary);
}

/// Listed positions give the results of equal consecutive positions. Exactly the rows with a position outside of the
/// table are NaN.
#[test]
fn rows_are_rotated_by_listed_positions() {
    let (q, kv) = (wave((2, 30, 2, 64), 3), wave((2, 40, 1, 64), 5));
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(64);
    let fp8 = || Attention::new(q.view(), kv.view(), kv.view()).fp8().rotary(&table).hadamard(1);
    let list = |rows, first: i32| (0..2 * rows).map(|row| first + row % rows).collect::<Vec<i32>>();
    let (of_q, of_k) = (list(30, 7), list(40, 3));
    let of = |fp8: Fp8<'_, bf16>| fp8.forward(&Device::Cpu).unwrap();
    let expected = of(fp8().first_positions(7, 3));
    assert_eq!(of(fp8().q_positions(&of_q).k_positions(&of_k)), expected);
    assert_eq!(of(fp8().first_positions(0, 3).q_positions(&of_q)), expected);
    assert_eq!(of(fp8().first_positions(7, 0).k_positions(&of_k)), expected);
    let mut some_nowhere = of_q.clone();
    (some_nowhere[4], some_nowhere[30]) = (-1, 64);
    let o = of(fp8().q_positions(&some_nowhere).first_positions(0, 3)).o;
    for ((batch, row, ..), o) in o.indexed_iter() {
        assert_eq!(o.is_nan(), [(0, 4), (1, 0)].contains(&(batch, row)));
    }
}

#[test]
fn invalid_positions_are_refused() {
    let (q, kv) = (wave((2, 3, 1, 32), 3), wave((2, 4, 1, 32), 5));
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(64);
    let fp8 = || Attention::new(q.view(), kv.view(), kv.view()).fp8();
    let refused = |fp8: Fp8<'_, bf16>| fp8.forward(&Device::Cpu).unwrap_err();
    let count = |given, seqlen| Error::PositionCount { given, batch: 2, seqlen };
    assert_eq!(refused(fp8().rotary(&table).q_positions(&[0; 8])), count(8, 3));
    assert_eq!(refused(fp8().rotary(&table).k_positions(&[0; 6])), count(6, 4));
    assert_eq!(refused(fp8().rotary(&table).q_positions(&[0; 6]).first_positions(1, 0)), Error::TwoPositions);
    assert_eq!(refused(fp8().rotary(&table).k_positions(&[0; 8]).first_positions(0, 1)), Error::TwoPositions);
    for nothing_rotates in [fp8().q_positions(&[0; 6]), fp8().k_positions(&[0; 8])] {
        assert_eq!(refused(nothing_rotates), Error::PositionsWithoutRotary);
    }
}

#[test]
fn what_has_no_codes_is_refused() {
    let x = wave((1, 8, 1, 24), 3);
    let error = Attention::new(x.view(), x.view(), x.view()).fp8().forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "q: x has head_dim 24, not a multiple of 16 up to 256");
    let x = Array4::<f32>::zeros((1, 8, 1, 32));
    let error = Attention::new(x.view(), x.view(), x.view()).fp8().forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "q: x is f32, expected f16 or bf16");
    let x = wave((1, 8, 1, 32), 3);
    let attention = Attention::new(&x, &x, &x);
    for used in [attention.clone().seqused_q(&[5]), attention.clone().seqused_k(&[5])] {
        let error = used.fp8().forward(&Device::Cpu).unwrap_err();
        assert!(matches!(error, Error::Fp8(fa3_types::Fp8ProblemError::Unknown(_))), "{error}");
    }
    attention.seqused_k(&[8]).fp8().forward(&Device::Cpu).unwrap();
    let packed = Attention::new(x.view(), x.view(), x.view()).packed(&[0, 8], &[0, 8]);
    let error = packed.clone().fp8().v_channels().forward(&Device::Cpu).unwrap_err();
    let text = "v: packed sequences have scales for blocks of rows, not a scale and a mean for each channel";
    assert_eq!(error.to_string(), text);
    let beyond = Attention::new(x.view(), x.view(), x.view()).packed(&[0, 9], &[0, 8]);
    let error = beyond.fp8().forward(&Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "cu_seqlens ends at 9, past the 8 rows of q");
}

#[test]
fn tensors_without_elements_are_legal() {
    for (seqlen_q, seqlen_k) in [(0, 4), (4, 0)] {
        let (q, kv) = (wave((2, seqlen_q, 2, 32), 3), wave((2, seqlen_k, 1, 32), 5));
        let output = Attention::new(q.view(), kv.view(), kv.view()).fp8().forward(&Device::Cpu).unwrap();
        assert!(output.o.iter().all(|o| o.to_f32() == 0.0) && output.o.dim() == q.dim());
    }
}

/// Quantized tensors act like their numbers: a scale of any granularity is a factor of the codes.
#[test]
fn quantized_tensors_are_their_numbers() {
    let (q, k, v) = (wave((2, 150, 4, 32), 3), wave((2, 140, 2, 32), 5), wave((2, 140, 2, 16), 11));
    let of = |x: &Array4<bf16>, scaling| Quantize::new(x).scaling(scaling).run(&Device::Cpu).unwrap();
    let blocks = Scaling::Block { rows: 64 };
    for (of_q, of_k, of_v) in [
        (blocks, blocks, Scaling::Channel),
        (Scaling::Heads { heads: 2 }, Scaling::Tensor, Scaling::Heads { heads: 1 }),
    ] {
        let [q, k, v] = [of(&q, of_q), of(&k, of_k), of(&v, of_v)];
        let output = Attention::of_quantized(&q, &k, &v).causal().forward(&Device::Cpu).unwrap();
        let [exact_q, exact_k, exact_v] = [&q, &k, &v].map(Quantized::dequantize);
        let exact = Attention::new(&exact_q, &exact_k, &exact_v).causal().forward(&Device::Cpu).unwrap();
        assert_eq!(
            (output.o.mapv(bf16::to_f32), output.lse),
            (exact.o.mapv(|x| bf16::from_f32(x).to_f32()), exact.lse)
        );

        let codes = Attention::new(&q.codes, &k.codes, &v.codes).causal().forward(&Device::Cpu).unwrap();
        assert_ne!(output.o, codes.o);
    }
}
