use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

/// Conversions to e4m3 as an H100 makes them: pairs of an f32 and its code.
const HOPPER: &[u8] = include_bytes!("../hopper/cvt.bin");

/// The value of an e4m3 code, from the format's definition; `None` for NaN.
fn e4m3_value(code: u8) -> Option<f64> {
    let (field, mantissa) = (i32::from(code >> 3 & 0xF), f64::from(code & 7));
    let size = match (field, code & 7) {
        (15, 7) => return None,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        (field, _) => (1.0 + mantissa / 8.0) * 2f64.powi(field - 7),
    };
    Some(if code < 0x80 { size } else { -size })
}

/// The code nearest to a positive number, ties to even, by search through the format; `values` ascend.
fn nearest(values: &[f64], x: f64) -> usize {
    let above = values.partition_point(|&value| value <= x).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let (to_below, to_above) = (x - values[below], values[above] - x);
    if to_below < to_above || (to_below == to_above && below % 2 == 0) { below } else { above }
}

/// The numbers around which rounding changes: every value, every middle, and their neighbours.
fn boundaries(values: &[f64]) -> impl Iterator<Item = f32> {
    let middles = values.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
    values.iter().copied().chain(middles).flat_map(|x| {
        let x = x as f32;
        [x.next_down().max(0.0), x, x.next_up()]
    })
}

#[test]
fn every_f16_code_has_its_value() {
    for code in 0..=u16::MAX {
        let expected = f16::from_bits(code).to_f32();
        let expected = if expected.is_nan() { NAN } else { expected };
        assert_eq!(f32_of_f16(code).to_bits(), expected.to_bits(), "{code:#06x}");
    }
}

#[test]
fn every_bf16_code_has_its_value() {
    for code in 0..=u16::MAX {
        let (ours, expected) = (f32_of_bf16(code), bf16::from_bits(code).to_f32());
        assert!(ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(), "{code:#06x}");
    }
}

#[test]
fn every_e4m3_code_has_its_value() {
    for code in 0..=u8::MAX {
        let ours = f32_of_e4m3(code);
        match e4m3_value(code) {
            None => assert_eq!(ours.to_bits(), NAN.to_bits()),
            Some(value) => {
                assert_eq!((f64::from(ours), ours.is_sign_negative()), (value, code >= 0x80));
                assert_eq!(e4m3_of_f32(ours), code);
            }
        }
    }
}

#[test]
fn f16_rounds_to_nearest_even_at_every_boundary() {
    // Where the next finite value would be, infinity's code rounds.
    let mut values: Vec<f64> = (0..0x7C00).map(|code| f16::from_bits(code).to_f64()).collect();
    values.push(65536.0);
    for x in boundaries(&values) {
        let expected = nearest(&values, x.into()) as u16;
        assert_eq!(f16_of_f32(x), expected, "{x:e}");
        assert_eq!(f16_of_f32(-x), expected | 0x8000, "{x:e}");
    }
}

#[test]
fn bf16_rounds_to_nearest_even_at_every_boundary() {
    let mut values: Vec<f64> = (0..0x7F80).map(|code| bf16::from_bits(code).to_f64()).collect();
    values.push(2f64.powi(128));
    for x in boundaries(&values) {
        let expected = nearest(&values, x.into()) as u16;
        assert_eq!(bf16_of_f32(x), expected, "{x:e}");
        assert_eq!(bf16_of_f32(-x), expected | 0x8000, "{x:e}");
    }
}

#[test]
fn e4m3_rounds_to_nearest_even_at_every_boundary_and_saturates() {
    let values: Vec<f64> = (0..0x7F).map_while(e4m3_value).collect();
    for x in boundaries(&values).chain([449.0, 464.0, 480.0, 1e9, f32::MAX, f32::INFINITY]) {
        let expected = nearest(&values, f64::from(x).min(448.0)) as u8;
        assert_eq!(e4m3_of_f32(x), expected, "{x:e}");
        assert_eq!(e4m3_of_f32(-x), expected | 0x80, "{x:e}");
    }
}

#[test]
fn e4m3_is_what_an_h100_gives() {
    let (pairs, rest) = HOPPER.as_chunks::<5>();
    assert!(rest.is_empty() && pairs.len() > 1500);
    for &[x0, x1, x2, x3, code] in pairs {
        let x = f32::from_le_bytes([x0, x1, x2, x3]);
        assert_eq!(e4m3_of_f32(x), code, "{x:e}");
    }
}

#[test]
fn nan_becomes_the_one_nan() {
    for bits in [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF] {
        let x = f32::from_bits(bits);
        assert_eq!((f16_of_f32(x), bf16_of_f32(x), e4m3_of_f32(x)), (0x7FFF, 0x7FFF, 0x7F));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_float_becomes_what_half_makes_of_it(bits: u32, small in 0u32..0x4800_0000) {
        for x in [bits, small].map(f32::from_bits).into_iter().filter(|x| !x.is_nan()) {
            prop_assert_eq!(f16_of_f32(x), f16::from_f32(x).to_bits());
            prop_assert_eq!(bf16_of_f32(x), bf16::from_f32(x).to_bits());
        }
    }
}
