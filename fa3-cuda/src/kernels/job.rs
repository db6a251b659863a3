//! A kernel with one problem: what to allocate, what to pass. A simulator or a GPU runs it alike.

use fa3_ir::{ArgValue, Elem, Kernel, TensorView};

/// A kernel, its grid, its arrays and its arguments.
#[derive(Clone, Debug)]
pub struct Job {
    /// The kernel.
    pub kernel: Kernel,
    /// CTAs.
    pub grid: [u32; 3],
    /// The arrays in global memory.
    pub arrays: Vec<Array>,
    /// One argument a parameter, in order.
    pub args: Vec<JobArg>,
}

/// An array in global memory, contiguous, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Its name.
    pub name: &'static str,
    /// Its element type.
    pub elem: Elem,
    /// Elements in each dimension.
    pub shape: Vec<u32>,
    /// What the kernel does with it.
    pub used: ArrayUse,
}

/// What a kernel does with an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayUse {
    /// Reads it.
    Input,
    /// Writes every element once.
    Output,
    /// Adds to what is there, or changes it in place.
    Sum,
}

/// An argument.
#[derive(Clone, Debug, PartialEq)]
pub enum JobArg {
    /// 32 bits.
    U32(u32),
    /// 64 bits.
    U64(u64),
    /// A number.
    F32(f32),
    /// The address of an array.
    Pointer(usize),
    /// A tensor over an array.
    Tensor {
        /// The array.
        array: usize,
        /// Elements in each dimension, innermost first.
        dims: Vec<u64>,
        /// Bytes from one element to the next in each dimension but the innermost.
        strides: Vec<u64>,
    },
}

impl Array {
    /// An array that the kernel reads.
    pub fn input(name: &'static str, elem: Elem, shape: &[u32]) -> Array {
        Array { name, elem, shape: shape.to_vec(), used: ArrayUse::Input }
    }

    /// An array that the kernel writes.
    pub fn output(name: &'static str, elem: Elem, shape: &[u32]) -> Array {
        Array { used: ArrayUse::Output, ..Array::input(name, elem, shape) }
    }

    /// An array that the kernel adds to; kernels of the ladder expect zeros.
    pub fn sum(name: &'static str, elem: Elem, shape: &[u32]) -> Array {
        Array { used: ArrayUse::Sum, ..Array::input(name, elem, shape) }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().map(|&dim| dim as usize).product()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.elem.bytes() as usize
    }
}

impl Job {
    /// The whole array `array` as a tensor.
    pub fn tensor(arrays: &[Array], array: usize) -> JobArg {
        let dims: Vec<u64> = arrays[array].shape.iter().rev().map(|&dim| dim.into()).collect();
        let TensorView { dims, strides, .. } = TensorView::contiguous(0, &dims, arrays[array].elem);
        JobArg::Tensor { array, dims, strides }
    }

    /// The arguments when array i is at `addresses[i]`.
    pub fn bind(&self, addresses: &[u64]) -> Vec<ArgValue> {
        self.args.iter().map(|arg| arg.bind(addresses)).collect()
    }
}

impl JobArg {
    /// The argument when array i is at `addresses[i]`.
    pub fn bind(&self, addresses: &[u64]) -> ArgValue {
        match self {
            JobArg::U32(value) => ArgValue::U32(*value),
            JobArg::U64(value) => ArgValue::U64(*value),
            JobArg::F32(value) => ArgValue::F32(*value),
            JobArg::Pointer(array) => ArgValue::Pointer(addresses[*array]),
            JobArg::Tensor { array, dims, strides } => ArgValue::Tensor(TensorView {
                address: addresses[*array],
                dims: dims.clone(),
                strides: strides.clone(),
            }),
        }
    }
}
