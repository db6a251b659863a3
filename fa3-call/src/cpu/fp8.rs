//! FP8 attention of 16-bit tensors.

use fa3::half::{bf16, f16};
use fa3::{Device, Scalar};
use fa3_types::{Dtype, Fp8Problem, Problem};

use super::call::CpuCall;
use super::inputs::{attention, contiguous, of_rows, qkv};
use super::lists::Lists;
use super::memory::Memory;
use super::rotary::{self, RowPositions};
use crate::error::Error;
use crate::fp8::Fp8Attention;

impl CpuCall for Fp8Attention {
    fn check_for_cpu(&self) -> Result<(), Error> {
        problem(self).map(drop)
    }

    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error> {
        forward(self, memory)
    }
}

/// The problem of a call with contiguous inputs, because the CPU takes any strides.
///
/// # Errors
/// The call is invalid.
fn problem(call: &Fp8Attention) -> Result<Fp8Problem, Error> {
    call.problem_of(contiguous(call.attention.spec()?))
}

/// Computes O and LSE of the tensors in `memory`.
///
/// # Errors
/// The call or an address is invalid.
fn forward(call: &Fp8Attention, memory: &Memory<'_>) -> Result<(), Error> {
    let problem = problem(call)?;
    match problem.attention().dtype() {
        Dtype::F16 => forward_of::<f16>(call, problem.attention(), memory),
        Dtype::Bf16 => forward_of::<bf16>(call, problem.attention(), memory),
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 => unreachable!("q has 16 bits in a valid problem"),
    }
}

fn forward_of<T: Scalar<Output = T>>(
    call: &Fp8Attention,
    problem: &Problem,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    let spec = call.attention.spec()?;
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (qkv, lists, rotation, mut o, lse) = unsafe {
        let rotation = call.rotary.map(|of| {
            let table = rotary::table(of.of_q(), memory)?;
            let q = rotary::positions("q_positions", of.of_q(), spec.q.shape, memory)?;
            let k = rotary::positions("k_positions", of.of_k(), spec.k.shape, memory)?;
            Ok::<_, Error>((table, q, k))
        });
        let (qkv, rotation) = (qkv::<T>(&spec, memory)?, rotation.transpose()?);
        let lists = Lists::of(&spec, memory)?;
        (qkv, lists, rotation, memory.view_mut("o", problem.o())?, of_rows("lse", problem, memory)?)
    };
    let mut fp8 = lists.given(attention(problem, qkv, None, None)).fp8();
    if let Some((table, q, k)) = &rotation {
        fp8 = fp8.rotary(table).first_positions(q.first(), k.first());
        if let RowPositions::Listed(list) = q {
            fp8 = fp8.q_positions(list);
        }
        if let RowPositions::Listed(list) = k {
            fp8 = fp8.k_positions(list);
        }
    }
    if let Some(seed) = call.hadamard_seed {
        fp8 = fp8.hadamard(seed);
    }
    if call.v_channels {
        fp8 = fp8.v_channels();
    }
    let output = fp8.forward(&Device::Cpu)?;
    o.assign(&output.o);
    if let Some(mut lse) = lse {
        lse.assign(&output.lse);
    }
    Ok(())
}
