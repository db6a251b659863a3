//! The work tile of one CTA: a block Q_i of query rows, and K and V in blocks.

use fa3_types::{KnownProblem, Lengths};
use ndarray::{Array2, ArrayView2, Axis, Slice};

use super::Tiles;
use super::softmax::ScoreUnit;
use crate::Precision;
use crate::inputs::Head32;

pub(super) struct QueryTile<'a> {
    problem: &'a KnownProblem,
    head: &'a Head32,
    len: Lengths,
    first_row: usize,
    tiles: Tiles,
    pub(super) unit: ScoreUnit,
    pub(super) precision: Precision,
}

impl<'a> QueryTile<'a> {
    /// Tile `i` of a head; the last one may have fewer than B_r rows.
    pub(super) fn new(
        problem: &'a KnownProblem,
        head: &'a Head32,
        len: Lengths,
        i: usize,
        tiles: Tiles,
        precision: Precision,
    ) -> QueryTile<'a> {
        let unit = ScoreUnit::of(problem);
        QueryTile { problem, head, len, first_row: i * tiles.rows, tiles, unit, precision }
    }

    /// B_r, or the remaining rows.
    pub(super) fn rows(&self) -> usize {
        self.tiles.rows.min(self.len.q - self.first_row)
    }

    pub(super) fn head_dim_v(&self) -> usize {
        self.head.v.ncols()
    }

    /// The head's sink; -inf without sinks.
    pub(super) fn sink(&self) -> f32 {
        self.head.sink
    }

    /// T_c, the number of key blocks.
    pub(super) fn key_blocks(&self) -> usize {
        self.len.k.div_ceil(self.tiles.keys)
    }

    pub(super) fn q(&self) -> ArrayView2<'a, f32> {
        let rows = self.first_row..self.first_row + self.rows();
        self.head.q.slice_axis(Axis(0), Slice::from(rows))
    }

    pub(super) fn k(&self, j: usize) -> ArrayView2<'a, f32> {
        self.head.k.slice_axis(Axis(0), self.block(j))
    }

    pub(super) fn v(&self, j: usize) -> ArrayView2<'a, f32> {
        self.head.v.slice_axis(Axis(0), self.block(j))
    }

    /// The keys of block `j`.
    fn block(&self, j: usize) -> Slice {
        let first = j * self.tiles.keys;
        Slice::from(first..self.len.k.min(first + self.tiles.keys))
    }

    /// S = Q_i K_jᵀ in [`ScoreUnit`]s: capped, replaced by the function of scores, then -inf where the mask forbids.
    pub(super) fn scores(&self, j: usize) -> Array2<f32> {
        self.scores_and_slopes(j).0
    }

    /// [`QueryTile::scores`], and their derivatives by the scaled scores.
    pub(super) fn scores_and_slopes(&self, j: usize) -> (Array2<f32>, Array2<f32>) {
        let mut s = self.q().dot(&self.k(j).t());
        let mut slopes = Array2::ones(s.dim());
        let [sequence, head] = self.head.of;
        let function = |row| self.problem.score_row([sequence, head, self.first_row + row]);
        let mut functions: Vec<_> = (0..self.rows()).map(function).collect();
        for (((row, key), s), slope) in s.indexed_iter_mut().zip(&mut slopes) {
            *s = self.unit.cap(*s);
            *slope = self.unit.slope(*s);
            if let Some(function) = &mut functions[row] {
                (*s, *slope) = function.with_slope(*s * self.unit.natural, *slope, j * self.tiles.keys + key);
            }
            if !self.allows(row, j, key) {
                *s = f32::NEG_INFINITY;
            }
        }
        (s, slopes)
    }

    /// Whether row `row` of the tile sees key `key` of block `j`.
    pub(super) fn allows(&self, row: usize, j: usize, key: usize) -> bool {
        let [sequence, head] = self.head.of;
        self.problem.allows([sequence, head, self.first_row + row], j * self.tiles.keys + key)
    }
}
