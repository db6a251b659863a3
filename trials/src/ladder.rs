//! The kernels of the ladder, each with problems of every shape class and what must come out.
//!
//! ```text
//! |result − f64| ≤ what the kernel's arithmetic allows, element by element; every element written once
//! ```

mod numbers;
mod rungs;

use fa3_ir::{Buffer, BufferRole, Kernel, Program};
use fa3_ref::plain::{self, Expected, Mismatch};

use crate::family::{Bits, Family, Trial};
use crate::mutate::Target;
use crate::values::Rng;

pub use rungs::{rungs, small_rungs};

/// The ladder's kernels.
pub(crate) const FAMILY: Family = Family {
    name: "ladder",
    trials: |seed| rungs().into_iter().map(|rung| rung.trial(seed)).collect(),
    small: || small_rungs().into_iter().map(|rung| rung.trial(3)).collect(),
    schedules: 10,
    targets: || small_rungs().iter().map(Target::of_ladder).collect(),
};

/// A kernel with one problem.
pub struct Rung {
    /// Kernel and problem, as `gemm bf16 256 x 512 x 64`.
    pub name: String,
    /// The kernel, its arrays and arguments.
    pub program: Program<Kernel>,
    /// Everything that the bits of the results depend on.
    pub bits: Bits,
    /// The outputs for the numbers of the inputs, array by array.
    expected: Reference,
}

/// Computes the outputs of a job from its inputs.
type Reference = Box<dyn Fn(&[Vec<f64>]) -> Vec<Expected> + Sync + Send>;

/// An element that is not what it must be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{array}: {mismatch}")]
pub struct WrongElement {
    /// The array.
    pub array: &'static str,
    /// Which element of it.
    pub mismatch: Mismatch,
}

impl Rung {
    /// The kernel on inputs made from `seed`.
    fn trial(self, seed: u64) -> Trial {
        Trial {
            name: self.name.clone(),
            program: self.program.clone(),
            before: self.initial(seed),
            bits: self.bits,
            judge: Box::new(move |before, after| {
                self.check(before, after).map_err(|mismatch| mismatch.to_string())
            }),
        }
    }

    /// The bytes of every array before the kernel runs: inputs standard normal, sums zero, outputs 0xFF (NaN in every
    /// type).
    pub fn initial(&self, seed: u64) -> Vec<Vec<u8>> {
        let mut rng = Rng::new(seed);
        let mut bytes = |buffer: &Buffer| match buffer.role {
            BufferRole::Input | BufferRole::OptionalInput => {
                (0..buffer.len()).flat_map(|_| numbers::encode(buffer.elem, rng.normal())).collect()
            }
            BufferRole::Output | BufferRole::OptionalOutput | BufferRole::Scratch => {
                vec![0xFF; buffer.bytes()]
            }
            BufferRole::InOut | BufferRole::Ticket => vec![0; buffer.bytes()],
        };
        self.program.buffers.iter().map(&mut bytes).collect()
    }

    /// Compares the bytes of every array after the kernel with what must be there.
    ///
    /// # Errors
    /// The first element that is not what it must be.
    ///
    /// # Panics
    /// If the bytes are not those of the program's buffers.
    pub fn check(&self, before: &[Vec<u8>], after: &[Vec<u8>]) -> Result<(), WrongElement> {
        let arrays = || self.program.buffers.iter();
        let inputs: Vec<Vec<f64>> = arrays()
            .zip(before)
            .filter(|(array, _)| array.role == BufferRole::Input)
            .map(|(array, bytes)| numbers::decode(array.elem, bytes))
            .collect();
        let output = arrays().zip(after).find(|(array, _)| array.role != BufferRole::Input);
        let (array, given) = output.expect("a program has an output");
        let given = numbers::decode(array.elem, given);
        let expected = (self.expected)(&inputs);
        plain::check(&given, &expected).map_err(|mismatch| WrongElement { array: array.name, mismatch })?;
        Ok(())
    }
}
