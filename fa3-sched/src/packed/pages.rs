//! The pages of a paged KV cache.

use fa3_types::{Problem, TensorName};

use super::MemoryRows;

/// The number of rows of one copy is a multiple of this, a period of the swizzle.
const PERIOD: u32 = 8;

/// Rows that are loaded one by one are less than this many bytes apart.
const STRIDE_LIMIT: u64 = 1 << 32;

/// How K and V lie in pages, and how many rows one copy moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLayout {
    /// Pages of each sequence: entries per row of the page table.
    pub per_sequence: u32,
    /// Entries from one row of the page table to the next.
    pub table_stride: u32,
    /// Rows per page.
    pub rows: u32,
    /// Number of pages.
    pub entries: u32,
    /// Rows of one copy: a multiple of 8 that divides a tile, such that no copy crosses from one page into the next; or
    /// 1 if rows are loaded one by one.
    pub block_rows: u32,
    /// Rows of the page table, if an array (`cache_batch_idx`) gives each sequence's row.
    pub indexed: Option<u32>,
}

/// Reasons why no kernel reads the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PagesError {
    #[error("up to 2^31 - 1 pages, not {given}")]
    Many { given: usize },
    #[error("rows of {tensor} that are loaded one by one less than {STRIDE_LIMIT} bytes apart, not {given}")]
    Apart { tensor: TensorName, given: u64 },
}

impl PageLayout {
    /// Whether rows of K and V are loaded one by one: no block of 8 rows lies within a page, because pages are too
    /// small or left padding shifts them.
    pub fn are_gathered(problem: &Problem) -> bool {
        let (sequences, rows) = (problem.seqs_k(), problem.k().shape.seqlen);
        let is_uneven = sequences.has_leftpad() || rows == 0 || !rows.is_multiple_of(PERIOD as usize);
        sequences.pages().is_some_and(|pages| pages > 1) && is_uneven
    }

    /// The pages of a paged problem, and the copies of tiles of `tile_n` keys; `in_rows` says that a kernel loads rows
    /// one by one whatever the pages are.
    ///
    /// # Errors
    /// [`PagesError`].
    pub fn of(problem: &Problem, tile_n: u32, in_rows: bool) -> Result<Option<PageLayout>, PagesError> {
        let in_rows = in_rows || PageLayout::are_gathered(problem);
        if in_rows {
            check_apart(problem)?;
        }
        let (sequences, shape) = (problem.seqs_k(), problem.k().shape);
        let Some((per_sequence, (table_stride, _))) = sequences.pages().zip(sequences.table_entries()) else {
            return Ok(None);
        };
        // All numbers are below 2³¹ in every problem, except the first two if there are no rows.
        let (per_sequence, rows, table_stride) =
            (per_sequence as u32, shape.seqlen as u32, table_stride as u32);
        let given = shape.batch;
        let entries = i32::try_from(given).map_err(|_| PagesError::Many { given })?.cast_unsigned();
        let indexed = sequences.table_rows().filter(|_| sequences.has_index()).map(|rows| rows as u32);
        let block_rows = match (in_rows, per_sequence) {
            (true, _) => 1,
            (false, 0 | 1) => tile_n,
            (false, _) => gcd(rows, tile_n),
        };
        Ok(Some(PageLayout { per_sequence, table_stride, rows, entries, block_rows, indexed }))
    }

    /// Whether rows are loaded one by one.
    pub fn is_gathered(&self) -> bool {
        self.block_rows == 1
    }
}

/// Checks that 32 bits hold the distance of the rows of K and of V. Rows that are not equally spaced are refused
/// elsewhere.
fn check_apart(problem: &Problem) -> Result<(), PagesError> {
    for (name, tensor) in [(TensorName::K, problem.k()), (TensorName::V, problem.v())] {
        let given = MemoryRows::of(tensor).map_or(0, |rows| rows.stride * tensor.dtype.bytes() as u64);
        if given >= STRIDE_LIMIT {
            return Err(PagesError::Apart { tensor: name, given });
        }
    }
    Ok(())
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, Sequences, Shape};

    use super::*;

    fn spec(sequences: Sequences, rows: usize) -> ProblemSpec {
        let q = Shape { batch: 2, seqlen: 1, heads: 1, head_dim: 64 };
        let spec = ProblemSpec::dense(Dtype::F16, q, Shape { batch: 9, seqlen: rows, ..q });
        spec.seqs_k(sequences.used())
    }

    fn pages(spec: ProblemSpec, tile_n: u32) -> Result<Option<PageLayout>, PagesError> {
        PageLayout::of(&spec.validate().unwrap(), tile_n, false)
    }

    fn block(sequences: Sequences, rows: usize, tile_n: u32) -> u32 {
        pages(spec(sequences, rows), tile_n).unwrap().unwrap().block_rows
    }

    #[test]
    fn copies_divide_tiles_and_pages() {
        let cases = [(16, 80, 16), (64, 80, 16), (64, 128, 64), (256, 128, 128), (24, 64, 8), (48, 96, 48)];
        for (rows, tile_n, expected) in cases {
            assert_eq!(block(Sequences::paged(2, 5), rows, tile_n), expected);
        }
        // A single page has no successor.
        let one = Sequences::paged(2, 1);
        assert_eq!([block(one, 1001, 80), block(one.left_padded(), 1001, 80)], [80, 80]);
        // Rows are loaded one by one if eight of them span several pages.
        assert_eq!([1, 2, 4, 12, 20].map(|rows| block(Sequences::paged(2, 5), rows, 48)), [1; 5]);
        assert_eq!(block(Sequences::paged(2, 5).left_padded(), 64, 64), 1);
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        let indexed =
            |rows| pages(spec(Sequences::indexed(2, [rows, 5]), 16), 64).map(|x| x.unwrap().indexed);
        assert_eq!(indexed(7), Ok(Some(7)));
        let mut apart = spec(Sequences::paged(2, 5), 1);
        apart.v.strides.batch = 1 << 31;
        let refused = PagesError::Apart { tensor: TensorName::V, given: 1 << 32 };
        assert_eq!(pages(apart.clone(), 64), Err(refused));
        apart.v.strides.batch -= 8;
        assert!(pages(apart, 64).is_ok());
    }
}
