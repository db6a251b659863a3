//! Matrix descriptors: how a wgmma finds its operands in shared memory (PTX ISA, "Matrix-descriptor format").
//!
//! A descriptor is a start address and three constants. The constants, and the increment of a descriptor for a step
//! along K, are known when a kernel is built.

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

    /// The address at which a swizzled tile keeps the byte of linear address `address`. The swizzle replaces address
    /// bits 4 to 6 (4 and 5 in rows of 64 bytes, 4 in rows of 32) by their exclusive or with the bits 3 places above.
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

    /// A swizzled MN-major tile of `k` rows. The tile of the next `row_bytes` of columns follows it.
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
