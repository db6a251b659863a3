//! One query head of one sequence.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use fa3_types::{KnownProblem, Lengths};

use super::tile::{Block, Buffers, TableGradients, Tile};
use super::{TILE_M, TILE_N};
use crate::Scalar;
use crate::cpu::mask::{Keys, keys_of_row, keys_of_rows};
use crate::cpu::product::Panels;
use crate::cpu::rows::Rows;
use crate::cpu::unit::ScoreUnit;

/// Inputs of a query head besides K and V.
pub(super) struct QueryHead<'a> {
    len: Lengths,
    head_dim: usize,
    head_dim_v: usize,
    unit: ScoreUnit<'a>,
    tiles: Vec<Tile>,
}

/// A head's gradients. dQ and dK are not yet multiplied by softmax_scale.
pub(super) struct HeadGradients {
    /// dQ (rows, head_dim).
    pub(super) dq: Vec<f32>,
    /// dK (keys, head_dim).
    pub(super) dk: Vec<f32>,
    /// dV (keys, head_dim_v).
    pub(super) dv: Vec<f32>,
    pub(super) dtables: TableGradients,
}

impl<'a> QueryHead<'a> {
    /// Q, O, dO, LSE and dLSE of a head of a sequence.
    pub(super) fn new<T: Scalar>(
        problem: &'a KnownProblem,
        [sequence, head]: [usize; 2],
        matrices: [Rows<'_, T>; 3],
        lse: &[f32],
        dlse: Option<&[f32]>,
    ) -> QueryHead<'a> {
        let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
        let unit = ScoreUnit::of(problem);
        let len = problem.lengths(sequence);
        let visible = |row| keys_of_row(problem, [sequence, head, row]);
        let tile = |first: usize| {
            let rows = first..len.q.min(first + TILE_M);
            let visible: Vec<Keys> = rows.clone().map(visible).collect();
            let seeing = |row: usize| !visible[row - first].all.is_empty();
            let [q, o, dout] = matrices.map(|x| read(x, rows.clone(), seeing));
            // A3:1, D.
            let products = dout.chunks_exact(head_dim_v).zip(o.chunks_exact(head_dim_v));
            let mut delta: Vec<f32> =
                products.map(|(x, y)| x.iter().zip(y).map(|(x, y)| x * y).sum()).collect();
            if let Some(dlse) = dlse {
                let rows = delta.iter_mut().zip(rows.clone());
                rows.filter(|(_, row)| seeing(*row)).for_each(|(delta, row)| *delta -= dlse[row]);
            }
            let lse = lse[rows].iter().map(|&lse| match lse {
                // A value above every score, so that P is 0.
                f32::NEG_INFINITY => f32::INFINITY,
                lse => (f64::from(lse) * LOG2_E / f64::from(unit.log2)) as f32,
            });
            let [mut q_panels, mut dout_panels] = [Panels::new(), Panels::new()];
            let rows = visible.len();
            q_panels.pack([rows, head_dim], |i, row| row.copy_from_slice(&q[i * head_dim..][..head_dim]));
            dout_panels.pack([rows, head_dim_v], |i, row| {
                row.copy_from_slice(&dout[i * head_dim_v..][..head_dim_v])
            });
            let keys = keys_of_rows(problem, sequence, head..head + 1, first..first + rows);
            Tile {
                first: [sequence, head, first],
                keys,
                visible,
                lse: lse.collect(),
                delta,
                q,
                dout,
                q_panels,
                dout_panels,
            }
        };
        let tiles = (0..len.q).step_by(TILE_M).map(tile).collect();
        QueryHead { len, head_dim, head_dim_v, unit, tiles }
    }

    /// This head's part of the gradients.
    pub(super) fn gradients<T: Scalar>(&self, k: Rows<'_, T>, v: Rows<'_, T>) -> HeadGradients {
        let (head_dim, head_dim_v) = (self.head_dim, self.head_dim_v);
        let mut dq = vec![0.0; self.len.q * head_dim];
        let (mut dk, mut dv) = (vec![0.0; self.len.k * head_dim], vec![0.0; self.len.k * head_dim_v]); // A3:16
        let mut dtables = TableGradients::new();
        let mut block = Block::new();
        let mut buffers = Buffers::new();
        for start in (0..self.len.k).step_by(TILE_N) {
            block.pack(start..self.len.k.min(start + TILE_N), k, v);
            let (dk, dv) = (&mut dk[start * head_dim..], &mut dv[start * head_dim_v..]);
            let dq = dq.chunks_mut(TILE_M * head_dim);
            for (tile, dq) in self.tiles.iter().zip(dq) {
                // A3:18, the loop over tiles of query rows.
                tile.add(&block, self.unit, &mut buffers, [dq, dk, dv], &mut dtables);
            }
        }
        HeadGradients { dq, dk, dv, dtables }
    }
}

/// Reads rows (rows, columns) as f32. Rows that see no key become 0, so that they contribute nothing.
fn read<T: Scalar>(from: Rows<'_, T>, rows: Range<usize>, seeing: impl Fn(usize) -> bool) -> Vec<f32> {
    let columns = from.columns();
    let mut to = vec![0.0; rows.len() * columns];
    for (row, to) in rows.zip(to.chunks_exact_mut(columns)).filter(|(row, _)| seeing(*row)) {
        from.read(row, to);
    }
    to
}
