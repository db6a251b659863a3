use fa3_ir::Ty;
use proptest::prelude::*;

use super::*;

/// Results of an H100: see `hopper/record.py`.
const HOPPER: &[u8] = include_bytes!("../hopper/lane.bin");

/// The first result in lane 0.
fn first(op: LaneOp, src: &[u64]) -> u64 {
    let src: Vec<Lanes> = src.iter().map(|&bits| [bits; 32]).collect();
    let mut dst = vec![[0; 32]; op.outputs().len()];
    eval(op, &src.iter().collect::<Vec<_>>(), &mut dst);
    dst[0][0]
}

fn float(op: LaneOp, src: &[f32]) -> u64 {
    first(op, &src.iter().map(|x| x.to_bits().into()).collect::<Vec<_>>())
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (taken, after) = rest.split_at(len);
    *rest = after;
    taken
}

/// A register of each case.
fn registers(rest: &mut &[u8], ty: Ty, cases: usize) -> Vec<u64> {
    let bytes = ty.bytes().max(1) as usize;
    let little_endian = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
    take(rest, bytes * cases).chunks_exact(bytes).map(little_endian).collect()
}

/// How far a result may be from the hardware's: nothing, except for approximations.
#[expect(clippy::wildcard_enum_match_arm, reason = "an operation is exact unless it is said here")]
fn is_within_bound(op: LaneOp, ours: u64, hardware: u64) -> bool {
    let [x, y] = [ours, hardware].map(|bits| f64::from(f32::from_bits(bits as u32)));
    let relative = (x - y).abs() / y.abs();
    ours == hardware
        || match op {
            // 2 ulp of the documented bound, and half a one of our rounding.
            LaneOp::Ex2 | LaneOp::Rcp | LaneOp::Rsqrt | LaneOp::Sqrt => relative < 2.5 * 2f64.powi(-23),
            LaneOp::Lg2 => relative < 2f64.powi(-22) || (x - y).abs() < 2f64.powi(-22),
            LaneOp::Tanh => relative < 2f64.powi(-11),
            _ => false,
        }
}

#[test]
fn every_operation_is_what_an_h100_computes() {
    let mut rest = HOPPER;
    let mut compared = 0;
    for &op in LaneOp::ALL {
        let len = usize::from(take(&mut rest, 1)[0]);
        assert_eq!(take(&mut rest, len), format!("{op:?}").as_bytes(), "record.py must run again");
        let cases = usize::from(u16::from_le_bytes([rest[0], rest[1]]));
        take(&mut rest, 2);
        let src: Vec<_> = op.inputs().iter().map(|&ty| registers(&mut rest, ty, cases)).collect();
        let hardware: Vec<_> = op.outputs().iter().map(|&ty| registers(&mut rest, ty, cases)).collect();
        for start in (0..cases).step_by(32) {
            let lanes: Vec<Lanes> = src.iter().map(|x| std::array::from_fn(|i| x[start + i])).collect();
            let mut dst = vec![[0; 32]; hardware.len()];
            eval(op, &lanes.iter().collect::<Vec<_>>(), &mut dst);
            for (lane, (dst, hardware)) in
                (0..32).flat_map(|lane| dst.iter().zip(&hardware).map(move |result| (lane, result)))
            {
                let (ours, hardware) = (dst[lane], hardware[start + lane]);
                let operands: Vec<u64> = lanes.iter().map(|x| x[lane]).collect();
                assert!(
                    is_within_bound(op, ours, hardware),
                    "{op:?} of {operands:#x?}: {ours:#x}, the H100 gives {hardware:#x}"
                );
                compared += 1;
            }
        }
    }
    assert!(rest.is_empty());
    assert!(compared >= 64 * LaneOp::ALL.len());
}

/// The definition over the integers, of the operations that have one.
#[expect(clippy::wildcard_enum_match_arm, reason = "the others have no such definition")]
fn integer(op: LaneOp, [a, b, c]: [u64; 3]) -> Option<i128> {
    let wide = op.inputs()[0] == Ty::B64;
    let signed = |x: u64, wide: bool| {
        if wide { i128::from(x.cast_signed()) } else { i128::from((x as u32).cast_signed()) }
    };
    let (ua, ub, uc) = (i128::from(a), i128::from(b), i128::from(c));
    let (sa, sb) = (signed(a, wide), signed(b, wide));
    let power = |b: u64| 1i128 << b.min(64);
    Some(match op {
        LaneOp::AddU32 | LaneOp::AddU64 => ua + ub,
        LaneOp::SubU32 | LaneOp::SubU64 => ua - ub,
        LaneOp::MulU32 | LaneOp::MulU64 => (ua as u128).wrapping_mul(ub as u128) as i128,
        LaneOp::MulHiU32 => (ua * ub).div_euclid(1 << 32),
        LaneOp::MulHiS32 => (sa * sb).div_euclid(1 << 32),
        LaneOp::MadU32 => ua * ub + uc,
        LaneOp::MulWideU32 => ua * ub,
        LaneOp::MulWideS32 => sa * sb,
        LaneOp::MadWideU32 => ua * ub + uc,
        LaneOp::MadWideS32 => sa * sb + signed(c, true),
        LaneOp::MinU32 => ua.min(ub),
        LaneOp::MaxU32 => ua.max(ub),
        LaneOp::MinS32 => sa.min(sb),
        LaneOp::MaxS32 => sa.max(sb),
        LaneOp::NegS32 => -sa,
        LaneOp::AbsS32 => sa.abs(),
        LaneOp::ShlB32 => (ua * power(b)) & 0xFFFF_FFFF,
        LaneOp::ShlB64 => ((ua as u128) << b.min(64)) as i128,
        LaneOp::ShrU32 | LaneOp::ShrU64 => ua / power(b),
        LaneOp::ShrS32 | LaneOp::ShrS64 => sa.div_euclid(power(b)),
        LaneOp::LtU32 | LaneOp::LtU64 => (ua < ub).into(),
        LaneOp::LeU32 | LaneOp::LeU64 => (ua <= ub).into(),
        LaneOp::GtU32 | LaneOp::GtU64 => (ua > ub).into(),
        LaneOp::GeU32 | LaneOp::GeU64 => (ua >= ub).into(),
        LaneOp::LtS32 | LaneOp::LtS64 => (sa < sb).into(),
        LaneOp::LeS32 | LaneOp::LeS64 => (sa <= sb).into(),
        LaneOp::GtS32 | LaneOp::GtS64 => (sa > sb).into(),
        LaneOp::GeS32 | LaneOp::GeS64 => (sa >= sb).into(),
        LaneOp::S64OfS32 => sa,
        _ => return None,
    })
}

/// The PTX ISA's pseudo-code of bfe, bit by bit.
fn documented_bfe(a: u32, b: u32, c: u32, signed: bool) -> u32 {
    let bit = |i: u32| a >> i & 1;
    let (pos, len) = (b & 0xFF, c & 0xFF);
    let sign = if !signed || len == 0 { 0 } else { bit((pos + len - 1).min(31)) };
    (0..32).map(|i| (if i < len && pos + i <= 31 { bit(pos + i) } else { sign }) << i).sum()
}

/// Any bits, and those near the ends of ranges.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0u64..70,
        (0u64..5).prop_map(u64::wrapping_neg),
        (0u64..3).prop_map(|x| (1 << 31) - 1 + x),
        (0u64..3).prop_map(|x| (1 << 63) - 1 + x)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn integers_are_those_of_the_definition(words in [word(), word(), word()]) {
        for &op in LaneOp::ALL {
            let mut src = words;
            for (x, ty) in src.iter_mut().zip(op.inputs()) {
                *x &= if *ty == Ty::B64 { u64::MAX } else { 0xFFFF_FFFF };
            }
            if let Some(exact) = integer(op, src) {
                let expected = if op.outputs() == [Ty::B64] { exact as u64 } else { (exact as u32).into() };
                prop_assert_eq!(first(op, &src[..op.inputs().len()]), expected, "{:?} of {:x?}", op, src);
            }
        }
    }

    #[test]
    fn bit_fields_are_the_documented_ones(a: u32, b in 0u32..300, c in 0u32..300) {
        prop_assert_eq!(bit_field(a, b, c), documented_bfe(a, b, c, false));
        prop_assert_eq!(signed_bit_field(a.cast_signed(), b, c).cast_unsigned(), documented_bfe(a, b, c, true));
    }

    /// Sums and products of binary32 are rounded as if once when they come from binary64: 53 ≥ 2 · 24 + 2.
    #[test]
    fn floats_are_rounded_once(a: u32, b: u32) {
        let [x, y] = [a, b].map(|bits| f64::from(f32::from_bits(bits)));
        for (op, exact) in [(LaneOp::AddF32, x + y), (LaneOp::SubF32, x - y), (LaneOp::MulF32, x * y)] {
            prop_assert_eq!(first(op, &[a.into(), b.into()]), u64::from(canonical(exact as f32).to_bits()));
        }
    }
}

#[test]
fn comparisons_with_nan_are_false_or_true_as_their_names_say() {
    let nan = f32::NAN;
    let ordered = [LaneOp::EqF32, LaneOp::NeF32, LaneOp::LtF32, LaneOp::LeF32, LaneOp::GtF32, LaneOp::GeF32];
    let unordered =
        [LaneOp::EquF32, LaneOp::NeuF32, LaneOp::LtuF32, LaneOp::LeuF32, LaneOp::GtuF32, LaneOp::GeuF32];
    for (a, b, holds) in
        [(1.0, 2.0, [0, 1, 1, 1, 0, 0]), (2.0, 1.0, [0, 1, 0, 0, 1, 1]), (-0.0, 0.0, [1, 0, 0, 1, 0, 1])]
    {
        assert_eq!(ordered.map(|op| float(op, &[a, b])), holds);
        assert_eq!(unordered.map(|op| float(op, &[a, b])), holds);
        assert_eq!([LaneOp::OrderedF32, LaneOp::UnorderedF32].map(|op| float(op, &[a, b])), [1, 0]);
    }
    for (a, b) in [(nan, 1.0), (1.0, nan), (nan, nan)] {
        assert_eq!(ordered.map(|op| float(op, &[a, b])), [0; 6]);
        assert_eq!(unordered.map(|op| float(op, &[a, b])), [1; 6]);
        assert_eq!([LaneOp::OrderedF32, LaneOp::UnorderedF32].map(|op| float(op, &[a, b])), [0, 1]);
    }
}

#[test]
fn conversions_to_integers_round_clamp_and_make_nan_zero() {
    let minus = |x: u32| u64::from(x.wrapping_neg());
    for (x, unsigned, to_zero, nearest, down) in [
        (2.5, 2, 2, 2, 2),
        (3.5, 3, 3, 4, 3),
        (-0.5, 0, 0, 0, minus(1)),
        (-1.5, 0, minus(1), minus(2), minus(2)),
        (3e9, 3_000_000_000, 0x7FFF_FFFF, 0x7FFF_FFFF, 0x7FFF_FFFF),
        (1e10, 0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_FFFF, 0x7FFF_FFFF),
        (f32::NEG_INFINITY, 0, 0x8000_0000, 0x8000_0000, 0x8000_0000),
        (f32::NAN, 0, 0, 0, 0),
    ] {
        let ops = [LaneOp::U32OfF32, LaneOp::S32OfF32, LaneOp::S32OfF32Nearest, LaneOp::S32OfF32Down];
        assert_eq!(ops.map(|op| float(op, &[x])), [unsigned, to_zero, nearest, down], "{x}");
    }
    // 2²⁴ + 1 is a tie.
    assert_eq!(first(LaneOp::F32OfU32, &[0x0100_0001]), u64::from(16_777_216f32.to_bits()));
    assert_eq!(first(LaneOp::F32OfS32, &[0xFEFF_FFFD]), u64::from((-16_777_220f32).to_bits()));
}

/// The selectors with which FlashAttention-3 transposes V and permutes P, and the sign's.
#[test]
fn prmt_picks_bytes_and_spreads_signs() {
    let (a, b) = (0x8372_6150_u32, 0xB4A5_9687_u32);
    for (selectors, expected) in [
        (0x3210, a),
        (0x7654, b),
        (0x6420, 0xA587_7250),
        (0x7531, 0xB496_8361),
        (0x5410, 0x9687_6150),
        (0xFB80, 0xFFFF_0050),
    ] {
        let bytes = first(LaneOp::PrmtB32, &[a.into(), b.into(), 0xABCD_0000 | selectors]);
        assert_eq!(bytes, u64::from(expected), "{selectors:#x}");
    }
}

#[test]
fn of_a_pair_the_first_operand_is_the_upper_half() {
    assert_eq!(float(LaneOp::F16x2OfF32, &[1.0, 2.0]), 0x3C00_4000);
    assert_eq!(float(LaneOp::Bf16x2OfF32, &[1.0, 2.0]), 0x3F80_4000);
    assert_eq!(float(LaneOp::E4m3x2OfF32, &[1.0, -1e9]), 0x38FE);
    assert_eq!(first(LaneOp::E4m3x2OfF16x2, &[0x3C00_FC00]), 0x38FE);
    assert_eq!(first(LaneOp::F16x2OfE4m3x2, &[0x3880]), 0x3C00_8000);
    assert_eq!(first(LaneOp::PackB32, &[0x1111, 0x2222]), 0x2222_1111);
}
