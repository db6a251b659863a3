//! The kernels' integers are the host's: every tile of small problems, decoded by both.

use fa3_cuda::kernels::{Spec, fwd};
use fa3_sched::forward::Plan;
use fa3_sched::{Longest, Order};
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::covering;
use fa3_tests::fwd::shapes::TINY;
use fa3_tests::fwd::{dense, device, with_tile};
use fa3_types::{Dtype, Mask};
use rayon::prelude::*;

const LENGTHS: [usize; 10] = [1, 15, 16, 17, 63, 64, 65, 100, 129, 200];

/// The numbers of every tile, as the kernel writes them.
fn decoded(plan: &Plan) -> Vec<u32> {
    let program = fwd::tiles(plan).map(Spec::kernel);
    let outcome = ProgramSimulation::new(&program).mode(Mode::Fast).run(&[vec![]]).unwrap();
    assert!(outcome.is_clean(), "{plan}");
    let (words, rest) = outcome.buffers[0].as_chunks::<4>();
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

/// Lengths, sides of the mask, orders and batches: each with each.
#[test]
fn kernels_decode_tiles_as_the_host_does() {
    let sides = [None, Some(0), Some(1), Some(30), Some(120)];
    let sections = [1, 2, 7, 100].into_iter().flat_map(|section| {
        [Longest::First, Longest::Last].map(|longest| Order::LongestFirst { section, longest })
    });
    let orders: Vec<Order> = [Order::Linear].into_iter().chain(sections).collect();
    let heads = [(1, (1, 1)), (3, (3, 1)), (2, (6, 2)), (1, (5, 5))];
    let levels = [LENGTHS.len(), LENGTHS.len(), sides.len(), sides.len(), orders.len(), heads.len()];
    let rows = covering(&levels, 0);
    let tiles: usize = rows
        .par_iter()
        .map(|row| {
            let &[q, k, left, right, order, batch] = &row[..] else {
                unreachable!("a level for each factor")
            };
            let ((batch, heads), mask) = (heads[batch], Mask::window(sides[left], sides[right]));
            let problem = dense(Dtype::Bf16, batch, (LENGTHS[q], LENGTHS[k]), heads, 64).mask(mask);
            let problem = problem.validate().unwrap();
            let options = with_tile(TINY).order(orders[order]);
            let plan = Plan::with(&problem, &device(3), &options).unwrap();
            assert_eq!(decoded(&plan), planned(&plan), "{plan}");
            plan.schedule().num_tiles() as usize
        })
        .sum();
    println!("{} problems, {tiles} tiles", rows.len());
    assert!(tiles > 1000, "{tiles} tiles");
}
