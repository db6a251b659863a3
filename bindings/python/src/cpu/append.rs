//! New rows of a cache.

use bytemuck::Pod;
use fa3::Scalar;
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array2, Array4, ArrayView2};
use fa3_ref::{AppendedTo, RotatedRows};
use fa3_types::{
    AppendProblem, AppendRotary, Dtype, QueryPositions, SequenceBase, SequenceRows, Sequences, TensorDesc,
};

use super::memory::Memory;
use crate::append::Append;
use crate::call::At;
use crate::error::Error;

/// Appends the rows that lie `at` to their cache, and rotates queries.
///
/// # Errors
/// A list that makes no sense, or an address that does not.
pub(crate) fn append(call: &Append, problem: &AppendProblem, at: &At) -> Result<(), Error> {
    match problem.dtype() {
        Dtype::F16 => append_of::<f16>(call, problem, at),
        Dtype::Bf16 => append_of::<bf16>(call, problem, at),
        Dtype::F32 | Dtype::E4m3 => unreachable!("rows have 16 bits in a valid problem"),
    }
}

/// # Errors
/// Those of [`append`].
fn append_of<T: Scalar + Pod>(call: &Append, problem: &AppendProblem, at: &At) -> Result<(), Error> {
    let (memory, count) = (Memory::new(at), problem.count());
    // SAFETY: the Python sources take the addresses from lists of as many numbers as the call says, which they hold
    // until it is over. That nobody writes to them meanwhile is up to the caller, as with torch's own operators.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let (seqused, entries, rotation) = unsafe {
        let entries = call.cached.pages().map(|pages| memory.slice::<i32>("page_table", count * pages));
        let rotation = call.rotary.map(|rotary| Rotation::of::<T>(rotary, &memory, count));
        (memory.slice::<i32>("seqused_k", count)?, entries.transpose()?, rotation.transpose()?)
    };
    let page_table = entries
        .zip(call.cached.pages())
        .map(|(entries, pages)| ArrayView2::from_shape((count, pages), entries).expect("they are so many"));
    let to = AppendedTo { seqused, page_table };
    let rows = rows_of("cu_seqlens_k_new", call.sequences, &call.new[0], &memory)?;
    for (name, of_cache, number) in [("k_new", "k_cache", 0), ("v_new", "v_cache", 1)] {
        // Keys and values of a cache may lie between each other: one of them is written at a time.
        let memory = Memory::new(at);
        // SAFETY: the Python sources take the addresses from tensors of the call's shapes, strides and dtypes, which
        // they hold until it is over. Those of a valid problem's cache have no two elements in one place. That nobody
        // else uses it or writes to the others meanwhile is up to the caller, as with torch's own operators.
        #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
        let (new, mut cache) = unsafe {
            let new = memory.view::<T>(name, &call.new[number])?.to_owned();
            (new, memory.view_mut::<T>(of_cache, &call.cache[number])?)
        };
        let new = match &rotation {
            Some(rotation) if number == 0 => rotation.rotated(new, &rows, seqused, QueryPositions::Each),
            _ => new,
        };
        to.append(new.view(), &rows, &mut cache);
    }
    if let (Some(queries), Some(rotation), Some(of_problem)) = (&call.queries, &rotation, problem.queries()) {
        let rows = rows_of("cu_seqlens_q", queries.sequences, &queries.q, &memory)?;
        let rotated = TensorDesc::contiguous(queries.q.dtype, queries.q.shape);
        // SAFETY: as above. The rotated queries are a new tensor.
        #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
        let (q, mut out) = unsafe {
            let q = memory.view::<T>("q", &queries.q)?.to_owned();
            (q, memory.view_mut::<T>("q_rotated", &rotated)?)
        };
        out.assign(&rotation.rotated(q, &rows, seqused, of_problem.positions));
    }
    // SAFETY: as above, of a new list.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    let after = unsafe { memory.slice_mut::<i32>("seqused_after", count) }?;
    after.copy_from_slice(&to.seqused_after(&rows, call.cache[0].shape.seqlen));
    Ok(())
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
    // SAFETY: as in [`append_of`].
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
