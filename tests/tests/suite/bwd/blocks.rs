//! Lists of blocks: lists of all blocks give the bits of the mask alone, and NaN in keys that no row lists reaches no
//! gradient.

use fa3_cuda::kernels::bwd::buffers;
use fa3_sched::backward::{DkvTile, DqTile, PlanOptions};
use fa3_tests::bwd::BwdCase;
use fa3_tests::fwd::blocks::Listed;
use fa3_tests::fwd::{Layout, dense, device};
use fa3_tests::{Case, Trial};
use fa3_types::{BlockSide, Dtype, KnownProblem, Mask};

use super::simulate;

/// A problem with a dQ kernel.
fn trial(problem: KnownProblem) -> Trial {
    let dkv = DkvTile::choose_even(64, 64, &device(2)).expect("64 columns have a tile");
    let dq = DqTile::choose_own_lists(64, 64, &device(2)).expect("64 columns have a tile");
    trial_with(problem, &PlanOptions::default().dkv(dkv).dq(dq))
}

fn trial_with(problem: KnownProblem, options: &PlanOptions) -> Trial {
    let case = Case::normal("blocks", problem, 3);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(2), options)
}

fn gradients(trial: &Trial, before: &[Vec<u8>]) -> [Vec<u8>; 3] {
    let mut after = simulate(trial, before);
    [buffers::DQ, buffers::DK, buffers::DV].map(|buffer| std::mem::take(&mut after[buffer.0]))
}

#[test]
fn lists_of_all_blocks_have_the_bits_of_none() {
    let spec = dense(Dtype::Bf16, 1, (140, 150), (1, 1), 64);
    let sides = [BlockSide::Of128, BlockSide::Of64];
    for mask in [Mask::None, Mask::Window { left: Some(130), right: Some(3) }] {
        let spec = spec.clone().mask(mask);
        let plain = trial(spec.clone().known().expect("it is valid"));
        let plain = gradients(&plain, &plain.before);
        for side in sides {
            let listed = trial(Listed::All.of_side(side, spec.clone(), (false, false)));
            assert_eq!(gradients(&listed, &listed.before), plain, "{mask}");
        }
    }
    for side in sides {
        let first = Listed::First.of_side(side, spec.clone(), (false, false));
        // One tile adds to dQ.
        for first in [trial(first.clone()), trial_with(first, &PlanOptions::default())] {
            let mut with_nan = first.before.clone();
            let row_bytes = 2 * 64;
            for input in [buffers::K, buffers::V] {
                with_nan[input.0][side.rows() * row_bytes..130 * row_bytes].fill(0xff);
            }
            assert_eq!(gradients(&first, &with_nan), gradients(&first, &first.before));
        }
    }
}
