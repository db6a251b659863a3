//! Layouts of operands in shared memory, written after the canonical layouts of the PTX ISA.

use fa3_ir::{Layout, Major, Swizzle, WgmmaType};

/// The form in which an operand is stored. If rows are long, the tile has more than the K of one product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stored {
    /// The contiguous dimension.
    pub(super) major: Major,
    /// The swizzle.
    pub(super) swizzle: Swizzle,
    /// Index of the step along K that is multiplied. A step has 32 bytes or 16 rows.
    pub(super) step: u32,
}

/// Steps along K per tile.
const STEPS: u32 = 4;

impl Stored {
    pub(super) fn name(&self) -> String {
        let Stored { major, swizzle, step } = self;
        format!("{major:?} {swizzle:?} {step}")
    }

    /// The layout fields of the operand's descriptor.
    pub(super) fn layout(&self) -> Layout {
        match (self.major, self.swizzle) {
            // 8 x 8 matrices of 128 bytes: first all matrices along K, then the matrices of the next 8 rows.
            (_, Swizzle::None) => Layout { swizzle: Swizzle::None, leading: 128, stride: 2 * STEPS * 128 },
            (Major::K, swizzle) => Layout::k_major(swizzle),
            (Major::Mn, swizzle) => Layout::mn_major(swizzle, STEPS * 16),
        }
    }

    /// Byte offset of element (`r`, `k`) of the multiplied step, for elements of `bytes` bytes.
    fn place(&self, r: u32, k: u32, bytes: u32) -> u32 {
        let span = self.swizzle.row_bytes();
        let linear = match (self.major, self.swizzle) {
            (Major::K, Swizzle::None) => {
                let column = 32 * self.step + k * bytes;
                r / 8 * (2 * STEPS * 128) + column / 16 * 128 + r % 8 * 16 + column % 16
            }
            (Major::K, _) => r * span + 32 * self.step + k * bytes,
            (Major::Mn, Swizzle::None) => {
                let k = 16 * self.step + k;
                r / 8 * (2 * STEPS * 128) + k / 8 * 128 + k % 8 * 16 + r % 8 * bytes
            }
            (Major::Mn, _) => {
                let k = 16 * self.step + k;
                r * bytes / span * (STEPS * 16 * span) + k * span + r * bytes % span
            }
        };
        self.swizzle.apply(linear)
    }

    /// The size of `rows` rows, in whole kilobytes.
    pub(super) fn bytes(&self, rows: u32) -> u32 {
        let span = self.swizzle.row_bytes();
        let bytes = match (self.major, self.swizzle) {
            (_, Swizzle::None) => rows / 8 * (2 * STEPS * 128),
            (Major::K, _) => rows * span,
            (Major::Mn, _) => (2 * rows).div_ceil(span) * STEPS * 16 * span,
        };
        bytes.next_multiple_of(1024)
    }

    /// The tile's bytes: the codes of `rows` rows, with ones in all other bits.
    pub(super) fn image(&self, ty: WgmmaType, codes: &[u16], rows: u32) -> Vec<u8> {
        let (k, bytes) = (ty.k(), 32 / ty.k());
        let mut image = vec![0xFF; self.bytes(rows) as usize];
        for (r, row) in (0..).zip(codes.chunks_exact(k as usize)) {
            for (k, code) in (0..).zip(row) {
                let place = self.place(r, k, bytes) as usize;
                image[place..][..bytes as usize].copy_from_slice(&code.to_le_bytes()[..bytes as usize]);
            }
        }
        image
    }
}

/// A in registers: 4 words per thread, in thread order.
pub(super) fn registers(ty: WgmmaType, a: &[u16]) -> Vec<u32> {
    let (k, bits) = (ty.k(), 512 / (2 * ty.k()));
    let parts = 32 / bits;
    let word = |thread: u32, register: u32| {
        let row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (register % 2);
        let column = parts * (thread % 4) + k / 2 * (register / 2);
        (0..parts).map(|part| u32::from(a[(row * k + column + part) as usize]) << (bits * part)).sum()
    };
    (0..128).flat_map(|thread| (0..4).map(move |register| word(thread, register))).collect()
}
