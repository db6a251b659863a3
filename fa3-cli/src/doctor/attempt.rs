//! Small computations that must succeed.

use fa3::half::bf16;
use fa3::ndarray::Array4;
use fa3::{Attention, Device};
use fa3_cuda::ArchiveError;
use fa3_cuda::host::HostError;
use fa3_cuda::kernels::ladder::vector_add;
use fa3_ir::Elem;
use fa3_sim::{ProgramSimulation, SimError};

use crate::sim::buffers::{self, BufferError};

/// Why an attempt failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("attention of ones is not one")]
    Attention,
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    Problem(#[from] fa3::Error),
    #[error(transparent)]
    Buffers(#[from] BufferError),
    #[error(transparent)]
    Sim(#[from] SimError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("vector_add: {wrong} of {count} sums are wrong")]
    Sums { wrong: usize, count: usize },
}

/// Computes attention of ones, which must give ones to within an ulp of bf16.
pub(super) fn attention(device: &Device) -> Result<(), Trouble> {
    let ones = Array4::from_elem((1, 16, 2, 64), bf16::ONE);
    let o = Attention::new(ones.view(), ones.view(), ones.view()).forward(device)?.o;
    if o.iter().all(|x| (x.to_f32() - 1.0).abs() < 0.01) { Ok(()) } else { Err(Trouble::Attention) }
}

/// Runs a vector addition in the simulator.
pub(super) fn simulated() -> Result<(), Trouble> {
    let program = vector_add::program(1000).kernels();
    let outcome = ProgramSimulation::new(&program).run(&buffers::initial(&program, 1)?)?;
    check(&outcome.buffers)
}

/// Checks z = x + y bit by bit.
fn check(buffers: &[Vec<u8>]) -> Result<(), Trouble> {
    let [x, y, z] = [0, 1, 2].map(|index| buffers::numbers(Elem::F32, &buffers[index]));
    let is_wrong = |(z, (x, y)): &(&f64, (&f64, &f64))| **z as f32 != **x as f32 + **y as f32;
    let wrong = z.iter().zip(x.iter().zip(&y)).filter(is_wrong).count();
    if wrong == 0 { Ok(()) } else { Err(Trouble::Sums { wrong, count: z.len() }) }
}
