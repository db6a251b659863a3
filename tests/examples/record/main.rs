//! Records results of micro-kernels on an H100: the files that `cargo test` replays.
//!
//! ```text
//! record FOLDER    all micro-kernels: one file a suite
//! ```

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use fa3_cuda::host::Device;
use fa3_tests::gpu;
use fa3_tests::micro::{Golden, suites};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).ok_or("record FOLDER")?;
    record(&Device::open(0)?, Path::new(&folder))
}

fn record(device: &Device, folder: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    for suite in suites() {
        let mut golden = Golden { device: device.name().to_owned(), results: Vec::new() };
        for micro in &suite.tests {
            match gpu::run(device, &micro.program, &micro.contents) {
                Ok(arrays) => {
                    let kept = micro.keep(&micro.written(&arrays));
                    golden.results.push((micro.name.clone(), micro.inputs(), kept));
                }
                Err(error) => println!("{} {}: {error}", suite.name, micro.name),
            }
        }
        let bytes = golden.encode();
        println!("{}: {} kernels, {} bytes", suite.name, golden.results.len(), bytes.len());
        fs::write(folder.join(format!("{}.bin", suite.name)), bytes)?;
    }
    Ok(())
}
