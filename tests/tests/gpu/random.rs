//! Checks hundreds and thousands of random problems.

use std::iter::StepBy;
use std::ops::Range;

use fa3_cuda::host::Device;
use fa3_tests::gpu::Kernels;
use fa3_tests::{Trial, cache};
use rayon::prelude::*;

use crate::{Fallible, no_faults};

/// Number of random problems, and of the kernels that they share unless `FA3_KERNELS` says another number.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

/// The seeds of random problems: all seeds, or the range in `FA3_PROBLEMS`, such as `0..500`, which saves time.
/// `3..3000/10` are every tenth of a range: ten processes share the problems and the kernels, which a driver compiles
/// one by one.
fn seeds() -> Fallible<StepBy<Range<u64>>> {
    let Ok(said) = std::env::var("FA3_PROBLEMS") else { return Ok((0..PROBLEMS).step_by(1)) };
    let parsed = || {
        let (range, step) = said.split_once('/').unwrap_or((&said, "1"));
        let (first, end) = range.split_once("..")?;
        let range = first.parse().ok()?..end.parse().ok()?;
        let step = step.parse().ok().filter(|&step| step > 0)?;
        Some(range).filter(|range| !range.is_empty()).map(|range| range.step_by(step))
    };
    parsed()
        .ok_or_else(|| format!("FA3_PROBLEMS is {said:?}, and not seeds such as 0..500 or 3..3000/10").into())
}

/// Runs the problems that `random` builds, each from a seed and the number of kernels.
pub(crate) fn problems(device: &Device, random: fn(u64, u64) -> Trial) -> Fallible<String> {
    let (kernels, seeds) = (Kernels::new(device), seeds()?.collect::<Vec<_>>());
    let shared = std::env::var("FA3_KERNELS").map_or(Ok(KERNELS), |said| said.parse())?;
    let faults: Vec<String> = seeds
        .par_iter()
        .filter_map(|&seed| {
            let trial = random(seed, shared);
            match kernels.run(&trial.program, &trial.before) {
                Ok(after) => trial.check(&after).err(),
                Err(error) => Some(format!("{}: {error}", trial.name)),
            }
        })
        .collect();
    no_faults(seeds.len() as u64, &faults)
}

/// Number of random batches over caches with fixed-size splits, whose sequences are also computed alone.
const BATCHES: u64 = 300;

/// Each sequence has the same bits as in a batch of its own, which runs on fewer SMs.
pub(crate) fn sequences_alone(device: &Device) -> Fallible<String> {
    let kernels = Kernels::new(device);
    let faults: Vec<String> = (0..BATCHES)
        .into_par_iter()
        .filter_map(|seed| {
            let run =
                |program: &_, before: &[_]| kernels.run(program, before).map_err(|error| error.to_string());
            let case = cache::in_pieces(seed, KERNELS);
            // Rows that see no key behind their own have the same bits in chunks of a prompt.
            let chunk = if case.mask.reach().1 == Some(0) { 1 + seed as usize % 7 } else { usize::MAX };
            case.check_chunks(chunk, 1 + (seed % 131) as u32, run).err()
        })
        .collect();
    no_faults(BATCHES, &faults)
}
