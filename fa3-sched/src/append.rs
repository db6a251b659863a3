//! Append to a KV cache with rotary embedding: the rows of each thread, and the destination of each row.
//!
//! The kernel has a thread for each [`ELEMENTS`] elements of a row. Its first CTAs take the new keys. CTAs for the new
//! values, for the queries, and for the lengths after the append follow. [`Plan`] counts CTAs without knowing lengths.
//! Host and kernel share the functions that compute a row's destination: [`position`], [`used_after`], [`table_row`].

use std::fmt;

use fa3_types::{AppendProblem, Dtype, TensorDesc};

use crate::Int;

/// Threads of a CTA.
pub const THREADS: u32 = 128;

/// Elements of a row per thread: 2 chunks of 16 bytes, so that a thread has both elements of each pair that rotates.
pub const ELEMENTS: u32 = 16;

/// The largest number of rows of a tensor, counted over all heads.
const MOST_ROWS: u32 = 1 << 30;

/// The largest number of elements of a row.
const MOST_ELEMENTS: u32 = THREADS / 2 * ELEMENTS;

/// The largest number of sequences, 32⁵. Then [`levels`] is 5.
const MOST_SEQUENCES: u32 = 1 << 25;

/// The reasons why no kernel appends the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlanError {
    #[error("{tensor} has {rows} rows of all heads, more than {limit}")]
    Rows { tensor: &'static str, rows: u128, limit: u32 },
    #[error("{tensor} has rows of {given} elements, more than {limit}")]
    Elements { tensor: &'static str, given: usize, limit: u32 },
    #[error("rows are {given}, and kernels append and rotate those of f16, bf16 and e4m3")]
    Dtype { given: Dtype },
    #[error("there are {given} sequences, more than {limit}")]
    Sequences { given: usize, limit: u32 },
}

/// Rows of a tensor, counted over all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Tokens times heads. Heads vary fastest.
    pub rows: u32,
    /// Heads.
    pub heads: u32,
    /// Head dimension in units of 16 bits: two e4m3 elements count as one.
    pub head_dim: u32,
}

impl Rows {
    fn new(tensor: &'static str, TensorDesc { shape, dtype, .. }: TensorDesc) -> Result<Rows, PlanError> {
        let rows = shape.batch as u128 * shape.seqlen as u128 * shape.heads as u128;
        if rows > MOST_ROWS.into() {
            return Err(PlanError::Rows { tensor, rows, limit: MOST_ROWS });
        }
        let head_dim = shape.head_dim * dtype.bytes() / 2;
        if head_dim > MOST_ELEMENTS as usize {
            return Err(PlanError::Elements { tensor, given: shape.head_dim, limit: MOST_ELEMENTS });
        }
        Ok(Rows { rows: rows as u32, heads: shape.heads as u32, head_dim: head_dim as u32 })
    }

    /// Number of CTAs for all rows.
    pub fn ctas(&self) -> u32 {
        self.rows.div_ceil(THREADS / lanes(self.head_dim))
    }
}

/// Number of threads for a row of `head_dim` elements: a power of two, so that the last threads may be idle.
pub fn lanes(head_dim: u32) -> u32 {
    head_dim.div_ceil(ELEMENTS).next_power_of_two()
}

/// Number of steps in which a warp finds one of `count` sequences in `cu_seqlens`, reading 32 entries in each step.
pub fn levels(count: u32) -> u32 {
    (1..).find(|&levels| u64::from(count) <= 32_u64.pow(levels)).unwrap_or(1)
}

/// The row of its sequence's cache to which new row `row` goes, and whether it fits. `used` (signed) is the number of
/// rows before the append, and `capacity` < 2³¹ is the number of rows that fit.
pub fn position<T: Int>(used: T, row: T, capacity: T) -> (T, T::Bool) {
    // A negative number is at least 2³¹ when it is read as unsigned.
    let position = used.at_most(used.lit(1 << 31)) + row;
    (position, position.lt(capacity))
}

/// Length of a sequence after the append of `new` rows: 0 if the length before, `used`, was negative.
pub fn used_after<T: Int>(used: T, new: T, capacity: T) -> T {
    let (end, _) = position(used, new, capacity);
    T::select(used.lt(used.lit(1 << 31)), end.at_most(capacity), used.lit(0))
}

/// Row of the rotary tables for row `row` of a sequence whose first row is at position `base` (signed). It is clamped
/// to the rows of the tables, `0 ..= last`.
pub fn table_row<T: Int>(base: T, row: T, last: T) -> T {
    let base = T::select(base.lt(base.lit(1 << 31)), base, base.lit(0));
    (base + row).at_most(last)
}

/// Plan of an append: the rows and CTAs of each tensor.
///
/// ```
/// use fa3_sched::append::Plan;
/// use fa3_types::{AppendSpec, AppendedRows, Dtype, Sequences, Shape, TensorDesc};
///
/// let new = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 4, seqlen: 1, heads: 8, head_dim: 128 });
/// let cache = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 4, seqlen: 1024, heads: 8, head_dim: 128 });
/// let (of_new, of_cache) = (Sequences::dense(4, 1), Sequences::dense(4, 1024).used());
/// let rows =
///     AppendedRows { k_new: new, v_new: new, new: of_new, k_cache: cache, v_cache: cache, cache: of_cache };
/// let plan = Plan::new(&AppendSpec::new(rows).validate()?)?;
/// // 32 rows of keys with 8 threads each, as many of values, and the lengths.
/// assert_eq!((plan.keys().map(|keys| keys.ctas()), plan.grid()), (Some(2), 2 + 2 + 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    problem: AppendProblem,
    keys: Option<Rows>,
    values: Option<Rows>,
    queries: Option<Rows>,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(problem: &AppendProblem) -> Result<Plan, PlanError> {
        let given = problem.dtype();
        if given == Dtype::F32 {
            return Err(PlanError::Dtype { given });
        }
        let given = problem.count();
        if given > MOST_SEQUENCES as usize {
            return Err(PlanError::Sequences { given, limit: MOST_SEQUENCES });
        }
        let of = |tensor, desc: Option<TensorDesc>| desc.map(|x| Rows::new(tensor, x)).transpose();
        let rows = problem.rows();
        Ok(Plan {
            problem: *problem,
            keys: of("k_new", rows.map(|rows| rows.k_new))?,
            values: of("v_new", rows.map(|rows| rows.v_new))?,
            queries: of("q", problem.queries().map(|queries| queries.q))?,
        })
    }

    /// The problem.
    pub fn problem(&self) -> &AppendProblem {
        &self.problem
    }

    /// Rows of new keys.
    pub fn keys(&self) -> Option<Rows> {
        self.keys
    }

    /// Rows of new values.
    pub fn values(&self) -> Option<Rows> {
        self.values
    }

    /// Rows of queries.
    pub fn queries(&self) -> Option<Rows> {
        self.queries
    }

    /// Sequences.
    pub fn count(&self) -> u32 {
        self.problem.count() as u32
    }

    /// The first CTA of the values, of the queries, and of the lengths. CTAs of keys come first.
    pub fn firsts(&self) -> [u32; 3] {
        let [keys, values, queries] =
            [self.keys, self.values, self.queries].map(|x| x.map_or(0, |x| x.ctas()));
        [keys, keys + values, keys + values + queries]
    }

    /// Number of CTAs; 0 if there is nothing to launch.
    pub fn grid(&self) -> u32 {
        let [.., lengths] = self.firsts();
        lengths + if self.keys.is_some() { self.count().div_ceil(THREADS) } else { 0 }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "problem    {}", self.problem)?;
        let rows = [("keys", self.keys), ("values", self.values), ("queries", self.queries)];
        for (name, rows) in rows.into_iter().filter_map(|(name, rows)| Some((name, rows?))) {
            let (threads, ctas) = (lanes(rows.head_dim), rows.ctas());
            writeln!(f, "{name:<10} {} rows, {threads} threads a row, {ctas} CTAs", rows.rows)?;
        }
        write!(f, "grid       {} CTAs of {THREADS} threads", self.grid())
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{
        AppendRotary, AppendSpec, AppendedRows, Dtype, QueryPositions, RopeStyle, RotatedQueries,
        SequenceBase, Sequences, Shape,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::checked::Checked;

    fn entry() -> impl Strategy<Value = i32> {
        prop_oneof![-2..12, any::<i32>(), Just(i32::MIN), Just(i32::MAX)]
    }

    proptest! {
        /// The functions equal their definitions in signed 64-bit arithmetic, and no 32-bit value overflows.
        #[test]
        fn lengths_may_be_anything(
            used in entry(), row in prop_oneof![0..12, Just(i32::MAX)], capacity in prop_oneof![0..12, Just(i32::MAX)],
        ) {
            let word = |x: i32| Checked::from(x.cast_unsigned());
            let [used, row, capacity] = [used, row, capacity].map(i64::from);
            let as_word = |x: i64| word(x as i32);
            let is_there = used >= 0 && used + row < capacity;
            // Code cannot branch on a comparison of `Checked` integers, so `select` turns it into a number.
            let (at, there) = position(as_word(used), as_word(row), as_word(capacity));
            prop_assert_eq!(Checked::select(there, word(1), word(0)).0, u64::from(is_there));
            if is_there {
                prop_assert_eq!(at.0 as i64, used + row);
            }
            let after = used_after(as_word(used), as_word(row), as_word(capacity)).0 as i64;
            prop_assert_eq!(after, if used < 0 { 0 } else { (used + row).min(capacity) });
            let in_table = table_row(as_word(used), as_word(row), as_word(capacity)).0 as i64;
            prop_assert_eq!(in_table, (used.max(0) + row).min(capacity));
        }
    }

    /// An append of rows of type `of_new` to a cache of `cache` rows of type `of_cache`.
    fn append(new: Shape, cache: usize, [of_new, of_cache]: [Dtype; 2]) -> AppendSpec {
        let tensor = TensorDesc::contiguous;
        let (x, cached) = (tensor(of_new, new), tensor(of_cache, Shape { seqlen: cache, ..new }));
        let [new, cache] = [new.seqlen, cache].map(|rows| Sequences::dense(new.batch, rows));
        let (cache, k_cache, v_cache) = (cache.used(), cached, cached);
        AppendSpec::new(AppendedRows { k_new: x, v_new: x, new, k_cache, v_cache, cache })
    }

    fn problem(new: Shape, cache: usize, queries: Option<Shape>) -> AppendProblem {
        let (style, table, base) = (RopeStyle::HalfSplit, Dtype::F32, SequenceBase::Used);
        let rotary = AppendRotary { style, rotary_dim: 16, table, table_rows: 1, base };
        let mut spec = append(new, cache, [Dtype::F16; 2]).rotary(rotary);
        spec.queries = queries.map(|shape| RotatedQueries {
            q: TensorDesc::contiguous(Dtype::F16, shape),
            sequences: Sequences::packed(new.batch),
            positions: QueryPositions::Each,
        });
        spec.validate().unwrap()
    }

    #[test]
    fn rows_of_f32_have_no_kernel() {
        let new = Shape { batch: 2, seqlen: 3, heads: 1, head_dim: 32 };
        let problem = append(new, 3, [Dtype::F32; 2]).validate().unwrap();
        assert_eq!(Plan::new(&problem).unwrap_err(), PlanError::Dtype { given: Dtype::F32 });
    }

    #[test]
    fn two_elements_of_e4m3_count_as_one() {
        let new = Shape { batch: 3, seqlen: 2, heads: 2, head_dim: 96 };
        let lanes_of = |dtype| {
            let plan = Plan::new(&append(new, 50, [dtype, Dtype::E4m3]).validate().unwrap()).unwrap();
            [plan.keys(), plan.values()].map(|rows| lanes(rows.unwrap().head_dim))
        };
        assert_eq!([Dtype::E4m3, Dtype::F16].map(lanes_of), [[4, 4], [8, 8]]);
    }

    #[test]
    fn every_row_has_threads() {
        let new = Shape { batch: 5, seqlen: 3, heads: 2, head_dim: 96 };
        let queries = Shape { batch: 1, seqlen: 40, heads: 8, head_dim: 96 };
        let plan = Plan::new(&problem(new, 7, Some(queries))).unwrap();
        // A CTA has 16 rows with 8 threads each.
        assert_eq!([16, 64, 80, 96, 128, 136, 256].map(lanes), [1, 4, 8, 8, 8, 16, 16]);
        assert_eq!((plan.firsts(), plan.grid()), ([2, 4, 24], 25));
        let nothing = Shape { seqlen: 0, ..new };
        let plan = Plan::new(&problem(nothing, 7, None)).unwrap();
        assert_eq!((plan.firsts(), plan.grid()), ([0; 3], 1));
        let text = "problem    f16 (5, 0, 2, 96) to sequences of 7 rows, half-split rotary embedding of 16 by f32\n\
                    keys       0 rows, 8 threads a row, 0 CTAs\n\
                    values     0 rows, 8 threads a row, 0 CTAs\n\
                    grid       1 CTAs of 128 threads";
        assert_eq!(plan.to_string(), text);
    }

    #[test]
    fn sequences_are_found_by_few_loads() {
        assert_eq!([0, 1, 32, 33, 1024, 1025, MOST_SEQUENCES].map(levels), [1, 1, 1, 2, 2, 3, 5]);
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        let new = Shape { batch: 1, seqlen: 1 << 20, heads: 1 << 10, head_dim: 16 };
        assert!(Plan::new(&problem(new, 7, None)).is_ok());
        let refused = |new, queries| Plan::new(&problem(new, 7, queries)).unwrap_err();
        let (limit, rows) = (MOST_ROWS, 1 << 31);
        let more = Shape { heads: 1 << 11, ..new };
        assert_eq!(refused(more, None), PlanError::Rows { tensor: "k_new", rows, limit });
        let few = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 16 };
        assert_eq!(refused(few, Some(more)), PlanError::Rows { tensor: "q", rows, limit });
        let wide = Shape { head_dim: 1032, ..few };
        let elements = PlanError::Elements { tensor: "k_new", given: 1032, limit: 1024 };
        assert_eq!(refused(wide, None), elements);
        let limit = MOST_SEQUENCES;
        let many = Shape { batch: limit as usize + 1, seqlen: 0, ..few };
        assert_eq!(refused(many, None), PlanError::Sequences { given: many.batch, limit });
    }
}
