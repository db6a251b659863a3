//! Tables of rotary embedding, and positions of rows.

use fa3::RopeTable;
use fa3::ndarray::Array2;
use fa3_types::{Positions, Rotary, Shape};

use super::memory::Memory;
use crate::error::Error;

/// The cosines and sines of a rotation.
///
/// # Safety
/// `memory` must have the tables `cos` and `sin` of the rotation. They stay alive and are not written to during this
/// call.
///
/// # Errors
/// An address or a table is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn table(rotary: Rotary, memory: &Memory<'_>) -> Result<RopeTable, Error> {
    let dims = [rotary.table_rows, rotary.rotary_dim / 2];
    let array = |name| {
        // SAFETY: the caller guarantees the tensors.
        let numbers = unsafe { memory.slice::<f32>(name, dims.iter().product()) }?.to_vec();
        Ok::<_, Error>(Array2::from_shape_vec(dims, numbers).expect("one element for each index"))
    };
    Ok(RopeTable::new(rotary.style, array("cos")?, array("sin")?)?)
}

/// The positions of a tensor's rows, in the form that `fa3` takes.
#[derive(Clone, Copy)]
pub(super) enum RowPositions<'a> {
    From(usize),
    Listed(&'a [i32]),
}

impl RowPositions<'_> {
    /// The position of the first row of each sequence. If positions are listed, it is 0, which is ignored.
    pub(super) fn first(self) -> usize {
        match self {
            RowPositions::From(first) => first,
            RowPositions::Listed(_) => 0,
        }
    }
}

/// The positions of the rows of a tensor of `shape`.
///
/// # Safety
/// If the positions are listed, `memory` must have the list. It stays alive and is not written to as long as the result
/// lives.
///
/// # Errors
/// An address is invalid.
#[allow(unsafe_code, reason = "tensors are plain addresses")]
pub(super) unsafe fn positions<'a>(
    name: &'static str,
    rotary: Rotary,
    shape: Shape,
    memory: &Memory<'_>,
) -> Result<RowPositions<'a>, Error> {
    Ok(match rotary.positions {
        Positions::From(first) => RowPositions::From(first),
        // SAFETY: the caller guarantees the tensors.
        Positions::Listed => RowPositions::Listed(unsafe { memory.slice(name, shape.batch * shape.seqlen) }?),
    })
}
