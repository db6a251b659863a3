//! Plans against the definition: a plan's tiles and key ranges cover exactly the pairs that the mask allows.

use std::collections::HashSet;
use std::ops::Range;

use fa3_sched::forward::{Plan, PlanOptions, Work};
use fa3_sched::{DeviceLimits, Longest, Order};
use fa3_tests::strategies;
use fa3_types::{Dtype, Lengths, Problem, ProblemSpec, Shape};
use proptest::prelude::*;
use proptest::sample::select;

/// How much of a key block a query row sees.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    Nothing,
    Part,
    Whole,
}

/// Visibility of each key block to each query row, by [`fa3_types::Mask::allows`] alone.
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

/// The query rows of a tile.
fn rows_of(plan: &Plan, work: &Work, len: Lengths) -> Range<usize> {
    let tile_m = plan.tile().tile_m as usize;
    let first = work.tile.m_block as usize * tile_m;
    first..(first + tile_m).min(len.q)
}

fn check(plan: &Plan) {
    let problem = plan.problem();
    let tile_n = plan.tile().tile_n as usize;
    let known = problem.known().unwrap();
    let lengths: Vec<Lengths> = (0..problem.batch()).map(|index| known.lengths(index)).collect();
    let seen: Vec<_> = lengths.iter().map(|&len| seen(problem, len, tile_n)).collect();
    // visits[sequence][head][row][block]
    let heads = problem.heads().q();
    let mut visits: Vec<Vec<Vec<Vec<u32>>>> =
        seen.iter().map(|rows| vec![rows.iter().map(|row| vec![0; row.len()]).collect(); heads]).collect();
    let mut tiles = HashSet::new();
    for (index, work) in plan.numbered().unwrap().works().enumerate() {
        assert_eq!(
            plan.numbered().unwrap().schedule().tile(index as u32),
            Some(work.tile),
            "tile {index} by number and in order"
        );
        assert!(tiles.insert(work.tile), "{:?} twice", work.tile);
        let sequence = work.tile.batch as usize;
        let rows = rows_of(plan, &work, lengths[sequence]);
        assert!(!rows.is_empty(), "{:?} has no rows", work.tile);
        let head = work.tile.head as usize;
        assert_eq!(plan.tiling().kv_head(work.tile.head), problem.heads().kv_head(head) as u32);
        for block in work.kv.first..work.kv.end {
            let unmasked = (work.kv.unmasked_first..work.kv.unmasked_end).contains(&block);
            let mut useful = false;
            for row in rows.clone() {
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
    assert_eq!(tiles.len(), plan.numbered().unwrap().schedule().num_tiles() as usize);
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

prop_compose! {
    fn problem()(
        dtype in select(vec![Dtype::F16, Dtype::Bf16]),
        batch in 1usize..4,
        (seqlen_q, seqlen_k) in (0usize..=600, 0usize..=600),
        (heads_q, heads_kv) in strategies::heads(),
        head_dim in select(vec![64usize, 96, 128, 192, 256]),
        mask in strategies::mask(700),
    ) -> Problem {
        let q = Shape { batch, seqlen: seqlen_q, heads: heads_q, head_dim };
        let kv = Shape { seqlen: seqlen_k, heads: heads_kv, ..q };
        let problem = ProblemSpec::dense(dtype, q, kv).mask(mask).validate();
        problem.expect("the strategy makes valid problems")
    }
}

prop_compose! {
    fn order()(
        section in 1u32..30, longest in select(vec![Longest::First, Longest::Last]), linear: bool,
    ) -> Order {
        if linear { Order::Linear } else { Order::LongestFirst { section, longest } }
    }
}

proptest! {
    #![proptest_config(strategies::config(200))]

    #[test]
    fn tiles_cover_exactly_what_the_mask_allows(problem in problem(), order in order()) {
        let limits = DeviceLimits::h100_sxm();
        // The plan's own order; then another one.
        check(&Plan::new(&problem, &limits).unwrap());
        check(&Plan::with(&problem, &limits, &PlanOptions::default().order(order)).unwrap());
    }
}
