//! The tiles that a kernel computes are those of the plan, with the same blocks of keys.
//!
//! Column c of V is NaN in the keys of block c and 1 elsewhere. A tile multiplies whole blocks, seen or not, so that
//! column c of its O is NaN exactly if it visits block c.

use fa3::sched::forward::{CtaTile, Plan};
use fa3::sched::{Longest, Order, Scheduler};
use fa3::types::{Dtype, Mask, Problem};
use fa3_sim::{Mode, Policy};
use fa3_tests::Values;
use fa3_tests::fwd::{Launch, device};
use ndarray::Array4;
use rayon::prelude::*;

use crate::{dense, normal, with_tile};
use fa3_tests::fwd::shapes::TINY;

/// (sequence, head, block of rows, block of keys).
type Visit = [usize; 4];

/// What the plan says, of tiles that have a row with a key.
fn planned(plan: &Plan) -> Vec<Visit> {
    let visits = plan.works().flat_map(|work| {
        let [batch, head, m_block] = [work.tile.batch, work.tile.head, work.tile.m_block].map(|x| x as usize);
        (work.kv.first..work.kv.end).map(move |block| [batch, head, m_block, block as usize])
    });
    let mut visits: Vec<Visit> = visits.collect();
    visits.sort_unstable();
    visits
}

/// What the kernel does.
fn visited(launch: &Launch, values: &Values) -> Vec<Visit> {
    let (problem, shape) = (launch.plan.problem(), launch.plan.tile());
    let answer = launch.simulate(values, Policy::Random(2), Mode::Fast);
    let answer = answer.unwrap_or_else(|fault| panic!("{}: {fault}", launch.plan));
    let (tile_m, len) = (shape.tile_m as usize, problem.lengths(0));
    let nan = answer.o.indexed_iter().filter(|(_, o)| o.is_nan());
    let mut visits: Vec<Visit> =
        nan.map(|((batch, row, head, column), _)| [batch, head, row / tile_m, column]).collect();
    visits.sort_unstable();
    visits.dedup();
    let blocks = len.k.div_ceil(shape.tile_n as usize);
    assert!(visits.iter().all(|visit| visit[3] < blocks), "NaN where V has none: {}", launch.plan);
    visits
}

/// V as above; Q and K are 0, so that every key that is seen counts.
fn marked(problem: &Problem, tile_n: usize) -> Values {
    let mut values = normal("marked", problem.clone(), 0).values();
    values.q.fill(0.0);
    values.k.fill(0.0);
    values.v = Array4::from_shape_fn(
        values.v.dim(),
        |(_, key, _, column)| {
            if key / tile_n == column { f32::NAN } else { 1.0 }
        },
    );
    values
}

fn check(problem: &Problem, tile: CtaTile, sms: u32, order: Order, scheduler: Scheduler) -> usize {
    let options = with_tile(tile).order(order).scheduler(scheduler);
    let launch = Launch::new(problem, &device(sms), &options).unwrap();
    let visited = visited(&launch, &marked(problem, tile.tile_n as usize));
    assert_eq!(visited, planned(&launch.plan), "{}", launch.plan);
    visited.len()
}

const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];

fn masks() -> Vec<Mask> {
    let sides = [None, Some(0), Some(1), Some(20), Some(70)];
    let mut masks: Vec<Mask> =
        sides.into_iter().flat_map(|left| sides.map(|right| Mask::window(left, right))).collect();
    masks.dedup();
    masks
}

/// All pairs of some lengths around multiples of a tile, with all masks; schedulers and orders take turns.
#[test]
fn small_problems_are_cut_as_planned() {
    let lengths_q = [1, 63, 64, 65, 130];
    let lengths_k = [1, 15, 16, 17, 66];
    let mut cases = Vec::new();
    for (index, (mask, lengths)) in masks()
        .into_iter()
        .flat_map(|mask| lengths_q.into_iter().flat_map(move |q| lengths_k.map(|k| (mask, (q, k)))))
        .enumerate()
    {
        cases.push((index, mask, lengths));
    }
    let visits: usize = cases
        .par_iter()
        .map(|&(index, mask, lengths)| {
            let (batch, heads) = [(1, (1, 1)), (2, (3, 1)), (1, (4, 2)), (3, (1, 1))][index % 4];
            let spec = dense(Dtype::F16, batch, lengths, heads, 8).head_dim_v(8);
            let problem = spec.mask(mask).validate().unwrap();
            let longest = [Longest::First, Longest::Last][index % 2];
            let order = match index % 5 {
                0 => Order::Linear,
                section => Order::LongestFirst { section: section as u32, longest },
            };
            check(&problem, TINY, 1 + index as u32 % 4, order, SCHEDULERS[index % 3])
        })
        .sum();
    println!("{} problems, {visits} visits of blocks", cases.len());
}

/// Heads, sequences and sections that divide nothing.
#[test]
fn many_tiles_are_dealt_out_as_planned() {
    let cases: Vec<_> = [(1, (7, 7)), (5, (3, 1)), (3, (10, 2)), (7, (1, 1))]
        .into_iter()
        .flat_map(|shape| (0..7).map(move |section| (shape, section)))
        .collect();
    cases.into_par_iter().for_each(|((batch, heads), section)| {
        let problem = dense(Dtype::F16, batch, (130, 40), heads, 8).causal().validate().unwrap();
        let longest = [Longest::First, Longest::Last][section % 2];
        let order = match section as u32 {
            0 => Order::Linear,
            section => Order::LongestFirst { section, longest },
        };
        for (scheduler, sms) in SCHEDULERS.into_iter().zip([1, 4, 5]) {
            check(&problem, TINY, sms, order, scheduler);
        }
    });
}
