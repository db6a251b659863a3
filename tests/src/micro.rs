//! Micro-kernels: one for each thing that hardware does, with what an H100 made of it.
//!
//! ```text
//! the simulator's bits = the H100's, of every micro-kernel and every input
//! ```
//!
//! A [`Micro`] is a small kernel with its inputs, which come from counters, so that they need not be stored. The
//! example `record` runs all of them on a GPU and writes what they leave in memory to `golden/`, one [`Golden`] file
//! a [`Suite`]; the test `golden` runs them in the simulator and compares. Only what the hardware's documentation
//! leaves open, approximations, may differ, by as much as [`Rule::Near`] says.

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

/// Micro-kernels whose results are in one file.
#[derive(Debug)]
pub struct Suite {
    /// The name of the file.
    pub name: &'static str,
    /// The kernels.
    pub tests: Vec<Micro>,
}

/// A kernel that does one thing, with its inputs.
#[derive(Debug)]
pub struct Micro {
    /// Its name, the only one in its suite.
    pub name: String,
    /// The kernel, its arrays and arguments.
    pub program: Program<Kernel>,
    /// The contents of each array before.
    pub contents: Vec<Vec<u8>>,
    /// How results are kept and compared.
    pub rule: Rule,
}

/// How results are kept and compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// All bits are kept, and equal.
    Bits,
    /// A digest of each group of this many bytes is kept, equal.
    Digests(usize),
    /// All bits of binary32 numbers are kept; those of the model are at most this far away.
    Near {
        /// The largest difference, in units in the last place of the hardware's number.
        ulp: u32,
        /// Numbers below this in magnitude have its last place.
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
    /// A digest of its inputs: results recorded for others say nothing.
    pub fn inputs(&self) -> u64 {
        self.contents.iter().fold(digest(&[]), |all, array| all.rotate_left(1) ^ digest(array))
    }

    /// The bytes that it wrote, given all of its arrays afterwards.
    pub fn written(&self, arrays: &[Vec<u8>]) -> Vec<u8> {
        let all = self.program.buffers.iter().zip(arrays);
        all.filter(|(buffer, _)| buffer.role != BufferRole::Input)
            .flat_map(|(_, bytes)| bytes.clone())
            .collect()
    }

    /// The part of its results that is kept.
    pub fn keep(&self, written: &[u8]) -> Vec<u8> {
        match self.rule {
            Rule::Bits | Rule::Near { .. } => written.to_vec(),
            Rule::Digests(bytes) => {
                written.chunks(bytes).flat_map(|chunk| digest(chunk).to_le_bytes()).collect()
            }
        }
    }

    /// Compares what is kept of the model's results with what is kept of the hardware's.
    ///
    /// # Errors
    /// How they differ, in words.
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

/// FNV-1a.
fn digest(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3);
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, step)
}
