//! Thousands of random problems.

use fa3_cuda::host::Device;
use fa3_tests::bwd::BwdCase;
use fa3_tests::gpu::Kernels;
use rayon::prelude::*;

use crate::{Fallible, no_faults};

/// Random problems, and the kernels that they take.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

pub(super) fn problems(device: &Device) -> Fallible<String> {
    let kernels = Kernels::new(device);
    let faults: Vec<String> = (0..PROBLEMS)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = BwdCase::random(seed, KERNELS);
            match kernels.run(&trial.program, &trial.before) {
                Ok(after) => trial.check(&after).err(),
                Err(error) => Some(format!("{}: {error}", trial.name)),
            }
        })
        .collect();
    no_faults(PROBLEMS, &faults)
}
