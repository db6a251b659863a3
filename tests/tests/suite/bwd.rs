//! Backward kernels in the simulator, beyond the trials of their family.

mod blocks;
mod lists;
mod poison;

use fa3_cuda::kernels::bwd::buffers;
use fa3_sim::{Loaded, Mode, Policy};
use fa3_tests::bwd::{BwdCase, Form};
use fa3_tests::fwd::{Layout, dense, device};
use fa3_tests::{Case, Trial};
use fa3_types::Dtype;

use crate::obey;

/// The bytes of all buffers after a run on `before`. They are only compared with each other: any arithmetic will do.
fn simulate(trial: &Trial, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let after = fa3_tests::simulate(&trial.program.map(Loaded::new), before, Policy::Random(7), Mode::Fast);
    after.unwrap_or_else(|fault| panic!("{}: {fault}", trial.name))
}

/// Gradients of random problems obey the error law. `FA3_CASES` sets their number.
#[test]
fn random_problems_obey_the_error_law() {
    obey(BwdCase::random);
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    obey(BwdCase::random_packed);
}

/// A sink that is far above all scores, or infinite, has all weight: the gradients of Q, K and V are 0, and the sink's
/// gradient is the sum of dLSE. The second LSE is below the sink by a rounding error.
#[test]
fn a_sink_above_all_scores_has_all_weight() {
    for (sink, lse) in [(f32::INFINITY, f32::INFINITY), (1e30, 1e30_f32.next_down())] {
        let problem = dense(Dtype::Bf16, 2, (70, 50), (1, 1), 64).causal().sink().known().unwrap();
        let case = Case::normal("sinks", problem, 3);
        let case = BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 };
        let options = Form::AnyOrder.options([64; 2], &device(2)).expect("64 columns have this form");
        let mut trial = case.trial(&device(2), &options);
        let find = |name| trial.program.find(name).expect("the program has these buffers").0;
        let [of_o, of_lse, of_sink, dlse, dsink] = ["o", "lse", "sink", "dlse", "dsink"].map(find);
        trial.before[of_o].fill(0);
        for (buffer, number) in [(of_lse, lse), (of_sink, sink)] {
            trial.before[buffer].as_chunks_mut().0.fill(number.to_le_bytes());
        }
        // Rows without keys have no NaN here.
        trial.before[dlse].as_chunks_mut().0.fill(0.5_f32.to_le_bytes());
        let after = simulate(&trial, &trial.before);
        for gradient in [buffers::DQ, buffers::DK, buffers::DV] {
            assert!(after[gradient.0].iter().all(|&byte| byte == 0), "{gradient:?}, a sink of {sink}");
        }
        assert_eq!(after[dsink], 70_f32.to_le_bytes(), "a sink of {sink}");
    }
}
