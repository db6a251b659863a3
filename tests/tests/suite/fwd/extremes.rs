//! Extreme values of a problem's parameters.

use fa3_cuda::kernels::fwd::buffers;
use fa3_sched::forward::{CtaTile, Pipeline, Precision};
use fa3_sim::{Buffer, Memory, Mode, Policy, ProgramSimulation, Simulation};
use fa3_tests::fwd::{dense, initial, judged, with_tile};
use fa3_tests::{Case, Dist, Values, pairs};
use fa3_types::{Dtype, KnownProblem, Mask};
use ndarray::array;
use rayon::prelude::*;

use super::{check, launch};
use fa3_tests::fwd::shapes::{PIPELINES, TINY, TINY_FP8, dtype};

fn tiles() -> Vec<CtaTile> {
    let fp8 = [TINY_FP8, CtaTile { pipeline: Pipeline::Serial, ..TINY_FP8 }];
    super::tiles().into_iter().chain(fp8).collect()
}

/// The tiles with which a problem is run.
fn tiles_for(problem: &KnownProblem) -> impl Iterator<Item = CtaTile> + use<> {
    let precision = Precision::of(problem);
    tiles().into_iter().filter(move |tile| tile.precision == precision)
}

fn check_all(cases: Vec<Case>) {
    let pairs: Vec<(Case, CtaTile)> = cases
        .into_iter()
        .flat_map(|case| tiles_for(&case.problem).map(move |tile| (case.clone(), tile)))
        .collect();
    let check = |(case, tile): &(Case, CtaTile)| {
        check(case, &case.values(), *tile, Policy::Random(9), Mode::Exact).err()
    };
    let faults: Vec<String> = pairs.par_iter().filter_map(check).collect();
    assert!(faults.is_empty(), "{} faults of {}\n\n{}", faults.len(), pairs.len(), faults.join("\n\n"));
}

fn scaled(scales: &[f64], caps: &[Option<f64>]) -> Vec<Case> {
    let all = pairs(pairs(scales.iter().copied(), caps.iter().copied()), [Dtype::Bf16, Dtype::E4m3]);
    let case = |((scale, cap), dtype)| {
        let mut spec = dense(dtype, 1, (20, 70), (1, 1), 64).causal();
        (spec.softmax_scale, spec.softcap) = (Some(scale), cap);
        Case::normal("scales", spec.known().unwrap(), 2)
    };
    all.into_iter().map(case).collect()
}

/// Scales for which softmax is between uniform and one-hot, and softcaps far above and far below all scores. Scores of
/// 1e9 and more are excluded, because the rounding error of their maximum exceeds the range of exponents.
#[test]
fn scales_and_caps() {
    let caps = [None, Some(1e-18), Some(1e-3), Some(50.0), Some(1e5), Some(1e7), Some(1e18)];
    check_all(scaled(&[1e-18, 1e-7, 1.0, 300.0, 1e7], &caps));
}

/// All scores are equal, so that the maximum of the first block stays. There are thousands of blocks: an error in each
/// block would add up to more than the law permits. The scales alternate.
#[test]
fn long_rows_do_not_drift() {
    let scales = [0.1, 0.13, 0.17, 0.2];
    let pipelines = PIPELINES.into_iter().filter(|&pipeline| pipeline != Pipeline::ThreeStage);
    let tiles = pipelines.map(|pipeline| CtaTile { tile_n: 16, pipeline, ..TINY });
    let tiles = tiles.chain([TINY_FP8, CtaTile { pipeline: Pipeline::Serial, ..TINY_FP8 }]);
    let pairs: Vec<(f64, CtaTile)> = scales.into_iter().cycle().zip(tiles).collect();
    pairs.into_par_iter().for_each(|(scale, tile)| {
        let dtype = if tile.precision.is_fp8() { Dtype::E4m3 } else { Dtype::F16 };
        let mut spec = dense(dtype, 1, (1, 64_000), (1, 1), 32);
        spec.softmax_scale = Some(scale);
        let case = Case::normal("long", spec.known().unwrap(), 2);
        let mut values = case.values();
        values.q.fill(1.0);
        values.k.fill(1.0);
        let checked = check(&case, &values, tile, Policy::Eager, Mode::Fast);
        assert!(checked.is_ok(), "scale {scale}: {checked:?}");
    });
}

/// Every distribution of the inputs, in all types.
#[test]
fn numbers() {
    let dtypes = [Dtype::F16, Dtype::Bf16, Dtype::E4m3];
    let cases = pairs(Dist::ALL, dtypes).into_iter().map(|(dist, dtype)| {
        let problem = dense(dtype, 1, (65, 130), (1, 1), 64).known().unwrap();
        Case { dist, ..Case::normal("numbers", problem, 2) }
    });
    check_all(cases.collect());
}

/// Sinks of every size, in problems with 20 rows that see no key and 50 rows that see keys.
#[test]
fn sinks() {
    let of = |tile: &CtaTile, sink: Option<f32>| {
        let spec = dense(dtype(tile), 1, (70, 50), (1, 1), 64).causal();
        let spec = if sink.is_some() { spec.sink() } else { spec };
        let case = Case::normal("sink", spec.known().unwrap(), 3);
        let values = Values { sink: sink.map(|sink| array![sink]), ..case.values() };
        let launch = launch(&case.problem, &with_tile(*tile)).unwrap();
        let answer = launch.simulate(&values, Policy::Random(9), Mode::Exact);
        let answer = answer.unwrap_or_else(|fault| panic!("{}: {fault}", launch.plan));
        (judged(&case, &values, &answer), answer)
    };
    tiles().into_par_iter().for_each(|tile| {
        let (_, without) = of(&tile, None);
        assert_eq!(of(&tile, Some(f32::NEG_INFINITY)).1, without, "{tile}");
        for sink in [-1e38, -1e30, -100.0, 0.0, 9.0, 87.0, 200.0, 1e30, 1e38] {
            let (verdict, answer) = of(&tile, Some(sink));
            assert!(verdict.is_ok(), "{tile}, a sink of {sink}: {verdict:?}");
            // If LSE is large, the law permits any O.
            let far_above = sink > 1e20 && answer.o.iter().any(|&o| o != 0.0);
            let far_below = sink < -1e20 && answer.o != without.o;
            assert!(!far_above && !far_below, "{tile}, a sink of {sink}");
        }
        let (_, infinite) = of(&tile, Some(f32::INFINITY));
        assert!(infinite.o.iter().all(|&o| o == 0.0), "{tile}");
        assert!(infinite.lse.iter().all(|&lse| lse == f32::INFINITY), "{tile}");
        let (_, nan) = of(&tile, Some(f32::NAN));
        assert!(nan.lse.iter().all(|lse| lse.is_nan()), "{tile}");
        let expected = |row: usize, o: f32| if row < 20 { o == 0.0 } else { o.is_nan() };
        assert!(nan.o.indexed_iter().all(|((_, row, ..), &o)| expected(row, o)), "{tile}");
    });
}

/// O does not change if the output of LSE is absent (address 0).
#[test]
fn without_lse() {
    for tile in tiles() {
        let problem = dense(dtype(&tile), 1, (70, 50), (2, 1), 64).causal().known().unwrap();
        let case = Case::normal("without", problem, 3);
        let program = launch(&case.problem, &with_tile(tile)).unwrap().program;
        let before = initial(&case.problem, &program, &case.values());
        let with = ProgramSimulation::new(&program).mode(Mode::Fast).run(&before).unwrap();
        let mut memory = Memory::new();
        let alloc = |bytes: &Vec<u8>| memory.alloc_from("array", bytes);
        let memories: Vec<Buffer> = before.iter().map(alloc).collect();
        let mut addresses: Vec<u64> = memories.iter().map(|buffer| buffer.address()).collect();
        addresses[buffers::LSE.0] = 0;
        let step = &program.steps[0];
        let args = step.bind(&step.kernel.params, &addresses).unwrap();
        let simulation = Simulation::new(&step.kernel).grid(step.grid).args(args);
        let outcome = simulation.mode(Mode::Fast).run(&mut memory).unwrap();
        assert_eq!(outcome.findings, []);
        let [o, lse] = [buffers::O, buffers::LSE].map(|buffer| buffer.0);
        assert_eq!(memory.read(memories[o]), with.buffers[o]);
        assert_eq!(memory.read(memories[lse]), before[lse]);
    }
}

/// With strides of 0, all sequences share one K and V, and all heads share one Q.
#[test]
fn broadcast_inputs() {
    let mut cases = Vec::new();
    for (mask, dtype) in pairs([Mask::None, Mask::Causal], [Dtype::F16, Dtype::E4m3]) {
        let mut spec = dense(dtype, 3, (40, 50), (4, 2), 64).mask(mask);
        (spec.k.strides.batch, spec.v.strides.batch, spec.q.strides.heads) = (0, 0, 0);
        cases.push(spec.known().unwrap());
    }
    let faults: Vec<String> = cases
        .into_iter()
        .flat_map(|problem| tiles_for(&problem).map(move |tile| (problem.clone(), tile)))
        .filter_map(|(problem, tile)| broadcast(problem, tile).err())
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn broadcast(problem: KnownProblem, tile: CtaTile) -> Result<(), String> {
    let case = Case::normal("broadcast", problem, 2);
    let mut values = case.values();
    for x in [&mut values.k, &mut values.v] {
        let first = x.index_axis(ndarray::Axis(0), 0).to_owned();
        x.outer_iter_mut().for_each(|mut x| x.assign(&first));
    }
    let first = values.q.index_axis(ndarray::Axis(2), 0).to_owned();
    values.q.axis_iter_mut(ndarray::Axis(2)).for_each(|mut x| x.assign(&first));
    check(&case, &values, tile, Policy::Random(9), Mode::Exact)
}

/// Extents are 1, or larger by one than a multiple of the hardware's granularity.
#[test]
fn least_dimensions() {
    let dims = [8, 16, 24, 56, 64].map(|dim| (dim, Dtype::Bf16)).into_iter();
    let dims = dims.chain([16, 32, 48, 64].map(|dim| (dim, Dtype::E4m3)));
    let all = pairs(dims.clone(), dims).into_iter().filter(|((_, dtype), (_, other))| dtype == other);
    let cases = all.map(|((dim, dtype), (dim_v, _))| {
        let spec = dense(dtype, 1, (1 + dim_v / 8, 33), (2, 2), dim).head_dim_v(dim_v);
        Case::normal("dimensions", spec.known().unwrap(), 2)
    });
    check_all(cases.collect());
}
