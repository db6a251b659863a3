//! Algorithm 3: FlashAttention-3 backward pass. A CTA owns a block of keys j and visits the query blocks i; the dQ
//! writer adds each CTA's part of dQ_i. Here the parts are added in the order of the key blocks, as a kernel's
//! deterministic mode does.

use fa3_types::{KnownProblem, TensorName};
use ndarray::{Array1, Array2, ArrayView2, ArrayView3, ArrayView4, Axis, Slice};

use super::Tiles;
use super::tile::QueryTile;
use crate::inputs::{Head32, Heads, OutputHeads, check_lse_shape, check_shape, gather};
use crate::output::{GroupGradients, backward_groups};
use crate::sink::{Row, sums};
use crate::{Element, Forward, Gradients, InputError, Inputs, OutputGradients, Precision};

/// The backward pass for the gradients of O and LSE, given O and LSE of the forward pass. P and dS are rounded to
/// `precision` as operands of matrix products; the gradients are rounded at the end. Gradients of tables stay 0.
///
/// # Errors
/// [`InputError::Shape`] if dO or `o` does not have O's shape, [`InputError::LseShape`] if dLSE or `lse` does not have
/// LSE's.
pub fn backward<'a, T: Element + 'a>(
    inputs: &Inputs<'_, T>,
    output: impl Into<OutputGradients<'a, T>>,
    o: ArrayView4<'_, f32>,
    lse: ArrayView3<'_, f32>,
    tiles: Tiles,
    precision: Precision,
) -> Result<Gradients<f32>, InputError> {
    of_heads(inputs, &output.into(), o, lse, tiles, precision)
}

fn of_heads(
    inputs: &dyn Heads,
    output: &dyn OutputHeads,
    o: ArrayView4<'_, f32>,
    lse: ArrayView3<'_, f32>,
    tiles: Tiles,
    precision: Precision,
) -> Result<Gradients<f32>, InputError> {
    let problem = inputs.problem();
    output.check(problem)?;
    check_shape(TensorName::O, &o, problem.o())?;
    check_lse_shape(&lse, problem)?;
    let forward = || Forward { o: o.to_owned(), lse: lse.to_owned() };
    let dsink = sums(inputs, output, forward, |row: Row| row.gradient());
    let dsink = dsink.map(|dsink| dsink.mapv(|x| x as f32));
    let [gradients] = backward_groups(problem, [dsink], |index, head_kv| {
        let group_size = problem.heads().group_size();
        let heads = (head_kv * group_size..(head_kv + 1) * group_size).map(|head_q| {
            let (dout, dlse) = output.head(problem, index, head_q);
            let (dout, dlse) = (dout.mapv(|x| x as f32), dlse.mapv(|x| x as f32));
            let o = gather(&o, problem.rows_q(), index, head_q).mapv(|x| x as f32);
            let (batch, first) = problem.rows_q().start(index);
            let rows = Slice::from(first..first + problem.rows_q().len(index));
            let lse = lse.index_axis(Axis(0), batch).index_axis_move(Axis(0), head_q);
            QueryHead {
                head: inputs.head(index, head_q).to_f32(),
                delta: (&dout * &o).sum_axis(Axis(1)) - dlse, // A3:1
                lse: lse.slice_axis(Axis(0), rows).to_owned(),
                dout,
            }
        });
        [Group { problem, index, tiles, precision, heads: heads.collect() }.gradients()]
    });
    Ok(gradients)
}

/// Inputs of Algorithm 3 for one query head.
struct QueryHead {
    head: Head32,
    dout: Array2<f32>,
    lse: Array1<f32>,
    /// D = rowsum(dO ∘ O) − dLSE
    delta: Array1<f32>,
}

/// The query heads that share one K and V.
struct Group<'a> {
    problem: &'a KnownProblem,
    index: usize,
    tiles: Tiles,
    precision: Precision,
    heads: Vec<QueryHead>,
}

/// dK_j and dV_j of one block of keys.
struct KeyBlock {
    dk: Array2<f32>,
    dv: Array2<f32>,
}

impl Group<'_> {
    fn gradients(&self) -> GroupGradients<f32> {
        let keys = self.problem.lengths(self.index).k;
        let mut dq: Vec<Array2<f32>> = self.heads.iter().map(|h| Array2::zeros(h.head.q.dim())).collect();
        let mut dk = Array2::zeros((keys, self.problem.head_dim()));
        let mut dv = Array2::zeros((keys, self.problem.head_dim_v()));
        for j in 0..keys.div_ceil(self.tiles.keys) {
            let block = self.key_block(j, &mut dq);
            let first = j * self.tiles.keys;
            let keys = Slice::from(first..first + block.dk.nrows());
            dk.slice_axis_mut(Axis(0), keys).assign(&block.dk);
            dv.slice_axis_mut(Axis(0), keys).assign(&block.dv);
        }
        // The softmax scale in front of dS is applied at the end: one multiplication an element of dQ and dK.
        let scale = self.problem.softmax_scale().natural() as f32;
        let finish = |x: Array2<f32>, factor: f32| x.mapv(|x| self.precision.round(x * factor));
        GroupGradients {
            dq: dq.into_iter().map(|dq| finish(dq, scale)).collect(),
            dk: finish(dk, scale),
            dv: finish(dv, 1.0),
            dtables: vec![],
        }
    }

    /// The consumer and the dQ writer of the CTA that owns key block `j`.
    fn key_block(&self, j: usize, dq: &mut [Array2<f32>]) -> KeyBlock {
        let len = self.problem.lengths(self.index);
        let keys = self.tiles.keys.min(len.k - j * self.tiles.keys);
        let mut dk = Array2::zeros((keys, self.problem.head_dim())); // A3:16
        let mut dv = Array2::zeros((keys, self.problem.head_dim_v())); // A3:16
        for (query, dq) in self.heads.iter().zip(dq) {
            for i in 0..len.q.div_ceil(self.tiles.rows) {
                // A3:18, the loop over blocks of query rows.
                let tile = QueryTile::new(self.problem, &query.head, len, i, self.tiles, self.precision);
                let rows = Slice::from(i * self.tiles.rows..i * self.tiles.rows + tile.rows());
                let dout = query.dout.slice_axis(Axis(0), rows);
                let (p, ds) = query.p_and_ds(&tile, j, dout, rows); // A3:19-25
                dv += &p.t().dot(&dout); // A3:26
                dk += &ds.t().dot(&tile.q()); // A3:27
                let dq_local = ds.dot(&tile.k(j)); // A3:28
                let mut dq_i = dq.slice_axis_mut(Axis(0), rows);
                dq_i += &dq_local; // A3:32-33
            }
        }
        KeyBlock { dk, dv }
    }
}

impl QueryHead {
    /// P_i^(j) and dS_i^(j), rounded.
    fn p_and_ds(
        &self,
        tile: &QueryTile<'_>,
        j: usize,
        dout: ArrayView2<'_, f32>,
        rows: Slice,
    ) -> (Array2<f32>, Array2<f32>) {
        let lse = self.lse.slice_axis(Axis(0), rows); // A3:20
        let delta = self.delta.slice_axis(Axis(0), rows); // A3:20
        let (s, slopes) = tile.scores_and_slopes(j); // A3:21
        let mut ds = dout.dot(&tile.v(j).t()); // A3:22-23, dP
        let mut p = s.clone();
        for (((i, key), p), ds) in p.indexed_iter_mut().zip(&mut ds) {
            // A hidden pair contributes nothing, and neither does a row that sees no key: its LSE is -inf.
            if !tile.allows(i, j, key) || lse[i] == f32::NEG_INFINITY {
                (*p, *ds) = (0.0, 0.0);
                continue;
            }
            let s = *p;
            *p = s.mul_add(tile.unit.log2, -lse[i] * std::f32::consts::LOG2_E).exp2(); // A3:24
            *ds = *p * (*ds - delta[i]) * slopes[[i, key]]; // A3:25
        }
        let round = |x: Array2<f32>| x.mapv(|x| tile.precision.round(x));
        (round(p), round(ds))
    }
}
