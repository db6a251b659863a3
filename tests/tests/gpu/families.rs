//! The ladder on a GPU: results against f64, and bit for bit against the simulator where the arithmetic is defined.
//!
//! `cargo run --release -p fa3-tests --example conformance`. Says `skipped` and why where there is no Hopper GPU.

use std::process::ExitCode;

use fa3_cuda::host::Device;
use fa3_sim::{Mode, Policy};
use fa3_tests::ladder::{Rung, rungs, simulate};

const SEEDS: u64 = 3;

fn main() -> ExitCode {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{device}");
    let mut failures = 0;
    for rung in rungs() {
        match conform(&device, &rung) {
            Ok(said) => println!("ok    {}: {said}", rung.name),
            Err(why) => {
                failures += 1;
                println!("FAIL  {}: {why}", rung.name);
            }
        }
    }
    println!("{failures} failures");
    ExitCode::from(u8::from(failures > 0))
}

fn conform(device: &Device, rung: &Rung) -> Result<&'static str, String> {
    for seed in 0..SEEDS {
        let before = rung.initial(seed);
        let after = device.run(&rung.job, &before).map_err(|error| error.to_string())?;
        rung.check(&before, &after).map_err(|mismatch| mismatch.to_string())?;
        if rung.exact {
            let policy = Policy::Random(seed);
            let simulated =
                simulate(&rung.job, &before, policy, Mode::Exact).map_err(|error| error.to_string())?;
            if simulated.arrays != after {
                return Err(differences(&simulated.arrays, &after));
            }
        }
    }
    Ok(if rung.exact { "as in the simulator, bit for bit" } else { "within its error" })
}

fn differences(simulated: &[Vec<u8>], gpu: &[Vec<u8>]) -> String {
    let bytes = simulated.iter().flatten().zip(gpu.iter().flatten());
    let (mut count, mut first) = (0, None);
    for (index, (simulated, gpu)) in bytes.enumerate() {
        if simulated != gpu {
            count += 1;
            first.get_or_insert((index, *simulated, *gpu));
        }
    }
    format!("{count} bytes differ from the simulator's, the first (place, simulated, gpu): {first:?}")
}
