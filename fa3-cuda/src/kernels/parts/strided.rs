//! A tensor as a kernel's parameter: its address and strides in global memory.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_types::{Shape, TensorDesc};

use super::store_rows::Global;
use crate::kernels::params::{Form, Host, Pass, Side};
use crate::kernels::tensors::{strides, transposed_strides};

/// A tensor in global memory: an address, and strides in bytes of sequences, heads and rows.
pub(crate) struct Strided<S: Side> {
    address: S::Pointer,
    strides: [S::U64; 3],
}

impl<A: Side> Strided<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>, name: &str) -> Strided<B> {
        let [batch, head, row] = self.strides;
        Strided {
            address: by.pointer(name, self.address),
            strides: [
                by.u64(&format!("{name}_batch_bytes"), batch),
                by.u64(&format!("{name}_head_bytes"), head),
                by.u64(&format!("{name}_row_bytes"), row),
            ],
        }
    }
}

impl<'k, S: Side<Pointer = U64<'k>, U64 = U64<'k>>> Strided<S> {
    /// The tensor, as stores address it.
    pub(crate) fn global(&self) -> Global<'k, 3> {
        Global { address: self.address, strides: self.strides }
    }
}

impl Strided<Form> {
    /// The parameters that a kernel declares for a tensor.
    pub(crate) fn form(elem: Elem) -> Strided<Form> {
        Strided { address: elem, strides: [(); 3] }
    }
}

impl Strided<Host> {
    /// The arguments of a launch for a tensor.
    pub(crate) fn of(buffer: BufferId, tensor: &TensorDesc) -> Strided<Host> {
        Strided { address: buffer, strides: strides(tensor) }
    }

    /// The arguments of a launch for V of this shape, transposed: a row has the keys of a channel.
    pub(crate) fn transposed(buffer: BufferId, shape: Shape) -> Strided<Host> {
        Strided { address: buffer, strides: transposed_strides(shape) }
    }
}
