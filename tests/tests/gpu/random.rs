//! Checks hundreds and thousands of random problems.

use std::ops::Range;

use fa3_cuda::host::Device;
use fa3_tests::gpu::Kernels;
use fa3_tests::{Trial, cache};
use rayon::prelude::*;

use crate::{Fallible, no_faults};

/// Number of random problems, and of the kernels that they share.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

/// The seeds of random problems: all seeds, or the range in `FA3_PROBLEMS`, such as `0..500`, which saves time.
fn seeds() -> Fallible<Range<u64>> {
    let Ok(said) = std::env::var("FA3_PROBLEMS") else { return Ok(0..PROBLEMS) };
    let number = |word: &str| word.parse().ok();
    let range = said.split_once("..").and_then(|(first, end)| Some(number(first)?..number(end)?));
    range
        .filter(|range| !range.is_empty())
        .ok_or_else(|| format!("FA3_PROBLEMS is {said:?}, and not seeds such as 0..500").into())
}

/// Runs the problems that `random` builds, each from a seed and the number of kernels.
pub(crate) fn problems(device: &Device, random: fn(u64, u64) -> Trial) -> Fallible<String> {
    let (kernels, seeds) = (Kernels::new(device), seeds()?);
    let faults: Vec<String> = seeds
        .clone()
        .into_par_iter()
        .filter_map(|seed| {
            let trial = random(seed, KERNELS);
            match kernels.run(&trial.program, &trial.before) {
                Ok(after) => trial.check(&after).err(),
                Err(error) => Some(format!("{}: {error}", trial.name)),
            }
        })
        .collect();
    no_faults(seeds.end - seeds.start, &faults)
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
            cache::in_pieces(seed, KERNELS).check_alone(1 + (seed % 131) as u32, run).err()
        })
        .collect();
    no_faults(BATCHES, &faults)
}
