//! The split-KV reduction, which merges partial results.

use fa3::half::{bf16, f16};
use fa3::ndarray::Axis;
use fa3::{Combine, Device, Scalar};
use fa3_types::{CombineProblem, Dtype};

use super::call::CpuCall;
use super::memory::Memory;
use crate::combine::Combination;
use crate::error::Error;

impl CpuCall for Combination {
    fn check_for_cpu(&self) -> Result<(), Error> {
        self.problem_for_cpu().map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        combine(self, memory)
    }
}

/// Reduces the partial results in `memory`.
///
/// # Errors
/// The call or an address is invalid.
fn combine(call: &Combination, memory: &Memory<'_>) -> Result<(), Error> {
    let problem = call.problem_for_cpu()?;
    match call.out_partial.first.dtype {
        Dtype::F32 => combine_of::<f32>(call, &problem, memory),
        Dtype::F16 => combine_of::<f16>(call, &problem, memory),
        Dtype::Bf16 => combine_of::<bf16>(call, &problem, memory),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("parts of 8 bits are no valid problem"),
    }
}

fn combine_of<T: Scalar + Copy>(
    call: &Combination,
    problem: &CombineProblem,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    match problem.o().dtype {
        Dtype::F32 => combine_to::<T, f32>(call, problem, memory),
        Dtype::F16 => combine_to::<T, f16>(call, problem, memory),
        Dtype::Bf16 => combine_to::<T, bf16>(call, problem, memory),
        Dtype::E4m3 | Dtype::Int8 => unreachable!("o of 8 bits is no valid problem"),
    }
}

fn combine_to<T: Scalar + Copy, O: Scalar + Copy>(
    call: &Combination,
    problem: &CombineProblem,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors. In a valid problem no two elements of an output
    // overlap.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (out_partial, lse_partial, mut o, mut lse) = unsafe {
        (
            memory.parts::<T>("out_partial", &call.out_partial)?,
            memory.parts::<f32>("lse_partial", &call.lse_partial)?,
            memory.view_mut::<O>("o", problem.o())?,
            memory.view_mut::<f32>("lse", problem.lse())?,
        )
    };
    let lse_partial = lse_partial.index_axis_move(Axis(4), 0);
    let combined = Combine::new(out_partial, lse_partial).run::<O>(&Device::Cpu)?;
    o.assign(&combined.o);
    lse.index_axis_mut(Axis(3), 0).assign(&combined.lse);
    Ok(())
}
