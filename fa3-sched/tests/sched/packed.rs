//! Tables of packed sequences: the properties that attention relies on.

use fa3_sched::packed::{CHUNK, HEADER, LengthArrays, Plan, SequenceRecord, Side};
use fa3_sched::{SeqLens, Tiling};
use fa3_types::Mask;
use proptest::collection::vec;
use proptest::prelude::*;

const TILE: [u32; 2] = [16, 8];

/// Sequences with their length arrays.
#[derive(Clone, Debug)]
struct Batch {
    plan: Plan,
    cu_seqlens: [Vec<i32>; 2],
    seqused: [Vec<i32>; 2],
}

impl Batch {
    fn table(&self) -> Table {
        let ([cu_seqlens_q, cu_seqlens_k], [seqused_q, seqused_k]) = (&self.cu_seqlens, &self.seqused);
        let values =
            LengthArrays { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, ..LengthArrays::default() };
        let words = self.plan.table(&values).expect("arrays are as long as they must be");
        let (header, rest) = words.split_at(HEADER as usize);
        let (records, record_of) = rest.split_at(8 * (self.plan.count() as usize + 1));
        let records: Vec<_> = records.as_chunks().0.iter().copied().map(SequenceRecord::from_words).collect();
        let record_of = record_of.to_vec();
        assert!(words.len() <= self.plan.words() as usize);
        assert_eq!((header[0] as usize, &header[1..]), (record_of.len(), &[0; 3][..]));
        Table { records, record_of }
    }

    /// Rows of Q of all sequences, as row indices of the tensor.
    fn rows_of_q(&self) -> usize {
        let (q, count) = (self.plan.q(), self.plan.count() as usize);
        if q.arrays.cu_seqlens { q.rows } else { q.rows * count }
    }
}

struct Table {
    records: Vec<SequenceRecord<u32>>,
    record_of: Vec<u32>,
}

fn side(is_packed: bool, is_used: bool, rows: usize) -> Side {
    let side = if is_packed { Side::packed(rows) } else { Side::dense(rows) };
    if is_used { side.with_used() } else { side }
}

fn mask() -> impl Strategy<Value = Mask> {
    let reach = || proptest::option::of(0_u32..60);
    let chunk = prop_oneof![2 => Just(0), 1 => 1_i64..60];
    (reach(), reach(), chunk).prop_map(|(left, right, chunk)| {
        Mask::window(left, right).and(Mask::from_chunk(chunk).unwrap()).unwrap()
    })
}

/// Lengths of one side: rows and valid rows of each sequence, and rows after the last sequence.
fn legal(is_packed: bool, is_used: bool, lengths: &[(u32, u32)], behind: u32) -> (Side, Vec<i32>, Vec<i32>) {
    let ends = lengths.iter().scan(0, |end, &(rows, _)| {
        *end += rows as i32;
        Some(*end)
    });
    let cu_seqlens: Vec<i32> = [0].into_iter().chain(ends).collect();
    let longest = lengths.iter().map(|&(rows, _)| rows).max().unwrap_or(0);
    let rows = if is_packed { cu_seqlens[lengths.len()] as u32 + behind } else { longest };
    let used = lengths.iter().map(|&(rows, used)| (used % (rows + 1)) as i32).collect();
    let none = Vec::new;
    (
        side(is_packed, is_used, rows as usize),
        if is_packed { cu_seqlens } else { none() },
        if is_used { used } else { none() },
    )
}

/// Valid lengths: mostly few sequences, sometimes more than a chunk.
fn legal_batch() -> impl Strategy<Value = Batch> {
    let lengths = || prop_oneof![0_u32..3, 0_u32..100, Just(16), Just(17), 300_u32..400];
    let few = vec([(lengths(), 0_u32..400), (lengths(), 0_u32..400)], 0..20);
    let many =
        vec([(0_u32..20, 0_u32..400), (0_u32..40, 0_u32..400)], CHUNK as usize - 2..CHUNK as usize + 30);
    let of_kind = [any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()];
    (prop_oneof![20 => few, 1 => many], of_kind, 0_u32..70, mask()).prop_map(
        |(lengths, [q_packed, q_used, k_packed, k_used], behind, mask)| {
            let of = |side: usize| lengths.iter().map(|both| both[side]).collect::<Vec<_>>();
            let (q, cu_q, used_q) = legal(q_packed, q_used, &of(0), behind);
            let (k, cu_k, used_k) = legal(k_packed, k_used, &of(1), behind);
            let plan = Plan::new(lengths.len(), [q, k], TILE, mask).expect("there are few rows");
            Batch { plan, cu_seqlens: [cu_q, cu_k], seqused: [used_q, used_k] }
        },
    )
}

/// Random lengths, and lengths that are nearly valid.
fn any_batch() -> impl Strategy<Value = Batch> {
    let entry = || prop_oneof![3 => -5..200, 1 => any::<i32>()];
    (0_usize..30).prop_flat_map(move |count| {
        let arrays =
            [vec(entry(), count + 1), vec(entry(), count + 1), vec(entry(), count), vec(entry(), count)];
        let of_kind = [any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()];
        (arrays, of_kind, [0_usize..150, 0_usize..150], mask()).prop_map(
            move |([cu_q, cu_k, used_q, used_k], kinds, [q_rows, k_rows], mask)| {
                let [q_packed, q_used, k_packed, k_used] = kinds;
                let sides = [side(q_packed, q_used, q_rows), side(k_packed, k_used, k_rows)];
                let plan = Plan::new(count, sides, TILE, mask).expect("there are few rows");
                let if_there = |is_there: bool, array: Vec<i32>| if is_there { array } else { Vec::new() };
                Batch {
                    plan,
                    cu_seqlens: [if_there(q_packed, cu_q), if_there(k_packed, cu_k)],
                    seqused: [if_there(q_used, used_q), if_there(k_used, used_k)],
                }
            },
        )
    })
}

proptest! {
    /// Every row of Q is in one row block, of its sequence or of the rows after all sequences.
    #[test]
    fn every_row_of_q_is_in_one_block(batch in legal_batch()) {
        let Table { records, record_of } = batch.table();
        let mut found = vec![0; batch.rows_of_q()];
        for (block, &number) in (0..).zip(&record_of) {
            let record = &records[number as usize];
            prop_assert!((record.first_block..record.first_block + record.blocks).contains(&block));
            let first = (block - record.first_block) * TILE[0];
            let (q, sequence) = (batch.plan.q(), record.sequence as usize);
            let start = record.q_row as usize + if q.arrays.cu_seqlens { 0 } else { sequence * q.rows };
            (first..record.q_rows.min(first + TILE[0])).for_each(|row| found[start + row as usize] += 1);
        }
        prop_assert!(found.iter().all(|&times| times == 1), "{found:?}");
    }

    /// Records are the sequences with their given lengths, in chunks. The last record is for the rows after all
    /// sequences.
    #[test]
    fn records_are_sequences_ordered_by_their_longest_tile(batch in legal_batch()) {
        let Table { records, .. } = batch.table();
        let (plan, count) = (&batch.plan, batch.plan.count());
        let (last, records) = records.split_last().unwrap();
        prop_assert_eq!((last.sequence, last.q_len, last.k_len), (count, 0, 0));
        let tiling = Tiling::new(TILE[0], TILE[1], 1, plan.mask());
        let cost = |record: &SequenceRecord<u32>| {
            let len = SeqLens { q: record.q_len, k: record.k_len };
            let tile = |m_block| tiling.kv_range(m_block, len).blocks();
            match (plan.mask().chunks(), plan.mask().reach()) {
                // With chunks the cost is an estimate, the cost of a whole chunk.
                (Some(_), _) => plan.cut().cost(len),
                (None, (Some(_), None)) => tile(0),
                (None, _) => tile(record.q_len.saturating_sub(1) / TILE[0]),
            }
        };
        for (number, chunk) in (0..).zip(records.chunks(CHUNK as usize)) {
            let order = |record: &SequenceRecord<u32>| (std::cmp::Reverse(cost(record)), record.sequence);
            prop_assert!(chunk.is_sorted_by_key(order));
            let mut sequences: Vec<u32> = chunk.iter().map(|record| record.sequence).collect();
            sequences.sort_unstable();
            let first = number * CHUNK;
            prop_assert!(sequences.into_iter().eq(first..count.min(first + CHUNK)));
        }
        for record in records {
            let i = record.sequence as usize;
            let sides = [(plan.q(), record.q_row, record.q_len), (plan.k(), record.k_row, record.k_len)];
            for (index, (side, row, len)) in (0..).zip(sides) {
                let cu_seqlens = &batch.cu_seqlens[index];
                let (start, rows) = match cu_seqlens.is_empty() {
                    true => (0, side.rows as i32),
                    false => (cu_seqlens[i], cu_seqlens[i + 1] - cu_seqlens[i]),
                };
                let used = batch.seqused[index].get(i).copied().unwrap_or(rows);
                prop_assert_eq!((row as i32, len as i32), (start, used));
                prop_assert!(index == 1 || record.q_rows as i32 == rows);
            }
        }
    }

    /// For any lengths, rows lie in the tensors, and there are no more blocks than the table has room for.
    #[test]
    fn no_lengths_lead_out_of_the_table_or_the_tensors(batch in any_batch()) {
        let Table { records, record_of } = batch.table();
        let plan = &batch.plan;
        prop_assert!(record_of.len() <= plan.capacity() as usize);
        for record in &records {
            prop_assert!(record.q_row + record.q_rows <= plan.q().rows as u32);
            prop_assert!(record.q_len <= record.q_rows);
            prop_assert!(record.k_row + record.k_len <= plan.k().rows as u32);
            prop_assert!(record.blocks <= record.q_rows.div_ceil(TILE[0]));
        }
        let blocks = records.iter().enumerate().flat_map(|(number, record)| {
            (record.first_block..record.first_block + record.blocks).map(move |block| (block, number as u32))
        });
        prop_assert!(blocks.eq((0..).zip(record_of)));
    }
}

#[test]
fn arrays_of_another_length_are_refused() {
    let plan = Plan::new(2, [Side::packed(9), Side::dense(9).with_used()], TILE, Mask::None).unwrap();
    let good = LengthArrays { cu_seqlens_q: &[0, 4, 9], seqused_k: &[9, 1], ..LengthArrays::default() };
    assert!(plan.table(&good).is_ok());
    let refused = |values: LengthArrays<'_>| plan.table(&values).unwrap_err().to_string();
    assert_eq!(refused(LengthArrays { cu_seqlens_q: &[0, 9], ..good }), "cu_seqlens_q has 2 entries, not 3");
    assert_eq!(
        refused(LengthArrays { cu_seqlens_k: &[0, 4, 9], ..good }),
        "cu_seqlens_k has 3 entries, not 0"
    );
    assert_eq!(refused(LengthArrays { seqused_q: &[1, 1], ..good }), "seqused_q has 2 entries, not 0");
    assert_eq!(refused(LengthArrays { seqused_k: &[], ..good }), "seqused_k has 0 entries, not 2");
}
