//! A tensor to e4m3 in one pass: rotary embedding, incoherent processing, block quantization (§3.3). One warp loads,
//! the others keep a block of rows in registers from its first use to its codes.
//!
//! ```text
//! y = x, rotated by its position, times M       M = diag(±1) · Hadamard
//! codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
//! ```
//!
//! Codes and scales are those of `fa3_quant::Preparation`, bit for bit. [`Spec`] is what a kernel's code depends on,
//! [`kernel`] the kernel, [`program`] what a plan lowers to.

mod angles;
mod encode;
mod params;
mod program;
mod row;
mod signs;
mod spec;

pub use program::program;
pub use spec::{Rotation, Spec};

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use self::angles::Angles;
use self::encode::{amax, codes, scale_of};
use self::params::{Params, Scale};
use self::row::Row;
use self::signs::Signs;
use super::params::{Declare, Form, InKernel};
use super::parts::block_max::BlockMax;
use super::parts::loader::Feed;
use super::parts::store_rows::Global;

/// What a kernel consists of.
struct Quantize<'k> {
    builder: &'k Builder,
    spec: Spec,
    params: Params<InKernel<'k>>,
    x: Feed<'k>,
    signs: Option<Signs<'k>>,
    /// The thread's number among those of its row, and how many these are.
    lane: (V<'k, B32>, u32),
}

/// Which rows of which head a tile is.
struct Place<'k> {
    batch: V<'k, B32>,
    head: V<'k, B32>,
    block: V<'k, B32>,
}

/// The kernel of this spec, one that [`Spec::of`] gives.
pub fn kernel(spec: &Spec) -> Kernel {
    let (warps, launch) = (spec.tile.threads() / 32, launch(spec));
    Kernel::build("quantize", launch, |b| {
        let params = Params::<Form>::form(spec).pass(&mut Declare(b));
        let x = Feed::declare(b, "x", params.x, spec.tile.stages, warps);
        let maxima = BlockMax::declare(b, warps);
        let lane = (b.tid() & (spec.tile.lanes - 1), spec.tile.lanes);
        let signs = params.signs.as_ref().map(|words| Signs::declare(b, words, spec.tile.chunks(), lane));
        let quantize = Quantize { builder: b, spec: *spec, params, x, signs, lane };
        b.init_mbarriers();
        // CTAs of the next kernel may take their places as ours leave them, and begin when all of ours are done.
        b.launch_dependents();
        b.grid_dependency_wait();
        let [mut consumer, mut producer] =
            [Role::new("quantize", 0..warps), Role::new("load", warps..launch.warps())];
        if let Some([of_consumer, of_producer]) = registers(spec) {
            (consumer, producer) = (consumer.registers(of_consumer), producer.registers(of_producer));
        }
        b.role(consumer, || quantize.consume(maxima));
        b.role(producer, || quantize.produce());
    })
}

/// Whole warpgroups, which can exchange registers, or a warp that loads for less than one.
fn launch(spec: &Spec) -> Launch {
    let threads = spec.tile.threads();
    let loading = if threads.is_multiple_of(128) { 128 } else { 32 };
    Launch::threads(threads + loading).per_sm(spec.tile.ctas_per_sm())
}

/// Registers of a thread of each role, if they can be exchanged.
fn registers(spec: &Spec) -> Option<[u32; 2]> {
    let (threads, launch) = (spec.tile.threads(), launch(spec));
    let loading = 24;
    let all = launch.entry_registers() * launch.threads;
    let left = (all - 128 * loading) / threads / 8 * 8;
    threads.is_multiple_of(128).then_some([left.min(240), loading])
}

impl<'k> Quantize<'k> {
    /// What the loading thread runs.
    fn produce(&self) {
        self.builder.once_per_role(|| {
            let mut loader = self.x.loader();
            self.each_tile(|tile, _| {
                let Place { batch, head, block } = self.place(tile);
                loader.load(head, block * self.spec.tile.rows, batch);
            });
        });
    }

    /// What the others run.
    fn consume(&self, maxima: BlockMax<'k>) {
        let (b, tile, params) = (self.builder, &self.spec.tile, &self.params);
        let (lane, row) = (self.lane, self.own_row());
        let rotation = self.spec.rotation.zip(params.rotation.as_ref());
        let angles = rotation
            .map(|(rotation, tables)| (rotation, Angles::new(b, rotation, tables, params.seqlen, lane)));
        let rows = |place: &Place<'k>| place.block.mad(tile.rows, row);
        if let Some((_, angles)) = &angles {
            let first = self.place(b.cta_x() * params.run);
            angles.go_to(first.batch, rows(&first));
        }
        let mut ring = self.x.consumer();
        self.each_tile(|index, next| {
            let place = self.place(index);
            let slot = ring.wait();
            let mut part = Row::load(b, slot.tile(), row, lane, tile.chunks());
            slot.release_loaded();
            let mut has_position = None;
            if let Some((rotation, angles)) = &angles {
                part.rotate(rotation, &angles.get());
                has_position = angles.has_position();
            }
            if let Some(signs) = &self.signs {
                part.transform(signs);
            }
            if let Some((_, angles)) = &angles {
                // Heads of the same rows have the same positions.
                let next = self.place(next.min(params.tiles - 1));
                let elsewhere = next.block.ne(place.block) | next.batch.ne(place.batch);
                b.if_uniform(elsewhere, || angles.go_to(next.batch, rows(&next)));
            }
            let mut x = part.x;
            match params.scale {
                Scale::Blocks(scales) => {
                    let amax = amax(b, &mut x);
                    // Rows at no position are NaN.
                    let amax = has_position.map_or(amax, |has_position| has_position.select(amax, 0.0));
                    let scale = scale_of(maxima.of(amax));
                    let at = place.batch.mad(params.heads, place.head).mad(params.blocks, place.block);
                    let at = at.mad_wide(4, scales);
                    b.guarded(b.tid().eq(0), || b.store(at, scale));
                    let inverse = b.value(1.0) / scale;
                    x.iter_mut().for_each(|x| *x = *x * inverse);
                }
                // Times 0 an infinity is NaN.
                Scale::Given { inverse } => x.iter_mut().for_each(|x| *x = x.fma(0.0, *x) * inverse),
            }
            self.store(&x, &place, rows(&place), lane.0, has_position);
        });
    }

    /// Runs `body` with the number of each of the CTA's tiles, and of the one that comes next.
    #[track_caller]
    fn each_tile(&self, body: impl FnOnce(V<'k, B32>, V<'k, B32>)) {
        let (b, &Params { run, tiles, .. }) = (self.builder, &self.params);
        // From the end of a run to the next one's start.
        let skipped = (b.grid_x() - 1) * run;
        let tile = b.var("tile", b.cta_x() * run);
        b.repeat(|| {
            b.break_if(tile.now().ge(tiles));
            let after = tile.now() + 1;
            let next = after + (after & (run - 1)).eq(0).select::<B32>(skipped, 0);
            body(tile.get(), next);
            tile.set(next);
        });
    }

    /// Tile number `index`.
    #[track_caller]
    fn place(&self, index: V<'k, B32>) -> Place<'k> {
        let fa3_sched::Tile { m_block, head, batch, split: _ } = self.params.decoder.decode(index);
        Place { batch: batch.in_register(), head: head.in_register(), block: m_block.in_register() }
    }

    /// The row of a tile that this thread has a part of. Eight threads that read shared memory at once have rows whose
    /// chunks lie in different banks: of the three lowest bits of a row's number, those that the threads differ in come
    /// first.
    fn own_row(&self) -> V<'k, B32> {
        let (lanes, tid) = (self.spec.tile.lanes.ilog2(), self.builder.tid());
        let number = tid >> lanes;
        let low = number & 7;
        let rotated = ((low << lanes) | (low >> (3 - lanes))) & 7;
        (number & !7) | rotated
    }

    /// Writes the codes of a thread's part of a row that there is.
    fn store(
        &self,
        x: &[V<'k, F32>],
        place: &Place<'k>,
        row: V<'k, B32>,
        lane: V<'k, B32>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let b = self.builder;
        let rows = Global { address: self.params.codes, strides: self.params.codes_strides };
        let at = lane.mad_wide(CHUNK, rows.at([place.batch, place.head, row]));
        let inside = row.lt(self.params.seqlen);
        for (chunk, x) in x.chunks_exact(CHUNK as usize).enumerate() {
            let mut words = codes(x);
            if let Some(has_position) = has_position {
                words = words.map(|word| has_position.select(word, u32::from_ne_bytes([0x7F; 4])));
            }
            let at = at.at((CHUNK * self.spec.tile.lanes) as i32 * chunk as i32);
            b.guarded(inside, || b.store_vector(at, words));
        }
    }
}
