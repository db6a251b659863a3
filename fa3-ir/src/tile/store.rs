//! Stores of fragments to tiles in shared memory.

use crate::lang::{AFrag, B32, F32, Frag, Half, Tile, V, Var};
use crate::{Elem, SharedAddr, WgmmaType};

impl<'k> Frag<'k> {
    /// Writes the fragment, rounded to the tile's element type, to a tile of 64 rows.
    ///
    /// Each warp writes its 16 rows: 16-bit elements by `stmatrix`, which touches every bank once, or binary32 elements
    /// in pairs, where two rows share banks. The number of columns is a multiple of 16, or of 8 for binary32.
    #[track_caller]
    pub fn store(&self, tile: Tile<'_, '_>) {
        let shape = tile.shape();
        let stored = match shape.elem {
            Elem::F16 => Some(Stored::Matrices(|x, y| y.f16x2_above(x))),
            Elem::Bf16 => Some(Stored::Matrices(|x, y| y.bf16x2_above(x))),
            Elem::F32 => Some(Stored::Pairs),
            Elem::U8 | Elem::U32 | Elem::U64 | Elem::E4m3 => None,
        };
        let fits = |stored: &Stored<'k>| {
            (shape.rows, shape.cols) == (64, self.cols()) && self.cols().is_multiple_of(stored.cols())
        };
        let _one = self.builder().as_one();
        match stored.filter(fits) {
            Some(stored) => self.write(tile, &stored),
            None => {
                self.builder().misfit("a fragment and its tile", format!("64 x {}", self.cols()), shape);
            }
        }
    }

    /// Writes columns of the fragment, from `first` (a multiple of 8) on, to a tile, which gives their number.
    #[track_caller]
    pub fn store_cols(&self, first: u32, tile: Tile<'_, '_>) {
        let end = first.saturating_add(tile.shape().cols);
        let _one = self.builder().as_one();
        match self.regs.get(first as usize / 2..end as usize / 2).filter(|_| first.is_multiple_of(8)) {
            Some(regs) => Frag::new(self.builder(), regs.to_vec()).store(tile),
            None => {
                let columns = format!("columns {first} to {end} of {}", self.cols());
                self.builder().misfit("a fragment and its tile", columns, tile.shape());
            }
        }
    }

    fn write(&self, tile: Tile<'_, '_>, stored: &Stored<'k>) {
        let b = self.builder();
        match stored {
            Stored::Matrices(pair) => {
                let rows = RowAddresses::of_matrices(tile);
                for (step, regs) in self.regs.chunks_exact(8).enumerate() {
                    let words = [0, 2, 4, 6].map(|first| pair(regs[first].now(), regs[first + 1].now()));
                    b.stmatrix(rows.at(32 * step as u32, 0), words, false);
                }
            }
            Stored::Pairs => {
                let tid = b.tid();
                let (warp, lane) = (tid.bfe(5, 2), tid & 31);
                let (row, quad) = (lane >> 2, lane & 3);
                let (row, byte) = (warp.mad(16, row), quad << 3);
                let rows = RowAddresses::new(tile, row, byte);
                for (at, pair) in self.pairs() {
                    b.store_vector(rows.at(4 * at.col, at.half.rows()), pair);
                }
            }
        }
    }

    /// Rounds to f16 or bf16 and packs two neighbouring columns into a word.
    #[track_caller]
    pub fn packed(&self, elem: Elem) -> Packed<'k> {
        let _one = self.builder().as_one();
        if !matches!(elem, Elem::F16 | Elem::Bf16) {
            self.builder().misfit("elements of 16 bits", elem, "f16 or bf16");
        }
        let pack = |x: Var<'k, F32>, y: Var<'k, F32>| {
            if elem == Elem::F16 { y.now().f16x2_above(x) } else { y.now().bf16x2_above(x) }
        };
        Packed { words: self.regs.chunks_exact(2).map(|pair| pack(pair[0], pair[1])).collect() }
    }
}

/// A [`Frag`] as words of two 16-bit elements.
#[derive(Clone, Debug)]
pub struct Packed<'k> {
    words: Vec<V<'k, B32>>,
}

impl<'k> Packed<'k> {
    /// Words per row of the thread: one for every 8 columns of the fragment.
    pub fn len(&self) -> u32 {
        self.words.len() as u32 / 2
    }

    /// Whether the fragment has no columns.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The thread's word in columns 8 `chunk` to 8 `chunk` + 7.
    ///
    /// # Panics
    /// If the fragment has no such columns.
    pub fn word(&self, half: Half, chunk: u32) -> V<'k, B32> {
        self.words[2 * chunk as usize + half as usize]
    }
}

impl AFrag<'_> {
    /// Writes an operand of 16-bit elements to a tile of 64 rows, as [`Frag::store`] would have written the fragment
    /// that it was made from.
    #[track_caller]
    pub fn store(&self, tile: Tile<'_, '_>) {
        let (b, shape) = (self.builder(), tile.shape());
        let fits = (shape.elem, shape.rows, shape.cols) == (self.elem(), 64, self.cols());
        if !fits || self.product_type() == WgmmaType::E4m3 {
            b.misfit("an A operand and its tile", format!("64 x {} {}", self.cols(), self.elem()), shape);
            return;
        }
        let _one = b.as_one();
        let rows = RowAddresses::of_matrices(tile);
        for (step, &words) in self.steps.iter().enumerate() {
            b.stmatrix(rows.at(32 * step as u32, 0), words.map(Var::get), false);
        }
    }
}

/// How a fragment is written.
enum Stored<'k> {
    /// As 8 x 8 matrices of the pairs that this function packs.
    Matrices(fn(V<'k, F32>, V<'k, F32>) -> V<'k, B32>),
    /// As pairs of binary32.
    Pairs,
}

impl Stored<'_> {
    /// Columns that are written at a time.
    fn cols(&self) -> u32 {
        match self {
            Stored::Matrices(_) => 16,
            Stored::Pairs => 8,
        }
    }
}

/// The addresses of a thread's row of a tile, at constant distances along it.
pub(crate) struct RowAddresses<'k> {
    /// One address for each 32 bytes of a panel's row.
    chunks: Vec<V<'k, B32>>,
    panel_stride: u32,
    span: u32,
}

impl<'k> RowAddresses<'k> {
    /// Addresses at which `stmatrix` writes a warp's 16 rows, 16 columns of 16 bits at a time: lane l gives the address
    /// of row l mod 16, column 8 (l / 16), rows 0-7 and 8-15 of two 8-column matrices.
    #[track_caller]
    fn of_matrices(tile: Tile<'_, 'k>) -> RowAddresses<'k> {
        let tid = tile.builder().tid();
        let (warp, lane) = (tid.bfe(5, 2), tid & 31);
        let (row, right) = (lane & 15, lane >> 4);
        let (row, byte) = (warp.mad(16, row), right << 4);
        RowAddresses::new(tile, row, byte)
    }

    /// Addresses of byte `byte`, below 32, of each 32 bytes of `row`.
    #[track_caller]
    pub(crate) fn new(tile: Tile<'_, 'k>, row: V<'k, B32>, byte: V<'k, B32>) -> RowAddresses<'k> {
        let span = tile.shape().swizzle.row_bytes();
        let start = tile.builder().shared_address(tile.address);
        let (offset, start) = (row * span, row.mad(span, start));
        // Without swizzle, 32 bytes of a row lie in two panels.
        let (byte, start) = if span < 32 {
            let right = byte >> 4;
            (byte & 15, right.mad(tile.panel_stride, start))
        } else {
            (byte, start)
        };
        // Panels begin at whole swizzle patterns, so that the permutation depends only on the row.
        let mixed = ((offset >> 3) & (span - 16)) ^ byte;
        let chunks = (0..span.div_ceil(32)).map(|chunk| start + (mixed ^ (32 * chunk)));
        RowAddresses { chunks: chunks.collect(), panel_stride: tile.panel_stride, span }
    }

    /// The address `bytes`, a multiple of 32, along the row, and `rows`, a multiple of 8, below it.
    pub(crate) fn at(&self, bytes: u32, rows: u32) -> SharedAddr {
        let (panel, within) = (bytes / self.span, bytes % self.span);
        let offset = panel * self.panel_stride + rows * self.span;
        self.chunks[within as usize / 32].at(offset as i32)
    }
}
