//! Branches, bank conflicts and refused launches. The recordings of an H100 do not cover these.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Outcome, Policy, SimError, Simulation};

use crate::rules::own_word;
use crate::runs::{assert_clean, results};

#[test]
fn branches_and_loops_run_lane_by_lane() {
    let kernel = Kernel::build("lanes", Launch::threads(32), |b| {
        let (lane, y) = (b.lane_id(), b.param_pointer("y", Elem::F32));
        let result = b.var("result", 1000);
        let even = || {
            result.set(lane + lane);
            b.if_lanes(lane.gt(15), || result.set(7));
        };
        b.if_else_lanes((lane & 1).eq(0), even, || result.set(result + lane));
        b.store(own_word(b, y), result.now().to_f32());
    });
    let expected = (0..32).map(|lane: u32| match lane {
        lane if lane % 2 == 1 => 1000 + lane,
        lane if lane > 15 => 7,
        lane => 2 * lane,
    });
    let expected: Vec<f32> = expected.map(|number| number as f32).collect();
    assert_eq!(results(&kernel, Policy::Random(5), &[], 32), expected);
}

/// Counts accesses and bank conflicts of each line. A column of a 32 x 32 tile takes 32 wavefronts, and a column of a
/// padded tile takes 1.
#[test]
fn bank_conflicts_are_counted() {
    for (pitch, conflicts) in [(128, 32), (132, 1)] {
        let kernel = Kernel::build("banks", Launch::threads(32), |b| {
            let tile = b.region("tile", 32 * 132, 128);
            b.store(b.lane_id().mad(pitch, b.address(tile)), 0.0);
        });
        let outcome = Simulation::new(&kernel).run(&mut Memory::new()).unwrap();
        assert_clean(&outcome);
        let wavefronts: Vec<_> = outcome.counters.shared.values().collect();
        assert_eq!(wavefronts.len(), 1);
        assert_eq!((wavefronts[0].accesses, wavefronts[0].ideal, wavefronts[0].actual), (1, 1, conflicts));
    }
}

/// Runs a kernel that has one argument. `None` leaves the argument out.
fn launch(kernel: &Kernel, grid: [u32; 3], n: Option<u32>) -> Result<Outcome, SimError> {
    let args = n.map(ArgValue::U32).into_iter().collect();
    Simulation::new(kernel).args(args).grid(grid).max_steps(1_000_000).run(&mut Memory::new())
}

#[test]
fn launches_that_do_not_fit_are_errors() {
    let kernel = Kernel::build("endless", Launch::threads(32), |b| {
        let n = b.param_u32("n");
        b.repeat(|| b.break_if(n.eq(0)));
    });
    assert_clean(&launch(&kernel, [1; 3], Some(0)).unwrap());
    let mut broken = kernel.clone();
    broken.launch.threads = 33;
    for (kernel, grid, n, message) in [
        (&kernel, [1; 3], None, "0 arguments for 1 parameters"),
        (
            &kernel,
            [1; 3],
            Some(1),
            "no end after 1000000 steps, the most that are simulated: smaller sizes take fewer",
        ),
        (&kernel, [1 << 20, 1 << 10, 1], Some(0), "a grid of 1073741824 ctas, more than 2^24"),
        (&broken, [1; 3], Some(0), "kernel endless breaks"),
    ] {
        let error = launch(kernel, grid, n).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

/// A reinitialized mbarrier counts as a new agent. With more agents than clocks can distinguish, findings would be
/// unreliable.
#[test]
fn more_agents_than_clocks_tell_apart_are_an_error() {
    let kernel = Kernel::build("again", Launch::threads(32), |b| {
        let (full, rounds) = (b.mbarriers("full", 1, 1), b.param_u32("rounds"));
        b.if_lanes(b.tid().eq(0), || {
            b.for_each((0, rounds), 1, |_| {
                b.mbarrier_init(full, 1);
                b.mbarrier_invalidate(full);
            });
        });
    });
    assert_clean(&launch(&kernel, [1; 3], Some(32_000)).unwrap());
    let error = launch(&kernel, [1; 3], Some(33_000)).unwrap_err();
    assert_eq!(error.to_string(), "a cluster with more than 65535 warps, mbarriers and copying threads");
}
