//! Every tile, form, mask, scheduler, soft cap, layout, size, at least each with each.

use std::collections::BTreeSet;

use fa3::sched::forward::{CtaTile, PlanOptions};
use fa3::sched::{Longest, Order, Scheduler};
use fa3::types::{Dtype, Mask};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{Launch, Layout, shapes};
use fa3_tests::{Case, Dist, Poison};
use rayon::prelude::*;

use crate::{HEADS, dense, judged, launch, with_tile};

const MASKS: [Mask; 5] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(37), right: Some(21) },
    Mask::Window { left: Some(50), right: None },
    Mask::Window { left: None, right: Some(13) },
];
const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
const ORDERS: [Order; 3] = [
    Order::Linear,
    Order::LongestFirst { section: 2, longest: Longest::First },
    Order::LongestFirst { section: 1, longest: Longest::Last },
];
const POLICIES: [Policy; 4] = [Policy::Eager, Policy::Lazy, Policy::Random(1), Policy::Random(2)];
const DISTS: [Dist; 4] = [Dist::Normal, Dist::Increasing, Dist::Decreasing, Dist::OneHot];
const DTYPES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];
const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];

/// Lengths of Q and of K, in terms of a tile of m x n.
type Lengths = fn(usize, usize) -> (usize, usize);

/// One of each; one query and several blocks; just less and more than tiles; rows without keys under a causal mask.
const LENGTHS: [Lengths; 5] = [
    |_, _| (1, 1),
    |_, n| (1, 3 * n + 7),
    |m, n| (m - 3, 2 * n + 1),
    |m, n| (m + 9, m + 9 + n / 2),
    |m, _| (m + 30, 29),
];

/// PlanOptions of a level for each factor, so that any two levels of any two factors meet.
fn pairwise(levels: &[usize]) -> Vec<Vec<usize>> {
    let pair =
        |(f, a): (usize, usize), (g, b): (usize, usize)| if f < g { [f, a, g, b] } else { [g, b, f, a] };
    let factors = || levels.iter().enumerate().flat_map(|(f, &levels)| (0..levels).map(move |a| (f, a)));
    let mut open: BTreeSet<[usize; 4]> =
        factors().flat_map(|x| factors().filter(move |y| x.0 < y.0).map(move |y| pair(x, y))).collect();
    let mut rows = Vec::new();
    while let Some(&[f, a, g, b]) = open.first() {
        let mut row: Vec<(usize, usize)> = vec![(f, a), (g, b)];
        for factor in (0..levels.len()).filter(|&factor| factor != f && factor != g) {
            let new =
                |level| row.iter().filter(|&&other| open.contains(&pair((factor, level), other))).count();
            // Those that meet nothing new take turns.
            let turn = |level| (level + levels[factor] - rows.len() % levels[factor]) % levels[factor];
            let best = (0..levels[factor]).max_by_key(|&level| (new(level), turn(level)));
            row.push((factor, best.expect("a factor has levels")));
        }
        for x in &row {
            row.iter().filter(|y| x.0 < y.0).for_each(|&y| _ = open.remove(&pair(*x, y)));
        }
        row.sort_unstable();
        rows.push(row.into_iter().map(|(_, level)| level).collect());
    }
    rows
}

#[test]
fn any_two_levels_meet() {
    let levels = [7, 2, 3, 4];
    let rows = pairwise(&levels);
    for (f, g) in (0..4).flat_map(|f| (0..f).map(move |g| (f, g))) {
        let met: BTreeSet<(usize, usize)> = rows.iter().map(|row| (row[f], row[g])).collect();
        assert_eq!(met.len(), levels[f] * levels[g]);
    }
    assert!(rows.len() <= 40, "{} rows; 28 are needed", rows.len());
}

/// A choice of levels.
fn entry(shapes: &[CtaTile], row: &[usize]) -> (Case, PlanOptions, Policy) {
    let &[shape, mask, scheduler, softcap, heads, dtype, layout, order, policy, lengths, dist, padding] = row
    else {
        unreachable!("a row has a level for each factor");
    };
    let shape = shapes[shape];
    let (seqlen_q, seqlen_k) = LENGTHS[lengths](shape.tile_m as usize, shape.tile_n as usize);
    // Many heads need not have many rows and keys.
    let (batch, tiles, blocks) = match HEADS[heads].0 {
        1 => (2, 2, 4),
        3 => (1, 1, 4),
        _ => (1, 1, 2),
    };
    let seqlen_q = seqlen_q.min((tiles * shape.tile_m - 1) as usize);
    let seqlen_k = seqlen_k.min((blocks * shape.tile_n - 1) as usize);
    // The tile's columns, or some less.
    let columns = |columns: u32| columns as usize - [0, 8, 24][padding];
    let mut spec = dense(DTYPES[dtype], batch, (seqlen_q, seqlen_k), HEADS[heads], columns(shape.head_dim))
        .head_dim_v(columns(shape.head_dim_v))
        .mask(MASKS[mask]);
    spec.softcap = SOFTCAPS[softcap];
    let problem = Layout::ALL[layout].of(spec).validate().expect("all levels are valid");
    let scheduler = shapes::dealt(&shape, SCHEDULERS[scheduler]);
    let options = with_tile(shape).order(ORDERS[order]).scheduler(scheduler);
    let (policy, layout) = (POLICIES[policy], Layout::ALL[layout]);
    let name = format!(
        "{problem}, {shape} for {}/{}, {scheduler}, {}, {layout:?}, {:?}, {policy:?}",
        shape.head_dim, shape.head_dim_v, ORDERS[order], DISTS[dist]
    );
    (Case { name, problem, dist: DISTS[dist], poison: Poison::None, seed: 3 }, options, policy)
}

fn run((case, options, policy): &(Case, PlanOptions, Policy)) -> Result<(f64, u64), String> {
    let launch: Launch = launch(&case.problem, options).map_err(|fault| fault.to_string())?;
    let values = case.values();
    let mode = if matches!(policy, Policy::Random(_)) { Mode::Fast } else { Mode::Exact };
    let answer = launch.simulate(&values, *policy, mode).map_err(|fault| fault.to_string())?;
    Ok((judged(case, &values, &answer)?, launch.macs()))
}

#[test]
fn every_combination_obeys_the_error_law() {
    let shapes = shapes::all();
    let levels = [
        shapes.len(),
        MASKS.len(),
        SCHEDULERS.len(),
        SOFTCAPS.len(),
        HEADS.len(),
        DTYPES.len(),
        Layout::ALL.len(),
        ORDERS.len(),
        POLICIES.len(),
        LENGTHS.len(),
        DISTS.len(),
        3,
    ];
    let entries: Vec<_> = pairwise(&levels).iter().map(|row| entry(&shapes, row)).collect();
    let results: Vec<_> = entries.par_iter().map(run).collect();
    let failures: Vec<String> = entries
        .iter()
        .zip(&results)
        .filter_map(|((case, ..), result)| {
            result.as_ref().err().map(|error| format!("{}\n{error}", case.name))
        })
        .collect();
    let passed = || results.iter().flatten();
    println!(
        "{} combinations of {} tiles, {} multiplications and additions; error / bound up to {:.2}",
        entries.len(),
        shapes.len(),
        passed().map(|(_, macs)| macs).sum::<u64>(),
        passed().map(|(ratio, _)| *ratio).fold(0.0, f64::max),
    );
    assert!(failures.is_empty(), "{} failures\n\n{}", failures.len(), failures.join("\n\n"));
}
