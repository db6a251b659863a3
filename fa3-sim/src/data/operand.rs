//! Operands of wgmma in shared memory, as matrix descriptors describe them (PTX ISA, "Matrix Descriptor Format").

use std::ops::Range;

use fa3_ir::{Major, Swizzle};

/// Bytes of a chunk, which swizzling moves as a whole.
const CHUNK: u32 = 16;
/// Bytes of K that one wgmma multiplies.
const DEPTH: u32 = 32;

/// A decoded matrix descriptor whose fields are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    swizzle: Swizzle,
    major: Major,
    elem_bytes: u32,
    start: u32,
    leading: u32,
    stride: u32,
}

/// Reasons why a matrix descriptor is invalid (rule W8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// An addition to the descriptor carried out of one of its fields.
    #[error("matrix descriptor {descriptor:#018x} has bits outside its fields: {bits:#x}")]
    Reserved {
        /// The descriptor.
        descriptor: u64,
        /// Its bits outside all fields.
        bits: u64,
    },
    /// The base offset does not match the alignment of the pattern.
    #[error("matrix descriptor {descriptor:#018x} has base offset {base_offset}, not 0")]
    BaseOffset {
        /// The descriptor.
        descriptor: u64,
        /// Its base offset.
        base_offset: u32,
    },
    /// The start is not in the first row of a repeating pattern.
    #[error(
        "operand starts at {start:#x}, which is not in the first {row} bytes of a swizzle pattern of {pattern}"
    )]
    Start {
        /// The start address.
        start: u32,
        /// Bytes of a row of the pattern.
        row: u32,
        /// Bytes of the pattern.
        pattern: u32,
    },
    /// A pattern begins every 8 rows, but the stride does not lead to its beginning.
    #[error("operand has a stride of {stride} bytes, not a multiple of the swizzle pattern's {pattern}")]
    Stride {
        /// The stride-dimension byte offset.
        stride: u32,
        /// Bytes of the pattern.
        pattern: u32,
    },
    /// The 32 bytes of K would continue in the next row.
    #[error("operand starts {column} bytes into a row of {row}, which leaves less than 32 of K")]
    Depth {
        /// Bytes of the row before the start address.
        column: u32,
        /// Bytes of a row of the pattern.
        row: u32,
    },
}

impl Operand {
    /// Decodes a descriptor of elements of `elem_bytes` bytes (1 or 2).
    ///
    /// # Errors
    /// If a field has a value that wgmma does not allow, or a value that leads out of the swizzle's pattern.
    pub fn decode(descriptor: u64, major: Major, elem_bytes: u32) -> Result<Operand, DescriptorError> {
        let field = |shift: u32| (descriptor >> shift & 0x3FFF) as u32 * CHUNK;
        let swizzle = match descriptor >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        let operand =
            Operand { swizzle, major, elem_bytes, start: field(0), leading: field(16), stride: field(32) };

        let bits = descriptor & 0x3FF1_C000_C000_C000;
        if bits != 0 {
            return Err(DescriptorError::Reserved { descriptor, bits });
        }
        let base_offset = (descriptor >> 49 & 7) as u32;
        if base_offset != 0 {
            return Err(DescriptorError::BaseOffset { descriptor, base_offset });
        }
        if swizzle != Swizzle::None {
            operand.check_pattern()?;
        }
        Ok(operand)
    }

    fn check_pattern(&self) -> Result<(), DescriptorError> {
        let (start, stride) = (self.start, self.stride);
        let (row, pattern) = (self.swizzle.row_bytes(), self.swizzle.pattern_bytes());
        if start % pattern >= row {
            return Err(DescriptorError::Start { start, row, pattern });
        }
        if stride % pattern != 0 {
            return Err(DescriptorError::Stride { stride, pattern });
        }
        let column = start % row;
        if self.major == Major::K && column + DEPTH > row {
            return Err(DescriptorError::Depth { column, row });
        }
        Ok(())
    }

    /// The byte address in shared memory of element (`r`, `k`), r along M or N.
    pub fn address(&self, r: u32, k: u32) -> u32 {
        // Number of elements along the contiguous dimension and along the other dimension, and the distance between 8
        // elements of the latter.
        let (along, across, eights, spans) = match (self.major, self.swizzle) {
            (Major::K, _) => (k, r, self.stride, self.leading),
            (Major::Mn, Swizzle::None) => (r, k, self.leading, self.stride),
            (Major::Mn, _) => (r, k, self.stride, self.leading),
        };
        let span = self.swizzle.row_bytes();
        let bytes = along * self.elem_bytes;
        let linear =
            self.start + bytes / span * spans + across / 8 * eights + across % 8 * span + bytes % span;
        self.swizzle.apply(linear)
    }

    /// The 16-byte chunks that hold the elements of `rows` at depths 0 to `k`: their addresses, ascending.
    pub fn chunks(&self, rows: Range<u32>, k: u32) -> Vec<u32> {
        let elems = CHUNK / self.elem_bytes;
        let mut chunks: Vec<u32> = match self.major {
            Major::K => rows
                .flat_map(|r| (0..k).step_by(elems as usize).map(move |k| (r, k)))
                .map(|(r, k)| self.address(r, k))
                .collect(),
            Major::Mn => (rows.start / elems * elems..rows.end)
                .step_by(elems as usize)
                .flat_map(|r| (0..k).map(move |k| (r, k)))
                .map(|(r, k)| self.address(r, k))
                .collect(),
        };
        chunks.sort_unstable();
        chunks.dedup();
        chunks
    }
}

#[cfg(test)]
mod tests;
