//! A tile of query rows, and a block of keys.

use std::collections::HashMap;
use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::{TILE_M, TILE_N};
use crate::Scalar;
use crate::cpu::LANES;
use crate::cpu::exp2::exp2;
use crate::cpu::mask::{Keys, within};
use crate::cpu::product::{Left, Panels, Product};
use crate::cpu::rows::Rows;
use crate::cpu::unit::ScoreUnit;

/// The stride of P's rows. A power of 2 would map a column to few sets of the CPU's cache.
const STRIDE: usize = TILE_N + LANES;

/// A tile of query rows.
pub(super) struct Tile {
    /// Sequence, head and row of the first row.
    pub(super) first: [usize; 3],
    /// The range from the first key that some row sees to the last.
    pub(super) keys: Range<usize>,
    /// The keys that each row sees.
    pub(super) visible: Vec<Keys>,
    /// LSE, in the unit of scores.
    pub(super) lse: Vec<f32>,
    /// D = rowsum(dO ∘ O) − dLSE.
    pub(super) delta: Vec<f32>,
    /// Q (rows, head_dim).
    pub(super) q: Vec<f32>,
    /// dO (rows, head_dim_v).
    pub(super) dout: Vec<f32>,
    /// Q as a right factor.
    pub(super) q_panels: Panels,
    /// dO as a right factor.
    pub(super) dout_panels: Panels,
}

/// A block of keys.
pub(super) struct Block {
    keys: Range<usize>,
    /// K (keys, head_dim).
    k: Panels,
    /// Kᵀ (head_dim, keys).
    k_transposed: Panels,
    /// Vᵀ (head_dim_v, keys).
    v_transposed: Panels,
}

impl Block {
    pub(super) fn new() -> Block {
        Block { keys: 0..0, k: Panels::new(), k_transposed: Panels::new(), v_transposed: Panels::new() }
    }

    /// Packs the block `keys` in place of the previous one.
    pub(super) fn pack<T: Scalar>(&mut self, keys: Range<usize>, k: Rows<'_, T>, v: Rows<'_, T>) {
        let (start, len) = (keys.start, keys.len());
        self.keys = keys;
        self.k.pack([len, k.columns()], |key, row| k.read(start + key, row));
        self.k_transposed.pack_transposed([len, k.columns()], |key, row| k.read(start + key, row));
        self.v_transposed.pack_transposed([len, v.columns()], |key, row| v.read(start + key, row));
    }
}

/// The gradients of elements of tables, by table and place.
pub(super) type TableGradients = HashMap<(usize, usize), f64>;

/// Adds a row's gradients of the elements that its scores read, given the gradients of scores.
fn add_read(ds: &[f32], read: &[(usize, usize, f32)], to: &mut TableGradients) {
    let same =
        |a: &(&(usize, usize, f32), &f32), b: &(&(usize, usize, f32), &f32)| (a.0.0, a.0.1) == (b.0.0, b.0.1);
    let of_scores: Vec<_> = read.iter().zip(ds).filter(|(_, ds)| **ds != 0.0).collect();
    for of_element in of_scores.chunk_by(same) {
        let &(table, place, _) = of_element[0].0;
        let terms = of_element.iter().map(|(read, ds)| f64::from(read.2 * **ds));
        *to.entry((table, place)).or_insert(0.0) += terms.sum::<f64>();
    }
}

/// P, dS and derivatives of scores of a tile and a block.
pub(super) struct Buffers {
    p: Vec<f32>,
    ds: Vec<f32>,
    slopes: Vec<f32>,
}

impl Buffers {
    pub(super) fn new() -> Buffers {
        let [p, ds, slopes] = [(); 3].map(|()| vec![0.0; TILE_M * STRIDE]);
        Buffers { p, ds, slopes }
    }
}

impl Tile {
    /// Adds the contributions of the tile and `block` to dQ of the tile, to dK and dV of the block, and to the
    /// gradients of tables.
    pub(super) fn add(
        &self,
        block: &Block,
        unit: ScoreUnit<'_>,
        buffers: &mut Buffers,
        [dq, dk, dv]: [&mut [f32]; 3],
        dtables: &mut TableGradients,
    ) {
        let columns = within(&self.keys, &block.keys);
        if columns.is_empty() {
            return;
        }
        let columns = block.k_transposed.panel_start(columns.start)..columns.end;
        let rows = self.visible.len();
        let (head_dim, head_dim_v) = (self.q.len() / rows, self.dout.len() / rows);
        let Buffers { p, ds, slopes } = buffers;
        let product = Product::new(rows, Left::Rows(&self.q, head_dim), &block.k_transposed, p);
        Product { columns: columns.clone(), stride: STRIDE, ..product }.run(); // A3:21
        let product = Product::new(rows, Left::Rows(&self.dout, head_dim_v), &block.v_transposed, ds);
        Product { columns: columns.clone(), stride: STRIDE, ..product }.run(); // A3:22-23, dP
        let (key, [sequence, head, first]) = (block.keys.start + columns.start, self.first);
        let scores = p.chunks_exact_mut(STRIDE).zip(slopes.chunks_exact_mut(STRIDE));
        let mut reads = Vec::with_capacity(rows);
        for (row, (scores, slopes)) in (first..first + rows).zip(scores) {
            let [scores, slopes] = [scores, slopes].map(|x| &mut x[columns.clone()]);
            reads.push(unit.reads([sequence, head, row], key, scores));
            unit.apply_with_slopes([sequence, head, row], key, scores, slopes);
        }
        Arch::new().dispatch(Slopes { tile: self, block, unit, columns: columns.clone(), p, ds });
        for (ds, reads) in ds.chunks_exact(STRIDE).zip(&reads) {
            reads.iter().for_each(|read| add_read(&ds[columns.clone()], read, dtables));
        }
        if unit.has_function() {
            for (ds, slopes) in ds.chunks_exact_mut(STRIDE).zip(slopes.chunks_exact(STRIDE)).take(rows) {
                let pairs = ds[columns.clone()].iter_mut().zip(&slopes[columns.clone()]);
                // The derivative of a hidden pair may be any number.
                pairs.filter(|(ds, _)| **ds != 0.0).for_each(|(ds, slope)| *ds *= slope);
            }
        }

        let p = Left::Columns(&p[columns.start..], STRIDE);
        let ds_transposed = Left::Columns(&ds[columns.start..], STRIDE);
        let dv = &mut dv[columns.start * head_dim_v..];
        let dk = &mut dk[columns.start * head_dim..];
        Product { add: true, ..Product::new(columns.len(), p, &self.dout_panels, dv) }.run(); // A3:26
        Product { add: true, ..Product::new(columns.len(), ds_transposed, &self.q_panels, dk) }.run(); // A3:27
        let ds = Left::Rows(&ds[columns.start..], STRIDE);
        Product { depth: columns, add: true, ..Product::new(rows, ds, &block.k, dq) }.run(); // A3:28, A3:32-33
    }
}

/// Turns scores into P and dP into dS.
struct Slopes<'a> {
    tile: &'a Tile,
    block: &'a Block,
    unit: ScoreUnit<'a>,
    /// The columns of S and dP that were computed.
    columns: Range<usize>,
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

impl WithSimd for Slopes<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Slopes { tile, block, unit, columns, p, ds } = self;
        let rows = p.chunks_exact_mut(STRIDE).zip(ds.chunks_exact_mut(STRIDE)).zip(&tile.visible);
        for (i, ((p, ds), visible)) in rows.enumerate() {
            let gaps = visible.gaps.iter().map(|gap| within(gap, &block.keys));
            // The range of a row that sees no key is arbitrary.
            let visible = within(&visible.all, &block.keys);
            let [start, end] = [visible.start, visible.end].map(|at| at.clamp(columns.start, columns.end));
            let (lse, delta) = (tile.lse[i], tile.delta[i]); // A3:20
            let steps = visible.start / LANES * LANES..visible.end.next_multiple_of(LANES);
            let (ps, _) = p[steps.clone()].as_chunks_mut::<LANES>();
            let (dss, _) = ds[steps].as_chunks_mut::<LANES>();
            for (p, ds) in ps.iter_mut().zip(dss) {
                for (p, ds) in p.iter_mut().zip(ds) {
                    let score = *p;
                    let exponent = (score - lse) * unit.log2;
                    // P is at most 1, which rounding may exceed.
                    *p = exp2(if exponent > 0.0 { 0.0 } else { exponent }); // A3:24
                    *ds = *p * (*ds - delta) * unit.slope(score); // A3:25
                }
            }
            // Hidden pairs contribute nothing, whatever was computed for them.
            for hidden in [columns.start..start, end..columns.end].into_iter().chain(gaps) {
                p[hidden.clone()].fill(0.0);
                ds[hidden].fill(0.0);
            }
        }
    }
}
