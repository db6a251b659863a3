//! The reduction of gradients of split tiles of keys. dK and dV of a tile are sums over the tile's parts, in f32, in
//! the order of parts, so that they have the same bits in every run. A CTA computes dK or dV of 64 keys.

use fa3_ir::lang::*;
use fa3_sched::Order;
use fa3_sched::backward::ADDED_ROWS;
use fa3_types::Mask;

use super::dq_accum::AccumBlock;
use super::gradients::{WARPGROUP, write_tile};
use super::params::Parts;
use super::spec::ReduceSpec;
use crate::kernels::params::{Declare, Form, InKernel, Pass, Side, param, params};
use crate::kernels::parts::geometry::{Geometry, WorkTile};
use crate::kernels::parts::key_tiles::{KeyTiles, SplitTile};
use crate::kernels::parts::strided::Strided;

params! {
    /// The parameters of the reduction kernel.
    struct ReduceParams {
        geometry: numbers Geometry,
        tiles: all KeyTiles,
        parts: all Parts,
        dk: named Strided,
        dv: named Strided,
        softmax_scale: f32,
    }
}

/// Keys of a block, which are the keys of one consumer. A block of the dQ accumulators has an equal number of rows.
pub(super) const KEYS: u32 = ADDED_ROWS;

impl ReduceParams<Form> {
    fn form(elem: Elem, order: Order) -> ReduceParams<Form> {
        ReduceParams {
            geometry: Geometry::form(order, Mask::None),
            tiles: KeyTiles::form(),
            parts: Parts { dk: Elem::F32, dv: Elem::F32 },
            dk: Strided::form(elem),
            dv: Strided::form(elem),
            softmax_scale: (),
        }
    }
}

/// dK or dV of split tiles, and the parts that add up to it.
struct Gradient<'a, 'k> {
    parts: U64<'k>,
    factor: Option<V<'k, F32>>,
    to: &'a Strided<InKernel<'k>>,
    /// Number of columns of parts, and of the gradient in memory.
    cols: [u32; 2],
}

pub(super) fn kernel(spec: &ReduceSpec) -> Kernel {
    Kernel::build("bwd_join", Launch::threads(WARPGROUP), |b| {
        let params = ReduceParams::<Form>::form(spec.elem, spec.order).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();
        // Each block of a tile has one CTA for dK and one for dV.
        let blocks = spec.tile_n / KEYS;
        let number = b.cta_x() >> (2 * blocks).ilog2();
        b.if_uniform(number.lt(params.tiles.header(b).tiles), || {
            let split = params.tiles.split_tile(b, number);
            let work = params.geometry.work(split.tile);
            let block = (b.cta_x() >> 1) & (blocks - 1);
            let ReduceParams { parts, dk, dv, softmax_scale, .. } = &params;
            let dk = Gradient { parts: parts.dk, factor: Some(*softmax_scale), to: dk, cols: spec.cols_of_k };
            let dv = Gradient { parts: parts.dv, factor: None, to: dv, cols: spec.cols_of_v };
            let of_k = (b.cta_x() & 1).eq(0);
            b.if_else_uniform(
                of_k,
                || dk.reduce(b, spec, &split, &work, block),
                || dv.reduce(b, spec, &split, &work, block),
            );
        });
    })
}

impl<'k> Gradient<'_, 'k> {
    /// Adds up a block of the gradient over all parts of a tile, and writes the sum.
    #[track_caller]
    fn reduce(
        &self,
        b: &'k Builder,
        spec: &ReduceSpec,
        split: &SplitTile<U32<'k>>,
        work: &WorkTile<'k>,
        block: U32<'k>,
    ) {
        let ([cols, in_memory], blocks) = (self.cols, spec.tile_n / KEYS);
        let mut sum = Frag::zeros(b, cols);
        b.for_each((split.first, split.first + split.parts), 1, |part| {
            AccumBlock::at(b, self.parts, part.mad(blocks, block), cols).add_to(&mut sum);
        });
        let key = work.row + block.mad(KEYS, b.frag_row());
        write_tile(sum, self.factor, self.to, work, (key, spec.tile_n), (spec.elem, in_memory));
    }
}
