//! Attention of e4m3 tensors, emulated bit by bit.

use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, Array4, ArrayView4, Axis, Slice};
use fa3::{E4m3, Scalar};
use fa3_quant::{Channels, Fp8Attention, Output, Quantized, add_sinks};
use fa3_types::{
    Dtype, Granularity, KnownProblem, ProblemSpec, SequenceRows, Shape, TensorDesc, ValueLayout,
};

use super::cache::rows::{CacheRows, is_cache};
use super::inputs::{contiguous, of_rows, score, sink};
use super::lists::Lists;
use super::memory::Memory;
use crate::error::Error;

/// The scales of Q, K and V and the means of V's channels, if given.
struct Scales<'a> {
    of: [Option<&'a [f32]>; 3],
    v_mean: Option<&'a [f32]>,
}

/// Computes O and LSE of codes.
///
/// # Errors
/// A scale is negative or not normal.
pub(super) fn forward(spec: &ProblemSpec, lists: Lists<'_>, memory: &Memory<'_>) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (problem, codes, scales, sink) = unsafe {
        let q = memory.view::<E4m3>("q", &spec.q)?.to_owned();
        let ([k, v], rows_k) = if is_cache(spec) {
            let rows = CacheRows::of(spec, lists, memory)?;
            let tensors = [memory.view("k", &spec.k)?, memory.view("v", &spec.v)?];
            rows.of_tensors(tensors).gathered(spec.seqs_q.is_packed())?
        } else {
            let k = memory.view("k", &spec.k)?.to_owned();
            ([k, values(spec, memory)?], lists.rows_k(spec)?)
        };
        let problem = known(spec.clone(), [&k, &v], lists.rows_q(spec)?, rows_k)?;
        let problem = score(spec.score.as_ref(), memory)?.iter().fold(problem, KnownProblem::with_score);
        let scales = scales(&problem, memory)?;
        let sink = sink(&problem, memory)?;
        (problem, [q, k, v], scales, sink)
    };
    let problem = &problem;
    let mut output = emulate(problem, codes, &scales)?;
    if let Some(sink) = sink {
        add_sinks(problem, sink.into(), &mut output)?;
    }
    match problem.o().dtype {
        Dtype::F16 => write::<f16>(problem, &output, memory),
        Dtype::Bf16 => write::<bf16>(problem, &output, memory),
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 => unreachable!("o of e4m3 has 16 bits in a valid problem"),
    }
}

/// The problem of contiguous tensors with this K and V, and the rows of its sequences, without a function of scores.
///
/// # Errors
/// The rows do not fit the tensors.
fn known(
    spec: ProblemSpec,
    [k, v]: [&Array4<E4m3>; 2],
    rows_q: SequenceRows,
    rows_k: SequenceRows,
) -> Result<KnownProblem, Error> {
    let mut spec = contiguous(spec);
    spec.score = None;
    for (desc, tensor) in [(&mut spec.k, k), (&mut spec.v, v)] {
        let (batch, seqlen, heads, head_dim) = tensor.dim();
        *desc = TensorDesc::contiguous(desc.dtype, Shape { batch, seqlen, heads, head_dim });
    }
    Ok(spec.with_rows(rows_q, rows_k)?)
}

/// V in rows, even if it is transposed in memory.
///
/// # Safety
/// `memory` must have V of `spec`. It stays alive and is not written to during this call.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn values(spec: &ProblemSpec, memory: &Memory<'_>) -> Result<Array4<E4m3>, Error> {
    if spec.v_layout == ValueLayout::Rows {
        // SAFETY: the caller guarantees the tensors.
        return Ok(unsafe { memory.view("v", &spec.v) }?.to_owned());
    }
    let [batch, seqlen, heads, head_dim] = spec.v.shape.dims();
    let dims = [batch, heads, head_dim, ValueLayout::keys_of_row(seqlen)];
    // SAFETY: the caller guarantees the tensors.
    let codes = unsafe { memory.slice("v", dims.iter().product()) }?;
    let codes = ArrayView4::from_shape(dims, codes).expect("one element for each index");
    Ok(Array4::from_shape_fn([batch, seqlen, heads, head_dim], |(batch, key, head, element)| {
        codes[[batch, head, element, ValueLayout::place_of_key(key)]]
    }))
}

/// The scales and means of a call.
///
/// # Safety
/// `memory` must have the problem's scales and means. They stay alive and are not written to as long as the result
/// lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn scales<'a>(problem: &KnownProblem, memory: &Memory<'_>) -> Result<Scales<'a>, Error> {
    let given = |tensor, shape: &[usize]| {
        // SAFETY: the caller guarantees the tensors.
        memory.has(tensor).then(|| unsafe { memory.slice(tensor, shape.iter().product()) }).transpose()
    };
    let [q, k, v] = problem.descale_shapes();
    let of = [given("q_descale", &q)?, given("k_descale", &k)?, given("v_descale", &v)?];
    Ok(Scales { of, v_mean: given("v_mean", &problem.v_mean_shape().unwrap_or_default())? })
}

fn emulate(problem: &KnownProblem, codes: [Array4<E4m3>; 3], scales: &Scales<'_>) -> Result<Output, Error> {
    let [q, k, mut v] = codes;
    let [of_q, of_k, of_v] = problem.scales();
    let (rows_q, rows_k) = (problem.rows_q(), problem.rows_k());
    let q = scaled(problem, rows_q, q, of_q, scales.of[0])?;
    let k = scaled(problem, rows_k, k, of_k, scales.of[1])?;
    let (channels, of_v, scale) = match (scales.v_mean, scales.of[2]) {
        // The scales of V's channels apply to O.
        (Some(mean), Some(scale)) => (Some(channels(problem, &mut v, mean, scale)?), Granularity::Head, None),
        (_, scale) => (None, of_v, scale),
    };
    let v = scaled(problem, rows_k, v, of_v, scale)?;
    let mut output = Fp8Attention::default().forward(problem, &q, &k, &v)?;
    if let Some(channels) = channels {
        channels.restore(problem, &mut output)?;
    }
    Ok(output)
}

/// Codes with their scales. A query head uses the scale of its key/value head.
fn scaled(
    problem: &KnownProblem,
    sequences: &SequenceRows,
    mut codes: Array4<E4m3>,
    granularity: Granularity,
    scales: Option<&[f32]>,
) -> Result<Quantized, Error> {
    let heads = codes.len_of(Axis(2));
    let (granularity, scales) = match (granularity, scales) {
        (Granularity::Block { rows }, scales) => {
            return Ok(Quantized::of_blocks(codes, sequences, rows, scales.unwrap_or_default())?);
        }
        (_, None) => (Granularity::Tensor, vec![1.0]),
        (_, Some(scales)) => {
            let (heads_kv, group) = (problem.heads().kv(), heads / problem.heads().kv());
            let of_head = |index: usize| scales[index / heads * heads_kv + index % heads / group];
            let mut scales: Vec<f32> = (0..sequences.count() * heads).map(of_head).collect();
            for (index, scale) in scales.iter_mut().enumerate() {
                let (batch, first) = sequences.start(index / heads);
                let rows = Slice::from(first..first + sequences.len(index / heads));
                let mut head = codes.index_axis_mut(Axis(0), batch);
                let mut head = head.index_axis_mut(Axis(1), index % heads);
                unscale(head.slice_axis_mut(Axis(0), rows).iter_mut(), scale);
            }
            (Granularity::Head, scales)
        }
    };
    Ok(Quantized::new(codes, sequences, granularity, scales)?)
}

/// The means and scales of V's channels.
fn channels(
    problem: &KnownProblem,
    codes: &mut Array4<E4m3>,
    mean: &[f32],
    scale: &[f32],
) -> Result<Channels, Error> {
    let dims = problem.v_mean_shape().expect("channels have means");
    let array =
        |numbers: &[f32]| Array3::from_shape_vec(dims, numbers.to_vec()).expect("one element for each index");
    let mut scale = array(scale);
    for ((batch, head, column), scale) in scale.indexed_iter_mut() {
        let mut channel = codes.index_axis_mut(Axis(0), batch);
        let mut channel = channel.index_axis_mut(Axis(1), head);
        unscale(channel.column_mut(column).iter_mut(), scale);
    }
    Ok(Channels::new(array(mean), scale)?)
}

/// Replaces a scale of 0 by 1, and its codes by zeros, except for NaN.
fn unscale<'a>(codes: impl Iterator<Item = &'a mut E4m3>, scale: &mut f32) {
    if *scale == 0.0 {
        codes.filter(|code| !code.is_nan()).for_each(|code| *code = E4m3::ZERO);
        *scale = 1.0;
    }
}

fn write<T: Scalar>(problem: &KnownProblem, output: &Output, memory: &Memory<'_>) -> Result<(), Error> {
    // SAFETY: the maker of `memory` guarantees the call's tensors.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    let (mut o, lse) = unsafe { (memory.view_mut::<T>("o", problem.o())?, of_rows("lse", problem, memory)?) };
    o.zip_mut_with(&output.o, |to, &from| *to = T::from_f32(from));
    if let Some(mut lse) = lse {
        lse.assign(&output.lse);
    }
    Ok(())
}
