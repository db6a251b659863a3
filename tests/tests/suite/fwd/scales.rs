//! Extreme scales. If the scales of Q and K are so small that all scores are 0, O is the mean of the visible rows of V.

use fa3_cuda::kernels::fwd::buffers;
use fa3_ir::BufferId;
use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, Pipeline};
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::fwd::shapes::{INPUTS, TINY_FP8, laid_out};
use fa3_tests::fwd::{dense, initial, results, with_tile};
use fa3_tests::{Case, Scaled, Values, in_turn, pairs};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec};

use super::launch;

const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;

const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(20), right: Some(5) }];

/// The tile with and without softmax/GEMM overlap.
fn tiles(tile: CtaTile) -> [CtaTile; 2] {
    [tile, CtaTile { pipeline: Pipeline::Serial, ..tile }]
}

/// Runs the problem with this tile, and with these scales in place of the tensors' own scales.
fn run(tile: CtaTile, spec: ProblemSpec, scales: &[(usize, &[f32])]) -> (Case, Values, Forward<f32>) {
    let case = Case::normal("scales", laid_out(&tile, spec).known().unwrap(), 5);
    let values = case.values();
    let program = launch(&case.problem, &with_tile(tile)).unwrap().program;
    let mut before = initial(&case.problem, &program, &values);
    for &(tensor, scales) in scales {
        let BufferId(at) = buffers::DESCALES[tensor];
        let count = before[at].len() / 4;
        before[at] = scales.iter().cycle().take(count).flat_map(|scale| scale.to_le_bytes()).collect();
    }
    let outcome = ProgramSimulation::new(&program).mode(Mode::Exact).run(&before).unwrap();
    let answer = results(&case.problem, &program, &outcome.buffers);
    (case, values, answer)
}

/// Checks that O is the mean of `v(key, column)` over the visible keys, and that LSE is the logarithm of their number.
fn check_means(problem: &KnownProblem, answer: &Forward<f32>, v: impl Fn(usize, usize) -> f32) {
    let len = problem.lengths(0);
    for row in 0..len.q {
        let seen: Vec<usize> = (0..len.k).filter(|&key| problem.mask().allows(row, key, len)).collect();
        let (lse, count) = (answer.lse[[0, 0, row]], seen.len() as f32);
        assert!((lse - count.ln()).abs() < 1e-3, "{problem}: {lse} of {count} keys");
        for col in 0..problem.head_dim_v() {
            let mean = seen.iter().map(|&key| v(key, col)).sum::<f32>() / count;
            let o = answer.o[[0, row, 0, col]];
            assert!((o - mean).abs() <= 0.01 + 0.01 * mean.abs(), "{problem}: {o}, not {mean}");
        }
    }
}

/// Per-head scales are 0, but masked keys, whose scores are -inf, stay masked. A small softmax_scale is tested as well.
#[test]
fn zeros_of_heads() {
    let settings = [(None, None), (Some(5.0), None), (None, Some(1e-15))];
    let cases = in_turn(pairs(tiles(TINY_FP8), MASKS), 1, settings);
    for ((tile, mask), (softcap, softmax_scale)) in cases {
        let mut spec = dense(Dtype::E4m3, 1, (70, 100), (1, 1), 64).mask(mask);
        (spec.softcap, spec.softmax_scale) = (softcap, softmax_scale);
        for tensor in [Q, K] {
            let (case, values, answer) = run(tile, spec.clone(), &[(tensor, &[0.0])]);
            check_means(&case.problem, &answer, |key, col| values.v[[0, key, 0, col]]);
        }
        let (_, _, answer) = run(tile, spec, &[(V, &[0.0])]);
        assert!(answer.o.iter().all(|&o| o == 0.0));
    }
}

/// Per-channel scales are 0, so O equals the channels' means. In fully masked rows O is 0.
#[test]
fn zeros_of_channels() {
    for inputs in [INPUTS[4], INPUTS[5]] {
        let tile = CtaTile { tile_n: 64, ..TINY_FP8 }.of_inputs(inputs);
        for (tile, mask) in pairs(tiles(tile), MASKS) {
            let spec = dense(Dtype::E4m3, 1, (120, 100), (2, 1), 64).head_dim_v(48).mask(mask);
            let (case, _, answer) = run(tile, spec, &[(V, &[0.0])]);
            let means = Scaled::means(&case.problem).unwrap();
            let len = case.problem.lengths(0);
            for ((_, row, _, col), &o) in answer.o.indexed_iter() {
                let sees_any = (0..len.k).any(|key| mask.allows(row, key, len));
                assert_eq!(o, if sees_any { means[col] } else { 0.0 }, "{}, row {row}", case.problem);
            }
        }
    }
}

/// The product of the block scales of Q and K underflows in binary32.
#[test]
fn small_scales_of_blocks() {
    let tile = CtaTile { tile_n: 64, ..TINY_FP8 }.of_inputs(INPUTS[2]);
    for (tile, mask) in pairs(tiles(tile), MASKS) {
        let spec = dense(Dtype::E4m3, 1, (70, 200), (1, 1), 64).mask(mask);
        let (case, values, answer) = run(tile, spec, &[(Q, &[2e-23]), (K, &[2e-23])]);
        check_means(&case.problem, &answer, |key, col| values.v[[0, key, 0, col]]);
    }
}

/// A block of V has a far smaller scale than the block before, so that its values vanish beside the others.
#[test]
fn scales_of_v_far_apart() {
    let tile = CtaTile { tile_n: 128, ..TINY_FP8 }.of_inputs(INPUTS[3]);
    for tile in tiles(tile) {
        for scales in [[1e-37, 1.0], [1.0, 1e-37]] {
            let spec = dense(Dtype::E4m3, 1, (70, 200), (1, 1), 64);
            let (case, values, answer) = run(tile, spec, &[(Q, &[1e-30]), (V, &scales)]);
            let codes = Scaled::V.codes(&case.problem, &values.v);
            check_means(&case.problem, &answer, |key, col| codes[[0, key, 0, col]] * scales[key / 128]);
        }
    }
}
