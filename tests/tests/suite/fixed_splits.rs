//! Fixed-size splits: a sequence has the same bits in any batch and on any number of SMs.

use fa3_ir::{Kernel, Program};
use fa3_sched::forward::{PlanOptions, SplitKeys};
use fa3_sim::{Mode, Policy, ProgramSimulation};
use fa3_tests::cache::{Case, Keys, Pages, Queries, paged};
use fa3_tests::fwd::{dense, trial};
use fa3_tests::{Dist, chunks, in_turn};
use fa3_types::{Dtype, Mask};
use rayon::prelude::*;

fn case() -> Case {
    Case { split_keys: Some(SplitKeys::FixedSize { keys: 128 }), ..paged((64, 64)) }
}

/// Cases with lengths at the ends of splits and of blocks, and with a sequence of many splits beside sequences of one
/// key, no key, and several tiles of rows.
fn cases() -> [Case; 6] {
    let window = Mask::Window { left: Some(150), right: Some(3) };
    [
        Case { lengths: vec![500, 1, 0, 128, 129], ..case() },
        Case { lengths: vec![5, 700], heads: (3, 1), queries: Queries::Packed(20), ..case() },
        Case { lengths: vec![300, 90, 256], queries: Queries::InPart(5), mask: window, ..case() },
        Case {
            lengths: vec![40, 400],
            keys: Keys::Padded,
            mask: chunks(300, None),
            dist: Dist::Increasing,
            ..case()
        },
        Case {
            lengths: vec![260, 70],
            queries: Queries::Packed(70),
            dtype: Dtype::F16,
            sink: false,
            ..case()
        },
        Case { lengths: vec![200, 390], columns: (128, 128), softcap: Some(3.0), mask: Mask::None, ..case() },
    ]
}

/// Runs a program under a random schedule.
fn simulated(program: &Program<Kernel>, before: &[Vec<u8>], seed: u64) -> Result<Vec<Vec<u8>>, String> {
    let simulation = ProgramSimulation::new(program).policy(Policy::Random(seed));
    let outcome = simulation.mode(Mode::Fast).run(before).map_err(|error| error.to_string())?;
    let finding = outcome.findings().next().map(ToString::to_string);
    finding.map_or(Ok(outcome.buffers), Err)
}

#[test]
fn sequences_have_the_bits_that_they_have_alone() {
    cases().into_par_iter().enumerate().for_each(|(index, case)| {
        let run = |program: &_, before: &_| simulated(program, before, index as u64);
        assert_eq!(case.check_alone(1 + index as u32, run), Ok(()));
    });
}

/// Prompts whose rows are computed together, and in chunks: 33 rows at a time, and one by one. Tiles of other rows
/// begin with other keys under a window, and reach other pieces; with a sink a row may have one piece in one tile and
/// several in another one.
fn prompts() -> [Case; 4] {
    let window = |left| Mask::Window { left: Some(left), right: Some(0) };
    let case = Case { split_keys: Some(SplitKeys::Fixed), sms: 3, ..case() };
    [
        Case { lengths: vec![700, 60], queries: Queries::Packed(90), mask: window(100), ..case.clone() },
        Case {
            lengths: vec![600],
            queries: Queries::Dense(80),
            keys: Keys::Padded,
            sink: false,
            ..case.clone()
        },
        Case {
            lengths: vec![690, 20],
            queries: Queries::Packed(100),
            heads: (2, 2),
            columns: (128, 128),
            mask: chunks(300, Some(0)),
            keys: Keys::Pages(Pages::of(12)),
            split_keys: Some(SplitKeys::FixedSize { keys: 128 }),
            dtype: Dtype::F16,
            ..case.clone()
        },
        Case { lengths: vec![560], queries: Queries::Dense(66), mask: window(112), sink: false, ..case },
    ]
}

#[test]
fn rows_have_the_same_bits_in_any_chunk_of_their_sequence() {
    // Prompts with a sink and prompts without one have chunks of either size.
    let cases = in_turn(prompts(), 1, [33, 1, 1, 33]);
    cases.into_par_iter().enumerate().for_each(|(index, (case, rows))| {
        let run = |program: &_, before: &_| simulated(program, before, index as u64);
        assert_eq!(case.check_chunks(rows, 2, run), Ok(()));
    });
}

/// Prompts for which kernels keep O of the pieces before in shared memory and in the workspace, with scales of V, and
/// with `qv`.
fn wide() -> [Case; 6] {
    let case = Case { lengths: vec![330, 40], queries: Queries::Packed(90), heads: (1, 1), ..case() };
    [
        Case { queries: Queries::Dense(1540), sink: false, ..case.clone() },
        Case { columns: (256, 256), mask: Mask::None, keys: Keys::Padded, sink: false, ..case.clone() },
        Case { columns: (192, 192), queries: Queries::InPart(5), heads: (8, 1), ..case.clone() },
        Case { columns: (128, 128), e4m3_keys: true, mask: Mask::None, sink: false, ..case.clone() },
        Case { columns: (128, 128), dtype: Dtype::E4m3, keys: Keys::Pages(Pages::of(12)), ..case.clone() },
        Case { columns: (64, 256), qv: true, sink: false, mask: Mask::None, ..case },
    ]
}

/// CTAs that merge the pieces of their tiles give the bits of the reduction.
#[test]
fn merged_splits_have_the_bits_of_reduced_ones() {
    let cases = cases().into_iter().chain(prompts()).chain(wide());
    let faults = cases.collect::<Vec<_>>().into_par_iter().filter_map(|case| {
        let [reducing, merging] =
            [u64::MAX, 0].map(|bytes| Case { split_bytes: Some(bytes), ..case.clone() });
        let run = |program: &_, before: &_| simulated(program, before, 5);
        reducing.check_against(&merging, run).err()
    });
    assert_eq!(faults.collect::<Vec<_>>(), [""; 0]);
}

/// Pieces of dense problems, whose tiles are found by their index.
#[test]
fn merged_pieces_of_dense_problems() {
    let problems = [
        dense(Dtype::Bf16, 1, (140, 400), (2, 1), 128).causal(),
        dense(Dtype::F16, 2, (130, 300), (2, 2), 64).mask(Mask::window(Some(90), Some(4))).sink(),
        dense(Dtype::Bf16, 1, (140, 300), (1, 1), 256),
        dense(Dtype::E4m3, 1, (150, 300), (2, 1), 64).causal(),
    ];
    problems.into_par_iter().for_each(|spec| {
        let options = PlanOptions::default().split_keys(SplitKeys::FixedSize { keys: 128 });
        let case = fa3_tests::Case::normal("pieces", spec.known().expect("lengths agree"), 3);
        let trial = trial(case, 3, &options);
        for policy in [Policy::Eager, Policy::Random(3)] {
            let checked = trial.simulate(policy, Mode::Fast).and_then(|after| trial.check(&after));
            assert_eq!(checked, Ok(()), "{}", trial.name);
        }
    });
}

/// If all CTAs get equal shares instead, the bits differ, and the check notices it.
#[test]
fn other_bits_are_found() {
    // The sequences are so long that work units are split. Short sequences would have the same bits.
    let case = Case { lengths: vec![2000, 700], split_keys: Some(SplitKeys::Even), ..cases()[0].clone() };
    let checked = case.check_alone(3, |program, before| {
        let outcome = ProgramSimulation::new(program).mode(Mode::Fast).run(before);
        Ok(outcome.map_err(|error| error.to_string())?.buffers)
    });
    assert!(checked.is_err_and(|fault| fault.contains("have other bits alone")));
}
