//! Interval masks. If the intervals equal another mask, results have the same bits as with this mask, and a NaN reaches
//! exactly the rows that see it.

use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, Pipeline};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::shapes::TINY;
use fa3_tests::fwd::{dense, with_tile};
use fa3_tests::intervals::Kind;
use fa3_tests::{Case, Poison, pairs};
use fa3_types::{Dtype, Intervals, IntervalsOfRow, KnownProblem, Mask, ProblemSpec};
use rayon::prelude::*;

use super::launch;

const TILES: [CtaTile; 3] = [
    CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY },
    CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY },
    CtaTile { pipeline: Pipeline::ThreeStage, tile_n: 48, ..TINY },
];

fn spec() -> ProblemSpec {
    dense(Dtype::Bf16, 1, (150, 140), (2, 1), 64)
}

fn run(problem: &KnownProblem, tile: CtaTile, poison: Poison) -> Forward<f32> {
    let values = Case { poison, ..Case::normal("intervals", problem.clone(), 8) }.values();
    let launch = launch(problem, &with_tile(tile)).expect("there is such a kernel");
    launch
        .simulate(&values, Policy::Random(5), Mode::Fast)
        .unwrap_or_else(|fault| panic!("{problem}: {fault}"))
}

/// Problem with intervals that equal `mask`. If each row has two intervals, they are two parts of the row's keys.
fn said(mask: Mask, of_row: IntervalsOfRow) -> KnownProblem {
    let known = spec().mask(mask).known().expect("it is valid");
    let form = Intervals { of_row, per_sequence: false, per_head: false };
    let bounds = (0..150).flat_map(|row| {
        let sees = |key: &usize| known.allows([0, 0, row], *key);
        let (start, end) = ((0..140).find(sees).unwrap_or(9), (0..140).rfind(sees).map_or(0, |key| key + 1));
        let middle = start.max(end) / 2;
        match of_row {
            IntervalsOfRow::One => vec![start as i32, end as i32],
            IntervalsOfRow::Two => {
                [middle.max(start), end, start, middle.min(end)].map(|bound| bound as i32).into()
            }
        }
    });
    let problem = spec().mask(Mask::Intervals(form)).validate().expect("it is valid");
    problem.known_intervals(bounds.collect::<Vec<_>>()).expect("every row has bounds")
}

#[test]
fn they_have_the_bits_of_the_mask_that_they_say() {
    let masks = [Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    pairs(TILES, masks).into_par_iter().for_each(|(tile, mask)| {
        let expected = run(&spec().mask(mask).known().expect("it is valid"), tile, Poison::None);
        for of_row in [IntervalsOfRow::One, IntervalsOfRow::Two] {
            assert_eq!(run(&said(mask, of_row), tile, Poison::None), expected, "{mask} {of_row:?} {tile}");
        }
    });
}

#[test]
fn a_nan_in_k_reaches_the_rows_that_see_it() {
    let kinds = [Kind::SinkAndWindow, Kind::FarApart, Kind::Meeting];
    TILES.into_par_iter().zip(kinds).for_each(|(tile, kind)| {
        let problem = kind.of(spec(), false, true);
        let clean = run(&problem, tile, Poison::None);
        for key in [0, 3, 63, 64, 139] {
            let nan = run(&problem, tile, Poison::KeyRow(key));
            for ((_, head, row), &lse) in nan.lse.indexed_iter() {
                let sees = problem.allows([0, head, row], key);
                let same = lse.to_bits() == clean.lse[[0, head, row]].to_bits();
                assert!(
                    if sees { lse.is_nan() } else { same },
                    "{kind:?}, head {head}, row {row}, key {key}"
                );
                let o = (0..64).map(|col| [nan.o[[0, row, head, col]], clean.o[[0, row, head, col]]]);
                let is_right = |[nan, clean]: [f32; 2]| {
                    if sees { nan.is_nan() } else { nan.to_bits() == clean.to_bits() }
                };
                assert!(o.into_iter().all(is_right), "{kind:?}, head {head}, row {row}, key {key}");
            }
        }
    });
}
