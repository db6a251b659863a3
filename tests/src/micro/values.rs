//! Inputs generated from counters, and the values at which arithmetic changes.

use super::digest;

/// A stream of numbers that depend only on its name and on their index.
#[derive(Clone, Copy)]
pub(super) struct Stream(u64);

impl Stream {
    pub(super) fn new(name: &str) -> Stream {
        Stream(digest(name.as_bytes()))
    }

    /// 64 random bits: the output of SplitMix64 for this index.
    pub(super) fn bits(self, index: u64) -> u64 {
        let x = self.0.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below `end`.
    pub(super) fn below(self, index: u64, end: usize) -> usize {
        (self.bits(index) % end as u64) as usize
    }

    /// One element of `of`.
    pub(super) fn pick<T: Copy>(self, index: u64, of: &[T]) -> T {
        of[self.below(index, of.len())]
    }

    /// A number in [0, 1).
    pub(super) fn unit(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Random bytes.
    pub(super) fn bytes(self, len: usize) -> Vec<u8> {
        (0..len as u64).map(|index| self.bits(index) as u8).collect()
    }

    /// The numbers 0 to `len` − 1 in random order.
    pub(super) fn permutation(self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        order.sort_by_key(|&index| self.bits(index.into()));
        order
    }
}

/// Little-endian bytes of 32-bit words.
pub(super) fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Special 32-bit integers.
pub(super) const INTEGERS: [u64; 24] = [
    0,
    1,
    2,
    3,
    7,
    15,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    0x5410,
    0x7531,
    0xBA98,
    0xFFFF,
    0x10000,
    0x7FFF_FFFF,
    0x8000_0000,
    0x8000_0001,
    0xFFFF_FFFF,
];

/// Special 64-bit integers.
pub(super) const LONG_INTEGERS: [u64; 12] = [
    0,
    1,
    3,
    0xFFFF_FFFF,
    0x1_0000_0000,
    0x1_2345_6789,
    0x7FFF_FFFF,
    0x8000_0000,
    0x7FFF_FFFF_FFFF_FFFF,
    0x8000_0000_0000_0000,
    0xFFFF_FFFF_0000_0000,
    0xFFFF_FFFF_FFFF_FFFF,
];

/// Special binary32 numbers, as bits: zeros, ones, subnormals and their neighbours, the largest number, infinities,
/// NaNs of either sign and kind, and numbers near the limits of the integers, of f16 and of e4m3.
pub(super) const FLOATS: [u64; 30] = [
    0,
    0x8000_0000,
    0x3F80_0000,
    0xBF80_0000,
    0x3FC0_0000,
    0x3F00_0000,
    0xC020_0000,
    0x3EAA_AAAB,
    0x0000_0001,
    0x8000_0001,
    0x007F_FFFF,
    0x807F_FFFF,
    0x0080_0000,
    0x8080_0000,
    0x7F7F_FFFF,
    0xFF7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0xFFC1_2345,
    0x7F80_0001,
    0x4B80_0001,
    0x4EFF_FFFF,
    0x4F00_0000,
    0xCF00_0000,
    0x4F80_0000,
    0x477F_F000,
    0x3380_0000,
    0x43E8_0000,
    0xC3E0_0001,
];

/// Special f16 numbers, as bits (see [`FLOATS`]).
pub(super) const HALVES: [u64; 22] = [
    0, 0x8000, 0x3C00, 0xBC00, 0x3E00, 0x3555, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF,
    0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x5F00, 0x5F40, 0x5F41, 0x1400,
];

/// Special bf16 numbers, as bits (see [`FLOATS`]).
pub(super) const BRAINS: [u64; 20] = [
    0, 0x8000, 0x3F80, 0xBF80, 0x3FC0, 0x3EAB, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x7F7F, 0xFF7F,
    0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x4300, 0x3B80,
];
