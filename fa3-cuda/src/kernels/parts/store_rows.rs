//! Rows of a fragment to global memory.

use fa3_ir::lang::*;

/// A tensor in global memory: an address, and the bytes from one index to the next in each dimension but the innermost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Global<'k, const D: usize> {
    /// Its first element.
    pub(crate) address: V<'k, B64>,
    /// Bytes, outermost dimension first.
    pub(crate) strides: [V<'k, B64>; D],
}

impl<'k, const D: usize> Global<'k, D> {
    /// The address of the row with these indices.
    #[track_caller]
    pub(crate) fn at(&self, indices: [V<'k, B32>; D]) -> V<'k, B64> {
        let strides = indices.into_iter().zip(self.strides);
        strides.fold(self.address, |at, (index, stride)| at + index.to_u64() * stride)
    }
}

/// How rows are written: as f16 or bf16, so many columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreRows {
    /// f16 or bf16.
    pub(crate) elem: Elem,
    /// Columns that there are; the fragment may have more.
    pub(crate) cols: u32,
}

impl StoreRows {
    /// Writes the thread's two rows to `rows`, where they are `inside`, each group of 32 columns at once: threads of a
    /// quad exchange what they have, so that each has 8 neighbours, 16 bytes. `quad` is the thread's number in its
    /// quad; its bytes begin at 16 · `quad`, which `rows` count.
    #[track_caller]
    pub(crate) fn store<'k>(
        &self,
        o: &Frag<'k>,
        quad: V<'k, B32>,
        rows: [V<'k, B64>; 2],
        inside: [V<'k, Pred>; 2],
    ) {
        let packed = o.packed(self.elem);
        let transpose = QuadTranspose::new(quad);
        for group in 0..self.cols.div_ceil(32) {
            let missing = (32 * (group + 1)).saturating_sub(self.cols) / 8;
            for half in Half::BOTH {
                let words = transpose.of([0, 1, 2, 3].map(|chunk| packed.word(half, 4 * group + chunk)));
                let mut writes = inside[half as usize];
                if missing > 0 {
                    writes = writes & quad.lt(4 - missing);
                }
                let at = rows[half as usize].at(64 * group as i32);
                o.builder().guarded(writes, || o.builder().store_vector(at, words));
            }
        }
    }
}
