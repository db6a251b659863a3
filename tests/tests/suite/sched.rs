//! Plans against the definition: a plan's tiles and key ranges cover exactly the pairs that the mask allows.

use std::collections::HashSet;
use std::num::NonZeroU32;

use fa3_sched::{DeviceLimits, Plan, PlanOptions, Work};
use fa3_tests::strategies;
use fa3_types::{Dtype, Lengths, Problem, ProblemSpec, Sequences, Shape};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// How much of a key block a query row sees.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    Nothing,
    Part,
    Whole,
}

/// What each query row sees of each key block, by [`fa3_types::Mask::allows`] alone.
fn seen(problem: &Problem, len: Lengths, tile_n: usize) -> Vec<Vec<Seen>> {
    let block = |row: usize, block: usize| {
        let keys = block * tile_n..(block + 1) * tile_n;
        match keys.filter(|&key| problem.mask().allows(row, key, len)).count() {
            0 => Seen::Nothing,
            n if n == tile_n => Seen::Whole,
            _ => Seen::Part,
        }
    };
    (0..len.q).map(|row| (0..len.k.div_ceil(tile_n)).map(|b| block(row, b)).collect()).collect()
}

/// The (query head, query row) pairs of a tile.
fn rows_of(plan: &Plan, work: &Work, len: Lengths) -> Vec<(usize, usize)> {
    let first = work.tile.m_block * plan.tiling.tile_m();
    let group = plan.problem.heads().group_size();
    let place = |row: u32| {
        let (position, in_group) = plan.tiling.unpack(row);
        let pack = if plan.tiling.is_packed() { group } else { 1 };
        (work.tile.head as usize * pack + in_group as usize, position as usize)
    };
    (first..first + plan.tiling.tile_m()).map(place).filter(|&(_, position)| position < len.q).collect()
}

fn check(plan: &Plan) {
    let problem = &plan.problem;
    let tile_n = plan.row.shape.tile_n as usize;
    let lengths: Vec<Lengths> = (0..problem.batch()).map(|index| problem.lengths(index)).collect();
    let seen: Vec<_> = lengths.iter().map(|&len| seen(problem, len, tile_n)).collect();
    // visits[sequence][head][row][block]
    let heads = problem.heads().q();
    let mut visits: Vec<Vec<Vec<Vec<u32>>>> =
        seen.iter().map(|rows| vec![rows.iter().map(|row| vec![0; row.len()]).collect(); heads]).collect();
    let mut tiles = HashSet::new();
    for (index, work) in plan.tiles().enumerate() {
        assert_eq!(plan.tile(index as u32), Some(work), "tile {index} by number and in order");
        assert!(tiles.insert(work.tile), "{:?} twice", work.tile);
        let sequence = work.tile.batch as usize;
        let rows = rows_of(plan, &work, lengths[sequence]);
        assert!(!rows.is_empty(), "{:?} has no rows", work.tile);
        if work.tile.split == 0 {
            let kv_heads = rows.iter().map(|&(head, _)| problem.heads().kv_head(head) as u32);
            assert!(
                kv_heads.eq(rows.iter().map(|_| plan.tiling.kv_head(work.tile.head))),
                "one KV head a tile"
            );
        }
        for block in work.kv.first..work.kv.end {
            let unmasked = (work.kv.unmasked_first..work.kv.unmasked_end).contains(&block);
            let mut useful = false;
            for &(head, row) in &rows {
                let seen = seen[sequence][row][block as usize];
                assert!(
                    !unmasked || seen == Seen::Whole,
                    "row {row} needs a mask in block {block} of {work:?}"
                );
                useful |= seen != Seen::Nothing;
                visits[sequence][head][row][block as usize] += 1;
            }
            assert!(useful, "no row sees block {block} of {work:?}");
        }
    }
    assert_eq!(tiles.len(), plan.num_tiles as usize);
    for (sequence, heads) in visits.iter().enumerate() {
        for (row, seen) in seen[sequence].iter().enumerate() {
            for (head, visits) in heads.iter().enumerate() {
                for (block, (&seen, &visits)) in seen.iter().zip(&visits[row]).enumerate() {
                    let at = || format!("sequence {sequence} head {head} row {row} block {block}: {plan}");
                    assert!(visits <= 1, "visited {visits} times: {}", at());
                    assert!(visits == 1 || seen == Seen::Nothing, "never visited: {}", at());
                }
            }
        }
    }
}

/// Dense or packed, up to `longest` rows a sequence.
fn sequences(longest: usize) -> impl Strategy<Value = (Sequences, Sequences)> {
    let packed =
        move |batch: usize| vec(0..=longest, batch).prop_map(|lens| Sequences::packed_lengths(&lens));
    let dense = move |batch: usize| (0..=longest).prop_map(move |len| Sequences::dense(batch, len));
    (1usize..4).prop_flat_map(move |batch| {
        prop_oneof![(dense(batch), dense(batch)).boxed(), (packed(batch), packed(batch)).boxed()]
    })
}

prop_compose! {
    fn problem()(
        dtype in select(vec![Dtype::F16, Dtype::Bf16, Dtype::E4m3]),
        (seqs_q, seqs_k) in sequences(600),
        (heads_q, heads_kv) in strategies::heads(),
        head_dim in select(vec![64usize, 96, 128, 192, 256]),
        mask in strategies::mask(700),
    ) -> Problem {
        let spec = if seqs_q.is_packed() {
            ProblemSpec::packed(dtype, (heads_q, heads_kv), head_dim, seqs_q, seqs_k)
        } else {
            let shape = |sequences: &Sequences, heads| {
                Shape { batch: sequences.count(), seqlen: sequences.capacity(0), heads, head_dim }
            };
            ProblemSpec::dense(dtype, shape(&seqs_q, heads_q), shape(&seqs_k, heads_kv))
        };
        spec.mask(mask).validate().expect("the strategy makes valid problems")
    }
}

proptest! {
    #![proptest_config(strategies::config(200))]

    #[test]
    fn tiles_cover_exactly_what_the_mask_allows(
        problem in problem(),
        pack_gqa in option::of(any::<bool>()),
        splits in option::of(1u32..6),
    ) {
        let limits = DeviceLimits::h100_sxm();
        // The plan's own decisions; then others, where they are possible.
        check(&Plan::new(&problem, &limits).unwrap());
        let splits = splits.and_then(NonZeroU32::new);
        if let Ok(plan) = Plan::with(&problem, &limits, &PlanOptions { pack_gqa, splits, ..PlanOptions::default() }) {
            check(&plan);
        }
    }
}
