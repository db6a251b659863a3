//! Interval masks. If the intervals equal another mask, results have the same bits as with this mask, and a NaN reaches
//! exactly the rows that see it.

use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, Pipeline};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::blocks::Listed;
use fa3_tests::fwd::shapes::TINY;
use fa3_tests::fwd::{dense, with_tile};
use fa3_tests::intervals::Kind;
use fa3_tests::{Case, Poison, pairs};
use fa3_types::{Dtype, Intervals, IntervalsOfRow, KnownProblem, Mask, ProblemSpec, SequenceRows};
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

/// A dense sequence, and packed ones. Some of them have no rows or no keys.
fn sequences() -> [(ProblemSpec, [SequenceRows; 2]); 2] {
    let dense = [150, 140].map(|rows| SequenceRows::dense(1, rows));
    let packed = [[150, 0, 3, 70], [140, 9, 0, 100]].map(|lengths| SequenceRows::packed_lengths(&lengths));
    let of_packed = ProblemSpec::packed(Dtype::Bf16, (2, 1), 64, &packed[0], &packed[1]);
    [(spec(), dense), (of_packed, packed)]
}

/// Problem with intervals that equal the mask of `known`, beside the mask that `spec` has. If each row has two
/// intervals, they are two parts of the row's keys.
fn said(spec: ProblemSpec, known: &KnownProblem, of_row: IntervalsOfRow) -> KnownProblem {
    let form = Intervals { of_row, per_sequence: false, per_head: false };
    let rows =
        (0..known.batch()).flat_map(|index| (0..known.lengths(index).q).map(move |row| [index, 0, row]));
    let bounds = rows.flat_map(|at| {
        let keys = known.lengths(at[0]).k;
        let sees = |key: &usize| known.allows(at, *key);
        let (start, end) =
            ((0..keys).find(sees).unwrap_or(9), (0..keys).rfind(sees).map_or(0, |key| key + 1));
        let middle = start.max(end) / 2;
        let two = [middle.max(start), end, start, middle.min(end)];
        let bounds = if of_row == IntervalsOfRow::One { vec![start, end] } else { two.into() };
        bounds.into_iter().map(|bound| bound as i32).collect::<Vec<_>>()
    });
    let problem = spec.mask(Mask::of_intervals(form)).validate().expect("it is valid");
    let bounds = bounds.collect::<Vec<_>>();
    KnownProblem::with_intervals(problem, known.rows_q().clone(), known.rows_k().clone(), bounds)
        .expect("every row has bounds")
}

#[test]
fn they_have_the_bits_of_the_mask_that_they_say() {
    // The mask that intervals say, and the mask beside them.
    let left = Mask::Window { left: Some(40), right: None };
    let masks = [
        (Mask::Causal, Mask::None),
        (Mask::Window { left: Some(40), right: Some(3) }, Mask::None),
        (Mask::None, Mask::Causal),
        (left, Mask::Window { left: Some(90), right: Some(3) }),
        (Mask::Causal, Mask::from_chunk(50).expect("it is a size")),
    ];
    pairs(TILES, masks).into_par_iter().for_each(|(tile, (mask, beside))| {
        for (spec, [rows_q, rows_k]) in sequences() {
            let spec = spec.seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences());
            let known =
                |spec: ProblemSpec| spec.with_rows(rows_q.clone(), rows_k.clone()).expect("it is valid");
            let expected = run(&known(spec.clone().mask(mask).mask(beside)), tile, Poison::None);
            for of_row in [IntervalsOfRow::One, IntervalsOfRow::Two] {
                let said = said(spec.clone().mask(beside), &known(spec.clone().mask(mask)), of_row);
                assert_eq!(run(&said, tile, Poison::None), expected, "{mask} {beside} {of_row:?} {tile}");
            }
        }
    });
}

#[test]
fn sequences_that_are_causal_or_not_have_the_bits_of_both_masks() {
    let masks = [(Mask::Causal, -3), (Mask::None, 0)];
    pairs(TILES, masks).into_par_iter().for_each(|(tile, (mask, is_causal))| {
        for (spec, [rows_q, rows_k]) in sequences() {
            let spec = spec.seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences());
            let known = spec.clone().mask(mask).with_rows(rows_q.clone(), rows_k.clone());
            let form = Intervals::of_causal(rows_q.count());
            let numbers = vec![is_causal; rows_q.count()];
            let problem = spec.mask(Mask::of_intervals(form)).validate().expect("it is valid");
            let said = KnownProblem::with_intervals(problem, rows_q, rows_k, numbers);
            let [said, known] = [said, known].map(|problem| problem.expect("it is valid"));
            assert_eq!(run(&said, tile, Poison::None), run(&known, tile, Poison::None), "{mask} {tile}");
        }
    });
}

/// Lists of all blocks have the bits of the mask alone, and NaN in blocks that no row lists reaches no row.
#[test]
fn lists_of_all_blocks_have_the_bits_of_none() {
    let tile = CtaTile { tile_n: 128, ..TILES[0] };
    let spec = dense(Dtype::Bf16, 1, (150, 300), (2, 1), 64);
    for mask in [Mask::None, Mask::Causal, Mask::Window { left: Some(140), right: Some(3) }] {
        let spec = spec.clone().mask(mask);
        let plain = run(&spec.clone().known().expect("it is valid"), tile, Poison::None);
        assert_eq!(run(&Listed::All.of(spec, (false, false)), tile, Poison::None), plain, "{mask}");
    }
    let first = Listed::First.of(spec, (false, false));
    assert_eq!(run(&first, tile, Poison::KeyRow(128)), run(&first, tile, Poison::None));
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
