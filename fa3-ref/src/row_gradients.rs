//! The error law on the gradients of single rows of O, for problems too large for judging all gradients.
//!
//! If dO is zero but for one row of a head of K and V, then dK and dV of this head, and dQ of its query heads, are the
//! gradients of a problem of its own without a mask: one query and the keys that it sees. All other elements are zero.

use ndarray::{ArrayView1, ArrayView4, Axis};

use crate::law::BackwardLaw;
use crate::rows::{RowIndex, RowViolation, SatisfiedRows, alone, visible};
use crate::{Element, Inputs, OutputGradients, Precision};

/// The error law for the gradients of one row of O in a dense problem.
#[derive(Clone, Debug)]
pub struct RowGradients {
    row: RowIndex,
    head_kv: usize,
    group: usize,
    /// The keys that the row sees.
    keys: Vec<usize>,
    /// The law for these keys; `None` if there are none.
    law: Option<BackwardLaw>,
}

impl RowGradients {
    /// Runs the oracle and the baseline, standard attention in `precision`, on a row whose dO is `dout`.
    ///
    /// # Panics
    /// If the problem has no such row, or has packed sequences or a function of scores, or if `dout` is no row of O.
    pub fn new<T: Element>(
        inputs: &Inputs<'_, T>,
        precision: Precision,
        row: RowIndex,
        dout: ArrayView1<'_, T>,
    ) -> RowGradients {
        let problem = inputs.problem();
        let starts = [problem.rows_q(), problem.rows_k()].map(|rows| rows.start(row.sequence));
        assert_eq!(starts, [(row.sequence, 0); 2], "packed sequences");
        let keys: Vec<usize> =
            visible(problem, [row.sequence, row.head, row.row]).into_iter().flatten().collect();
        let law = (!keys.is_empty()).then(|| {
            let dout = dout.insert_axis(Axis(0)).insert_axis(Axis(0)).insert_axis(Axis(0));
            let law =
                |inputs: &Inputs<'_, T>| BackwardLaw::new(inputs, OutputGradients::from(dout), precision);
            let law = alone(inputs, (row.sequence, row.head), &[row.row], &keys, law);
            law.expect("dO is a row of O")
        });
        let (head_kv, group) = (problem.heads().kv_head(row.head), problem.heads().group_size());
        RowGradients { row, head_kv, group, keys, law }
    }

    /// Judges dQ (batch, seqlen_q, heads_q, head_dim), dK and dV (batch, seqlen_k, heads_kv, ...): all elements of the
    /// row's sequence and its head of K and V.
    ///
    /// # Errors
    /// The first element past its bound.
    ///
    /// # Panics
    /// If the arrays do not have these shapes.
    pub fn check<T: Element>(
        &self,
        [dq, dk, dv]: [ArrayView4<'_, T>; 3],
    ) -> Result<SatisfiedRows, RowViolation> {
        let RowGradients { row: RowIndex { sequence, head, row }, head_kv, group, keys, law } = self;
        let mut satisfied = SatisfiedRows { rows: 1, ratio: 0.0 };
        let mut judge = |what, of: ArrayView4<'_, T>, head: usize, which: usize, rows: &[usize]| {
            let of_head = of.index_axis(Axis(0), *sequence).index_axis_move(Axis(1), head);
            let law = law.as_ref().map(|law| (law.bounds()[which], law.oracle()));
            for (index, given) in of_head.rows().into_iter().enumerate() {
                let place = rows.binary_search(&index).ok();
                for (column, &given) in given.iter().enumerate() {
                    let expected = law.as_ref().zip(place).map(|((bound, oracle), place)| {
                        let oracle = [&oracle.dq, &oracle.dk, &oracle.dv][which];
                        (oracle[[0, place, 0, column]], *bound)
                    });
                    let (expected, bound) = expected.unwrap_or((0.0, 0.0));
                    satisfied.judge(
                        what,
                        || vec![*sequence, index, head, column],
                        given.into(),
                        expected,
                        bound,
                    )?;
                }
            }
            Ok(())
        };
        for of_group in head_kv * group..(head_kv + 1) * group {
            judge("dq", dq, of_group, 0, if of_group == *head { std::slice::from_ref(row) } else { &[] })?;
        }
        judge("dk", dk, *head_kv, 1, keys)?;
        judge("dv", dv, *head_kv, 2, keys)?;
        Ok(satisfied)
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask, ProblemSpec, Shape};
    use half::f16;
    use ndarray::Array4;

    use super::*;
    use crate::tiled;

    /// The gradients of Algorithm 3 satisfy the law; no other elements do.
    #[test]
    fn right_gradients_satisfy_it_and_wrong_ones_do_not() {
        let q = Shape { batch: 2, seqlen: 20, heads: 4, head_dim: 16 };
        for (mask, at) in [(Mask::None, 7), (Mask::Causal, 12), (Mask::Causal, 0)] {
            let spec = ProblemSpec::dense(Dtype::F16, q, Shape { seqlen: 15, heads: 2, ..q }).mask(mask);
            let problem = spec.known().unwrap();
            let number = |seed: usize| {
                move |(b, s, h, d): (usize, usize, usize, usize)| {
                    f16::from_f32(((7 * b + 5 * s + 3 * h + d * d + seed) as f32).sin())
                }
            };
            let tensor = |shape: Shape, seed| Array4::from_shape_fn(shape.dims(), number(seed));
            let [q, k, v] =
                [(problem.q(), 1), (problem.k(), 2), (problem.v(), 3)].map(|(x, seed)| tensor(x.shape, seed));
            let row = RowIndex { sequence: 1, head: 3, row: at };
            let mut dout = Array4::from_elem(problem.o().shape.dims(), f16::ZERO);
            for column in 0..16 {
                dout[[1, at, 3, column]] = number(4)((1, at, 3, column));
            }
            let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
            let of_row = dout.index_axis(Axis(0), 1).index_axis_move(Axis(1), 3).index_axis_move(Axis(0), at);
            let law = RowGradients::new(&inputs, Precision::F16, row, of_row);
            let tiles = tiled::Tiles::new(16, 16).unwrap();
            let flash = tiled::forward(&inputs, tiled::Algorithm::TwoStage, tiles, Precision::F16);
            let (o, lse) = (flash.o.view(), flash.lse.view());
            let gradients = tiled::backward(&inputs, dout.view(), o, lse, tiles, Precision::F16).unwrap();
            let mut all = [gradients.dq, gradients.dk, gradients.dv].map(|x| x.mapv(f16::from_f32));
            let check = |all: &[Array4<f16>; 3]| law.check(all.each_ref().map(|x| x.view()));
            let satisfied = check(&all).unwrap();
            // Row 0 sees no key.
            assert_eq!(satisfied.rows, 1);
            assert_eq!(satisfied.ratio > 0.0, at > 0, "{satisfied:?}");
            for (which, index) in
                [(0, [1, at, 3, 5]), (0, [1, 19, 2, 0]), (1, [1, 2, 1, 1]), (2, [1, 14, 1, 0])]
            {
                let right = all[which][index];
                for wrong in [right + f16::from_f32(0.2), f16::NAN] {
                    all[which][index] = wrong;
                    let violation = check(&all).unwrap_err();
                    assert_eq!((violation.what, violation.at), (["dq", "dk", "dv"][which], index.to_vec()));
                }
                all[which][index] = right;
            }
            // Another sequence is not judged.
            all[1][[0, 0, 1, 0]] = f16::NAN;
            check(&all).unwrap();
        }
    }
}
