//! Finds the sequence of a row: by a division, or by a search in which all lanes of a warp take part.

use fa3_ir::lang::*;
use fa3_sched::{FastDiv, Int};

use super::spec::Search;

/// The layout of a tensor's sequences.
pub(super) struct Tokens<'k> {
    /// Number of rows of each sequence, as a divisor, in a dense tensor.
    pub(super) of_sequence: Option<FastDiv<U32<'k>>>,
    /// The address of cu_seqlens, in a packed tensor.
    pub(super) cu_seqlens: Option<U64<'k>>,
    /// Number of sequences.
    pub(super) count: U32<'k>,
}

/// A row of a tensor, which includes all heads.
pub(super) struct Token<'k> {
    /// The row's entry in the tensor's batch.
    pub(super) entry: U32<'k>,
    /// The row's index in that entry.
    pub(super) row_of_entry: U32<'k>,
    /// The row's sequence.
    pub(super) sequence: U32<'k>,
    /// The row's index in its sequence.
    pub(super) row: U32<'k>,
    /// Whether the row belongs to a sequence; `None` if all rows do, in a dense tensor.
    pub(super) is_there: Option<V<'k, Pred>>,
}

impl<'k> Tokens<'k> {
    /// The token whose index is `number`. Groups of `lanes` neighbouring threads must ask for one index.
    #[track_caller]
    pub(super) fn token(&self, b: &'k Builder, search: Search, number: U32<'k>, lanes: u32) -> Token<'k> {
        match (search, self.of_sequence, self.cu_seqlens) {
            (Search::Packed { levels }, _, Some(cu_seqlens)) => {
                let sequence = self.search(b, cu_seqlens, number, (lanes, levels));
                let is_one = sequence.lt(self.count);
                let begin = b.var("begin", 0);
                b.guarded(is_one, || begin.set(b.load::<B32>(sequence.mad_wide(4, cu_seqlens))));
                // A negative begin of a sequence counts as 0.
                let begin = begin.get().max_s32(0);
                let is_there = Some(is_one & begin.le(number));
                Token {
                    entry: b.value(0),
                    row_of_entry: number,
                    sequence,
                    row: number.sub_sat(begin),
                    is_there,
                }
            }
            (_, Some(of_sequence), _) => {
                let (sequence, row) = of_sequence.div_rem(number);
                Token { entry: sequence, row_of_entry: row, sequence, row, is_there: None }
            }
            (Search::Dense | Search::Packed { .. }, None, _) => {
                unreachable!("a tensor has dense or packed sequences")
            }
        }
    }

    /// The number of sequences that end at row `number` or before, which is the index of the row's sequence, if the row
    /// has one. For each of the warp's rows, the lanes read 32 entries in each round. The entries are far apart in the
    /// first round, and neighbours in the last.
    #[track_caller]
    fn search(
        &self,
        b: &'k Builder,
        cu_seqlens: U64<'k>,
        number: U32<'k>,
        (lanes, levels): (u32, u32),
    ) -> U32<'k> {
        let lane = b.lane_id();
        let rows = (32 / lanes).max(1);
        let numbers: Vec<U32<'k>> = (0..rows).map(|row| number.shfl_idx(row * lanes.min(32))).collect();
        let mut found: Vec<U32<'k>> = numbers.iter().map(|_| b.value(0)).collect();
        for level in (0..levels).rev() {
            let step = 32_u32.pow(level);
            let entry = |before: U32<'k>| {
                let index = lane.mad(step, before + step);
                // An entry behind the last one counts as larger than any row.
                let entry = b.var("end", i32::MAX.cast_unsigned());
                let at = index.mad_wide(4, cu_seqlens);
                b.guarded(index.le(self.count), || entry.set(b.load::<B32>(at)));
                entry.get()
            };
            // In the first round, all rows need the same entries, which are loaded once.
            let entries = match level + 1 == levels {
                true => vec![entry(b.value(0)); found.len()],
                false => found.iter().map(|&before| entry(before)).collect(),
            };
            for ((found, &number), entry) in found.iter_mut().zip(&numbers).zip(entries) {
                *found = entry.le_s32(number).ballot().popc().mad(step, *found);
            }
        }
        let own = lane >> lanes.min(32).ilog2();
        let choose = |found, (row, other): (u32, U32<'k>)| own.eq(row).select(other, found);
        let first = found[0];
        (0..).zip(found).skip(1).fold(first, choose)
    }
}
