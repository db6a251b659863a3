//! Judges e4m3 results by the FP8 error law. The baselines of this law take whole problems, so slices of rows are
//! judged as problems of their own.

use fa3_ref::Forward;
use fa3_ref::rows::SatisfiedRows;
use fa3_tests::{Arithmetic, Case, Judge, Values};
use fa3_types::{Mask, Problem};
use ndarray::{Array3, Array4};

use super::tensor::Tensor;
use super::trial::{Inputs, Outputs};

/// Number of rows that are judged together.
const ROWS: usize = 32;

/// Judges the first, the middle and the last rows of the first head and of the last head.
///
/// # Errors
/// The violation of the law.
pub(super) fn judge(problem: &Problem, inputs: &Inputs, outputs: &Outputs) -> Result<SatisfiedRows, String> {
    let (rows, heads) = (problem.q().shape.seqlen, problem.heads().q());
    let count = rows.min(ROWS);
    let mut satisfied = SatisfiedRows { rows: 0, ratio: 0.0 };
    for (batch, head) in [(0, 0), (problem.batch() - 1, heads - 1)] {
        for first in [0, (rows - count) / 2, rows - count] {
            let part = Part { problem, batch, head, first, count };
            if let Some(ratio) = part.judge(inputs, outputs)? {
                satisfied.rows += count;
                satisfied.ratio = satisfied.ratio.max(ratio);
            }
        }
    }
    Ok(satisfied)
}

/// Rows of one head of one sequence.
struct Part<'p> {
    problem: &'p Problem,
    batch: usize,
    head: usize,
    first: usize,
    count: usize,
}

impl Part<'_> {
    /// The largest ratio of an error to its bound, or `None` if no row sees a key.
    fn judge(&self, inputs: &Inputs, outputs: &Outputs) -> Result<Option<f64>, String> {
        let &Part { problem, batch, head, first, count } = self;
        let Some((mask, keys)) = self.mask() else { return Ok(None) };
        let part =
            problem.of_rows(count, keys).spec().mask(mask).known().map_err(|error| error.to_string())?;
        let kv_head = head / problem.heads().group_size();
        let of = |x: &Tensor, first: usize, rows: usize, head: usize| {
            Array4::from_shape_fn((1, rows, 1, x.desc.shape.head_dim), |(_, row, _, element)| {
                x.number(x.row(batch, first + row, head)[element])
            })
        };
        let o = of(&outputs.o, first, count, head);
        let values = Values {
            q: of(&inputs.q, first, count, head),
            k: of(&inputs.k, 0, keys, kv_head),
            v: of(&inputs.v, 0, keys, kv_head),
            dout: o.clone(),
            qv: None,
            sink: None,
        };
        let lse = Array3::from_shape_fn((1, 1, count), |(_, _, row)| {
            outputs.lse(problem, batch, first + row, head)
        });
        let name = format!("rows from {first} of head {head} of sequence {batch}");
        let case = Case::normal(&name, part, 0);
        let verdict = Judge::new(&case, &values).forward(Arithmetic::Fp8RoundedSums, &Forward { o, lse }, "");
        let parts = verdict.map_err(|violation| format!("{name}: {violation}"))?;
        Ok(Some(parts.iter().map(|part| part.ratio).fold(0.0, f64::max)))
    }

    /// The mask of these rows as a problem of their own, and the number of keys of this problem. Masks are aligned to
    /// the last row and the last key.
    fn mask(&self) -> Option<(Mask, usize)> {
        let keys = self.problem.k().shape.seqlen;
        let below = self.problem.q().shape.seqlen - self.first - self.count;
        let (left, right) = self.problem.mask().reach();
        // Number of last keys that none of these rows sees. The mask shifts by the rows below, less the hidden keys.
        let hidden = right.map_or(0, |right| below.saturating_sub(right as usize));
        let moved = (below - hidden) as u32;
        let mask = Mask::window(left.map(|left| left + moved), right.map(|right| right - moved));
        (hidden < keys).then(|| (mask, keys - hidden))
    }
}
