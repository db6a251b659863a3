//! Kinds of numbers that a sum of products may meet, one for each row of an operand.

use fa3_ir::WgmmaType;

use super::super::values::{FLOATS, Stream};

/// Exponent and fraction bits of a floating-point type.
fn fields(ty: WgmmaType) -> (u32, u32) {
    match ty {
        WgmmaType::F16 => (5, 10),
        WgmmaType::Bf16 => (8, 7),
        WgmmaType::E4m3 => (4, 3),
    }
}

/// Codes of `rows` rows of length `k`, in alternating kinds. If `mirrored`, pairs in cancelling kinds have alternating
/// signs, otherwise equal signs. So the products of a mirrored operand with one that is not mirrored cancel.
pub(super) fn codes(ty: WgmmaType, rows: u32, stream: Stream, mirrored: bool) -> Vec<u16> {
    let k = u64::from(ty.k());
    let code = |row: u64, column: u64| {
        let kind = (row % 7, if row % 7 == 1 { row * k + column / 2 * 2 } else { row * k + column });
        let code = one(ty, kind.0, stream.bits(kind.1), stream.bits((1 << 32) + row * k + column));
        let flip = kind.0 == 1 && mirrored && column % 2 == 1;
        code ^ if flip { sign(ty) } else { 0 }
    };
    (0..u64::from(rows)).flat_map(|row| (0..k).map(move |column| code(row, column))).collect()
}

fn sign(ty: WgmmaType) -> u16 {
    let (exponent, fraction) = fields(ty);
    1 << (exponent + fraction)
}

/// A code of a kind, from random bits. `rare` decides whether it is one of the kind's exceptions.
fn one(ty: WgmmaType, kind: u64, bits: u64, rare: u64) -> u16 {
    let (exponent_bits, fraction_bits) = fields(ty);
    let fraction = (bits & ((1 << fraction_bits) - 1)) as u16;
    let sign = if bits >> 63 == 1 { sign(ty) } else { 0 };
    let largest = (1u16 << exponent_bits) - 1;
    let bias = largest / 2;
    let compose = |exponent: u16, fraction: u16| sign | exponent << fraction_bits | fraction;
    let ordinary = compose(bias + (bits >> 32) as u16 % 5 - 2, fraction);
    match kind {
        // Ordinary numbers. In mirrored operands pairs cancel, but in kind 1 sometimes not in the last bit.
        0 => ordinary,
        1 => ordinary ^ u16::from(rare.is_multiple_of(8)),
        // Huge and tiny numbers.
        2 => compose((bits >> 32) as u16 % largest, fraction),
        // Subnormal numbers, with a few ordinary ones.
        3 => {
            if rare.is_multiple_of(8) {
                ordinary
            } else {
                compose(0, fraction)
            }
        }
        // Infinities and NaNs among ordinary numbers.
        4 => match rare % 32 {
            0 => compose(largest, 0),
            1 => compose(largest, fraction),
            2 => compose(0, 0),
            _ => ordinary,
        },
        // Zeros of either sign, with a few ordinary numbers.
        5 => {
            if rare.is_multiple_of(8) {
                ordinary
            } else {
                compose(0, 0)
            }
        }
        // Random bits.
        _ => sign | bits as u16 & (self::sign(ty) - 1),
    }
}

/// Initial values of D: zeros, ordinary numbers and special values, in random order.
pub(super) fn accumulators(count: u32, stream: Stream) -> Vec<u32> {
    let one = |index: u64| {
        let bits = stream.bits(2 * index + 1);
        match stream.bits(2 * index) % 8 {
            0 => 0,
            1 => 0x8000_0000,
            2 => stream.pick(2 * index + 1, &FLOATS) as u32,
            3 => bits as u32,
            _ => (bits & 0x807F_FFFF) as u32 | (120 + (bits >> 32) as u32 % 14) << 23,
        }
    };
    (0..u64::from(count)).map(one).collect()
}
