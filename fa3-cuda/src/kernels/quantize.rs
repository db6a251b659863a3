//! Quantizes a tensor to e4m3 in one pass: rotary embedding, incoherent processing, block quantization (§3.3). A CTA
//! keeps a block of rows in registers from the load to the codes, while the next blocks are loaded.
//!
//! ```text
//! y = x, rotated by its position, times M       M = diag(±1) · Hadamard
//! codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
//! ```
//!
//! Codes and scales equal the results of `fa3_quant::Preparation`, bit for bit. [`Spec`] builds the kernel, and
//! [`program`] lowers a plan to its launches. If heads, channels or the whole tensor have scales, kernels of [`scales`]
//! run first.

mod block_max;
mod encode;
mod key_rows;
mod params;
mod program;
mod rotation;
mod row;
pub mod scales;
mod spans;
mod spec;
mod store;
mod tiles;
mod transform;
pub mod transpose_v;

pub use program::program;
pub use spec::{Rotation, ScaleSource, Spec};

use fa3_ir::lang::*;
use fa3_types::ValueLayout;

use self::block_max::BlockMax;
use self::encode::{amax, scale_of};
use self::params::{Params, Scale};
use self::rotation::Angles;
use self::row::Row;
use self::store::Transposed;
use self::tiles::{HeadBlock, Loads};
use self::transform::Signs;
use super::KernelSpec;
use super::params::{Declare, Form, InKernel};
use super::parts::tma_pipeline::TmaPipeline;

/// State that all parts of the kernel read.
struct Quantize<'k> {
    builder: &'k Builder,
    spec: Spec,
    params: Params<InKernel<'k>>,
    x: TmaPipeline<'k>,
    signs: Option<Signs<'k>>,
    /// The staging buffer for transposed codes.
    transposed: Option<Transposed<'k>>,
    /// The thread's index among the threads of its row, and their number.
    lane: (U32<'k>, u32),
    /// The CTA's rank in its cluster of two, which says which half of a block's rows it has.
    rank: Option<U32<'k>>,
}

impl KernelSpec for Spec {
    /// Builds the kernel of a spec that comes from [`Spec::of`].
    fn kernel(&self) -> Kernel {
        let tile = &self.tile;
        let launch = Launch::threads(tile.threads()).per_sm(tile.ctas_per_sm).cluster(tile.cluster);
        Kernel::build("quantize", launch, |b| {
            if self.scale != ScaleSource::Heads {
                // At head_dim 256, ptxas spills 40 bytes without this; with scales of heads, it spills 80 with this.
                b.guard_all();
            }
            let (params, warps) = (Params::<Form>::form(self).pass(&mut Declare(b)), tile.threads() / 32);
            let x = TmaPipeline::declare(b, "x", params.x, [tile.stages, warps]);
            let maxima = BlockMax::declare(b, warps);
            let rank = (tile.cluster > 1).then(|| b.cluster_cta_rank());
            let lane = (b.tid() & (tile.lanes - 1), tile.lanes);
            let signs = params.signs.as_ref().map(|words| Signs::declare(b, &words.0, tile.chunks(), lane));
            let transposed = match self.layout {
                ValueLayout::Rows => None,
                ValueLayout::Transposed => Some(Transposed::declare(b, tile)),
            };
            b.init_mbarriers();
            // PDL: CTAs of the next kernel become resident as CTAs of this one leave, and wait until all of these have
            // ended.
            b.launch_dependents();
            b.grid_dependency_wait();
            Quantize { builder: b, spec: *self, params, x, signs, transposed, lane, rank }.run(maxima);
        })
    }
}

impl<'k> Quantize<'k> {
    /// Computes the tiles of the CTA. All threads call this.
    fn run(&self, maxima: BlockMax<'k>) {
        let (b, tile, params) = (self.builder, &self.spec.tile, &self.params);
        let (lane, row, first) = (self.lane, self.own_row(), self.cluster() * self.params.run);
        let rotation = self.spec.rotation.zip(params.rotation.as_ref());
        let angles = rotation.map(|(rotation, tables)| {
            let keeps = rotation.rotary_dim / lane.1 <= tile.registers_for_angles();
            Angles::new(b, rotation, tables, params, lane, keeps)
        });
        let rows = |place: &HeadBlock<'k>| self.part(place).mad(tile.rows, row);
        let spans = self.spans();
        if let Some(angles) = &angles {
            let first = self.place(first, spans.as_ref());
            angles.go_to(&first, rows(&first));
        }
        let (mut pipeline, mut loads) = (self.x.consumer(), Loads::new(self));
        (0..tile.stages).for_each(|_| loads.next(self));
        let current = b.var("tile", first);
        b.repeat(|| {
            b.break_if(current.now().ge(params.tiles));
            let index = current.get();
            let next = self.after(index);
            current.set(next);
            let place = self.place(index, spans.as_ref());
            let rotation = self.spec.rotation.zip(angles.as_ref().map(Angles::get));
            let known = self.known_inverse(&place);
            let stage = pipeline.wait();
            let mut part = Row::load(b, stage.tile(), row, lane, tile.chunks(), rotation);
            stage.release_loaded();
            let has_position = angles.as_ref().and_then(Angles::has_position);
            if let Some(signs) = &self.signs {
                part.transform(signs);
            }
            if let Some(angles) = &angles {
                // All heads of a row have its position, so angles stay until the row changes.
                let next = self.place(next.min(params.tiles - 1), spans.as_ref());
                let elsewhere = next.block.ne(place.block) | next.batch.ne(place.batch);
                b.if_uniform(elsewhere, || angles.go_to(&next, rows(&next)));
            }
            let mut x = part.x;
            match params.scale {
                Scale::Blocks(to) | Scale::Measured(to) => {
                    let amax = maxima.of(amax(b, &mut x, has_position));
                    // All threads have read the tile now, so its stage is free.
                    loads.next(self);
                    let measures = self.spec.scale == ScaleSource::Measured;
                    let number = if measures { amax } else { scale_of(amax) };
                    self.store_of_block(number, to, &place);
                    if measures {
                        return;
                    }
                    let inverse = b.value(1.0) / number;
                    x.iter_mut().for_each(|x| *x = *x * inverse);
                }
                Scale::Given { .. } | Scale::Heads { .. } => {
                    loads.next(self);
                    if let Some(inverse) = known {
                        // This makes an infinity NaN, because an infinity times 0 is NaN.
                        x.iter_mut().for_each(|x| *x = x.fma(0.0, *x) * inverse);
                    }
                }
                Scale::Channels { mean, inverse } => {
                    loads.next(self);
                    self.centre(&mut x, &place, [mean, inverse]);
                }
            }
            match &self.transposed {
                None => self.store(&x, &place, rows(&place), has_position),
                Some(through) => self.store_transposed(through, &x, &place, row, has_position),
            }
        });
    }

    /// Writes a block's scale, or its largest magnitude.
    #[track_caller]
    fn store_of_block(&self, number: V<'k, F32>, to: U64<'k>, place: &HeadBlock<'k>) {
        let (b, params) = (self.builder, &self.params);
        let at = place.batch.mad(params.heads, place.head).mad(params.blocks, place.block);
        let at = at.mad_wide(4, to);
        // Both CTAs of a cluster have this number, so only one thread of the two writes it.
        let writes = self.rank.map_or(b.tid(), |rank| b.tid() | rank).eq(0);
        b.guarded(writes, || b.store(at, number));
    }

    /// 1 / scale of a tile, if its scale is known before the tile is read.
    #[track_caller]
    fn known_inverse(&self, place: &HeadBlock<'k>) -> Option<V<'k, F32>> {
        match self.params.scale {
            Scale::Given { inverse } => Some(inverse),
            Scale::Heads { inverse } => {
                let head = place.batch.mad(self.params.heads, place.head);
                // This must not be a read-only load: with PDL, the previous kernel may still write the scales when this
                // kernel starts.
                Some(self.builder.load(head.mad_wide(4, inverse)))
            }
            Scale::Blocks(_) | Scale::Measured(_) | Scale::Channels { .. } => None,
        }
    }

    /// The row of a tile of which this thread has a part. Eight threads that read shared memory together have rows
    /// whose chunks lie in different banks. For this, the bits in which these threads differ come first among the three
    /// lowest bits of a row's index.
    fn own_row(&self) -> U32<'k> {
        let (lanes, tid) = (self.spec.tile.lanes.ilog2(), self.builder.tid());
        let number = tid >> lanes;
        let low = number & 7;
        let rotated = ((low << lanes) | (low >> (3 - lanes))) & 7;
        (number & !7) | rotated
    }
}
