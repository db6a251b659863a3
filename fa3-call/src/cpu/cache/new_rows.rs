//! New rows of a cache, and the rotation of these rows and of queries.

use fa3::ndarray::{Array2, ArrayView4};
use fa3::{NewRows, RopeTable, Scalar};
use fa3_types::{AppendRotary, Dtype, SequenceBase};

use crate::cached::Cached;
use crate::cpu::memory::Memory;
use crate::error::Error;

/// New rows of a cache.
pub(super) struct NewTensors<'a, T> {
    tensors: [ArrayView4<'a, T>; 2],
    cu_seqlens: Option<&'a [i32]>,
    rotation: Option<(RopeTable, Option<&'a [i32]>)>,
}

impl<'a, T: Scalar> NewTensors<'a, T> {
    /// The new rows of a call, and their rotation by tables of f32 or of T.
    ///
    /// # Safety
    /// `memory` must have the tensors and lists of new rows. They stay alive and are not written to as long as the
    /// result lives.
    ///
    /// # Errors
    /// An address or a table is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn of(call: &Cached, memory: &Memory<'_>) -> Result<NewTensors<'a, T>, Error> {
        let ([k, v], count) = (&call.new, call.sequences.count());
        let list = |name, is_there: bool, entries| {
            // SAFETY: the caller guarantees the tensors.
            is_there.then(|| unsafe { memory.slice(name, entries) }).transpose()
        };
        let rotation = call.rotary.map(|rotary| {
            // SAFETY: as above.
            let table = unsafe { rotation_table::<T>(rotary, memory) }?;
            Ok::<_, Error>((table, list("rotary_seqlens", rotary.base == SequenceBase::Listed, count)?))
        });
        // SAFETY: as above.
        let tensors = unsafe { [memory.view("k_new", k)?, memory.view("v_new", v)?] };
        let cu_seqlens = list("cu_seqlens_k_new", call.sequences.is_packed(), count + 1)?;
        Ok(NewTensors { tensors, cu_seqlens, rotation: rotation.transpose()? })
    }

    /// The rows as `fa3` takes them.
    pub(super) fn rows(&self) -> NewRows<'_, T> {
        let [k, v] = self.tensors.each_ref().map(|x| x.view());
        let mut rows = NewRows::new(k, v);
        if let Some(cu_seqlens) = self.cu_seqlens {
            rows = rows.cu_seqlens_k_new(cu_seqlens);
        }
        if let Some((table, listed)) = &self.rotation {
            rows = rows.rotary(table);
            if let Some(listed) = listed {
                rows = rows.rotary_seqlens(listed);
            }
        }
        rows
    }
}

/// The tables of a rotation, converted to f32.
///
/// # Safety
/// `memory` must have the tables. They stay alive and are not written to during this call.
///
/// # Errors
/// An address or a table is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
unsafe fn rotation_table<T: Scalar>(rotary: AppendRotary, memory: &Memory<'_>) -> Result<RopeTable, Error> {
    let dims = (rotary.table_rows, rotary.rotary_dim / 2);
    let table = |name| {
        // SAFETY: the caller guarantees the tensors.
        let numbers: Vec<f32> = unsafe {
            match rotary.table {
                Dtype::F32 => memory.slice::<f32>(name, dims.0 * dims.1)?.to_vec(),
                Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 => {
                    memory.slice::<T>(name, dims.0 * dims.1)?.iter().map(|&x| x.to_f32()).collect()
                }
            }
        };
        Ok::<_, Error>(Array2::from_shape_vec(dims, numbers).expect("one element for each index"))
    };
    Ok(RopeTable::new(rotary.style, table("rotary_cos")?, table("rotary_sin")?)?)
}
