//! The forward kernels on a GPU, judged by the error law: real sizes, where the simulator's are small.
//!
//! `cargo run --release -p fa3-tests --example attention`. An argument chooses the groups whose names contain it. Says
//! `skipped` and why where there is no Hopper GPU. Takes about eight minutes on 16 cores.

mod groups;
mod judge;
mod large;
mod repeat;
mod simulated;
mod tensor;
mod trial;

use std::process::ExitCode;
use std::time::Instant;

use fa3::reference::rows::SatisfiedRows;
use fa3_cuda::host::Device;
use rayon::prelude::*;

use groups::Group;
use judge::judge;
use trial::{Bench, Fallible, Inputs, Trial};

/// Failures of a group that are printed.
const PRINTED: usize = 10;

/// Something else than a list of problems: what it says if it holds.
type Check = fn(&Device) -> Fallible<String>;

const CHECKS: [(&str, Check); 6] = [
    ("schedulers, orders and numbers of ctas: bit-equal", repeat::schedulers),
    ("neighbours that are nan: bit-equal", repeat::neighbours),
    ("1000 repetitions: bit-equal", repeat::repetitions),
    ("as in the simulator", simulated::compare),
    ("q and o of more than 2^31 elements", large::queries),
    ("k and v of more than 2^31 elements", large::keys),
];

fn main() -> ExitCode {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{device}");
    let only = std::env::args().nth(1).unwrap_or_default();
    let (start, mut failures) = (Instant::now(), 0);
    for Group { name, trials } in groups::all().into_iter().filter(|group| group.name.contains(&only)) {
        failures += group(&device, name, &trials);
    }
    for (name, check) in CHECKS.into_iter().filter(|(name, _)| name.contains(&only)) {
        let start = Instant::now();
        let said = check(&device);
        let seconds = start.elapsed().as_secs_f64();
        match said {
            Ok(said) => println!("ok    {name}: {said}, {seconds:.1} s"),
            Err(error) => {
                failures += 1;
                println!("FAIL  {name}: {error}, {seconds:.1} s");
            }
        }
    }
    println!("{failures} failures, {:.0} s", start.elapsed().as_secs_f64());
    ExitCode::from(u8::from(failures > 0))
}

/// Runs and judges every trial, and says how many failed.
fn group(device: &Device, name: &str, trials: &[Trial]) -> usize {
    let start = Instant::now();
    let results: Vec<Result<SatisfiedRows, String>> =
        trials.par_iter().enumerate().map(|(index, trial)| try_one(device, trial, index as u64)).collect();
    let passed: Vec<SatisfiedRows> = results.iter().flatten().copied().collect();
    let rows: usize = passed.iter().map(|judged| judged.rows).sum();
    let ratio = passed.iter().map(|judged| judged.ratio).fold(0.0, f64::max);
    let failures = trials.len() - passed.len();
    let verdict = if failures == 0 { "ok   " } else { "FAIL " };
    println!(
        "{verdict} {name}: {} problems, {rows} rows judged, error / bound up to {ratio:.2}, {failures} failures, {:.1} s",
        trials.len(),
        start.elapsed().as_secs_f64()
    );
    let failed =
        trials.iter().zip(&results).filter_map(|(trial, result)| Some((trial, result.as_ref().err()?)));
    for (trial, error) in failed.take(PRINTED) {
        println!("      {} {:?}: {error}", trial.problem, trial.options.tile);
    }
    failures
}

fn try_one(device: &Device, trial: &Trial, seed: u64) -> Result<SatisfiedRows, String> {
    let inputs = Inputs::random(&trial.problem, seed);
    let mut bench = Bench::new(device, trial, &inputs).map_err(|error| error.to_string())?;
    let outputs = bench.run().map_err(|error| error.to_string())?;
    let tile_m = bench.forward.plan().tile().tile_m as usize;
    drop(bench);
    judge(&trial.problem, tile_m, &inputs, &outputs)
}
