//! The parameters of the scales of e4m3 Q, K and V, or of e4m3 K and V beside 16-bit Q. Heads, blocks of rows, or
//! channels of V have scales.

use fa3_ir::lang::*;
use fa3_types::{Granularity, Problem, Sequences};

use super::buffers;
use super::spec::FwdSpec;
use crate::kernels::params::{Form, Host, Pass, Side};

/// Indices of the tensors in arrays of scales.
pub(super) const Q: usize = 0;
pub(super) const K: usize = 1;
pub(super) const V_: usize = 2;

/// Addresses and strides of scales. If heads have scales, address 0 means that all scales of the tensor are 1. Q has no
/// scales if it has 16 bits in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descales<S: Side> {
    /// The addresses of the scales of Q, K and V; `None` for a tensor without scales.
    pub(super) pointers: [Option<S::Pointer>; 3],
    /// Number of heads of K and V.
    pub(super) heads_kv: S::U32,
    /// The scale blocks of Q, K and V; `None` for a tensor with a scale per head or channel.
    pub(super) blocks: [Option<Blocks<S>>; 3],
    /// The address of the means of V's channels, if channels have scales.
    pub(super) mean: Option<S::Pointer>,
}

/// The scale blocks of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks<S: Side> {
    /// Number of blocks per head.
    pub(super) count: S::U32,
    /// log2 of the rows per block.
    pub(super) shift: S::U32,
    /// Stride of scales from one sequence to the next, if lengths are data. It is 1 if sequences are packed, see
    /// [`ScaleBlocks`](fa3_types::ScaleBlocks).
    pub(super) apart: Option<S::U32>,
}

impl<A: Side> Descales<A> {
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Descales<B> {
        let [q, k, v] = self.pointers;
        Descales {
            pointers: [("q_descale", q), ("k_descale", k), ("v_descale", v)]
                .map(|(name, pointer)| pointer.map(|pointer| by.pointer(name, pointer))),
            heads_kv: by.u32("heads_kv", self.heads_kv),
            blocks: {
                let [q, k, v] = self.blocks;
                [("q", q), ("k", k), ("v", v)].map(|(name, blocks)| {
                    blocks.map(|Blocks { count, shift, apart }| Blocks {
                        count: by.u32(&format!("{name}_blocks"), count),
                        shift: by.u32(&format!("{name}_shift"), shift),
                        apart: apart.map(|apart| by.u32(&format!("{name}_blocks_apart"), apart)),
                    })
                })
            },
            mean: self.mean.map(|mean| by.pointer("v_mean", mean)),
        }
    }
}

impl Descales<Form> {
    /// The parameters that a kernel of this spec declares.
    pub(super) fn form(spec: &FwdSpec) -> Descales<Form> {
        let [of_qk, of_v] = [spec.has_block_scales(), spec.has_v_blocks()].map(|has| {
            has.then_some(Blocks { count: (), shift: (), apart: spec.lengths_are_data().then_some(()) })
        });
        let blocks = [of_qk, of_qk, of_v];
        let mean = spec.has_v_channels().then_some(Elem::F32);
        let of_q = (spec.query_elem() == Elem::E4m3).then_some(Elem::F32);
        Descales { pointers: [of_q, Some(Elem::F32), Some(Elem::F32)], heads_kv: (), blocks, mean }
    }
}

impl Descales<Host> {
    /// The scales of a problem.
    pub(super) fn of(problem: &Problem, lengths_are_data: bool) -> Descales<Host> {
        let [q, k, v] = problem.scales();
        let (counts, heads) = (problem.scale_blocks(), problem.heads());
        let tensors = [(Q, q, heads.q()), (K, k, heads.kv()), (V_, v, heads.kv())];
        let packed = [problem.seqs_q(), problem.seqs_k(), problem.seqs_k()].map(Sequences::is_packed);
        Descales {
            pointers: buffers::descales(problem),
            heads_kv: problem.heads().kv() as u32,
            blocks: tensors.map(|(of, granularity, heads)| {
                let (Some(blocks), Granularity::Block { rows }) = (counts[of], granularity) else {
                    return None;
                };
                let count = blocks.count() as u32;
                let apart = if packed[of] { 1 } else { count * heads as u32 };
                Some(Blocks { count, shift: rows.ilog2(), apart: lengths_are_data.then_some(apart) })
            }),
            mean: problem.has_v_channels().then_some(buffers::V_MEAN),
        }
    }
}
