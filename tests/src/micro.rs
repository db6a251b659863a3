//! Micro-kernels, one for each feature of the hardware, and the results that an H100 gave.
//!
//! ```text
//! the simulator's bits = the H100's bits, for every micro-kernel and every input
//! ```
//!
//! A [`Micro`] is a small kernel with its inputs, which are not stored, because counters generate them. The example
//! `record` runs all of them on a GPU and writes their results to `golden/`, one [`Golden`] file per [`Suite`]. The
//! test `golden` runs them in the simulator and compares. Only approximations may differ, within [`Rule::Near`],
//! because the hardware's documentation leaves them open.

mod bench;
mod golden;
mod near;
mod simulate;
mod values;

// The suites.
mod approximate;
mod copy;
mod lane;
mod memory;
mod reduce;
mod sync;
mod warp;
mod wgmma;

pub use golden::{Golden, GoldenError};

use fa3_ir::{BufferRole, Kernel, Program};

/// A group of micro-kernels with a common file of results.
#[derive(Debug)]
pub struct Suite {
    /// Name of the file.
    pub name: &'static str,
    /// Its micro-kernels.
    pub tests: Vec<Micro>,
}

/// A kernel that does one thing, with its inputs.
#[derive(Debug)]
pub struct Micro {
    /// Name, unique in its suite.
    pub name: String,
    /// The kernel with its arrays and arguments.
    pub program: Program<Kernel>,
    /// Initial contents of each array.
    pub contents: Vec<Vec<u8>>,
    /// How results are kept and compared.
    pub rule: Rule,
}

/// How results are kept and compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// All bits are stored and must be equal.
    Bits,
    /// A digest of each group of this many bytes is stored and must be equal.
    Digests(usize),
    /// All bits of binary32 numbers are stored. The simulator's numbers may be off by at most this distance.
    Near {
        /// Largest difference in ulp of the hardware's number.
        ulp: u32,
        /// Smallest magnitude whose ulp counts. A smaller number is judged by the ulp of this magnitude.
        floor: f32,
    },
}

/// Every micro-kernel.
pub fn suites() -> Vec<Suite> {
    let suite = |name, tests| Suite { name, tests };
    vec![
        suite("lane", lane::tests()),
        suite("approximate", approximate::tests()),
        suite("wgmma", wgmma::tests()),
        suite("warp", warp::tests()),
        suite("copy", copy::tests()),
        suite("reduce", reduce::tests()),
        suite("memory", memory::tests()),
        suite("sync", sync::tests()),
    ]
}

impl Micro {
    /// A digest of the inputs, because results recorded for other inputs are not comparable.
    pub fn inputs(&self) -> u64 {
        self.contents.iter().fold(digest(&[]), |all, array| all.rotate_left(1) ^ digest(array))
    }

    /// The bytes that the kernel wrote, taken from the final contents of its arrays.
    pub fn written(&self, arrays: &[Vec<u8>]) -> Vec<u8> {
        let all = self.program.buffers.iter().zip(arrays);
        all.filter(|(buffer, _)| buffer.role != BufferRole::Input)
            .flat_map(|(_, bytes)| bytes.clone())
            .collect()
    }

    /// The stored part of the results.
    pub fn keep(&self, written: &[u8]) -> Vec<u8> {
        match self.rule {
            Rule::Bits | Rule::Near { .. } => written.to_vec(),
            Rule::Digests(bytes) => {
                written.chunks(bytes).flat_map(|chunk| digest(chunk).to_le_bytes()).collect()
            }
        }
    }

    /// Compares the stored parts of the simulator's results (`model`) with the stored parts of the hardware's.
    ///
    /// # Errors
    /// The difference, in words.
    pub fn compare(&self, model: &[u8], hardware: &[u8]) -> Result<(), String> {
        if model.len() != hardware.len() {
            return Err(format!("{} bytes, not {}", model.len(), hardware.len()));
        }
        match self.rule {
            Rule::Bits => same(model, hardware, 4, "word"),
            Rule::Digests(bytes) => same(model, hardware, 8, &format!("digest of {bytes} bytes")),
            Rule::Near { ulp, floor } => near::compare(model, hardware, ulp, floor),
        }
    }
}

fn same(model: &[u8], hardware: &[u8], unit: usize, what: &str) -> Result<(), String> {
    let pairs = || model.chunks(unit).zip(hardware.chunks(unit)).enumerate();
    let different: Vec<_> = pairs().filter(|(_, (x, y))| x != y).collect();
    let Some((index, (x, y))) = different.first() else { return Ok(()) };
    let hex = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (count, all) = (different.len(), pairs().count());
    Err(format!("{count} of {all} differ; {what} {index} is {}, the H100's {}", hex(x), hex(y)))
}

/// The FNV-1a hash.
fn digest(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3);
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, step)
}
