//! Fragments into tiles of shared memory.

use crate::{AFrag, Arg, At, B32, Builder, Elem, F32, Frag, Tile, TileShape, V, Var, WgmmaType};

impl Frag {
    /// Writes the fragment, rounded to the tile's elements, to a tile of 64 rows.
    ///
    /// Each warp writes its 16 rows: 16-bit elements by `stmatrix`, which touches every bank once; binary32 in pairs, of
    /// which two rows share banks. The columns are a multiple of 16, and of 8 for binary32.
    #[track_caller]
    pub fn store(&self, b: &mut Builder, tile: &Tile<'_>) {
        let shape = tile.shape();
        let stored = match shape.elem {
            Elem::F16 => Some(Stored::Matrices(|b, x, y| b.f16x2_of_f32(y, x))),
            Elem::Bf16 => Some(Stored::Matrices(|b, x, y| b.bf16x2_of_f32(y, x))),
            Elem::F32 => Some(Stored::Pairs),
            Elem::U8 | Elem::U32 | Elem::U64 | Elem::E4m3 => None,
        };
        let fits = |stored: &Stored| {
            (shape.rows, shape.cols) == (64, self.cols()) && self.cols().is_multiple_of(stored.cols())
        };
        match stored.filter(fits) {
            Some(stored) => b.as_one(|b| self.write(b, tile, &stored)),
            None => b.misfit("a fragment and its tile", format!("64 x {}", self.cols()), shape),
        }
    }

    /// Writes columns of the fragment, from `first`, a multiple of 8, on, to a tile that has as many columns.
    #[track_caller]
    pub fn store_cols(&self, b: &mut Builder, first: u32, tile: &Tile<'_>) {
        let end = first.saturating_add(tile.shape().cols);
        match self.regs.get(first as usize / 2..end as usize / 2).filter(|_| first.is_multiple_of(8)) {
            Some(regs) => b.as_one(|b| Frag { regs: regs.to_vec() }.store(b, tile)),
            None => {
                let columns = format!("columns {first} to {end} of {}", self.cols());
                b.misfit("a fragment and its tile", columns, tile.shape());
            }
        }
    }

    fn write(&self, b: &mut Builder, tile: &Tile<'_>, stored: &Stored) {
        match stored {
            Stored::Matrices(pair) => {
                let rows = RowAddresses::of_matrices(b, tile);
                for (step, regs) in self.regs.chunks_exact(8).enumerate() {
                    let words = [0, 2, 4, 6].map(|first| pair(b, regs[first], regs[first + 1]));
                    b.stmatrix(rows.at(32 * step as u32, 0), words, false);
                }
            }
            Stored::Pairs => {
                let tid = b.tid();
                let (warp, lane) = (b.bfe_u32(tid, 5, 2), b.and(tid, 31));
                let (row, quad) = (b.shr_u32(lane, 2), b.and(lane, 3));
                let (row, byte) = (b.mad_u32(warp, 16, row), b.shl_b32(quad, 3));
                let rows = RowAddresses::new(b, tile, row, byte);
                for (index, pair) in self.regs.chunks_exact(2).enumerate() {
                    let (col, half) = (8 * (index as u32 / 2), index as u32 % 2);
                    b.store_vector(rows.at(4 * col, 8 * half), [pair[0], pair[1]]);
                }
            }
        }
    }
}

impl AFrag {
    /// Writes an operand of 16-bit elements to a tile of 64 rows, as [`Frag::store`] would write it before it was rounded.
    #[track_caller]
    pub fn store(&self, b: &mut Builder, tile: &Tile<'_>) {
        let shape = tile.shape();
        let fits = (shape.elem, shape.rows, shape.cols) == (self.elem(), 64, self.cols());
        if !fits || self.product_type() == WgmmaType::E4m3 {
            b.misfit("an A operand and its tile", format!("64 x {} {}", self.cols(), self.elem()), shape);
            return;
        }
        b.as_one(|b| {
            let rows = RowAddresses::of_matrices(b, tile);
            for (step, &words) in self.steps.iter().enumerate() {
                let words = words.map(|word| b.get(word));
                b.stmatrix(rows.at(32 * step as u32, 0), words, false);
            }
        });
    }
}

/// How a fragment is written.
enum Stored {
    /// As 8 x 8 matrices of the pairs that this makes.
    Matrices(fn(&mut Builder, Var<F32>, Var<F32>) -> V<B32>),
    /// As pairs of binary32.
    Pairs,
}

impl Stored {
    /// Columns that are written at a time.
    fn cols(&self) -> u32 {
        match self {
            Stored::Matrices(_) => 16,
            Stored::Pairs => 8,
        }
    }
}

/// The addresses of a thread's row of a tile, at constant distances along it.
pub(crate) struct RowAddresses {
    /// Of each 32 bytes of a panel's row.
    chunks: Vec<V<B32>>,
    panel_stride: u32,
    span: u32,
}

impl RowAddresses {
    /// Those at which `stmatrix` writes a warp's 16 rows, 16 columns of 16 bits at a time: lane l gives the address of row
    /// l mod 16, column 8 (l / 16), rows 0-7 and 8-15 of two 8-column matrices.
    #[track_caller]
    fn of_matrices(b: &mut Builder, tile: &Tile<'_>) -> RowAddresses {
        let tid = b.tid();
        let (warp, lane) = (b.bfe_u32(tid, 5, 2), b.and(tid, 31));
        let (row, right) = (b.and(lane, 15), b.shr_u32(lane, 4));
        let (row, byte) = (b.mad_u32(warp, 16, row), b.shl_b32(right, 4));
        RowAddresses::new(b, tile, row, byte)
    }

    /// Of byte `byte`, below 32, of each 32 bytes of `row`.
    #[track_caller]
    pub(crate) fn new(b: &mut Builder, tile: &Tile<'_>, row: V<B32>, byte: V<B32>) -> RowAddresses {
        let span = tile.shape().swizzle.row_bytes();
        let start = b.shared_address(tile.place);
        let (offset, start) = (b.mul(row, span), b.mad_u32(row, span, start));
        // Without swizzle 32 bytes of a row are in two panels.
        let (byte, start) = if span < 32 {
            let right = b.shr_u32(byte, 4);
            (b.and(byte, 15), b.mad_u32(right, tile.panel_stride, start))
        } else {
            (byte, start)
        };
        // Panels begin at whole patterns, so that the permutation depends on the row alone.
        let shifted = b.shr_u32(offset, 3);
        let mixed = b.and(shifted, span - 16);
        let mixed = b.xor(mixed, byte);
        let chunks = (0..span.div_ceil(32)).map(|chunk| {
            let chunk = b.xor(mixed, 32 * chunk);
            b.add(start, chunk)
        });
        RowAddresses { chunks: chunks.collect(), panel_stride: tile.panel_stride, span }
    }

    /// The address `bytes`, a multiple of 32, along the row, and `rows`, a multiple of 8, below it.
    pub(crate) fn at(&self, bytes: u32, rows: u32) -> crate::SharedAddr {
        let (panel, within) = (bytes / self.span, bytes % self.span);
        let offset = panel * self.panel_stride + rows * self.span;
        self.chunks[within as usize / 32].at(offset as i32)
    }
}

/// Elements of a fragment by their place, for stores of another kind.
impl Frag {
    /// The thread's pairs of neighbouring columns, each with the place of its first.
    pub fn pairs(&self) -> impl Iterator<Item = (At, [Var<F32>; 2])> + '_ {
        let firsts = self.elements().step_by(2).map(|(at, _)| at);
        firsts.zip(self.regs.chunks_exact(2)).map(|(at, pair)| (at, [pair[0], pair[1]]))
    }
}

/// Single elements.
impl Builder {
    /// The address of an element of a tile.
    #[track_caller]
    pub fn element_address(
        &mut self,
        tile: &Tile<'_>,
        row: impl Arg<Ty = B32>,
        col: impl Arg<Ty = B32>,
    ) -> V<B32> {
        let TileShape { elem, swizzle, .. } = tile.shape();
        let span = swizzle.row_bytes();
        self.as_one(|b| {
            let byte = b.mul(col, elem.bytes());
            let (panel, within) = (b.shr_u32(byte, span.trailing_zeros()), b.and(byte, span - 1));
            let linear = b.mad_u32(row, span, within);
            let shifted = b.shr_u32(linear, 3);
            let mixed = b.and(shifted, span - 16);
            let mixed = b.xor(linear, mixed);
            let start = b.shared_address(tile.place);
            let start = b.mad_u32(panel, tile.panel_stride, start);
            b.add(start, mixed)
        })
    }
}
