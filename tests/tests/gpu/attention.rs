//! The forward kernels on real sizes, judged by the error law. The simulator's tests have only small sizes.

mod fp8;
mod groups;
mod judge;
mod large;
mod repeat;
mod simulated;
mod tensor;
mod trial;

use fa3_cuda::host::Device;
use fa3_ref::rows::SatisfiedRows;
use fa3_tests::{cache, fwd, sparse};
use fa3_types::Dtype;
use rayon::prelude::*;

use crate::{Check, Fallible, random};
use judge::judge;
use trial::{Bench, Inputs, Trial};

/// Largest number of failures that are printed for a group.
const PRINTED: usize = 10;

pub(crate) const CHECKS: [(&str, Check); 22] = [
    ("attention::two_head_dims", |device| group(device, &groups::wide())),
    ("attention::softcap", |device| group(device, &groups::capped())),
    ("attention::scales", |device| group(device, &groups::scaled())),
    ("attention::one_row_or_key_and_many", |device| group(device, &groups::long())),
    ("attention::strides", |device| group(device, &groups::strided())),
    ("attention::forms_and_tiles", |device| group(device, &groups::forms())),
    ("attention::all_sizes_bf16", |device| group(device, &groups::sizes(Dtype::Bf16))),
    ("attention::all_sizes_f16", |device| group(device, &groups::sizes(Dtype::F16))),
    ("attention::fp8", |device| group(device, &groups::fp8())),
    ("attention::random_packed_problems", |device| random::problems(device, fwd::random_packed)),
    ("attention::random_cache_problems", |device| random::problems(device, cache::random)),
    ("attention::random_wide_problems", |device| random::problems(device, cache::random_wide)),
    ("attention::random_listed_blocks", |device| random::problems(device, fwd::blocks::random)),
    ("attention::random_functions", |device| random::problems(device, fwd::random_function)),
    ("attention::random_sparse", |device| random::problems(device, sparse::random)),
    ("attention::bits_whoever_computes", repeat::schedulers),
    ("attention::bits_of_pieces_alone", random::sequences_alone),
    ("attention::bits_beside_nan", repeat::neighbours),
    ("attention::bits_1000_times", repeat::repetitions),
    ("attention::near_the_simulator", simulated::compare),
    ("attention::large_q", large::queries),
    ("attention::large_k", large::keys),
];

/// Runs and judges every trial.
fn group(device: &Device, trials: &[Trial]) -> Fallible<String> {
    let results: Vec<Result<SatisfiedRows, String>> =
        trials.par_iter().enumerate().map(|(index, trial)| try_one(device, trial, index as u64)).collect();
    let passed: Vec<SatisfiedRows> = results.iter().flatten().copied().collect();
    let rows: usize = passed.iter().map(|judged| judged.rows).sum();
    let ratio = passed.iter().map(|judged| judged.ratio).fold(0.0, f64::max);
    let said = format!("{} problems, {rows} rows judged, error / bound up to {ratio:.2}", trials.len());
    let failures = trials.len() - passed.len();
    if failures == 0 {
        return Ok(said);
    }
    let failed =
        trials.iter().zip(&results).filter_map(|(trial, result)| Some((trial, result.as_ref().err()?)));
    let line =
        |(trial, error): (&Trial, &String)| format!("{} {:?}: {error}", trial.problem, trial.options.tile);
    let lines: Vec<String> = failed.take(PRINTED).map(line).collect();
    Err(format!("{said}, {failures} failures\n{}", lines.join("\n")).into())
}

fn try_one(device: &Device, trial: &Trial, seed: u64) -> Result<SatisfiedRows, String> {
    let inputs = Inputs::random(&trial.problem, seed);
    let mut bench = Bench::new(device, trial, &inputs).map_err(|error| error.to_string())?;
    let (outputs, tile_m) = (bench.run().map_err(|error| error.to_string())?, bench.tile_m);
    drop(bench);
    judge(&trial.problem, tile_m, &inputs, &outputs)
}
