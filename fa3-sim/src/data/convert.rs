//! Conversions between binary32 and the narrow formats: to nearest, ties to even (PTX ISA, "cvt").

/// The NaN that every operation on binary32 gives.
pub const NAN: f32 = f32::from_bits(0x7FFF_FFFF);
/// The NaN that every operation on f16 or bf16 gives.
pub const NAN_16: u16 = 0x7FFF;

/// A format narrower than binary32.
struct Format {
    /// Stored bits of the significand.
    mantissa: u32,
    /// The exponent of the smallest normal number and of all subnormal ones.
    smallest: i32,
}

const F16: Format = Format { mantissa: 10, smallest: -14 };
const BF16: Format = Format { mantissa: 7, smallest: -126 };
const E4M3: Format = Format { mantissa: 3, smallest: -6 };

impl Format {
    /// Bits of a binary32's significand that the format lacks.
    const fn dropped(&self) -> u32 {
        23 - self.mantissa
    }

    /// Difference between the exponent fields of a number in binary32 and in this format.
    const fn rebias(&self) -> u32 {
        (126 + self.smallest).cast_unsigned()
    }

    /// The code nearest to `size`, which is not negative. Beyond the format's range, and for NaN, the code is too
    /// large.
    ///
    /// Normal and subnormal results are both computed, without a branch, so that a loop over this function becomes
    /// vector code.
    #[inline]
    fn nearest(&self, size: f32) -> u32 {
        let bits = size.to_bits();
        let tie_to_even = bits >> self.dropped() & 1;
        let rounded = bits.wrapping_add((1 << (self.dropped() - 1)) - 1 + tie_to_even) >> self.dropped();
        let normal = rounded.wrapping_sub(self.rebias() << self.mantissa);
        // The last bit of `shift` is worth the smallest subnormal number, so the sum with `size` is `size` rounded to
        // nearest even, as needed.
        let shift = f32::from_bits((self.rebias() + 1 + self.dropped()) << 23);
        let subnormal = (size + shift).to_bits().wrapping_sub(shift.to_bits());
        if bits >> 23 > self.rebias() { normal } else { subnormal }
    }

    /// The number with this code, which has no sign bit and is neither infinity nor NaN.
    #[inline]
    fn value(&self, code: u32) -> f32 {
        let bits = code << self.dropped();
        let smallest = (self.rebias() + 1) << 23;
        let subnormal = f32::from_bits(bits | smallest) - f32::from_bits(smallest);
        let normal = f32::from_bits(bits.wrapping_add(self.rebias() << 23));
        if code >> self.mantissa == 0 { subnormal } else { normal }
    }
}

const fn sign_16(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16 & 0x8000
}

/// The number of an f16 code.
#[inline]
pub fn f32_of_f16(code: u16) -> f32 {
    let size = u32::from(code & 0x7FFF);
    let value = if size == 0x7C00 { f32::INFINITY } else { F16.value(size) };
    let signed = f32::from_bits(value.to_bits() | u32::from(code & 0x8000) << 16);
    if size > 0x7C00 { NAN } else { signed }
}

/// The number of a bf16 code. A NaN keeps its bits, as on hardware. Every other conversion gives the NaN [`NAN`].
#[inline]
pub fn f32_of_bf16(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// The number of an e4m3 code.
#[inline]
pub fn f32_of_e4m3(code: u8) -> f32 {
    let size = u32::from(code & 0x7F);
    let signed = f32::from_bits(E4M3.value(size).to_bits() | u32::from(code & 0x80) << 24);
    if size == 0x7F { NAN } else { signed }
}

/// The f16 code nearest to `x`; infinity from 65520 on.
#[inline]
pub fn f16_of_f32(x: f32) -> u16 {
    let code = F16.nearest(x.abs()).min(0x7C00) as u16 | sign_16(x);
    if x.is_nan() { NAN_16 } else { code }
}

/// The bf16 code nearest to `x`.
#[inline]
pub fn bf16_of_f32(x: f32) -> u16 {
    let code = BF16.nearest(x.abs()) as u16 | sign_16(x);
    if x.is_nan() { NAN_16 } else { code }
}

/// The e4m3 code nearest to `x`; beyond ±448, infinities included, the code of ±448 (`.satfinite`).
#[inline]
pub fn e4m3_of_f32(x: f32) -> u8 {
    let code = E4M3.nearest(x.abs()).min(0x7E) as u8 | (sign_16(x) >> 8) as u8;
    if x.is_nan() { 0x7F } else { code }
}

#[cfg(test)]
mod tests;
