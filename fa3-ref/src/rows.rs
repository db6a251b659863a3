//! The error law on selected rows, for problems too large for judging every row.
//!
//! A row is a problem of its own without a mask: one query and the keys that it sees. Its bound is the bound of the
//! [law](crate::law) for that problem. The bound of all selected rows is the largest of their bounds, which is no more
//! than the law's bound for the whole problem.

use std::collections::BTreeMap;
use std::ops::Range;

use fa3_types::{KnownProblem, Lengths};
use ndarray::{Array2, ArrayView2, ArrayView3, ArrayView4, Axis};
use rayon::prelude::*;

use crate::law::{ForwardLaw, LseTolerance};
use crate::norms::error;
use crate::{Element, Inputs, Precision, inputs};

/// Problems with at most this many rows are judged in all rows.
const ALL_ROWS: usize = 600;

/// A row of O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowIndex {
    /// The sequence.
    pub sequence: usize,
    /// The query head.
    pub head: usize,
    /// The row of the sequence.
    pub row: usize,
}

/// Rows that satisfied the law.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SatisfiedRows {
    /// Number of judged rows.
    pub rows: usize,
    /// The largest quotient of an element's error and its allowed error.
    pub ratio: f64,
}

/// An element that broke the law.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "{what} at {at:?} is {given:e}, expected {expected:e}, off by {error:.2e} where {bound:.2e} is allowed"
)]
pub struct RowViolation {
    /// Name of the judged tensor: o, lse, dq, dk or dv.
    pub what: &'static str,
    /// The element's index in this tensor.
    pub at: Vec<usize>,
    /// The value judged.
    pub given: f64,
    /// The value expected.
    pub expected: f64,
    /// The error.
    pub error: f64,
    /// The allowed error.
    pub bound: f64,
}

/// The error law for some rows of a forward pass.
#[derive(Clone, Debug)]
pub struct RowsLaw {
    groups: Vec<Group>,
    bound: f64,
    /// The tolerance of LSE.
    tolerance: LseTolerance,
}

/// The map key of rows that share a problem: the rows' sequence, head, and ranges of visible keys.
type Alike = (usize, usize, Vec<[usize; 2]>);

/// Rows of a head that see the same keys.
#[derive(Clone, Debug)]
struct Group {
    /// The rows' batch index in the tensors O and LSE, which is 0 for packed sequences.
    batch: usize,
    head: usize,
    rows: Vec<usize>,
    o: Array2<f64>,
    lse: Vec<f64>,
    bound: f64,
    /// Whether these rows see no key.
    is_empty: bool,
}

impl RowsLaw {
    /// Runs the oracle and the baseline, standard attention in `precision`, on `rows`.
    ///
    /// # Panics
    /// If the problem has no such row, or has a function of scores, which depends on positions.
    pub fn new<T: Element>(inputs: &Inputs<'_, T>, precision: Precision, rows: &[RowIndex]) -> RowsLaw {
        RowsLaw::with(inputs, rows, LseTolerance::F32, |inputs| ForwardLaw::new(inputs, precision))
    }

    /// Applies a given law to the rows' problems, with a tolerance of LSE.
    ///
    /// # Panics
    /// If the problem has no such row, or has a function of scores, which depends on positions.
    pub fn with<T: Element>(
        inputs: &Inputs<'_, T>,
        rows: &[RowIndex],
        tolerance: LseTolerance,
        law: impl Fn(&Inputs<'_, T>) -> ForwardLaw + Sync,
    ) -> RowsLaw {
        let problem = inputs.problem();
        let mut alike: BTreeMap<Alike, Vec<usize>> = BTreeMap::new();
        for &RowIndex { sequence, head, row } in rows {
            let keys =
                visible(problem, [sequence, head, row]).iter().map(|keys| [keys.start, keys.end]).collect();
            alike.entry((sequence, head, keys)).or_default().push(row);
        }
        let groups: Vec<Group> = alike
            .into_par_iter()
            .map(|((sequence, head, keys), rows)| {
                let keys = keys.into_iter().flat_map(|[start, end]| start..end).collect();
                Group::new(inputs, &law, (sequence, head), rows, keys)
            })
            .collect();
        let bound = groups.iter().map(|group| group.bound).fold(0.0, f64::max);
        RowsLaw { groups, bound, tolerance }
    }

    /// The largest allowed |o − oracle| in the rows.
    pub fn bound(&self) -> f64 {
        self.bound
    }

    /// Judges the chosen rows of O (batch, seqlen_q, heads_q, head_dim_v) and LSE (batch, heads_q, seqlen_q).
    ///
    /// # Errors
    /// The first element past its bound.
    ///
    /// # Panics
    /// If the arrays do not have these shapes.
    pub fn check<T: Element>(
        &self,
        o: ArrayView4<'_, T>,
        lse: ArrayView3<'_, f32>,
    ) -> Result<SatisfiedRows, RowViolation> {
        let mut satisfied = SatisfiedRows::default();
        for group in &self.groups {
            let (batch, head) = (group.batch, group.head);
            let o = o.index_axis(Axis(0), batch).index_axis_move(Axis(1), head);
            for ((&row, expected_o), &expected) in group.rows.iter().zip(group.o.rows()).zip(&group.lse) {
                let bound = if expected.is_finite() { self.tolerance.at(expected) } else { 0.0 };
                // A row without keys is exactly 0.
                let bound_o = if group.is_empty { 0.0 } else { self.bound };
                let at = || vec![batch, head, row];
                satisfied.judge("lse", at, lse[[batch, head, row]].into(), expected, bound)?;
                for (column, (&given, &expected)) in o.row(row).iter().zip(expected_o).enumerate() {
                    let at = || vec![batch, row, head, column];
                    satisfied.judge("o", at, given.into(), expected, bound_o)?;
                }
                satisfied.rows += 1;
            }
        }
        Ok(satisfied)
    }
}

impl SatisfiedRows {
    pub(crate) fn judge(
        &mut self,
        what: &'static str,
        at: impl Fn() -> Vec<usize>,
        given: f64,
        expected: f64,
        bound: f64,
    ) -> Result<(), RowViolation> {
        let error = error(given, expected).abs();
        if error > bound {
            return Err(RowViolation { what, at: at(), given, expected, error, bound });
        }
        if error > 0.0 {
            self.ratio = self.ratio.max(error / bound);
        }
        Ok(())
    }
}

impl Group {
    fn new<T: Element>(
        inputs: &Inputs<'_, T>,
        law: impl Fn(&Inputs<'_, T>) -> ForwardLaw,
        (sequence, head): (usize, usize),
        rows: Vec<usize>,
        keys: Vec<usize>,
    ) -> Group {
        let problem = inputs.problem();
        let (batch, first) = problem.rows_q().start(sequence);
        let place = |rows: Vec<usize>| rows.into_iter().map(|row| first + row).collect();
        if keys.is_empty() {
            let lse = inputs.sink().map_or(f64::NEG_INFINITY, |sink| sink[head].into());
            let (o, lse) = (Array2::zeros((rows.len(), problem.head_dim_v())), vec![lse; rows.len()]);
            return Group { batch, head, rows: place(rows), o, lse, bound: 0.0, is_empty: true };
        }
        let law = alone(inputs, (sequence, head), &rows, &keys, law);
        let o = law.oracle().o.index_axis(Axis(0), 0).index_axis_move(Axis(1), 0).to_owned();
        let lse = law.oracle().lse.iter().copied().collect();
        Group { batch, head, rows: place(rows), o, lse, bound: law.bound(), is_empty: false }
    }
}

/// The result of `law` for the problem without a mask of some rows of a head, and of the keys that they see.
pub(crate) fn alone<T: Element, L>(
    inputs: &Inputs<'_, T>,
    (sequence, head): (usize, usize),
    rows: &[usize],
    keys: &[usize],
    law: impl FnOnce(&Inputs<'_, T>) -> L,
) -> L {
    let problem = inputs.problem();
    let alone = problem.of_rows(rows.len(), keys.len()).known().expect("a dense problem has its lengths");
    let head_kv = problem.heads().kv_head(head);
    let (q, k, v) = (inputs.q(), inputs.k(), inputs.v());
    let q = inputs::rows(&q, problem.rows_q(), sequence, head).select(Axis(0), rows);
    let [k, v] = [&k, &v].map(|x| inputs::rows(x, problem.rows_k(), sequence, head_kv).select(Axis(0), keys));
    let sink = inputs.sink().map(|sink| sink.slice_axis_move(Axis(0), (head..head + 1).into()));
    let inputs = Inputs::with_sink(&alone, [&q, &k, &v].map(|x| whole(x.view())), sink);
    law(&inputs.expect("a part of a problem has the part's shapes"))
}

/// A matrix as a tensor of one sequence with one head.
fn whole<T>(matrix: ArrayView2<'_, T>) -> ArrayView4<'_, T> {
    matrix.insert_axis(Axis(1)).insert_axis(Axis(0))
}

/// The keys that a row sees.
pub(crate) fn visible(problem: &KnownProblem, at @ [sequence, _, row]: [usize; 3]) -> Vec<Range<usize>> {
    let len = problem.lengths(sequence);
    assert!(row < len.q, "row {row} of a sequence of {} rows", len.q);
    if let Some(ranges) = problem.intervals_of_row(at) {
        return ranges;
    }
    let sees = |key: &usize| problem.mask().allows(row, *key, len);
    match ((0..len.k).find(sees), (0..len.k).rfind(sees)) {
        (Some(first), Some(last)) => std::iter::once(first..last + 1).collect(),
        _ => Vec::new(),
    }
}

/// The rows where errors are most likely to show. For a small problem these are all rows. For others they are, in a few
/// heads, the first and last rows, rows around the edges of tiles (for each number of rows in `tile_rows`), rows where
/// the mask's bounds meet the matrix's corners, and some random rows.
///
/// # Panics
/// If a tile has no rows.
pub fn telling_rows(problem: &KnownProblem, tile_rows: &[usize]) -> Vec<RowIndex> {
    let (sequences, heads) = (problem.batch(), problem.heads().q());
    let seqlen = |sequence| problem.lengths(sequence).q;
    let every_head = (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head)));
    let count = heads * (0..sequences).map(seqlen).sum::<usize>();
    if count <= ALL_ROWS {
        let index = |(sequence, head)| (0..seqlen(sequence)).map(move |row| RowIndex { sequence, head, row });
        return every_head.flat_map(index).collect();
    }
    let random = |part: u64, below: usize| (mix(part ^ count as u64) % below as u64) as usize;
    let mut few = vec![(0, 0), (random(7, sequences), random(8, heads)), (sequences - 1, heads - 1)];
    few.sort_unstable();
    few.dedup();
    let index = |(sequence, head)| {
        let len = problem.lengths(sequence);
        let mut rows = edges(len, tile_rows);
        rows.extend((0..5).filter(|_| len.q > 0).map(|part| random(part, len.q)));
        rows.sort_unstable();
        rows.dedup();
        rows.into_iter().map(move |row| RowIndex { sequence, head, row })
    };
    few.into_iter().flat_map(index).collect()
}

/// The rows at, before and after each edge.
fn edges(len: Lengths, tile_rows: &[usize]) -> Vec<usize> {
    let tiles = tile_rows.iter().flat_map(|&rows| [rows, len.q / rows * rows]);
    let edges = [0, 64, len.q / 2, len.q.saturating_sub(len.k), len.q].into_iter().chain(tiles);
    let around = edges.flat_map(|edge| [edge.wrapping_sub(1), edge, edge + 1]);
    around.filter(|&row| row < len.q).collect()
}

/// SplitMix64's finaliser.
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use fa3_types::{Dtype, Mask, ProblemSpec, SequenceRows, Shape};
    use half::f16;
    use ndarray::{Array1, Array3, Array4};

    use crate::tiled;

    const MASKS: [Mask; 5] = [
        Mask::None,
        Mask::Causal,
        Mask::Window { left: Some(5), right: Some(2) },
        Mask::Window { left: None, right: Some(3) },
        Mask::chunk(NonZeroU32::new(7).unwrap()),
    ];

    /// Numbers around 0, which only the shape and the seed determine.
    fn tensor(shape: Shape, seed: usize) -> Array4<f16> {
        let number =
            |(b, s, h, d)| (mix((((b * 97 + s) * 97 + h) * 97 + d + seed * 1_000_003) as u64) % 4096) as f32;
        Array4::from_shape_fn(shape.dims(), |index| f16::from_f32(number(index) / 1024.0 - 2.0))
    }

    /// A problem with its tensors, and the result of Algorithm 2.
    struct Case {
        problem: KnownProblem,
        qkv: [Array4<f16>; 3],
        sink: Option<Array1<f32>>,
        o: Array4<f16>,
        lse: Array3<f32>,
    }

    impl Case {
        fn new(spec: ProblemSpec) -> Case {
            Case::of(spec.known().unwrap())
        }

        fn of(problem: KnownProblem) -> Case {
            let qkv =
                [(problem.q(), 1), (problem.k(), 2), (problem.v(), 3)].map(|(x, seed)| tensor(x.shape, seed));
            let [q, k, v] = &qkv;
            let heads = 0..problem.heads().q();
            let sink = problem.has_sink().then(|| Array1::from_iter(heads.map(|head| head as f32 - 1.0)));
            let view = sink.as_ref().map(|sink| sink.view());
            let inputs = Inputs::with_sink(&problem, [q.view(), k.view(), v.view()], view).unwrap();
            let tiles = tiled::Tiles::new(16, 16).unwrap();
            let flash = tiled::forward(&inputs, tiled::Algorithm::TwoStage, tiles, Precision::F16);
            Case { o: flash.o.mapv(f16::from_f32), lse: flash.lse, problem, qkv, sink }
        }

        fn judge(&self, rows: &[RowIndex]) -> Result<SatisfiedRows, RowViolation> {
            let [q, k, v] = &self.qkv;
            let sink = self.sink.as_ref().map(|sink| sink.view());
            let inputs = Inputs::with_sink(&self.problem, [q.view(), k.view(), v.view()], sink).unwrap();
            RowsLaw::new(&inputs, Precision::F16, rows).check(self.o.view(), self.lse.view())
        }
    }

    /// 40 queries, 50 keys, four query heads on two KV heads, and a head_dim_v that differs from head_dim.
    fn dense(mask: Mask) -> ProblemSpec {
        let q = Shape { batch: 2, seqlen: 40, heads: 4, head_dim: 16 };
        let kv = Shape { seqlen: 50, heads: 2, ..q };
        ProblemSpec::dense(Dtype::F16, q, kv).head_dim_v(24).mask(mask)
    }

    #[test]
    fn right_results_satisfy_it_and_wrong_ones_do_not() {
        for (mask, softcap) in MASKS.into_iter().flat_map(|mask| [None, Some(1.5)].map(|cap| (mask, cap))) {
            let spec = dense(mask).softmax_scale(0.4);
            let mut case = Case::new(match softcap {
                Some(cap) => spec.softcap(cap),
                None => spec,
            });
            let rows = telling_rows(&case.problem, &[16]);
            let satisfied = case.judge(&rows).unwrap_or_else(|error| panic!("{mask}: {error}"));
            assert_eq!(satisfied.rows, 40 * 4 * 2);
            assert!(satisfied.ratio > 0.0 && satisfied.ratio <= 1.0, "{satisfied:?}");

            let chosen = [RowIndex { sequence: 1, head: 3, row: 17 }];
            let right = case.o[[1, 17, 3, 23]];
            for wrong in [right + f16::from_f32(0.1), f16::NAN, f16::INFINITY] {
                case.o[[1, 17, 3, 23]] = wrong;
                let violation = case.judge(&chosen).unwrap_err();
                assert_eq!((violation.what, violation.at), ("o", vec![1, 17, 3, 23]));
                // Other rows are not affected.
                case.judge(&[RowIndex { row: 18, ..chosen[0] }]).unwrap();
            }
            case.o[[1, 17, 3, 23]] = right;
            for wrong in [case.lse[[1, 3, 17]] + 1e-3, f32::NAN, f32::NEG_INFINITY] {
                case.lse[[1, 3, 17]] = wrong;
                let violation = case.judge(&chosen).unwrap_err();
                assert_eq!((violation.what, violation.at), ("lse", vec![1, 3, 17]));
            }
        }
    }

    #[test]
    fn the_bound_is_no_more_than_the_laws() {
        let case = Case::new(dense(Mask::Causal));
        let [q, k, v] = &case.qkv;
        let inputs = Inputs::new(&case.problem, q.view(), k.view(), v.view()).unwrap();
        let whole = ForwardLaw::new(&inputs, Precision::F16).bound();
        let rows = RowsLaw::new(&inputs, Precision::F16, &telling_rows(&case.problem, &[64])).bound;
        assert!(rows > 0.5 * whole && rows <= whole * (1.0 + 1e-12), "{rows} {whole}");
    }

    #[test]
    fn rows_without_keys_are_empty() {
        let (q, kv) = (Shape { batch: 1, seqlen: 9, heads: 1, head_dim: 8 }, 4);
        let spec = ProblemSpec::dense(Dtype::F16, q, Shape { seqlen: kv, ..q }).causal();
        let mut case = Case::new(spec);
        let first = [RowIndex { sequence: 0, head: 0, row: 0 }];
        assert_eq!(case.judge(&first), Ok(SatisfiedRows { rows: 1, ratio: 0.0 }));
        case.o[[0, 0, 0, 3]] = f16::from_f32(1e-7);
        assert_eq!(case.judge(&first).unwrap_err().at, [0, 0, 0, 3]);
        let all = telling_rows(&case.problem, &[64]);
        assert!(all.len() > 1);
        assert_eq!(case.judge(&all).unwrap_err().at, [0, 0, 0, 3]);
    }

    #[test]
    fn rows_have_their_heads_sink() {
        let q = Shape { batch: 1, seqlen: 9, heads: 3, head_dim: 8 };
        let spec = ProblemSpec::dense(Dtype::F16, q, Shape { seqlen: 4, heads: 1, ..q }).causal().sink();
        let mut case = Case::new(spec);
        let rows = telling_rows(&case.problem, &[64]);
        assert_eq!(case.judge(&rows).unwrap().rows, 27);
        // Row 0 sees no key: its LSE is the sink, and its O is 0.
        assert_eq!(case.lse[[0, 2, 0]], 1.0);
        case.lse[[0, 2, 0]] = 0.0;
        assert_eq!(case.judge(&rows).unwrap_err().at, [0, 2, 0]);
        case.lse[[0, 2, 0]] = 1.0;
        case.o[[0, 0, 2, 3]] = f16::from_f32(1e-7);
        assert_eq!(case.judge(&rows).unwrap_err().at, [0, 0, 2, 3]);
    }

    #[test]
    fn packed_rows_lie_behind_one_another() {
        let [rows_q, rows_k] = [[0, 3, 30], [0, 20, 47]].map(|starts| SequenceRows::packed(&starts).unwrap());
        let spec = ProblemSpec::packed(Dtype::F16, (2, 1), 16, &rows_q, &rows_k).causal();
        let mut case = Case::of(spec.with_rows(rows_q, rows_k).unwrap());
        let rows = telling_rows(&case.problem, &[16]);
        assert_eq!(case.judge(&rows).unwrap().rows, 2 * 30);
        case.lse[[0, 1, 3]] += 1.0;
        assert_eq!(case.judge(&rows).unwrap_err().at, [0, 1, 3]);
        case.judge(&[RowIndex { sequence: 1, head: 1, row: 1 }]).unwrap();
    }

    #[test]
    fn the_keys_that_a_row_sees_are_neighbours() {
        for (q, k) in (1..9).flat_map(|q| (0..9).map(move |k| (q, k))) {
            for mask in MASKS {
                let len = Lengths { q, k };
                let [q_shape, kv] = [q, k].map(|seqlen| Shape { batch: 1, seqlen, heads: 1, head_dim: 8 });
                let problem = ProblemSpec::dense(Dtype::F16, q_shape, kv).mask(mask).known().unwrap();
                for row in 0..q {
                    let ranges = visible(&problem, [0, 0, row]);
                    let sees = |key| ranges.iter().any(|keys| keys.contains(&key));
                    assert!((0..k).all(|key| sees(key) == mask.allows(row, key, len)), "{mask} {len:?}");
                    assert!(ranges.len() <= 1);
                }
            }
        }
    }

    #[test]
    fn rows_that_tell_most() {
        let shape = Shape { batch: 3, seqlen: 1000, heads: 5, head_dim: 8 };
        let problem = ProblemSpec::dense(Dtype::F16, shape, shape).known().unwrap();
        let rows = telling_rows(&problem, &[128, 192]);
        assert!(rows.iter().all(|at| at.sequence < 3 && at.head < 5 && at.row < 1000));
        // 1000 rows are 7 tiles of 128 and 104 rows, 5 of 192 and 40 rows.
        for row in [0, 1, 127, 128, 191, 192, 895, 896, 897, 959, 960, 999] {
            for (sequence, head) in [(0, 0), (2, 4)] {
                assert!(rows.contains(&RowIndex { sequence, head, row }), "{row}");
            }
        }
        assert!(rows.len() < 120, "{}", rows.len());
        let few = ProblemSpec::dense(Dtype::F16, Shape { seqlen: 40, ..shape }, shape).known().unwrap();
        assert_eq!(telling_rows(&few, &[128]).len(), 600);
    }
}
