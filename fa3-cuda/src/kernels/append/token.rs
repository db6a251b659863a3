//! The sequence of a row, by a division or by a search that a warp does together.

use fa3_ir::lang::*;
use fa3_sched::{FastDiv, Int};

use super::spec::Search;

/// Where the sequences of a tensor are.
pub(super) struct Tokens<'k> {
    /// Rows of each sequence of a dense tensor.
    pub(super) of_sequence: Option<FastDiv<V<'k, B32>>>,
    /// Where sequences of a packed tensor begin.
    pub(super) cu_seqlens: Option<V<'k, B64>>,
    /// Sequences.
    pub(super) count: V<'k, B32>,
}

/// A row of a tensor, of all heads.
pub(super) struct Token<'k> {
    /// Its entry in the tensor's batch.
    pub(super) entry: V<'k, B32>,
    /// Its row there.
    pub(super) row_of_entry: V<'k, B32>,
    /// Its sequence.
    pub(super) sequence: V<'k, B32>,
    /// Its row in the sequence.
    pub(super) row: V<'k, B32>,
    /// Whether it is a sequence's. All rows of a dense tensor are.
    pub(super) is_there: Option<V<'k, Pred>>,
}

impl<'k> Tokens<'k> {
    /// Token number `number`, the same in each `lanes` threads.
    #[track_caller]
    pub(super) fn token(&self, b: &'k Builder, search: Search, number: V<'k, B32>, lanes: u32) -> Token<'k> {
        match (search, self.of_sequence, self.cu_seqlens) {
            (Search::Packed { levels }, _, Some(cu_seqlens)) => {
                let sequence = self.search(b, cu_seqlens, number, (lanes, levels));
                let is_one = sequence.lt(self.count);
                let begin = b.var("begin", 0);
                b.guarded(is_one, || begin.set(b.load::<B32>(sequence.mad_wide(4, cu_seqlens))));
                // Below 0 there is none.
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

    /// The number of sequences that end at row `number` or before, which is that of the row's own, if it has one. The
    /// lanes of a warp look at 32 entries at a time for each of the warp's rows: first at those that are far from each
    /// other, at last at neighbours.
    #[track_caller]
    fn search(
        &self,
        b: &'k Builder,
        cu_seqlens: V<'k, B64>,
        number: V<'k, B32>,
        (lanes, levels): (u32, u32),
    ) -> V<'k, B32> {
        let lane = b.lane_id();
        let rows = (32 / lanes).max(1);
        let numbers: Vec<V<'k, B32>> = (0..rows).map(|row| number.shfl_idx(row * lanes.min(32))).collect();
        let mut found: Vec<V<'k, B32>> = numbers.iter().map(|_| b.value(0)).collect();
        for level in (0..levels).rev() {
            let step = 32_u32.pow(level);
            let entry = |before: V<'k, B32>| {
                let index = lane.mad(step, before + step);
                // Behind the last one there are no ends.
                let entry = b.var("end", i32::MAX.cast_unsigned());
                let at = index.mad_wide(4, cu_seqlens);
                b.guarded(index.le(self.count), || entry.set(b.load::<B32>(at)));
                entry.get()
            };
            // At first all rows look at the same ones.
            let entries = match level + 1 == levels {
                true => vec![entry(b.value(0)); found.len()],
                false => found.iter().map(|&before| entry(before)).collect(),
            };
            for ((found, &number), entry) in found.iter_mut().zip(&numbers).zip(entries) {
                *found = entry.le_s32(number).ballot().popc().mad(step, *found);
            }
        }
        let own = lane >> lanes.min(32).ilog2();
        let choose = |found, (row, other): (u32, V<'k, B32>)| own.eq(row).select(other, found);
        let first = found[0];
        (0..).zip(found).skip(1).fold(first, choose)
    }
}
