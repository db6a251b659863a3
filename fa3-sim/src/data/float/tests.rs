use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

/// A 16-bit format for exact arithmetic: numbers are integers in units of 2^-`unit`.
struct Exact {
    unit: i32,
    /// Bits of a significand, the leading one included.
    bits: u32,
    /// Exponent of the last bit of the smallest subnormal number, which is 2^-`last`.
    last: i32,
    /// The smallest power of two above the format's numbers.
    beyond: f64,
}

impl Exact {
    fn integer<H: Half>(&self, code: u16) -> i128 {
        let scaled = f64::from(H::widen(code)) * 2f64.powi(self.unit);
        assert_eq!(scaled.fract(), 0.0, "the unit is too large");
        scaled as i128
    }

    /// Rounds x · 2^-`unit` to nearest even: the leading bits of x stay, rounded by the remaining bits.
    fn nearest(&self, x: i128, unit: i32) -> f64 {
        let size = x.unsigned_abs();
        let length = 128 - size.leading_zeros();
        let cut = length.saturating_sub(self.bits).max((unit - self.last).max(0).cast_unsigned()).min(127);
        let (kept, rest, half) = (size >> cut, size & ((1 << cut) - 1), (1u128 << cut) / 2);
        let up = cut > 0 && (rest > half || (rest == half && kept % 2 == 1));
        let value = (kept + u128::from(up)) as f64 * 2f64.powi(cut.cast_signed() - unit);
        let value = if value >= self.beyond { f64::INFINITY } else { value };
        if x < 0 { -value } else { value }
    }

    fn check<H: Half>(&self, codes: [u16; 3]) {
        let [a, b, c] = codes;
        let [x, y, z] = codes.map(|code| self.integer::<H>(code));
        for (name, ours, exact) in [
            ("a + b", H::binary(a, b, |a, b| a + b), (x + y) << self.unit),
            ("a - b", H::binary(a, b, |a, b| a - b), (x - y) << self.unit),
            ("a b", H::binary(a, b, |a, b| a * b), x * y),
            ("a b + c", H::fma(a, b, c), x * y + (z << self.unit)),
        ] {
            let expected = self.nearest(exact, 2 * self.unit);
            assert_eq!(f64::from(H::widen(ours)), expected, "{name} of {a:#x} {b:#x} {c:#x}");
        }
    }
}

/// Codes of any finite f16, and of f16 numbers with few bits, so that ties occur.
fn f16_code() -> impl Strategy<Value = u16> {
    let finite = any::<u16>().prop_map(|code| if code & 0x7C00 == 0x7C00 { code & 0xBFFF } else { code });
    prop_oneof![finite.clone(), finite.prop_map(|code| code & 0xFF80), (0u16..0x800)]
}

/// Codes of bf16 numbers between 2⁻²⁰ and 2²⁰, so that sums of products fit in 128 bits.
fn bf16_code() -> impl Strategy<Value = u16> {
    (107u16..147, 0u16..128, any::<bool>(), any::<bool>()).prop_map(|(field, mantissa, sign, few)| {
        u16::from(sign) << 15 | field << 7 | if few { mantissa & 0x60 } else { mantissa }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn f16_is_rounded_once(codes in [f16_code(), f16_code(), f16_code()]) {
        Exact { unit: 24, bits: 11, last: 24, beyond: 65536.0 }.check::<F16>(codes);
    }

    #[test]
    fn bf16_is_rounded_once(codes in [bf16_code(), bf16_code(), bf16_code()]) {
        // The last bit of 2⁻²⁰ is worth 2⁻²⁷.
        Exact { unit: 27, bits: 8, last: 133, beyond: f64::INFINITY }.check::<Bf16>(codes);
    }

    #[test]
    fn fma_is_libm_s(a: u32, b: u32, c: u32, cancel: bool) {
        let [a, b, c] = [a, b, c].map(f32::from_bits);
        let c = if cancel { -(a * b) } else { c };
        let (ours, expected) = (fma(a, b, c), a.mul_add(b, c));
        prop_assert_eq!(canonical(ours).to_bits(), canonical(expected).to_bits(), "{:e} {:e} {:e}", a, b, c);
    }

    /// c is near a tie: the product is half an ulp of c times (1 − j² 2⁻⁴⁶), a difference that binary64 cannot resolve
    /// at c's size.
    #[test]
    fn fma_beside_a_tie_is_libm_s(mantissa in 0u32..1 << 23, j in 1u32..1000, negate: bool) {
        let c = f32::from_bits(127 << 23 | mantissa);
        let ulp = f32::EPSILON;
        let (a, b) = (ulp / 2.0 * (1.0 + j as f32 * ulp), 1.0 - j as f32 * ulp);
        let a = if negate { -a } else { a };
        prop_assert_eq!(fma(a, b, c).to_bits(), a.mul_add(b, c).to_bits(), "{:e} {:e} {:e}", a, b, c);
    }

    /// Numbers have similar sizes and few bits, which gives ties, cancellation and subnormal results.
    #[test]
    fn fma_of_close_numbers_is_libm_s(
        bits in [any::<u32>(), any::<u32>(), any::<u32>()], field in 60u32..70, few in 0u32..24
    ) {
        let [a, b] = [bits[0], bits[1]].map(|x| f32::from_bits(x & 0x807F_FFFF & !0 << few | field << 23));
        for shift in -30i32..30 {
            let c_field = (2 * field as i32 - 127 + shift).clamp(0, 254) as u32;
            let c = f32::from_bits(bits[2] & 0x807F_FFFF & !0 << few | c_field << 23);
            prop_assert_eq!(fma(a, b, c).to_bits(), a.mul_add(b, c).to_bits(), "{:e} {:e} {:e}", a, b, c);
        }
    }
}

#[test]
fn ends_of_the_16_bit_formats() {
    let f = |x: f64| f16::from_f64(x).to_bits();
    let b = |x: f64| bf16::from_f64(x).to_bits();
    // A tie at the upper end overflows, and the tie below does not.
    assert_eq!(F16::binary(f(65504.0), f(16.0), |a, b| a + b), 0x7C00);
    assert_eq!(F16::binary(f(65504.0), f(8.0), |a, b| a + b), f(65504.0));
    // Half the smallest subnormal number rounds to zero, and three quarters of it round up to it. Both keep their sign.
    assert_eq!(F16::binary(1, f(0.5), |a, b| a * b), 0);
    assert_eq!(F16::binary(0x8001, f(0.75), |a, b| a * b), 0x8001);
    assert_eq!(Bf16::binary(1, b(0.5), |a, b| a * b), 0);
    assert_eq!(Bf16::binary(0x8001, b(0.75), |a, b| a * b), 0x8001);
    assert_eq!(Bf16::fma(b(1e38), b(10.0), b(-1e38)), 0x7F80);
    assert_eq!(Bf16::fma(1, 1, b(1.0)), b(1.0));
    // (1 + 2⁻⁷)² = 1 + 2⁻⁶ + 2⁻¹⁴ rounds down. After subtracting 1, all bits stay.
    let x = b(1.0 + 2f64.powi(-7));
    assert_eq!(Bf16::fma(x, x, 0), b(1.0 + 2f64.powi(-6)));
    assert_eq!(Bf16::fma(x, x, b(-1.0)), b(2f64.powi(-6)));
    // 1 + 2⁻¹⁰ + 2⁻¹¹ − 2⁻³¹ lies below a tie. Rounding to binary32 first would turn it into the tie.
    let (one, small) = (1.0 + 2f64.powi(-10), 2f64.powi(-11) * (1.0 + 2f64.powi(-10)));
    assert_eq!(F16::fma(f(small), f(1.0 - 2f64.powi(-10)), f(one)), f(one));
}

#[test]
fn min_and_max_order_zeros_and_pass_over_nan() {
    let nan = f32::from_bits(0xFFC0_1234);
    let bits = |x: f32| x.to_bits();
    for (a, b, least, greatest) in [
        (1.0, 2.0, 1.0, 2.0),
        (-1.0, -2.0, -2.0, -1.0),
        (0.0, -0.0, -0.0, 0.0),
        (f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY),
        (3.0, nan, 3.0, 3.0),
        (-0.0, nan, -0.0, -0.0),
        (nan, nan, NAN, NAN),
    ] {
        for (a, b) in [(a, b), (b, a)] {
            assert_eq!((bits(min(a, b)), bits(max(a, b))), (bits(least), bits(greatest)), "{a} {b}");
            let is_nan = a.is_nan() || b.is_nan();
            let [least, greatest] = [least, greatest].map(|x| if is_nan { NAN } else { x });
            assert_eq!((bits(min_nan(a, b)), bits(max_nan(a, b))), (bits(least), bits(greatest)), "{a} {b}");
        }
    }
}
