//! Consecutive tiles that share the loop over the blocks of keys.

use std::ops::Range;

use fa3_types::KnownProblem;
use ndarray::{ArrayViewMut3, Axis};
use rayon::prelude::*;

use super::keys::Keys;
use super::mask::{keys_of_row, keys_of_rows};
use super::product::Panels;
use super::queries::Queries;
use super::rows::{Rows, write};
use super::tile::{Block, Seen, Tile};
use super::unit::ScoreUnit;
use super::{TILE_M, TILE_N};
use crate::Scalar;

/// Number of keys of a split, unless that makes more than [`PARTS`] splits.
const PART: usize = 16 * TILE_N;
/// Largest number of splits of a sequence of keys: each split has its own O while a strip is computed.
const PARTS: usize = 16;

/// The inputs of a call.
pub(super) struct Call<'a, T> {
    pub(super) problem: &'a KnownProblem,
    pub(super) unit: ScoreUnit<'a>,
    pub(super) queries: Queries<'a, T>,
    pub(super) keys: Keys<'a>,
}

/// A strip of tiles, and its part of the results.
pub(super) struct Strip<'a, T: Scalar> {
    pub(super) call: &'a Call<'a, T>,
    /// The sequence.
    pub(super) index: usize,
    pub(super) head_kv: usize,
    /// The first query head.
    pub(super) first_head: usize,
    /// The first query position, within the sequence.
    pub(super) first: usize,
    /// O (positions, heads, head_dim_v).
    pub(super) o: ArrayViewMut3<'a, T::Output>,
    /// LSE, and the largest scores, if they are a result (positions, heads, 1 or 2).
    pub(super) of_rows: ArrayViewMut3<'a, f32>,
}

impl<T: Scalar> Strip<'_, T> {
    /// Estimates the number of pairs of a query and a key that the strip computes.
    pub(super) fn pairs(&self) -> usize {
        let (positions, heads, _) = self.o.dim();
        positions * heads * self.keys(self.first..self.first + positions).len()
    }

    pub(super) fn run(mut self) {
        let tiles = self.tiles();
        let keys = tiles.iter().map(|tile| tile.keys.clone()).filter(|keys| !keys.is_empty());
        // Without keys there is one empty split.
        let keys = keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let seen = self.parts(keys).into_par_iter().map(|part| self.walk(&tiles, part));
        let seen = seen.collect::<Vec<_>>().into_iter().reduce(|mut seen, part| {
            seen.iter_mut().zip(part).for_each(|(seen, part)| seen.merge(part, self.call.unit));
            seen
        });
        let heads = self.o.len_of(Axis(1));
        for (tile, seen) in tiles.iter().zip(seen.unwrap_or_default()) {
            let sink = |row: usize| self.call.queries.sink(self.first_head + row % heads);
            let largest = seen.largest(self.call.unit);
            let (o, lse) = seen.finish(self.call.unit, sink, self.call.problem.lse_form());
            let columns = o.len() / lse.len();
            for (row, (o, numbers)) in o.chunks_exact(columns).zip(lse.into_iter().zip(largest)).enumerate() {
                let (position, head) = (tile.first - self.first + row / heads, row % heads);
                write(self.o.index_axis_mut(Axis(0), position).index_axis_move(Axis(0), head), o);
                let to = self.of_rows.index_axis_mut(Axis(0), position).index_axis_move(Axis(0), head);
                to.into_iter().zip(<[f32; 2]>::from(numbers)).for_each(|(to, from)| *to = from);
            }
        }
    }

    /// Divides the range `keys` into splits that are computed separately. Each split begins at the start of a block.
    fn parts(&self, keys: Range<usize>) -> Vec<Range<usize>> {
        let start = keys.start / TILE_N * TILE_N;
        let part = PART.max((keys.end - start).div_ceil(PARTS).next_multiple_of(TILE_N));
        let end = keys.end.max(start + 1);
        (start..end).step_by(part).map(|start| start..keys.end.min(start + part)).collect()
    }

    fn tiles(&self) -> Vec<Tile> {
        let problem = self.call.problem;
        let (positions, heads, _) = self.o.dim();
        let (batch, first_row) = problem.rows_q().start(self.index);
        let queries = &self.call.queries;
        let head_rows: Vec<_> = (self.first_head..self.first_head + heads)
            .map(|head| {
                let of = |x| Rows::of(x, batch, first_row..first_row + problem.lengths(self.index).q, head);
                (queries.qv.map(of), of(queries.q))
            })
            .collect();
        let (columns, latent) = (queries.score_columns(), queries.latent_columns());
        let end = self.first + positions;
        let tile_positions = TILE_M / heads;
        (self.first..end)
            .step_by(tile_positions)
            .map(|first| {
                let positions = first..end.min(first + tile_positions);
                let mut q = vec![0.0; positions.len() * heads * columns];
                let rows =
                    positions.clone().flat_map(|position| head_rows.iter().map(move |head| (head, position)));
                for (((of_qv, of_q), position), row) in rows.zip(q.chunks_exact_mut(columns)) {
                    let (qv, q) = row.split_at_mut(latent);
                    of_qv.iter().for_each(|rows| rows.read(position, qv));
                    of_q.read(position, q);
                }
                let heads = self.first_head..self.first_head + heads;
                let rows =
                    positions.clone().flat_map(|row| heads.clone().map(move |head| [self.index, head, row]));
                let rows: Vec<_> = rows.collect();
                let visible = rows.iter().map(|&row| keys_of_row(problem, row)).collect();
                Tile { first, q, rows, keys: self.keys(positions.clone()), visible }
            })
            .collect()
    }

    /// The range from the first to the last key that any of these positions sees.
    fn keys(&self, positions: Range<usize>) -> Range<usize> {
        let heads = self.first_head..self.first_head + self.o.len_of(Axis(1));
        keys_of_rows(self.call.problem, self.index, heads, positions)
    }

    /// Computes every tile over `keys`, a whole number of blocks.
    fn walk(&self, tiles: &[Tile], keys: Range<usize>) -> Vec<Seen> {
        let Call { problem, queries, keys: tensors, .. } = self.call;
        let place = problem.rows_k().start(self.index);
        let [k, v] = tensors.rows(self.index, self.head_kv, &place);
        let (columns, latent) = (queries.score_columns(), queries.latent_columns());
        let mut block = Block { keys: 0..0, k: Panels::new(), v: Panels::new() };
        let mut scores = vec![0.0; TILE_M * TILE_N];
        let mut seen: Vec<Seen> =
            tiles.iter().map(|tile| Seen::nothing(tile.visible.len(), v.columns())).collect();
        for start in keys.clone().step_by(TILE_N) {
            block.keys = start..keys.end.min(start + TILE_N);
            block.k.pack_transposed([block.keys.len(), columns], |key, row| {
                let (of_v, of_k) = row.split_at_mut(latent);
                if latent > 0 {
                    v.read_with_scale_of(&k, start + key, of_v);
                }
                k.read(start + key, of_k);
            });
            block.v.pack([block.keys.len(), v.columns()], |key, row| v.read(start + key, row));
            for (tile, seen) in tiles.iter().zip(&mut seen) {
                tile.attend(&block, self.call.unit, &mut scores, seen);
            }
        }
        seen
    }
}
