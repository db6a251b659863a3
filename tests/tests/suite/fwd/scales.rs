//! Scales of heads that are 0.

use fa3_cuda::kernels::fwd::buffers;
use fa3_sched::forward::{CtaTile, Overlap};
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::Case;
use fa3_tests::fwd::shapes::TINY_FP8;
use fa3_tests::fwd::{dense, initial, results, with_tile};
use fa3_types::{Dtype, Mask};

use super::launch;

/// Of Q or K all scores are 0: O is the mean of what a row sees of V, hidden keys or not. Of V O is 0.
#[test]
fn zeros() {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(20), right: Some(5) }];
    let tiles = [TINY_FP8, CtaTile { overlap: Overlap::None, ..TINY_FP8 }];
    for ((tile, mask), softcap) in tiles
        .into_iter()
        .flat_map(|tile| masks.map(|mask| (tile, mask)))
        .zip([None, Some(5.0)].into_iter().cycle())
    {
        let mut spec = dense(Dtype::E4m3, 1, (70, 100), (1, 1), 64).mask(mask);
        spec.softcap = softcap;
        let case = Case::normal("zeros", spec.validate().unwrap(), 5);
        let (problem, values) = (&case.problem, case.values());
        let program = launch(problem, &with_tile(tile)).unwrap().program;
        for (tensor, scales) in buffers::DESCALES.into_iter().enumerate() {
            let mut before = initial(problem, &program, &values);
            before[scales.0].fill(0);
            let outcome = ProgramSimulation::new(&program).mode(Mode::Exact).run(&before).unwrap();
            let answer = results(problem, &outcome.buffers).unwrap();
            let len = problem.lengths(0);
            for row in 0..len.q {
                let seen: Vec<usize> =
                    (0..len.k).filter(|&key| problem.mask().allows(row, key, len)).collect();
                if tensor < 2 {
                    let lse = answer.lse[[0, 0, row]];
                    assert!(
                        (lse - (seen.len() as f32).ln()).abs() < 1e-3,
                        "{tile}, {mask}: {lse} of {}",
                        seen.len()
                    );
                }
                for col in 0..64 {
                    let sum: f32 = seen.iter().map(|&key| values.v[[0, key, 0, col]]).sum();
                    let mean = if tensor < 2 { sum / seen.len() as f32 } else { 0.0 };
                    let o = answer.o[[0, row, 0, col]];
                    assert!((o - mean).abs() <= 0.01 + 0.01 * mean.abs(), "{tile}, {mask}: {o}, not {mean}");
                }
            }
        }
    }
}
