use proptest::prelude::*;

use super::*;

const TYPES: [WgmmaType; 3] = [WgmmaType::F16, WgmmaType::Bf16, WgmmaType::E4m3];

fn product(ty: WgmmaType, n: usize) -> Product {
    Product { ty, n, negate_a: false, negate_b: false, accumulate: true }
}

/// A finite number as (significand, its fraction bits, exponent), by the format's definition.
fn split(ty: WgmmaType, code: u16) -> (i128, i32, i32) {
    let (exponent_bits, mantissa_bits, bias) = match ty {
        WgmmaType::F16 => (5, 10, 15),
        WgmmaType::Bf16 => (8, 7, 127),
        WgmmaType::E4m3 => (4, 3, 7),
    };
    let mantissa = i128::from(code) & ((1 << mantissa_bits) - 1);
    let field = i32::from(code) >> mantissa_bits & ((1 << exponent_bits) - 1);
    let significand = if field == 0 { mantissa } else { mantissa + (1 << mantissa_bits) };
    let negative = code >> (exponent_bits + mantissa_bits) & 1 == 1;
    (if negative { -significand } else { significand }, mantissa_bits, field.max(1) - bias)
}

/// significand · 2^shift, truncated toward zero.
fn shifted(significand: i128, shift: i32) -> i128 {
    let size = significand.unsigned_abs();
    let size = if shift >= 0 { size << shift } else { size.checked_shr(shift.unsigned_abs()).unwrap_or(0) };
    significand.signum() * size as i128
}

/// The model in integers: D = C + Σ a b of finite numbers.
fn model(ty: WgmmaType, a: &[u16], b: &[u16], c: f32) -> f32 {
    let (fraction_bits, result_bits) = if ty == WgmmaType::E4m3 { (13, 13) } else { (25, 23) };
    let field = (c.to_bits() >> 23 & 0xFF) as i32;
    let significand = i128::from(c.to_bits() & 0x7F_FFFF) + if field == 0 { 0 } else { 1 << 23 };
    let signed = if c.is_sign_negative() { -significand } else { significand };
    let mut addends = vec![(signed, 23, field.max(1) - 127)];
    for ((sa, bits_a, ea), (sb, bits_b, eb)) in a.iter().zip(b).map(|(&a, &b)| (split(ty, a), split(ty, b))) {
        if sa * sb != 0 {
            addends.push((sa * sb, bits_a + bits_b, ea + eb));
        }
    }
    let largest = addends.iter().map(|addend| addend.2).max().unwrap();
    let sum: i128 = addends.iter().map(|&(s, bits, e)| shifted(s, fraction_bits - bits + e - largest)).sum();
    // The sum is in units of 2^unit. Bits below the result's last bit are truncated.
    let unit = largest - fraction_bits;
    let length = 128 - sum.unsigned_abs().leading_zeros() as i32;
    let last = (unit + length - 1).max(-126) - result_bits;
    let kept = shifted(sum, unit - last) as f64 * 2f64.powi(last);
    if kept.abs() >= 2f64.powi(128) { f32::INFINITY.copysign(kept as f32) } else { kept as f32 }
}

/// Finite codes: random, medium-sized, small, with few bits, or mostly zeros.
fn codes(ty: WgmmaType, len: usize) -> BoxedStrategy<Vec<u16>> {
    let (mantissa_bits, fields, width) = match ty {
        WgmmaType::F16 => (10, 31u16, 16),
        WgmmaType::Bf16 => (7, 255, 16),
        WgmmaType::E4m3 => (3, 15, 8),
    };
    let of = move |range: std::ops::Range<u16>, few: u16| {
        let code = (range, any::<u16>(), any::<bool>()).prop_map(move |(field, mantissa, sign)| {
            let mantissa = mantissa & ((1 << mantissa_bits) - 1) & !few;
            u16::from(sign) << (width - 1) | field << mantissa_bits | mantissa
        });
        prop::collection::vec(code, len)
    };
    let zeros = |codes: Vec<u16>| {
        codes.into_iter().enumerate().map(|(i, x)| if i % 5 == 0 { x } else { 0 }).collect()
    };
    let middle = fields / 2;
    prop_oneof![
        of(0..fields, 0),
        of(middle - 3..middle + 4, 0),
        of(0..2, 0),
        of(middle - 3..middle + 4, 0xFFFE),
        of(0..fields, 0).prop_map(zeros)
    ]
    .boxed()
}

fn accumulator() -> impl Strategy<Value = f32> {
    let finite = any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite());
    prop_oneof![finite, -100.0..100.0f32, -1e-6..1e-6f32, Just(0.0), Just(-0.0), Just(f32::MAX)]
}

/// A type, a row of A, 8 columns of B, and 8 accumulators.
fn row() -> impl Strategy<Value = (WgmmaType, Vec<u16>, Vec<u16>, Vec<f32>)> {
    prop::sample::select(TYPES.to_vec()).prop_flat_map(|ty| {
        let k = ty.k() as usize;
        (Just(ty), codes(ty, k), codes(ty, 8 * k), prop::collection::vec(accumulator(), 8))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_vector_code_is_the_model((ty, a, b, c) in row()) {
        let mut d = c.clone();
        multiply(&product(ty, 8), Arithmetic::Exact, &a, &b, &mut d);
        for ((b, c), d) in b.chunks(a.len()).zip(c).zip(d) {
            let expected = model(ty, &a, b, c);
            let message = format!("{ty:?} {a:x?} {b:x?} {c:e}: {d:e}, not {expected:e}");
            prop_assert_eq!(d.to_bits(), expected.to_bits(), "{}", message);
        }
    }

    /// The error of k products and k additions in binary32 is at most that number of roundings of the sum of
    /// magnitudes.
    #[test]
    fn fast_is_close_to_the_sum((ty, a, b, c) in row()) {
        let mut d = c.clone();
        multiply(&product(ty, 8), Arithmetic::Fast, &a, &b, &mut d);
        let value = |code: u16| {
            let (significand, bits, exponent) = split(ty, code);
            significand as f64 * 2f64.powi(exponent - bits)
        };
        for ((b, c), d) in b.chunks(a.len()).zip(c).zip(d) {
            let products = || a.iter().zip(b).map(|(&a, &b)| value(a) * value(b));
            let sum = products().sum::<f64>() + f64::from(c);
            let size = products().map(f64::abs).sum::<f64>() + f64::from(c.abs());
            let underflow = 33.0 * f64::from(f32::from_bits(1));
            let bound = size * 2f64.powi(-24) * (2 * a.len() + 1) as f64 + underflow;
            prop_assert!(size > f32::MAX.into() || (f64::from(d) - sum).abs() <= bound, "{:e} {:e}", d, sum);
        }
    }
}

#[test]
fn overwriting_does_not_read_d() {
    for arithmetic in [Arithmetic::Exact, Arithmetic::Fast] {
        let mut d = [f32::NAN, f32::INFINITY, 1.0, 1e30, -1.0, f32::MAX, 0.0, -0.0];
        let product = Product { accumulate: false, negate_a: true, ..product(WgmmaType::F16, 8) };
        multiply(&product, arithmetic, &[0x3C00; 16], &[0x4000; 8 * 16], &mut d);
        assert_eq!(d, [-32.0; 8]);
    }
}
