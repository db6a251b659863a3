//! The kernels of the ladder, each with problems of every shape class and what must come out.
//!
//! ```text
//! |result − f64| ≤ what the kernel's arithmetic allows, element by element; every element written once
//! ```

mod numbers;
mod rungs;

use fa3_cuda::kernels::Spec;
use fa3_ir::{BufferRole, Program};
use fa3_ref::plain::{self, Expected};

use crate::family::Family;
use crate::memory::before;
use crate::mutate::Prey;
use crate::values::Rng;
use crate::{Bits, Trial};

pub use rungs::{rungs, small_rungs};

/// The ladder's kernels.
pub(crate) const FAMILY: Family = Family {
    name: "ladder",
    trials: rungs,
    small: || small_rungs(3),
    schedules: 10,
    preys: || small_rungs(1).iter().map(Prey::of_ladder).collect(),
};

/// A kernel on inputs that are standard normal, and sums that begin at zero. `expected` gives the output for the
/// numbers of the inputs, array by array.
fn trial(
    name: String,
    bits: Bits,
    program: &Program<Spec>,
    seed: u64,
    expected: impl Fn(&[Vec<f64>]) -> Vec<Expected> + Send + Sync + 'static,
) -> Trial {
    let program = program.map(Spec::kernel);
    let mut rng = Rng::new(seed);
    let before = before(&program, |buffer| match buffer.role {
        BufferRole::Input | BufferRole::OptionalInput => {
            let numbers = (0..buffer.len()).flat_map(|_| numbers::encode(buffer.elem, rng.normal()));
            Some(numbers.collect())
        }
        BufferRole::InOut => Some(vec![0; buffer.bytes()]),
        BufferRole::Output | BufferRole::OptionalOutput | BufferRole::Scratch | BufferRole::Ticket => None,
    });
    let buffers = program.buffers.clone();
    Trial::new(name, bits, program, before, move |after| {
        let numbers = |name| {
            let elem = buffers.iter().find(|buffer| buffer.name == name).expect("it is one of them").elem;
            numbers::decode(elem, after.bytes(name).expect("it is one of them"))
        };
        let (outputs, inputs): (Vec<_>, Vec<_>) = buffers.iter().partition(|buffer| buffer.role.is_written());
        let inputs: Vec<Vec<f64>> = inputs.iter().map(|buffer| numbers(buffer.name)).collect();
        let output = outputs[0].name;
        plain::check(&numbers(output), &expected(&inputs)).map_err(|wrong| format!("{output}: {wrong}"))?;
        Ok(())
    })
}
