//! The kernels' integers are the host's: every tile of small problems, decoded by both.

use fa3::sched::forward::Plan;
use fa3::sched::{Longest, Order};
use fa3::types::{Dtype, Mask};
use fa3_cuda::kernels::fwd::decoded_tiles;
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::device;
use fa3_tests::fwd::shapes::TINY;
use fa3_tests::ladder::simulate;
use rayon::prelude::*;

use crate::{dense, with_tile};

const LENGTHS: [usize; 10] = [1, 15, 16, 17, 63, 64, 65, 100, 129, 200];

/// The numbers of every tile, as the kernel writes them.
fn decoded(plan: &Plan) -> Vec<u32> {
    let job = decoded_tiles(plan).unwrap();
    let simulated = simulate(&job, &[vec![0xFF; job.arrays[0].bytes()]], Policy::Eager, Mode::Fast).unwrap();
    assert_eq!(simulated.outcome.findings, [], "{plan}");
    let (words, rest) = simulated.arrays[0].as_chunks::<4>();
    assert!(rest.is_empty());
    words.iter().copied().map(u32::from_le_bytes).collect()
}

/// The same, as the host has them.
fn planned(plan: &Plan) -> Vec<u32> {
    let group = plan.problem().heads().group_size() as u32;
    let numbers = plan.works().flat_map(|work| {
        let (tile, kv) = (work.tile, work.kv);
        let row = tile.m_block * plan.tile().tile_m;
        [tile.batch, tile.head, tile.head / group, row, kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]
    });
    numbers.collect()
}

#[test]
fn kernels_decode_tiles_as_the_host_does() {
    let sides = [None, Some(0), Some(1), Some(30), Some(120)];
    let masks: Vec<Mask> =
        sides.into_iter().flat_map(|left| sides.map(|right| Mask::window(left, right))).collect();
    let sections = [1, 2, 7, 100].into_iter().flat_map(|section| {
        [Longest::First, Longest::Last].map(|longest| Order::LongestFirst { section, longest })
    });
    let orders: Vec<Order> = [Order::Linear].into_iter().chain(sections).collect();
    let heads = [(1, (1, 1)), (3, (3, 1)), (2, (6, 2)), (1, (5, 5))];
    // Every pair of lengths with every mask, in turn with one of the orders and one of the batches: 9 and 4 have no common
    // divisor, so that in time all meet.
    let lengths = LENGTHS.into_iter().flat_map(|q| LENGTHS.map(|k| (q, k)));
    let problems: Vec<_> =
        lengths.flat_map(|lengths| masks.iter().map(move |mask| (lengths, *mask))).enumerate().collect();
    let tiles: usize = problems
        .into_par_iter()
        .map(|(index, (lengths, mask))| {
            let (batch, heads) = heads[index % heads.len()];
            let problem = dense(Dtype::Bf16, batch, lengths, heads, 64).mask(mask).validate().unwrap();
            let options = with_tile(TINY).order(orders[index % orders.len()]);
            let plan = Plan::with(&problem, &device(3), &options).unwrap();
            assert_eq!(decoded(&plan), planned(&plan), "{plan}");
            plan.schedule().num_tiles() as usize
        })
        .sum();
    assert!(tiles > 10_000, "{tiles} tiles");
}
