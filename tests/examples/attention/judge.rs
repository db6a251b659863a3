//! Chosen rows against the oracle, by the error law.
//!
//! The keys that a row sees are neighbours, so that a row is a problem of its own without a mask: one query, those keys. Its
//! bound is the law's for that problem; the bound of all chosen rows is the largest of theirs, which is no more than what the
//! law allows the whole problem.

use std::collections::BTreeMap;
use std::ops::Range;

use fa3::reference::law::ForwardLaw;
use fa3::reference::{Inputs as Arrays, Precision};
use fa3::types::{Lengths, Mask, Problem, ProblemSpec, Shape};

use crate::tensor::{mix, rows};
use crate::trial::{Inputs, Outputs};

/// Problems with no more rows are judged in all rows.
const ALL_ROWS: usize = 600;

/// What was judged.
#[derive(Clone, Copy, Default)]
pub(crate) struct Judged {
    pub(crate) rows: usize,
    /// The largest error over what is allowed.
    pub(crate) ratio: f64,
}

/// Rows of a head that see the same keys.
type Groups = BTreeMap<(usize, usize, usize, usize), Vec<usize>>;

/// # Errors
/// The first row that is not as it must be.
pub(crate) fn judge(
    problem: &Problem,
    tile_m: usize,
    inputs: &Inputs,
    outputs: &Outputs,
) -> Result<Judged, String> {
    if let Some(fault) = outputs.o.fault() {
        return Err(fault);
    }
    if let Some(nan) = outputs.lse.iter().position(|lse| lse.is_nan()) {
        return Err(format!("element {nan} of lse is NaN"));
    }
    let mut groups = Groups::new();
    for (batch, row, head) in chosen(problem, tile_m) {
        let keys = visible(problem.mask(), row, problem.lengths(batch));
        groups.entry((batch, head, keys.start, keys.end)).or_default().push(row);
    }
    let precision = Precision::of_output(problem.dtype());
    let (mut bound, mut judged, mut errors) = (0.0f64, Judged::default(), Vec::new());
    for ((batch, head, start, end), rows) in groups {
        judged.rows += rows.len();
        if start >= end {
            empty(problem, outputs, batch, head, &rows)?;
            continue;
        }
        let head_kv = problem.heads().kv_head(head);
        let q = inputs.q.gather(batch, head, rows.iter().copied());
        let [k, v] = [&inputs.k, &inputs.v].map(|x| x.gather(batch, head_kv, start..end));
        let alone = alone(problem, rows.len(), end - start);
        let arrays = Arrays::new(&alone, q.view(), k.view(), v.view()).map_err(|error| error.to_string())?;
        let law = ForwardLaw::new(&arrays, precision);
        bound = bound.max(law.bound());
        let given = outputs.o.gather(batch, head, rows.iter().copied());
        for ((index, given), &expected) in given.indexed_iter().zip(&law.oracle().o) {
            let (row, column) = (rows[index.1], index.3);
            errors.push(((f64::from(*given) - expected).abs(), [batch, row, head, column], *given, expected));
        }
        for (&row, &expected) in rows.iter().zip(&law.oracle().lse) {
            let given = outputs.lse(problem, batch, row, head);
            let allowed = 1e-5 * expected.abs().max(1.0);
            let error = (f64::from(given) - expected).abs();
            if error.is_nan() || error > allowed {
                return Err(format!(
                    "lse of row {row}, head {head}, sequence {batch} is {given}, not {expected}"
                ));
            }
            judged.ratio = judged.ratio.max(error / allowed);
        }
    }
    for (error, at, given, expected) in errors {
        if error.is_nan() || error > bound {
            return Err(format!(
                "o at {at:?} is {given}, not {expected}: {error:.2e} of {bound:.2e} allowed"
            ));
        }
        judged.ratio = judged.ratio.max(error / bound);
    }
    Ok(judged)
}

fn empty(
    problem: &Problem,
    outputs: &Outputs,
    batch: usize,
    head: usize,
    rows: &[usize],
) -> Result<(), String> {
    for &row in rows {
        let lse = outputs.lse(problem, batch, row, head);
        if lse != f32::NEG_INFINITY || outputs.o.row(batch, row, head).iter().any(|&o| o != 0) {
            return Err(format!(
                "row {row} of head {head} of sequence {batch} sees no key, and its lse is {lse}"
            ));
        }
    }
    Ok(())
}

/// Some rows of one head of `problem` with the keys that they see.
fn alone(problem: &Problem, rows: usize, keys: usize) -> Problem {
    let q = Shape { batch: 1, seqlen: rows, heads: 1, head_dim: problem.head_dim() };
    let mut spec =
        ProblemSpec::dense(problem.dtype(), q, Shape { seqlen: keys, ..q }).head_dim_v(problem.head_dim_v());
    spec.softmax_scale = Some(problem.softmax_scale().natural());
    spec.softcap = problem.softcap().map(|cap| cap.bound());
    spec.validate().expect("a part of a valid problem is one")
}

/// The keys that a row sees.
///
/// # Panics
/// If [`Mask::allows`] says otherwise at their ends.
fn visible(mask: Mask, row: usize, len: Lengths) -> Range<usize> {
    let (left, right) = mask.reach();
    let (position, keys) = (row as i64 + len.k as i64 - len.q as i64, len.k as i64);
    let start = left.map_or(0, |left| (position - i64::from(left)).clamp(0, keys));
    let end = right.map_or(keys, |right| (position + i64::from(right) + 1).clamp(start, keys));
    let (start, end) = (start as usize, end as usize);
    let sees = |key: usize| mask.allows(row, key, len);
    let inside = start == end || (sees(start) && sees(end - 1));
    assert!(
        inside && !start.checked_sub(1).is_some_and(sees) && !sees(end),
        "{mask} of row {row} of {len:?}"
    );
    start..end
}

/// (sequence, row, head): all of a small problem; of others the first and last rows, those around the edges of tiles and
/// where the mask's sides meet the matrix's corners, and some at random, of a few heads.
fn chosen(problem: &Problem, tile_m: usize) -> Vec<(usize, usize, usize)> {
    let shape = problem.o().shape;
    if shape.batch * shape.seqlen * shape.heads <= ALL_ROWS {
        return rows(shape).collect();
    }
    let len = problem.lengths(0);
    let edges = [0, 64, tile_m, len.q / 2, len.q / tile_m * tile_m, len.q.saturating_sub(len.k), len.q];
    let mut rows: Vec<usize> =
        edges.into_iter().flat_map(|edge| [edge.wrapping_sub(1), edge, edge + 1]).collect();
    let random = |part: u64, below: usize| (mix(part ^ (len.q * 31 + len.k) as u64) % below as u64) as usize;
    rows.extend((0..5).map(|part| random(part, len.q)));
    rows.retain(|&row| row < len.q);
    rows.sort_unstable();
    rows.dedup();
    let mut heads =
        vec![(0, 0), (random(7, shape.batch), random(8, shape.heads)), (shape.batch - 1, shape.heads - 1)];
    heads.dedup();
    heads.into_iter().flat_map(|(batch, head)| rows.iter().map(move |&row| (batch, row, head))).collect()
}
