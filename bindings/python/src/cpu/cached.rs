//! Attention over a cache that gets rows before.

use bytemuck::Pod;
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array2, Array4};
use fa3::{E4m3, Scalar};
use fa3_ref::{AppendedTo, RotatedRows, with_scales};
use fa3_types::{
    AppendProblem, AppendRotary, CachedProblem, Dtype, QueryPositions, SequenceBase, SequenceRows, Sequences,
    TensorDesc,
};

use super::cache::page_table;
use super::contiguous;
use super::memory::Memory;
use crate::cached::Cached;
use crate::call::At;
use crate::error::Error;

/// The problem of a call, of contiguous tensors but for the cache, whose rows lie apart: any strides of the others will
/// do.
///
/// # Errors
/// The call makes no sense.
pub(crate) fn problem(call: &Cached) -> Result<CachedProblem, Error> {
    super::problem(&call.attention)?;
    let spec = call.attention.spec()?;
    let mut read = contiguous(spec.clone());
    (read.k, read.v) = (spec.k, spec.v);
    call.problem_of(read, call.new.map(|x| TensorDesc::contiguous(x.dtype, x.shape)))
}

/// Appends the rows that lie `at` to their cache, and computes the attention afterwards.
///
/// # Errors
/// The call makes no sense, or an address or a list does not.
pub(crate) fn forward(call: &Cached, at: &At) -> Result<(), Error> {
    let problem = problem(call)?;
    match problem.append().dtype() {
        Dtype::F16 => forward_of::<f16>(call, &problem, at),
        Dtype::Bf16 => forward_of::<bf16>(call, &problem, at),
        Dtype::E4m3 => forward_of::<E4m3>(call, &problem, at),
        Dtype::F32 => unreachable!("new rows have at most 16 bits in a valid problem"),
    }
}

fn forward_of<T: Scalar + Pod>(call: &Cached, problem: &CachedProblem, at: &At) -> Result<(), Error> {
    let (after, q) = append::<T>(call, problem.append(), at)?;
    // The attention's own are in memory of this call.
    let mut attention = call.attention.clone();
    let mut passed = vec![("seqused_k", after.as_ptr().expose_provenance() as u64)];
    if let Some(q) = &q {
        attention.inputs[0] = *problem.attention().q();
        passed.push(("q", q.as_ptr().expose_provenance() as u64));
    }
    let of = |name| passed.iter().find(|(of, _)| *of == name).map(|&(_, address)| address);
    let at: Vec<_> = at.iter().map(|&(name, address)| (name, of(name).or(address))).collect();
    super::forward(&attention, &at)
}

/// Writes new rows to the cache. Gives the rows of each sequence afterwards, and Q if it is rotated.
///
/// # Errors
/// A list that makes no sense, or an address that does not.
fn append<T: Scalar + Pod>(
    call: &Cached,
    problem: &AppendProblem,
    at: &At,
) -> Result<(Vec<i32>, Option<Array4<T>>), Error> {
    let (memory, count, spec) = (Memory::new(at), problem.count(), call.attention.spec()?);
    // SAFETY: the Python sources take the addresses from lists of as many numbers as the call says, which they hold
    // until it is over. That nobody writes to them meanwhile is up to the caller, as with torch's own operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (seqused, page_table, rotation) = unsafe {
        let rotation = call.rotary.map(|rotary| Rotation::of::<T>(rotary, &memory, count));
        (memory.slice::<i32>("seqused_k", count)?, page_table(spec.seqs_k, &memory)?, rotation.transpose()?)
    };
    let to = AppendedTo { seqused, page_table };
    let rows = rows_of("cu_seqlens_k_new", call.sequences, &call.new[0], &memory)?;
    let rows_q = rows_of("cu_seqlens_q", spec.seqs_q, &spec.q, &memory)?;
    let tensors = [
        ("k_new", "k", "k_descale", call.new[0], &spec.k),
        ("v_new", "v", "v_descale", call.new[1], &spec.v),
    ];
    for (name, of_cache, descale, new, cache) in tensors {
        // Keys and values of a cache may lie between each other: one of them is written at a time.
        let memory = Memory::new(at);
        // SAFETY: the Python sources take the addresses from tensors of the call's shapes, strides and dtypes, which
        // they hold until it is over. Those of the cache have no two elements in one place. That nobody else uses it or
        // writes to the others meanwhile is up to the caller, as with torch's own operators.
        #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
        let new = unsafe { memory.view::<T>(name, &new)?.to_owned() };
        let new = match &rotation {
            Some(rotation) if name == "k_new" => rotation.rotated(new, &rows, seqused, QueryPositions::Each),
            _ => new,
        };
        // SAFETY: as above.
        #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
        unsafe {
            let Some([count, heads]) = problem.descale_shape() else {
                to.append(new.view(), &rows, &mut memory.view_mut::<T>(of_cache, cache)?);
                continue;
            };
            let scales =
                memory.has(descale).then(|| memory.slice::<f32>(descale, count * heads)).transpose()?;
            let code = |x: T, scale: f32| E4m3::from_f32(x.to_f32() / scale);
            let codes = with_scales(new.view(), &rows, scales, code);
            to.append(codes.view(), &rows, &mut memory.view_mut::<E4m3>(of_cache, cache)?);
        }
    }
    let q = match (&rotation, problem.queries()) {
        (Some(rotation), Some(queries)) => {
            // SAFETY: as above.
            #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
            let q = unsafe { memory.view::<T>("q", &spec.q)? }.as_standard_layout().to_owned();
            Some(rotation.rotated(q, &rows_q, seqused, queries.positions))
        }
        _ => None,
    };
    Ok((to.seqused_after(&rows, spec.k.shape.seqlen), q))
}

/// The rows of sequences of a tensor, dense or packed by the list of this name.
///
/// # Errors
/// A list that makes no sense, or an address that does not.
fn rows_of(
    list: &'static str,
    sequences: Sequences,
    tensor: &TensorDesc,
    memory: &Memory<'_>,
) -> Result<SequenceRows, Error> {
    // SAFETY: as in [`append`].
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let ends =
        sequences.is_packed().then(|| unsafe { memory.slice(list, sequences.count() + 1) }).transpose()?;
    let rows = SequenceRows::listed(tensor.shape.batch, tensor.shape.seqlen, ends, None)?;
    match rows.end() {
        given if given > tensor.shape.seqlen => {
            Err(Error::NewRows { list, given, rows: tensor.shape.seqlen })
        }
        _ => Ok(rows),
    }
}

/// A rotation, and its tables in f32.
struct Rotation<'a> {
    rotary: AppendRotary,
    cos: Array2<f32>,
    sin: Array2<f32>,
    /// The positions of first rows, unless they are those of the rows before.
    listed: Option<&'a [i32]>,
}

impl<'a> Rotation<'a> {
    /// The rotation of a call with tables of f32 or of T.
    ///
    /// # Safety
    /// Its tables and its list lie there. They live, and nobody writes to them, for as long as the result.
    ///
    /// # Errors
    /// An address that makes no sense.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    unsafe fn of<T: Scalar + Pod>(
        rotary: AppendRotary,
        memory: &Memory<'_>,
        count: usize,
    ) -> Result<Rotation<'a>, Error> {
        let dims = (rotary.table_rows, rotary.rotary_dim / 2);
        let table = |name| {
            // SAFETY: the caller vouches for it.
            let numbers: Vec<f32> = unsafe {
                match rotary.table {
                    Dtype::F32 => memory.slice::<f32>(name, dims.0 * dims.1)?.to_vec(),
                    Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 => {
                        memory.slice::<T>(name, dims.0 * dims.1)?.iter().map(|&x| x.to_f32()).collect()
                    }
                }
            };
            Ok::<_, Error>(Array2::from_shape_vec(dims, numbers).expect("they are so many"))
        };
        let is_listed = rotary.base == SequenceBase::Listed;
        // SAFETY: as above.
        let listed = is_listed.then(|| unsafe { memory.slice("rotary_seqlens", count) }).transpose()?;
        Ok(Rotation { rotary, cos: table("rotary_cos")?, sin: table("rotary_sin")?, listed })
    }

    /// The rows of sequences, rotated; others as they are.
    fn rotated<T: Scalar + Pod>(
        &self,
        mut x: Array4<T>,
        rows: &SequenceRows,
        seqused: &[i32],
        positions: QueryPositions,
    ) -> Array4<T> {
        let rotation = RotatedRows {
            style: self.rotary.style,
            cos: self.cos.view(),
            sin: self.sin.view(),
            base: self.listed.unwrap_or(seqused),
            positions,
        };
        rotation.rotate(&mut x.view_mut(), rows, T::to_f32, T::from_f32);
        x
    }
}
