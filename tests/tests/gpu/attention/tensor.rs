//! Tensors of elements of up to 16 bits, in their memory layout.

use std::borrow::Cow;

use fa3_tests::fwd::{decode, encode};
use fa3_types::{Dtype, Shape, TensorDesc};
use ndarray::Array4;
use rayon::prelude::*;

/// Bits of gaps and of unwritten memory: NaN.
pub(super) const UNWRITTEN: u16 = 0xFFFF;

/// A tensor in host memory.
#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) desc: TensorDesc,
    /// The bits of each number. An e4m3 number is in the lower 8 bits.
    pub(super) bits: Vec<u16>,
}

impl Tensor {
    /// Random numbers of mean 0 and variance 1, with NaN in the gaps.
    pub(super) fn random(desc: &TensorDesc, seed: u64) -> Tensor {
        let mut tensor = Tensor::unwritten(desc);
        let dtype = desc.dtype;
        if tensor.is_gapless() {
            tensor.bits.par_chunks_mut(1 << 16).enumerate().for_each(|(chunk, bits)| {
                fill(bits, dtype, seed, (chunk as u64) << 16);
            });
        } else {
            for (batch, row, head) in rows(desc.shape) {
                let start = tensor.start(batch, row, head);
                fill(&mut tensor.bits[start..][..desc.shape.head_dim], dtype, seed, start as u64);
            }
        }
        tensor
    }

    pub(super) fn unwritten(desc: &TensorDesc) -> Tensor {
        Tensor { desc: *desc, bits: vec![UNWRITTEN; desc.extent().0 as usize] }
    }

    /// Whether the tensor's memory has no gaps.
    pub(super) fn is_gapless(&self) -> bool {
        self.bits.len() == self.desc.shape.dims().iter().product::<usize>()
    }

    fn start(&self, batch: usize, row: usize, head: usize) -> usize {
        self.desc.offset(batch, row, head, 0).0 as usize
    }

    pub(super) fn row(&self, batch: usize, row: usize, head: usize) -> &[u16] {
        &self.bits[self.start(batch, row, head)..][..self.desc.shape.head_dim]
    }

    pub(super) fn row_mut(&mut self, batch: usize, row: usize, head: usize) -> &mut [u16] {
        let start = self.start(batch, row, head);
        &mut self.bits[start..][..self.desc.shape.head_dim]
    }

    /// The bytes of the tensor's memory.
    pub(super) fn bytes(&self) -> Cow<'_, [u8]> {
        match self.desc.dtype.bytes() {
            1 => self.bits.iter().map(|&bits| bits as u8).collect(),
            _ => Cow::Borrowed(bytemuck::cast_slice(&self.bits)),
        }
    }

    /// All numbers of the tensor.
    pub(super) fn numbers(&self) -> Array4<f32> {
        Array4::from_shape_fn(self.desc.shape.dims(), |(batch, row, head, element)| {
            self.number(self.row(batch, row, head)[element])
        })
    }

    pub(super) fn number(&self, bits: u16) -> f32 {
        decode(self.desc.dtype, bits)
    }

    /// The first element that is NaN, or the first gap that was written.
    pub(super) fn fault(&self) -> Option<String> {
        if self.is_gapless() {
            let nan = self.bits.par_iter().position_first(|&x| self.number(x).is_nan())?;
            return Some(format!("element {nan} of o is NaN"));
        }
        let mut gaps = self.bits.clone();
        for (batch, row, head) in rows(self.desc.shape) {
            if self.row(batch, row, head).iter().any(|&x| self.number(x).is_nan()) {
                return Some(format!("row {row} of head {head} of sequence {batch} of o has a NaN"));
            }
            let start = self.start(batch, row, head);
            gaps[start..][..self.desc.shape.head_dim].fill(UNWRITTEN);
        }
        let written = gaps.iter().position(|&x| x != UNWRITTEN)?;
        Some(format!("number {written} of o's memory is no element and was written"))
    }
}

/// All rows, as (sequence, row, head).
pub(super) fn rows(shape: Shape) -> impl Iterator<Item = (usize, usize, usize)> {
    let Shape { batch, seqlen, heads, .. } = shape;
    ndarray::indices((batch, seqlen, heads)).into_iter()
}

/// Fills memory with sums of four uniform numbers, which depend on the element's index.
fn fill(bits: &mut [u16], dtype: Dtype, seed: u64, first: u64) {
    for (index, bits) in (first..).zip(bits) {
        let z = mix(mix(seed) ^ index);
        let sum: u64 = (0..4).map(|part| z >> (16 * part) & 0xFFFF).sum();
        *bits = encode(dtype, (sum as f32 / 65536.0 - 2.0) * 3.0f32.sqrt());
    }
}

/// The finalizer of SplitMix64.
pub(super) fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
