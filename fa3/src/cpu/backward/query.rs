//! One query head of one sequence.

use std::f64::consts::LOG2_E;
use std::ops::Range;

use fa3_sched::{Lens, Tiling};
use fa3_types::{Lengths, Problem};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut2, Axis, Slice};

use super::{TILE_M, TILE_N};
use crate::cpu::exp2::exp2;
use crate::cpu::tile::KeyValue;
use crate::cpu::unit::ScoreUnit;

/// What is read of a query head, beside K and V.
pub(super) struct QueryHead<'a> {
    problem: &'a Problem,
    len: Lengths,
    unit: ScoreUnit,
    /// Q (seqlen_q, head_dim).
    q: Array2<f32>,
    /// dO (seqlen_q, head_dim_v).
    dout: Array2<f32>,
    /// LSE (seqlen_q), as a score.
    lse: Array1<f32>,
    /// D = rowsum(dO ∘ O) − dLSE (seqlen_q).
    delta: Array1<f32>,
}

/// A head's gradients: of Q and of K as multiples of softmax_scale.
pub(super) struct HeadGradients {
    pub(super) dq: Array2<f32>,
    pub(super) dk: Array2<f32>,
    pub(super) dv: Array2<f32>,
}

impl QueryHead<'_> {
    pub(super) fn new(
        problem: &Problem,
        len: Lengths,
        [q, o, dout]: [Array2<f32>; 3],
        lse: Array1<f32>,
        dlse: Option<Array1<f32>>,
    ) -> QueryHead<'_> {
        let unit = ScoreUnit::of(problem);
        let mut delta = (&dout * &o).sum_axis(Axis(1)); // A3:1
        if let Some(dlse) = dlse {
            delta -= &dlse;
        }
        let lse = lse.mapv(|lse| match lse {
            // Above every score, so that P is 0: the row sees no key.
            f32::NEG_INFINITY => f32::INFINITY,
            lse => (f64::from(lse) * LOG2_E / f64::from(unit.log2)) as f32,
        });
        QueryHead { problem, len, unit, q, dout, lse, delta }
    }

    /// This head's part of the gradients.
    pub(super) fn gradients(&self, kv: &KeyValue) -> HeadGradients {
        let mut dq = Array2::zeros(self.q.dim());
        let (mut dk, mut dv) = (Array2::zeros(kv.k.dim()), Array2::zeros(kv.v.dim())); // A3:16
        let (mut p, mut ds) = (Array2::zeros((TILE_M, TILE_N)), Array2::zeros((TILE_M, TILE_N)));
        // The transposed matrix: the rows that see a key instead of the keys that a row sees.
        let tiling = Tiling::new(TILE_N as u32, TILE_M as u32, 1, self.problem.mask().transposed());
        // A validated problem's lengths are below 2³¹.
        let lens = Lens { q: self.len.k as u32, k: self.len.q as u32 };
        for block in 0..self.len.k.div_ceil(TILE_N) {
            let first_key = block * TILE_N;
            let keys = Slice::from(first_key..self.len.k.min(first_key + TILE_N));
            let (k, v) = (kv.k.slice_axis(Axis(0), keys), kv.v.slice_axis(Axis(0), keys));
            let (mut dk, mut dv) = (dk.slice_axis_mut(Axis(0), keys), dv.slice_axis_mut(Axis(0), keys));
            let range = tiling.kv_range(block as u32, lens);
            for tile in range.first..range.end {
                // A3:18
                let first_row = tile as usize * TILE_M;
                let rows = first_row..self.len.q.min(first_row + TILE_M);
                let (mut p, mut ds) =
                    (corner(&mut p, rows.len(), k.nrows()), corner(&mut ds, rows.len(), k.nrows()));
                self.p_and_ds(rows.clone(), k, v, &mut p, &mut ds);
                if !(range.unmasked_first..range.unmasked_end).contains(&tile) {
                    self.hide(first_row, first_key, &mut p, &mut ds);
                }
                let rows = Slice::from(rows);
                let (q, dout) = (self.q.slice_axis(Axis(0), rows), self.dout.slice_axis(Axis(0), rows));
                let mut dq = dq.slice_axis_mut(Axis(0), rows);
                general_mat_mul(1.0, &p.t(), &dout, 1.0, &mut dv); // A3:26
                general_mat_mul(1.0, &ds.t(), &q, 1.0, &mut dk); // A3:27
                general_mat_mul(1.0, &ds, &k, 1.0, &mut dq); // A3:28, A3:32-33
            }
        }
        HeadGradients { dq, dk, dv }
    }

    /// P and dS of some rows and a block of keys, without the mask.
    fn p_and_ds(
        &self,
        rows: Range<usize>,
        k: ArrayView2<'_, f32>,
        v: ArrayView2<'_, f32>,
        p: &mut ArrayViewMut2<'_, f32>,
        ds: &mut ArrayViewMut2<'_, f32>,
    ) {
        let first_row = rows.start;
        let rows = Slice::from(rows);
        general_mat_mul(1.0, &self.q.slice_axis(Axis(0), rows), &k.t(), 0.0, p); // A3:21
        general_mat_mul(1.0, &self.dout.slice_axis(Axis(0), rows), &v.t(), 0.0, ds); // A3:22-23, dP
        self.unit.cap(p);
        for (row, (mut p, mut ds)) in (first_row..).zip(p.rows_mut().into_iter().zip(ds.rows_mut())) {
            let (lse, delta) = (self.lse[row], self.delta[row]); // A3:20
            let row_major = "the buffers are row-major";
            let (p, ds) = (p.as_slice_mut().expect(row_major), ds.as_slice_mut().expect(row_major));
            for (p, ds) in p.iter_mut().zip(ds) {
                let score = *p;
                let exponent = (score - lse) * self.unit.log2;
                // P is at most 1, which rounding may exceed.
                *p = exp2(if exponent > 0.0 { 0.0 } else { exponent }); // A3:24
                *ds = *p * (*ds - delta) * self.unit.slope(score); // A3:25
            }
        }
    }

    /// Pairs that the mask hides have no part in anything, whatever was computed of them.
    fn hide(
        &self,
        first_row: usize,
        first_key: usize,
        p: &mut ArrayViewMut2<'_, f32>,
        ds: &mut ArrayViewMut2<'_, f32>,
    ) {
        for (((row, key), p), ds) in p.indexed_iter_mut().zip(ds) {
            if !self.problem.mask().allows(first_row + row, first_key + key, self.len) {
                (*p, *ds) = (0.0, 0.0);
            }
        }
    }
}

/// The first rows and columns of a buffer.
fn corner(buffer: &mut Array2<f32>, rows: usize, columns: usize) -> ArrayViewMut2<'_, f32> {
    let rows = buffer.slice_axis_mut(Axis(0), Slice::from(..rows));
    rows.slice_axis_move(Axis(1), Slice::from(..columns))
}
