//! Matrix products of tiles in f32. The right factor is packed once for many left factors.
//!
//! A vector holds elements of different columns. So each element of the result is one sum in the order of the depth,
//! whatever the machine's vector width is.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd, bytemuck};

/// Number of vectors in a row of a panel.
const VECTORS: usize = 2;

/// The right factor (depth, columns), cut into panels of `width` columns. A panel lies in memory row by row.
pub(super) struct Panels {
    /// Number of columns of a panel.
    width: usize,
    depth: usize,
    columns: usize,
    data: Vec<f32>,
    /// The row that is being packed.
    row: Vec<f32>,
}

impl Panels {
    /// Panels without elements, of the machine's best width.
    pub(super) fn new() -> Panels {
        Panels { width: Arch::new().dispatch(Width), depth: 0, columns: 0, data: vec![], row: vec![] }
    }

    /// Packs a matrix. `read(i, row)` writes its row `i` to `row`.
    pub(super) fn pack(&mut self, [depth, columns]: [usize; 2], read: impl Fn(usize, &mut [f32])) {
        self.resize(depth, columns, columns);
        for i in 0..depth {
            read(i, &mut self.row);
            let panels = self.data.chunks_exact_mut(self.width * depth);
            for (panel, part) in panels.zip(self.row.chunks(self.width)) {
                panel[i * self.width..][..part.len()].copy_from_slice(part);
            }
        }
    }

    /// Packs the transpose of a matrix. `read(j, row)` writes row `j` of the matrix to `row`.
    pub(super) fn pack_transposed(&mut self, [columns, depth]: [usize; 2], read: impl Fn(usize, &mut [f32])) {
        self.resize(depth, columns, depth);
        let width = self.width;
        for j in 0..columns {
            read(j, &mut self.row);
            let panel = &mut self.data[j / width * width * depth..][..width * depth];
            for (to, &x) in panel.chunks_exact_mut(width).zip(&self.row) {
                to[j % width] = x;
            }
        }
    }

    /// Resizes the panels. Old elements may remain in the padding columns of the last panel, which no result includes.
    fn resize(&mut self, depth: usize, columns: usize, row: usize) {
        (self.depth, self.columns) = (depth, columns);
        self.data.resize(columns.next_multiple_of(self.width) * depth, 0.0);
        self.row.resize(row, 0.0);
    }

    /// The first column of the panel that contains `column`.
    pub(super) fn panel_start(&self, column: usize) -> usize {
        column / self.width * self.width
    }
}

/// The number of columns of a panel.
pub(super) struct Width;

impl WithSimd for Width {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) -> usize {
        VECTORS * S::F32_LANES
    }
}

/// The left factor, rows by depth.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// Row after row, with the stride of rows.
    Rows(&'a [f32], usize),
    /// Column after column, with the stride of columns: the transpose of the matrix in memory.
    Columns(&'a [f32], usize),
}

/// A product, added to `to` or written to it.
pub(super) struct Product<'a> {
    /// Rows of the left factor and of the result.
    pub(super) rows: usize,
    pub(super) left: Left<'a>,
    pub(super) right: &'a Panels,
    /// The part of the right factor's depth that is multiplied. The left factor has exactly this depth.
    pub(super) depth: Range<usize>,
    /// The columns of the right factor that are multiplied. The first one is the start of a panel.
    pub(super) columns: Range<usize>,
    /// The result: its element (0, 0) belongs to row 0, and to column 0 of the right factor.
    pub(super) to: &'a mut [f32],
    /// The stride of the result's rows.
    pub(super) stride: usize,
    /// Whether the product is added to `to`.
    pub(super) add: bool,
}

impl<'a> Product<'a> {
    /// The product with the whole right factor.
    pub(super) fn new(rows: usize, left: Left<'a>, right: &'a Panels, to: &'a mut [f32]) -> Product<'a> {
        let (depth, columns) = (0..right.depth, 0..right.columns);
        Product { rows, left, right, depth, columns, to, stride: right.columns, add: false }
    }

    pub(super) fn run(self) {
        if !self.depth.is_empty() {
            Arch::new().dispatch(self);
        }
    }

    /// Computes rows of the result from `first` on, `ROWS` at a time, for the panel that begins at `column`. Returns
    /// the first row that is left.
    #[inline(always)]
    fn rows<S: Simd, const ROWS: usize>(&mut self, simd: S, first: usize, column: usize) -> usize {
        let mut row = first;
        while row + ROWS <= self.rows {
            self.tile::<S, ROWS>(simd, row, column);
            row += ROWS;
        }
        row
    }

    /// Computes `ROWS` rows of the result from `row` on, for the panel that begins at `column`.
    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize>(&mut self, simd: S, row: usize, column: usize) {
        let width = self.right.width;
        let panel = &self.right.data[column * self.right.depth..][..width * self.right.depth];
        let (panel, _) = S::as_simd_f32s(&panel[self.depth.start * width..self.depth.end * width]);
        let (panel, _) = panel.as_chunks::<VECTORS>();
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        match self.left {
            Left::Rows(left, stride) => {
                let left: [&[f32]; ROWS] =
                    std::array::from_fn(|i| &left[(row + i) * stride..][..panel.len()]);
                for (k, right) in panel.iter().enumerate() {
                    step(simd, &mut sums, |i| left[i][k], right);
                }
            }
            Left::Columns(left, stride) => {
                for (left, right) in left[row..].chunks(stride).zip(panel) {
                    let left: &[f32; ROWS] = left.first_chunk().expect("a column has all rows");
                    step(simd, &mut sums, |i| left[i], right);
                }
            }
        }
        let columns = width.min(self.columns.end - column);
        for (i, sums) in sums.iter().enumerate() {
            let sums: &[f32] = bytemuck::cast_slice(sums);
            let to = &mut self.to[(row + i) * self.stride + column..][..columns];
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = if self.add { *to + sum } else { *sum };
            }
        }
    }
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        for column in self.columns.clone().step_by(self.right.width) {
            let mut row = 0;
            if S::REGISTER_COUNT >= 32 {
                row = self.rows::<S, 12>(simd, row, column);
            }
            row = self.rows::<S, 6>(simd, row, column);
            row = self.rows::<S, 2>(simd, row, column);
            self.rows::<S, 1>(simd, row, column);
        }
    }
}

/// Adds a column of the left factor, whose elements `left` gives, times a row of a panel. It does not use `map` on
/// arrays, which the compiler does not inline in a development build: the closure would have no vector instructions.
#[inline(always)]
fn step<S: Simd, const ROWS: usize>(
    simd: S,
    sums: &mut [[S::f32s; VECTORS]; ROWS],
    left: impl Fn(usize) -> f32,
    right: &[S::f32s; VECTORS],
) {
    for (i, sums) in sums.iter_mut().enumerate() {
        let left = simd.splat_f32s(left(i));
        for (sum, right) in sums.iter_mut().zip(right) {
            *sum = simd.mul_add_e_f32s(left, *right, *sum);
        }
    }
}
