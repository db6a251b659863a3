//! Thousands of random problems.

use fa3_cuda::host::Device;
use fa3_tests::bwd::BwdCase;
use fa3_tests::gpu::Kernels;
use rayon::prelude::*;

use crate::Fallible;

/// Random problems, and the kernels that they take.
const PROBLEMS: u64 = 3000;
const KERNELS: u64 = 100;

pub(super) fn problems(device: &Device) -> Fallible<String> {
    let kernels = Kernels::new(device);
    let faults: Vec<String> = (0..PROBLEMS)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = BwdCase::random(seed, KERNELS);
            let after = kernels.run(&trial.program, &trial.before).map_err(|error| error.to_string());
            after.and_then(|after| trial.check(&after)).err().map(|fault| format!("{}\n{fault}", trial.name))
        })
        .collect();
    let said = format!("{PROBLEMS} problems, {} faults", faults.len());
    if faults.is_empty() {
        Ok(said)
    } else {
        Err(format!("{said}: {}", faults[..faults.len().min(3)].join("\n")).into())
    }
}
