//! Attention of 16-bit queries over e4m3 keys and values, which become numbers of f32 with their scales.

use bytemuck::Pod;
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, Array4};
use fa3::{Device, E4m3, Scalar};
use fa3_ref::with_scales;
use fa3_types::{Dtype, Problem, ProblemSpec};

use super::cache::{self, Gathered};
use super::lists::Lists;
use super::memory::Memory;
use super::{attention, lse, sink};
use crate::error::Error;

/// Computes O and LSE.
///
/// # Errors
/// An address or a list that makes no sense.
pub(super) fn forward(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    match problem.dtype() {
        Dtype::F16 => forward_of::<f16>(spec, problem, lists, memory),
        Dtype::Bf16 => forward_of::<bf16>(spec, problem, lists, memory),
        Dtype::F32 | Dtype::E4m3 => unreachable!("q has 16 bits where keys are converted"),
    }
}

fn forward_of<T: Scalar + Pod>(
    spec: &ProblemSpec,
    problem: &Problem,
    lists: Lists<'_>,
    memory: &Memory<'_>,
) -> Result<(), Error> {
    let shapes = problem.descale_shapes();
    // SAFETY: the Python sources take the addresses from tensors of the problem's shapes, strides and dtypes, which
    // they hold until the call is over. O and LSE are new ones, or the caller gave them to be written; a valid
    // problem's O has no two elements in one place. That nobody else uses them or writes to the others meanwhile is up
    // to the caller, as with torch's own operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (q, cached, codes, scales, sink, mut o, lse) = unsafe {
        let of_head = |name, shape: &[usize]| {
            memory.has(name).then(|| memory.slice::<f32>(name, shape.iter().product())).transpose()
        };
        let (o, lse) = (memory.view_mut::<T>("o", problem.o())?, lse(problem, memory)?);
        let cached = cache::is_cache(spec).then(|| Gathered::<E4m3>::of(spec, memory)).transpose()?;
        let codes = match &cached {
            Some(_) => None,
            None => Some([memory.view::<E4m3>("k", &spec.k)?, memory.view("v", &spec.v)?]),
        };
        let scales = [of_head("k_descale", &shapes[1])?, of_head("v_descale", &shapes[2])?];
        (memory.view::<T>("q", &spec.q)?, cached, codes, scales, sink(problem, memory)?, o, lse)
    };
    let (rows, codes, lists) = match (&cached, codes) {
        (Some(cached), _) => {
            let lists = cached.lists(lists);
            let [_, rows] = lists.rows(&cached.spec(spec))?;
            (rows, cached.tensors().map(|x| x.view()), lists)
        }
        (None, Some(codes)) => {
            let [_, rows] = lists.rows(spec)?;
            (rows, codes, lists)
        }
        (None, None) => unreachable!("codes are gathered or viewed"),
    };
    let q = q.mapv(T::to_f32);
    let [of_k, of_v] = scales;
    let [k, v] = codes;
    let [k, v] = [(k, of_k), (v, of_v)]
        .map(|(codes, scales)| with_scales(codes, &rows, scales, |code, scale| code.to_f32() * scale));
    let attention = lists.given(attention(spec, [q.view(), k.view(), v.view()], sink)?);
    let mut computed = Array4::<f32>::zeros(problem.o().shape.dims());
    let mut unwanted = Array3::zeros(if lse.is_some() { [0; 3] } else { problem.lse_shape() });
    let lse = lse.unwrap_or_else(|| unwanted.view_mut());
    attention.forward_into(&Device::Cpu, computed.view_mut(), lse)?;
    o.zip_mut_with(&computed, |to, &from| *to = T::from_f32(from));
    Ok(())
}
