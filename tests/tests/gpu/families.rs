//! Every family's trials, judged on a GPU. If the bits of the results depend only on the inputs, they must equal the
//! simulator's bits.

use fa3_cuda::host::Device;
use fa3_sim::{Mode, Policy};
use fa3_tests::{Bits, Family, Trial, families, gpu};
use rayon::prelude::*;

use crate::Fallible;

const SEEDS: u64 = 3;

/// One check for each family.
pub(crate) fn checks() -> impl Iterator<Item = (String, impl Fn(&Device) -> Fallible<String>)> {
    let check = |family: Family| {
        (format!("families::{}", family.name), move |device: &Device| every_trial(device, &family))
    };
    families().into_iter().map(check)
}

fn every_trial(device: &Device, family: &Family) -> Fallible<String> {
    let of_seed = |seed| (family.trials)(seed).into_iter().map(move |trial| (trial, seed));
    let trials: Vec<(Trial, u64)> = (0..SEEDS).flat_map(of_seed).collect();
    let judge =
        |(trial, seed): &(Trial, u64)| conform(device, trial, *seed).err().map(|fault| fault.to_string());
    let faults: Vec<String> = trials.par_iter().filter_map(judge).collect();
    if faults.is_empty() { Ok(format!("{} trials", trials.len())) } else { Err(faults.join("\n").into()) }
}

fn conform(device: &Device, trial: &Trial, seed: u64) -> Fallible<()> {
    let after = gpu::run(device, &trial.program, &trial.before)?;
    trial.check(&after)?;
    if trial.bits == Bits::Inputs {
        let simulated = trial.simulate(Policy::Random(seed), Mode::Exact)?;
        if simulated != after {
            return Err(format!("{}: {}", trial.name, differences(&simulated, &after)).into());
        }
    }
    Ok(())
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
