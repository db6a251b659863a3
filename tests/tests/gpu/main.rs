//! Tests that need a GPU. They have the names, filters and options of other tests: `cargo test --release -p fa3-tests
//! --test gpu`.
//!
//! Prints `skipped` and the reason if there is no Hopper GPU. `--ignored` runs the tests that take minutes, and
//! `--include-ignored` runs all tests. `cargo test --release -p fa3-tests --test gpu --no-run` builds one executable
//! that needs only a driver.

mod attention;
mod backward;
mod bench;
mod combine;
mod facade;
mod families;
mod host;
mod launches;
mod plans;
mod quantize;
mod random;

use std::error::Error;
use std::process::ExitCode;

use fa3_cuda::host::{Device, HostError};
use libtest_mimic::{Arguments, Failed, Trial};

/// The report of a check, or its failure.
type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// A check of a device, with its report if it holds.
type Check = fn(&Device) -> Fallible<String>;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Tests run one by one, because times are measured and the last check breaks the context of all others.
    args.test_threads = Some(1);
    let device = match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ (HostError::NoDriver | HostError::NoDevice { .. } | HostError::NotHopper { .. })) => {
            println!("skipped: no GPU: {error}");
            None
        }
        Err(error) => {
            println!("FAILED: {error}");
            return ExitCode::FAILURE;
        }
    };
    if device.is_none() && !args.list {
        return ExitCode::SUCCESS;
    }
    libtest_mimic::run(&args, tests(device.as_ref())).exit_code()
}

/// All tests, in order.
fn tests(device: Option<&Device>) -> Vec<Trial> {
    let short = |(name, check): (&str, Check)| test(name, device, check);
    // The times of making plans come first, before any kernel is compiled.
    let mut tests: Vec<Trial> = plans::CHECKS.into_iter().chain(host::CHECKS).map(short).collect();
    tests.extend(launches::CHECKS.into_iter().chain(backward::SHORT).chain(facade::CHECKS).map(short));
    tests.extend(families::checks().map(|(name, check)| test(&name, device, check).with_ignored_flag(true)));
    let long = attention::CHECKS.into_iter().chain(backward::CHECKS).chain(quantize::CHECKS);
    let long = long.chain(combine::CHECKS);
    tests.extend(long.map(|check| short(check).with_ignored_flag(true)));
    tests.push(short(host::LAST));
    tests
}

fn test(
    name: &str,
    device: Option<&Device>,
    check: impl Fn(&Device) -> Fallible<String> + Send + 'static,
) -> Trial {
    let device = device.cloned();
    Trial::test(name, move || {
        let device = device.ok_or("there is no GPU")?;
        let said = check(&device).map_err(|error| Failed::from(error.to_string()))?;
        println!("{said}");
        Ok(())
    })
}

/// The result of a check that found these faults in `problems` problems.
fn no_faults(problems: u64, faults: &[String]) -> Fallible<String> {
    let said = format!("{problems} problems, {} faults", faults.len());
    if faults.is_empty() {
        Ok(said)
    } else {
        Err(format!("{said}: {}", faults[..faults.len().min(3)].join("\n")).into())
    }
}

fn ensure(holds: bool, otherwise: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}
