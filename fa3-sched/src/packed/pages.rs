//! The pages of a cache of keys and values.

use fa3_types::Problem;

/// A copy fills at least so many rows of a tile: a period of the swizzle.
const LEAST_ROWS: u32 = 8;

/// How keys and values lie in pages, and in which blocks of rows they are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Pages of each sequence: entries of a row of the page table.
    pub per_sequence: u32,
    /// Rows of each.
    pub rows: u32,
    /// Pages that there are.
    pub entries: u32,
    /// Rows that are copied at once. They divide a tile, and no copy goes beyond a page that has another behind it.
    pub block_rows: u32,
}

/// Pages that no copies fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PagesError {
    #[error("pages of a multiple of {LEAST_ROWS} rows, not of {rows}")]
    Rows { rows: u32 },
    #[error("padding on the left in a cache of one page a sequence, not of {pages}")]
    Leftpad { pages: u32 },
    #[error("up to 2^31 - 1 pages, not {given}")]
    Entries { given: usize },
}

impl Pages {
    /// The pages of a problem, if it has some, and the copies of tiles of `tile_n` keys.
    ///
    /// # Errors
    /// [`PagesError`].
    pub fn of(problem: &Problem, tile_n: u32) -> Result<Option<Pages>, PagesError> {
        let (sequences, shape) = (problem.seqs_k(), problem.k().shape);
        let Some(per_sequence) = sequences.pages() else { return Ok(None) };
        // Both are below 2³¹ in every problem, unless there are no rows.
        let (per_sequence, rows) = (per_sequence as u32, shape.seqlen as u32);
        let entries = i32::try_from(shape.batch).map_err(|_| PagesError::Entries { given: shape.batch })?;
        let block_rows = if per_sequence <= 1 { tile_n } else { gcd(rows.max(1), tile_n) };
        if block_rows < LEAST_ROWS {
            return Err(PagesError::Rows { rows });
        }
        if per_sequence > 1 && sequences.has_leftpad() {
            return Err(PagesError::Leftpad { pages: per_sequence });
        }
        Ok(Some(Pages { per_sequence, rows, entries: entries.cast_unsigned(), block_rows }))
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, Sequences, Shape};

    use super::*;

    fn pages(per_sequence: usize, rows: usize, tile_n: u32) -> Result<Option<u32>, PagesError> {
        let q = Shape { batch: 2, seqlen: 1, heads: 1, head_dim: 64 };
        let spec = ProblemSpec::dense(Dtype::F16, q, Shape { batch: 9, seqlen: rows, ..q });
        let spec = spec.seqs_k(Sequences::paged(2, per_sequence).used());
        Pages::of(&spec.validate().unwrap(), tile_n).map(|pages| pages.map(|pages| pages.block_rows))
    }

    #[test]
    fn copies_divide_tiles_and_pages() {
        let cases = [(16, 80, 16), (64, 80, 16), (64, 128, 64), (256, 128, 128), (24, 64, 8), (48, 96, 48)];
        for (rows, tile_n, block) in cases {
            assert_eq!(pages(5, rows, tile_n), Ok(Some(block)));
        }
        // One page has no other behind it.
        assert_eq!(pages(1, 1001, 80), Ok(Some(80)));
        assert_eq!(pages(2, 12, 64), Err(PagesError::Rows { rows: 12 }));
    }
}
