//! The kernels of the ladder (worked examples), each on problems of every class of shapes.
//!
//! ```text
//! |result − f64| ≤ the bound of the kernel's arithmetic, element by element; every element written once
//! ```

mod rungs;

use fa3_cuda::kernels::Spec;
use fa3_ir::{BufferRole, Program};
use fa3_ref::plain::{self, Expected};

use crate::memory::{before, dtype, number_bytes};
use crate::mutate::Target;
use crate::values::Rng;
use crate::{Bits, Trial};

pub use rungs::{rungs, small_rungs};

/// The ladder's kernels as mutation targets.
pub(crate) fn targets() -> Vec<Target> {
    small_rungs(1).iter().map(Target::of_ladder).collect()
}

/// A trial of a kernel on standard normal inputs, with accumulators initialized to 0. `expected` takes the input
/// arrays, and returns the output.
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
            let numbers = (0..buffer.len()).map(|_| rng.normal() as f32);
            Some(number_bytes(dtype(buffer.elem), numbers))
        }
        BufferRole::InOut => Some(vec![0; buffer.bytes()]),
        BufferRole::Output | BufferRole::OptionalOutput | BufferRole::Scratch | BufferRole::TileCounter => {
            None
        }
    });
    let names = program.buffers.iter().map(|buffer| (buffer.name, buffer.role.is_written()));
    let (outputs, inputs): (Vec<_>, Vec<_>) = names.partition(|(_, is_written)| *is_written);
    Trial::new(name, bits, program, before, move |after| {
        let numbers = |name| after.numbers(name).into_iter().map(f64::from).collect::<Vec<f64>>();
        let inputs: Vec<Vec<f64>> = inputs.iter().map(|(name, _)| numbers(name)).collect();
        let (output, _) = outputs[0];
        plain::check(&numbers(output), &expected(&inputs)).map_err(|wrong| format!("{output}: {wrong}"))?;
        Ok(())
    })
}
