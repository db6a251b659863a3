//! Thousands of random problems.

use fa3_cuda::host::Device;
use fa3_tests::Trial;
use fa3_tests::gpu::Kernels;
use rayon::prelude::*;

use crate::{Fallible, no_faults};

/// Random problems, and the kernels that they take.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

/// Runs these, each of a seed and the number of kernels.
pub(crate) fn problems(device: &Device, random: fn(u64, u64) -> Trial) -> Fallible<String> {
    let kernels = Kernels::new(device);
    let faults: Vec<String> = (0..PROBLEMS)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = random(seed, KERNELS);
            match kernels.run(&trial.program, &trial.before) {
                Ok(after) => trial.check(&after).err(),
                Err(error) => Some(format!("{}: {error}", trial.name)),
            }
        })
        .collect();
    no_faults(PROBLEMS, &faults)
}
