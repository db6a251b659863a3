//! The number format: OCP FP8 E4M3.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use float8::F8E4M3;

/// An 8-bit floating-point number: sign, 4 exponent bits of bias 7, 3 mantissa bits.
///
/// The largest finite value is 448 = 1.75 · 2⁸, the smallest normal one 2⁻⁶, the smallest subnormal one 2⁻⁹.
/// There is no infinity; the codes 0x7F and 0xFF are NaN. Two numbers are equal if their codes are: NaN
/// equals itself, 0 and −0 differ.
///
/// The conversions use [`float8::F8E4M3`], which for every number equals `cvt.rn.satfinite.e4m3x2.f32`. `E4m3` hides
/// two properties of `F8E4M3`. `F8E4M3` converts a negative NaN to 0xFF, while conversions to `E4m3` have one code for
/// every NaN. The `MAX`, `INFINITY` and `is_infinite` of `F8E4M3` treat 448 as an infinity, which the format does not
/// have.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(u8);

impl E4m3 {
    /// 448, the largest finite value.
    pub const MAX: f32 = 448.0;
    /// The NaN that conversions return.
    pub const NAN: E4m3 = E4m3(0x7F);
    /// Positive zero.
    pub const ZERO: E4m3 = E4m3(0);

    /// The number nearest to `x`, ties to even. Beyond ±448, infinities included, it is ±448; NaN stays NaN. This is
    /// one element of `cvt.rn.satfinite.e4m3x2.f32` (PTX ISA, "cvt").
    pub fn from_f32(x: f32) -> E4m3 {
        if x.is_nan() { E4m3::NAN } else { E4m3(F8E4M3::from_f32(x).to_bits()) }
    }

    /// The value, exactly.
    pub const fn to_f32(self) -> f32 {
        F8E4M3::from_bits(self.0).to_f32()
    }

    /// The number with this code.
    pub const fn from_bits(bits: u8) -> E4m3 {
        E4m3(bits)
    }

    /// The code.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Whether this is NaN.
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7F == 0x7F
    }

    /// `E4m3::from_f32(x).to_f32()` without a branch, so that a loop over it becomes vector code.
    ///
    /// Adding and subtracting 2²⁰ · 2^e, where e is the exponent of x, leaves a multiple of 2^(e − 3): the addition
    /// rounds to the last of 24 bits, to nearest even.
    #[inline]
    pub(crate) fn round(x: f32) -> f32 {
        const SIGN: u32 = 1 << 31;
        let power_of_two = f32::from_bits(x.to_bits() & 0x7F80_0000);
        let smallest_normal = 1.0 / 64.0;
        let power_of_two = if power_of_two < smallest_normal { smallest_normal } else { power_of_two };
        // Numbers beyond 2⁹ saturate. The bound on their power of two keeps the shift from overflowing.
        let power_of_two = if power_of_two > 512.0 { 512.0 } else { power_of_two };
        let shift = power_of_two * (1 << 20) as f32;
        let size = f32::from_bits(x.to_bits() & !SIGN);
        let rounded = (size + shift) - shift;
        let saturated = if rounded > E4m3::MAX { E4m3::MAX } else { rounded };
        f32::from_bits(saturated.to_bits() | (x.to_bits() & SIGN))
    }
}

impl From<E4m3> for f64 {
    fn from(x: E4m3) -> f64 {
        x.to_f32().into()
    }
}

impl From<E4m3> for f32 {
    fn from(x: E4m3) -> f32 {
        x.to_f32()
    }
}

impl fmt::Debug for E4m3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_f32(), f)
    }
}

impl fmt::Display for E4m3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.to_f32(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The value of a code in units of 2⁻¹⁰, half the smallest subnormal number, from the format's
    /// definition; `None` for NaN.
    fn value(code: u8) -> Option<i64> {
        let (field, mantissa) = (i64::from(code >> 3 & 0xF), i64::from(code & 7));
        let size = match (field, mantissa) {
            (15, 7) => return None,
            (0, m) => m << 1,
            (e, m) => (8 + m) << e,
        };
        Some(if code < 0x80 { size } else { -size })
    }

    /// Rounds to nearest even by a search over the whole format in f64, which is exact. `x` is clamped first, since f64
    /// could not represent the distance of a larger number.
    fn nearest(x: f32) -> u8 {
        let x = x.clamp(-448.0, 448.0);
        let distance = |code: u8| (f64::from(x) * 1024.0 - value(code).unwrap() as f64).abs();
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let codes = (0..0x7F).map(|code| sign | code);
        codes.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
    }

    fn next(x: f32) -> f32 {
        f32::from_bits(x.to_bits() + 1)
    }

    fn previous(x: f32) -> f32 {
        f32::from_bits(x.to_bits() - 1)
    }

    fn agrees(x: f32) {
        let expected = nearest(x);
        assert_eq!(E4m3::from_f32(x).to_bits(), expected, "{x:e}");
        assert_eq!(E4m3::round(x).to_bits(), E4m3(expected).to_f32().to_bits(), "{x:e}");
    }

    #[test]
    fn every_code_decodes_to_its_definition_and_encodes_to_itself() {
        for code in 0..=255 {
            let decoded = E4m3(code).to_f32();
            match value(code) {
                None => assert!(decoded.is_nan() && E4m3(code).is_nan()),
                Some(units) => {
                    assert_eq!(f64::from(decoded) * 1024.0, units as f64);
                    assert_eq!(decoded.is_sign_negative(), code >= 0x80);
                    assert_eq!(E4m3::from_f32(decoded).to_bits(), code);
                    assert!(!E4m3(code).is_nan());
                }
            }
        }
    }

    #[test]
    fn every_rounding_boundary() {
        for code in 0..0x7E {
            let (low, high) = (value(code).unwrap(), value(code + 1).unwrap());
            // Neighbours are an even number of units apart, so that the midpoint is exact.
            let middle = ((low + high) / 2) as f32 / 1024.0;
            for x in [previous(middle), middle, next(middle)] {
                agrees(x);
                agrees(-x);
            }
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(E4m3::from_f32(middle).to_bits(), even);
            assert_eq!(E4m3::from_f32(previous(middle)).to_bits(), code);
            assert_eq!(E4m3::from_f32(next(middle)).to_bits(), code + 1);
        }
    }

    #[test]
    fn beyond_the_largest_value_all_saturates() {
        for x in [448.0, 464.0, next(464.0), 480.0, 1e4, f32::MAX, f32::INFINITY] {
            assert_eq!(E4m3::from_f32(x).to_bits(), 0x7E, "{x}");
            assert_eq!(E4m3::from_f32(-x).to_bits(), 0xFE, "{x}");
            assert_eq!((E4m3::round(x), E4m3::round(-x)), (448.0, -448.0));
        }
    }

    #[test]
    fn nan_stays_nan_and_loses_its_sign() {
        for x in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001), f32::from_bits(0xFFFF_FFFF)] {
            assert_eq!(E4m3::from_f32(x), E4m3::NAN);
            assert!(E4m3::round(x).is_nan());
        }
    }

    #[test]
    fn where_float8_differs() {
        let negative_nan = f32::from_bits(0xFFC0_0000);
        assert_eq!(F8E4M3::from_f32(negative_nan).to_bits(), 0xFF);
        assert_eq!(E4m3::from_f32(negative_nan).to_bits(), 0x7F);
        assert_eq!(F8E4M3::MAX.to_f32(), 416.0);
        assert!(F8E4M3::from_f32(448.0).is_infinite());
        assert_eq!(E4m3::MAX, 448.0);
    }

    proptest! {
        #[test]
        fn any_float_rounds_to_the_nearest(bits: u32) {
            let x = f32::from_bits(bits);
            prop_assume!(x.is_finite());
            agrees(x);
        }

        #[test]
        fn floats_of_the_format_s_range_round_to_the_nearest(x in -500.0..500.0f32, small in -0.05..0.05f32) {
            agrees(x);
            agrees(small);
        }
    }
}
