//! Operands of products in shared memory: the offsets and contents of their 16-byte chunks.

use std::ops::Range;
use std::rc::Rc;

use fa3_ir::Major;

use crate::data::operand::{DescriptorError, Operand};
use crate::machine::{At, Machine};
use crate::shared::WINDOW;

/// Bytes of a chunk.
pub(super) const CHUNK: u32 = 16;

/// A part of an operand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    /// The matrix descriptor.
    pub(super) desc: u64,
    pub(super) major: Major,
    /// Rows of A or columns of B.
    pub(super) rows: Range<u32>,
    /// The depth of the product, in elements: 32 bytes.
    pub(super) k: u32,
}

impl Part {
    fn elem_bytes(&self) -> u32 {
        32 / self.k
    }

    /// The offsets of the part's chunks: row by row along K, or depth by depth along the rows. A wrong address becomes
    /// an offset beyond all shared memory.
    pub(super) fn chunks(&self) -> Result<Vec<u32>, DescriptorError> {
        let operand = Operand::decode(self.desc, self.major, self.elem_bytes())?;
        let step = (CHUNK / self.elem_bytes()) as usize;
        let offset = |r, k| operand.address(r, k).wrapping_sub(WINDOW);
        let (rows, k) = (self.rows.clone(), self.k);
        Ok(match self.major {
            Major::K => rows
                .flat_map(|r| (0..k).step_by(step).map(move |k| (r, k)))
                .map(|(r, k)| offset(r, k))
                .collect(),
            Major::Mn => (0..k)
                .flat_map(|k| rows.clone().step_by(step).map(move |r| (r, k)))
                .map(|(r, k)| offset(r, k))
                .collect(),
        })
    }

    /// The element codes, row by row, in the chunks at these offsets; zeros for chunks outside of shared memory.
    fn gather(&self, chunks: &[u32], shared: &[u8]) -> Vec<u16> {
        let (k, rows) = (self.k as usize, self.rows.len());
        let step = (CHUNK / self.elem_bytes()) as usize;
        let chunk = |offset: u32| shared.get(offset as usize..offset as usize + CHUNK as usize);
        let mut elements = vec![0; rows * k];
        match self.major {
            Major::K => {
                for (elements, &offset) in elements.chunks_exact_mut(step).zip(chunks) {
                    if let Some(chunk) = chunk(offset) {
                        decode(chunk, elements);
                    }
                }
            }
            Major::Mn => {
                let mut column = vec![0; rows];
                for (depth, chunks) in chunks.chunks_exact(rows / step).enumerate() {
                    for (elements, &offset) in column.chunks_exact_mut(step).zip(chunks) {
                        match chunk(offset) {
                            Some(chunk) => decode(chunk, elements),
                            None => elements.fill(0),
                        }
                    }
                    elements
                        .iter_mut()
                        .skip(depth)
                        .step_by(k)
                        .zip(&column)
                        .for_each(|(to, &code)| *to = code);
                }
            }
        }
        elements
    }
}

/// Decodes the codes of a chunk, each of one or two bytes.
fn decode(chunk: &[u8], codes: &mut [u16]) {
    if codes.len() == chunk.len() {
        codes.iter_mut().zip(chunk).for_each(|(code, &byte)| *code = byte.into());
    } else {
        let (pairs, _) = chunk.as_chunks();
        codes.iter_mut().zip(pairs).for_each(|(code, &pair)| *code = u16::from_le_bytes(pair));
    }
}

impl Machine<'_> {
    /// The chunks of a part. They are kept, because parts repeat with the stages of a pipeline.
    pub(super) fn chunks_of(&mut self, part: &Part) -> Result<Rc<[u32]>, DescriptorError> {
        if let Some(chunks) = self.operands.get(part) {
            return Ok(Rc::clone(chunks));
        }
        let chunks: Rc<[u32]> = part.chunks()?.into();
        self.operands.insert(part.clone(), Rc::clone(&chunks));
        Ok(chunks)
    }

    /// The elements of a part; zeros if its descriptor is invalid.
    pub(super) fn gather(&mut self, at: At, part: &Part) -> Vec<u16> {
        match self.chunks_of(part) {
            Ok(chunks) => part.gather(&chunks, &self.cta(at).shared.bytes),
            Err(_) => vec![0; part.rows.len() * part.k as usize],
        }
    }
}
