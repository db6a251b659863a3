//! A problem's tensors as buffers of a program, and as arguments.

use fa3_ir::{Buffer, BufferId, BufferRole, Elem, Passed, Program};
use fa3_sched::packed::MemoryRows;
use fa3_types::{Dtype, Problem, Shape, TensorDesc, ValueLayout};

use super::parts::ragged::{BEYOND, MOST, STEP};

/// The element type of a kernel for tensors of type `dtype`.
pub(super) fn elem(dtype: Dtype) -> Elem {
    match dtype {
        Dtype::F32 => Elem::F32,
        Dtype::F16 => Elem::F16,
        Dtype::Bf16 => Elem::Bf16,
        Dtype::E4m3 => Elem::E4m3,
        Dtype::Int8 => Elem::U8,
    }
}

/// Declares the input buffer of a tensor. It extends from the tensor's first element to its last one, gaps included.
pub(super) fn input<K>(program: &mut Program<K>, name: &'static str, tensor: &TensorDesc) -> BufferId {
    declare(program, name, tensor, BufferRole::Input)
}

/// Declares the buffer of a tensor that is written.
pub(super) fn output<K>(program: &mut Program<K>, name: &'static str, tensor: &TensorDesc) -> BufferId {
    // A tensor with gaps is not written in full, so what lies in its gaps must be kept.
    let role = if is_contiguous(tensor) { BufferRole::Output } else { BufferRole::InOut };
    declare(program, name, tensor, role)
}

/// Declares the buffer of a tensor that is read, and written in part.
pub(super) fn in_out<K>(program: &mut Program<K>, name: &'static str, tensor: &TensorDesc) -> BufferId {
    declare(program, name, tensor, BufferRole::InOut)
}

fn declare<K>(
    program: &mut Program<K>,
    name: &'static str,
    tensor: &TensorDesc,
    role: BufferRole,
) -> BufferId {
    let shape = if is_contiguous(tensor) {
        tensor.shape.dims().map(|extent| extent as u64).to_vec()
    } else {
        vec![tensor.extent().0]
    };
    let (elem, tensor) = (elem(tensor.dtype), Some(*tensor));
    program.add(Buffer { name, elem, shape, role, align: Buffer::ALIGN, tensor })
}

fn is_contiguous(tensor: &TensorDesc) -> bool {
    tensor.extent().0 == tensor.shape.dims().iter().map(|&extent| extent as u64).product::<u64>()
}

/// Declares the buffer of sinks, if the problem has sinks.
pub(super) fn sink<K>(program: &mut Program<K>, problem: &Problem) -> Option<BufferId> {
    problem.has_sink().then(|| {
        let sink = program.buffer("sink", Elem::F32, &[problem.heads().q() as u32], BufferRole::Input);
        program.align(sink, 4);
        sink
    })
}

/// A tensor whose tiles are copied. Its dimensions are head_dim, heads, rows, sequences.
pub(super) fn view(buffer: BufferId, tensor: &TensorDesc) -> Passed {
    let (shape, strides) = (tensor.shape, tensor.strides);
    Passed::Tensor {
        buffer,
        dims: [shape.head_dim, shape.heads, shape.seqlen, shape.batch].map(|extent| extent as u64).to_vec(),
        strides: [strides.heads, strides.seqlen, strides.batch].map(|stride| bytes(tensor, stride)).to_vec(),
    }
}

/// A tensor whose tiles are clipped at a sequence's end (see [`ragged`](super::parts::ragged)).
pub(super) fn ragged_view(buffer: BufferId, tensor: &TensorDesc, rows: MemoryRows) -> Passed {
    let (shape, row) = (tensor.shape, rows.stride * tensor.dtype.bytes() as u64);
    Passed::Tensor {
        buffer,
        dims: vec![shape.head_dim as u64, MOST.into(), shape.heads as u64, BEYOND, u64::from(rows.count) + 1],
        strides: vec![row, bytes(tensor, tensor.strides.heads), STEP - row, row],
    }
}

/// A tensor whose tiles are clipped at a sequence's end and have rows of several heads (PackGQA).
pub(super) fn ragged_view_of_heads(buffer: BufferId, tensor: &TensorDesc, rows: MemoryRows) -> Passed {
    let (shape, row) = (tensor.shape, rows.stride * tensor.dtype.bytes() as u64);
    Passed::Tensor {
        buffer,
        dims: vec![shape.head_dim as u64, shape.heads as u64, MOST.into(), BEYOND, u64::from(rows.count) + 1],
        strides: vec![bytes(tensor, tensor.strides.heads), row, STEP - row, row],
    }
}

/// e4m3 V, transposed. Its dimensions are keys, head_dim, heads, sequences.
pub(super) fn transposed_view(buffer: BufferId, shape: Shape) -> Passed {
    let mut dims = transposed_dims(shape).map(u64::from);
    let mut strides = transposed_strides(shape);
    dims.reverse();
    strides.reverse();
    Passed::Tensor { buffer, dims: dims.to_vec(), strides: strides.to_vec() }
}

/// The extents of transposed V, given the shape of V: sequences, heads, columns and keys.
pub(super) fn transposed_dims(shape: Shape) -> [u32; 4] {
    let Shape { batch, seqlen, heads, head_dim } = shape;
    [batch, heads, head_dim, ValueLayout::keys_of_row(seqlen)].map(|extent| extent as u32)
}

/// Strides of transposed V, given the shape of V, in bytes: from one sequence, head and row of keys to the next.
pub(super) fn transposed_strides(shape: Shape) -> [u64; 3] {
    let [_, heads, cols, keys] = transposed_dims(shape).map(u64::from);
    [heads * cols * keys, cols * keys, keys]
}

/// Strides in bytes: from one sequence, head and row to the next.
pub(super) fn strides(tensor: &TensorDesc) -> [u64; 3] {
    [tensor.strides.batch, tensor.strides.heads, tensor.strides.seqlen].map(|stride| bytes(tensor, stride))
}

/// A stride in bytes. Strides of a problem's tensors are not negative.
fn bytes(tensor: &TensorDesc, stride: i64) -> u64 {
    stride.unsigned_abs() * tensor.dtype.bytes() as u64
}
