//! The plan of a varlen table: all that the host decides without lengths.

use fa3_types::{Mask, Problem, Sequences};

use super::{CHUNK, Cut, HEADER, SequenceRecord};

/// Largest number of row blocks of a table. Even if each sequence of a chunk had this number, their sum would be less
/// than 2³².
const MOST_BLOCKS: u32 = 1 << 21;

/// Largest number of rows of a tensor, or of a sequence of a dense tensor.
const MOST_ROWS: u32 = i32::MAX as u32;

/// The length arrays that Q, or K and V, have on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Arrays {
    /// `cu_seqlens`, with one entry more than there are sequences: sequences are packed into one tensor. Without it the
    /// tensor is dense.
    pub cu_seqlens: bool,
    /// `seqused`, with one entry per sequence: the number of leading rows that take part in attention. Without it all
    /// rows do.
    pub seqused: bool,
    /// `leftpad`, with one entry per sequence: the number of rows of memory before the sequence's first row. `seqused`
    /// counts these rows, too.
    pub leftpad: bool,
}

/// The rows of Q, or of K and V, as far as the host knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    /// Rows of the packed tensor, or of each sequence of a dense or a paged one.
    pub rows: usize,
    /// The arrays that only the device reads.
    pub arrays: Arrays,
}

impl Side {
    /// Sequences packed into a tensor of `total` rows.
    pub fn packed(total: usize) -> Side {
        Side { rows: total, arrays: Arrays { cu_seqlens: true, ..Arrays::default() } }
    }

    /// Sequences of `seqlen` rows each.
    pub fn dense(seqlen: usize) -> Side {
        Side { rows: seqlen, arrays: Arrays::default() }
    }

    /// Sequences of a tensor with `rows` rows per batch entry.
    pub fn of(sequences: Sequences, rows: usize) -> Side {
        let [cu_seqlens, seqused] = [sequences.is_packed(), sequences.has_used()];
        let arrays = Arrays { cu_seqlens, seqused, leftpad: sequences.has_leftpad() };
        Side { rows: sequences.capacity(rows), arrays }
    }

    /// The rows of Q, and of K and V.
    pub fn both(problem: &Problem) -> [Side; 2] {
        let sides = [(problem.seqs_q(), problem.q()), (problem.seqs_k(), problem.k())];
        sides.map(|(sequences, tensor)| Side::of(sequences, tensor.shape.seqlen))
    }

    /// This side with a `seqused` array.
    #[must_use]
    pub fn with_used(self) -> Side {
        Side { arrays: Arrays { seqused: true, ..self.arrays }, ..self }
    }

    /// This side with a `leftpad` array.
    #[must_use]
    pub fn left_padded(self) -> Side {
        Side { arrays: Arrays { leftpad: true, ..self.arrays }, ..self }
    }
}

/// Reasons why there is no table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages above name the fields")]
pub enum PlanError {
    #[error("{tensor} has {rows} rows, the limit is {limit}")]
    Rows { tensor: &'static str, rows: usize, limit: u32 },
    #[error("sequences may have {blocks} row blocks, the limit of a table is {limit}")]
    Blocks { blocks: u128, limit: u32 },
}

/// The varlen table of some sequences: its size, and the arguments of the kernel that writes it.
///
/// ```
/// use fa3_sched::packed::{Plan, Side, LengthArrays};
/// use fa3_types::Mask;
///
/// // Two sequences of 100 and of 300 rows in tiles of 128: the longer one comes first.
/// let plan = Plan::new(2, [Side::packed(400); 2], [128, 128], Mask::Causal)?;
/// let cu_seqlens = [0, 100, 400];
/// let values = LengthArrays { cu_seqlens_q: &cu_seqlens, cu_seqlens_k: &cu_seqlens, ..LengthArrays::default() };
/// let table = plan.table(&values)?;
/// assert_eq!(table[..4], [4, 0, 0, 0]);
/// assert_eq!(table[4..][..8], [100, 300, 300, 100, 300, 0, 3, 1]);
/// assert_eq!(table[12..][..8], [0, 100, 100, 0, 100, 3, 1, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    count: u32,
    q: Side,
    k: Side,
    cut: Cut<u32>,
    mask: Mask,
    capacity: u32,
}

impl Plan {
    /// The plan of `count` sequences in tiles of `tile_m` rows and blocks of `tile_n` keys.
    ///
    /// # Errors
    /// [`PlanError`], if there are too many rows or row blocks.
    ///
    /// # Panics
    /// If `tile_m` or `tile_n` is 0.
    pub fn new(
        count: usize,
        [q, k]: [Side; 2],
        [tile_m, tile_n]: [u32; 2],
        mask: Mask,
    ) -> Result<Plan, PlanError> {
        for (tensor, Side { rows, .. }) in [("Q", q), ("K", k)] {
            if rows > MOST_ROWS as usize {
                return Err(PlanError::Rows { tensor, rows, limit: MOST_ROWS });
            }
        }
        // Each sequence has at most one block that is not full, and so have the rows after the last sequence.
        let sequences = if q.arrays.cu_seqlens { 1 } else { count as u128 };
        let blocks = sequences * q.rows as u128 / u128::from(tile_m) + count as u128 + 1;
        let capacity = u32::try_from(blocks).ok().filter(|&blocks| blocks <= MOST_BLOCKS);
        let capacity = capacity.ok_or(PlanError::Blocks { blocks, limit: MOST_BLOCKS })?;
        Ok(Plan { count: count as u32, q, k, cut: Cut::new(tile_m, tile_n, mask), mask, capacity })
    }

    /// Number of sequences.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The rows of Q.
    pub fn q(&self) -> Side {
        self.q
    }

    /// The rows of K and V.
    pub fn k(&self) -> Side {
        self.k
    }

    /// Whether there may be rows of Q.
    pub fn has_rows(&self) -> bool {
        self.q.rows > 0 && (self.q.arrays.cu_seqlens || self.count > 0)
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// How sequences are cut into row blocks, and what they cost.
    pub fn cut(&self) -> Cut<u32> {
        self.cut
    }

    /// The largest number of row blocks of all sequences and of the rows after them:
    ///
    /// ```text
    /// rows / tile_m + count + 1      rows: of the whole tensor, packed or dense
    /// ```
    ///
    /// Invalid lengths may ask for more blocks. The last blocks are then left out.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Largest number of row blocks of one sequence.
    pub fn most_blocks(&self) -> u32 {
        // There are fewer than 2³¹ rows.
        self.cut.blocks(self.q.rows as u32)
    }

    /// Size of the table in 32-bit words.
    pub fn words(&self) -> u32 {
        HEADER + SequenceRecord::<u32>::WORDS * (self.count + 1) + self.capacity
    }

    /// Threads of the CTA that writes the table: a power of two, one per sequence of a chunk.
    pub fn threads(&self) -> u32 {
        self.count.next_power_of_two().clamp(32, CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(count: usize, q: Side, tile_m: u32) -> Result<Plan, PlanError> {
        Plan::new(count, [q, Side::packed(1)], [tile_m, 64], Mask::None)
    }

    #[test]
    fn a_table_has_place_for_what_sequences_may_need() {
        let packed = plan(3, Side::packed(300), 128).unwrap();
        assert_eq!((packed.capacity(), packed.words()), (2 + 3 + 1, 4 + 4 * 8 + 6));
        let dense = plan(3, Side::dense(300), 128).unwrap();
        assert_eq!(dense.capacity(), 7 + 3 + 1);
        let nothing = plan(0, Side::dense(300), 128).unwrap();
        assert_eq!((nothing.capacity(), nothing.words()), (1, 4 + 8 + 1));
    }

    #[test]
    fn threads_are_a_power_of_two() {
        let threads = |count| plan(count, Side::packed(1), 64).unwrap().threads();
        let counts = [0, 1, 32, 33, 64, 65, 1024, 1025, 5000];
        assert_eq!(counts.map(threads), [32, 32, 32, 64, 64, 128, 1024, 1024, 1024]);
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        let limit = MOST_ROWS;
        let rows = limit as usize + 1;
        assert_eq!(plan(1, Side::packed(rows), 4096), Err(PlanError::Rows { tensor: "Q", rows, limit }));
        let of_k = Plan::new(1, [Side::dense(1), Side::dense(rows)], [64, 64], Mask::None);
        assert_eq!(of_k, Err(PlanError::Rows { tensor: "K", rows, limit }));
        assert!(plan(1, Side::packed(rows - 1), 4096).is_ok());

        let limit = MOST_BLOCKS;
        let fits = limit as usize - 2;
        assert_eq!(plan(1, Side::packed(fits), 1).unwrap().capacity(), limit);
        let refused = |blocks| Err(PlanError::Blocks { blocks, limit });
        assert_eq!(plan(1, Side::packed(fits + 1), 1), refused(u128::from(limit) + 1));
        let count = usize::MAX;
        assert_eq!(plan(count, Side::dense(0), 1), refused(count as u128 + 1));
        assert_eq!(plan(count, Side::dense(2), 1), refused(3 * count as u128 + 1));
    }
}
