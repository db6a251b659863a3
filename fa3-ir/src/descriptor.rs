//! Matrix descriptors: how a wgmma finds its operands in shared memory (PTX ISA, "Matrix-descriptor format").
//!
//! A descriptor is a start address and three constants. Everything but the address is known when a kernel is built, as
//! is the increment of a step along K.

use std::fmt;

use crate::Major;

/// The permutation of 16-byte chunks within rows of 32, 64 or 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// No permutation.
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// Every mode.
    pub const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    /// Bytes of a row; 16 for no swizzle.
    pub const fn row_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::B32 => 32,
            Swizzle::B64 => 64,
            Swizzle::B128 => 128,
        }
    }

    /// Bytes after which the pattern repeats: 8 rows. Tiles must be aligned to it.
    pub const fn pattern_bytes(self) -> u32 {
        8 * self.row_bytes()
    }

    /// The position of the byte with linear address `address`: address bits 4 to 6 ⊕ bits 7 to 9, as many bits as the
    /// mode has.
    pub const fn apply(self, address: u32) -> u32 {
        address ^ ((address >> 3) & (self.row_bytes() - 16))
    }

    const fn code(self) -> u64 {
        match self {
            Swizzle::None => 0,
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            Swizzle::B32 => 3,
        }
    }
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Swizzle::None => write!(f, "no swizzle"),
            Swizzle::B32 | Swizzle::B64 | Swizzle::B128 => write!(f, "{}-byte swizzle", self.row_bytes()),
        }
    }
}

/// Where the elements of an operand lie, relative to the start address of its tile.
///
/// With `span` = [`Swizzle::row_bytes`], the byte of element (r, k), r along M or N, is [`Swizzle::apply`] of
/// - K-major: (r / 8) · stride + (r mod 8) · span + k · bytes; without swizzle every 16 bytes of k are `leading` apart;
/// - MN-major: (r · bytes / span) · leading + (k / 8) · stride + (k mod 8) · span + r · bytes mod span; without
///   swizzle `leading` and `stride` change places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The permutation.
    pub swizzle: Swizzle,
    /// The leading-dimension byte offset. A swizzled K-major operand has none.
    pub leading: u32,
    /// The stride-dimension byte offset.
    pub stride: u32,
}

impl Layout {
    /// A swizzled K-major tile whose rows are as long as the swizzle's and follow each other. Without swizzle,
    /// `leading` depends on the number of rows.
    pub const fn k_major(swizzle: Swizzle) -> Layout {
        Layout { swizzle, leading: 16, stride: swizzle.pattern_bytes() }
    }

    /// A swizzled MN-major tile of `k` rows; the tile of the next span of columns follows it.
    pub const fn mn_major(swizzle: Swizzle, k: u32) -> Layout {
        Layout { swizzle, leading: k * swizzle.row_bytes(), stride: swizzle.pattern_bytes() }
    }

    /// The descriptor without its start address.
    pub const fn descriptor(self) -> u64 {
        field(self.leading) << 16 | field(self.stride) << 32 | self.swizzle.code() << 62
    }

    /// The increment of a descriptor for a step along K (32 bytes of a K-major row, 16 rows of an MN-major tile),
    /// within a row or a tile.
    pub const fn k_step(self, major: Major) -> u64 {
        let bytes = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => 2 * self.leading,
            (Major::K, _) => 32,
            (Major::Mn, Swizzle::None) => 2 * self.leading,
            (Major::Mn, _) => 2 * self.stride,
        };
        field(bytes)
    }
}

/// The start address `bytes` as a descriptor encodes it; also the difference between the descriptors of two addresses.
pub const fn descriptor_address(bytes: u32) -> u64 {
    field(bytes)
}

const fn field(bytes: u32) -> u64 {
    ((bytes & 0x3_FFFF) >> 4) as u64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The byte of element (r, k) of a 2-byte operand, read back from the descriptor's fields: the address
    /// function of the PTX ISA's canonical layouts.
    pub(crate) fn element(descriptor: u64, major: Major, r: u32, k: u32) -> u32 {
        let part = |shift: u32| ((descriptor >> shift & 0x3FFF) as u32) << 4;
        let (start, leading, stride) = (part(0), part(16), part(32));
        let bits = [0, 3, 2, 1][(descriptor >> 62) as usize];
        let span = 16 << bits;
        let linear = match (major, bits) {
            (Major::K, 0) => (r / 8) * stride + (r % 8) * 16 + (2 * k / 16) * leading + 2 * k % 16,
            (Major::K, _) => (r / 8) * stride + (r % 8) * span + 2 * k,
            (Major::Mn, 0) => (r / 8) * stride + (k / 8) * leading + (k % 8) * 16 + (r % 8) * 2,
            (Major::Mn, _) => (2 * r / span) * leading + (k / 8) * stride + (k % 8) * span + 2 * r % span,
        };
        let a = start + linear;
        a ^ ((a >> 3) & ((1 << (4 + bits)) - 16))
    }

    /// A tile is written row by row, chunk by chunk, by the address bits' permutation alone; every product's
    /// descriptor must find the element that was put there.
    #[test]
    fn k_major_steps_find_every_element() {
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            let (start, layout) = (4096, Layout::k_major(swizzle));
            let base = layout.descriptor() + descriptor_address(start);
            for step in 0..swizzle.row_bytes() / 32 {
                let descriptor = base + u64::from(step) * layout.k_step(Major::K);
                for (r, k) in (0..64).flat_map(|r| (0..16).map(move |k| (r, k))) {
                    let linear = start + r * swizzle.row_bytes() + 2 * (16 * step + k);
                    assert_eq!(element(descriptor, Major::K, r, k), swizzle.apply(linear));
                }
            }
        }
    }

    #[test]
    fn mn_major_steps_find_every_element() {
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            let (start, rows, span) = (2048, 64, swizzle.row_bytes());
            let layout = Layout::mn_major(swizzle, rows);
            let base = layout.descriptor() + descriptor_address(start);
            for step in 0..rows / 16 {
                let descriptor = base + u64::from(step) * layout.k_step(Major::Mn);
                for (n, k) in (0..128).flat_map(|n| (0..16).map(move |k| (n, k))) {
                    let (tile, column) = (2 * n / span, 2 * n % span);
                    let linear = start + tile * rows * span + (16 * step + k) * span + column;
                    assert_eq!(element(descriptor, Major::Mn, n, k), swizzle.apply(linear));
                }
            }
        }
    }

    /// Without swizzle, 8 x 8 matrices of 128 contiguous bytes; here the next along K follows, then the next 8 rows.
    #[test]
    fn unswizzled_matrices_find_every_element() {
        let k = 64;
        let matrix = |r: u32, c: u32| (r / 8) * (16 * k) + (c / 8) * 128;
        let layout = Layout { swizzle: Swizzle::None, leading: 128, stride: 16 * k };
        for step in 0..k / 16 {
            for (r, c) in (0..64).flat_map(|r| (0..16).map(move |c| (r, c))) {
                let column = 16 * step + c;
                let at = |major| {
                    element(layout.descriptor() + u64::from(step) * layout.k_step(major), major, r, c)
                };
                assert_eq!(at(Major::K), matrix(r, column) + (r % 8) * 16 + (column % 8) * 2);
                assert_eq!(at(Major::Mn), matrix(r, column) + (column % 8) * 16 + (r % 8) * 2);
            }
        }
    }

    /// The 128-byte pattern as the PTX ISA draws it: chunk c of row r lies at chunk c ⊕ r.
    #[test]
    fn swizzle_is_the_documented_table() {
        for (r, c) in (0..8).flat_map(|r| (0..8).map(move |c| (r, c))) {
            assert_eq!(Swizzle::B128.apply(128 * r + 16 * c), 128 * r + 16 * (c ^ r));
            assert_eq!(Swizzle::B64.apply(64 * r + 16 * (c % 4)), 64 * r + 16 * ((c % 4) ^ (r / 2)));
            assert_eq!(Swizzle::B32.apply(32 * r + 16 * (c % 2)), 32 * r + 16 * ((c % 2) ^ (r / 4)));
        }
    }

    /// CUTLASS's K-major 128-byte descriptor: leading 1, stride 64, code 1.
    #[test]
    fn descriptor_bits() {
        assert_eq!(Layout::k_major(Swizzle::B128).descriptor(), 1 << 62 | 64 << 32 | 1 << 16);
        assert_eq!(descriptor_address(0x1_0010), 0x1001);
    }
}
