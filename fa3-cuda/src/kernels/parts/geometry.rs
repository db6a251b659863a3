//! The rows and keys of a work tile, given its index. The host and a kernel compute them by the same arithmetic.

use std::num::NonZeroU32;

use fa3_ir::lang::*;
use fa3_sched::{
    Decoder, Int, KvRange, Order, Schedule, SeqLens, TileCoord, TileCounts, Tiling, VisibleKeys,
};
use fa3_types::{Chunk, Intervals, Mask};

use super::out::Out;

/// The numbers of a launch that give the rows and keys of each tile index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry<T> {
    /// Number of tiles.
    pub(crate) tiles: T,
    /// Rows of Q and of K, equal for all sequences.
    pub(crate) lens: SeqLens<T>,
    decoder: Decoder<T>,
    pub(crate) tiling: Tiling<T>,
}

/// A work tile in a kernel.
pub(crate) type WorkTile<'k> = WorkTileOf<U32<'k>>;

/// A work tile, on the host or in a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkTileOf<T> {
    /// The index of the tile's sequence.
    pub(crate) batch: T,
    /// The tile's head of Q and O.
    pub(crate) head: T,
    /// The tile's head of K and V.
    pub(crate) kv_head: T,
    /// Numbers of rows of Q and of K of the sequence that take part in attention.
    pub(crate) lens: SeqLens<T>,
    /// The tile's first query row.
    pub(crate) row: T,
    /// The KV blocks that the tile visits. If `ranges` exists, the numbers of the steps instead.
    pub(crate) kv: KvRange<T>,
    /// The shared-memory address of the tile's [`BlockRanges`](fa3_sched::BlockRanges), under a mask of intervals.
    pub(crate) ranges: Option<T>,
    /// The destination of the tile's result, in kernels that split keys or split tiles of keys. Without it, the tensor.
    pub(crate) out: Option<Out<T>>,
    /// The location of the sequence in memory, if the sequence comes from a table.
    pub(crate) varlen: Option<Varlen<T>>,
}

/// A sequence of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Varlen<T> {
    /// The sequence's first row of Q and O: absolute in a packed tensor, 0 in a dense one.
    pub(crate) q_row: T,
    /// Number of rows of O, all of which are written. The first `lens.q` of them take part in attention.
    pub(crate) q_rows: T,
    /// The sequence's first row of K and V: absolute in a packed tensor, 0 in a dense one.
    pub(crate) k_row: T,
    /// The position of the sequence's first row of Q in arrays that pad each sequence to whole blocks. `None` in
    /// kernels without such arrays.
    pub(crate) padded_row: Option<T>,
}

impl<T: Copy> WorkTileOf<T> {
    /// Number of rows of O of the tile's sequence, all of which are written.
    pub(crate) fn rows_of_o(&self) -> T {
        self.varlen.map_or(self.lens.q, |varlen| varlen.q_rows)
    }
}

impl Geometry<u32> {
    /// The geometry of a launch: the order of its tiles, the tile sizes, and the lengths.
    pub(crate) fn of(schedule: &Schedule, tiling: Tiling<u32>, lens: SeqLens<u32>) -> Geometry<u32> {
        let decoder = schedule.decoder().unwrap_or_else(|| Decoder::new(TileCounts::ONE, schedule.order()));
        Geometry { tiles: schedule.num_tiles(), lens, decoder, tiling }
    }
}

impl Geometry<()> {
    /// The parameters that all launches with this order and mask share.
    pub(crate) fn form(order: Order, mask: Mask) -> Geometry<()> {
        let (decoder, tiling) = (Decoder::new(TileCounts::ONE, order), Tiling::new(1, 1, 1, mask));
        Geometry { tiles: 1, lens: SeqLens { q: 1, k: 1 }, decoder, tiling }.map_named(&mut |_, _| ())
    }
}

impl<T> Geometry<T> {
    /// Applies `f` to each number and its name, in a fixed order.
    pub(crate) fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> Geometry<U> {
        Geometry {
            tiles: f("tiles", self.tiles),
            lens: SeqLens { q: f("seqlen_q", self.lens.q), k: f("seqlen_k", self.lens.k) },
            decoder: self.decoder.map_named(f),
            tiling: self.tiling.map_named(f),
        }
    }
}

impl<T: Int> Geometry<T> {
    /// The work tile with this index.
    fn decode(&self, index: T) -> WorkTileOf<T> {
        let TileCoord { m_block, head, batch } = self.decoder.decode(index);
        WorkTileOf {
            batch,
            head,
            kv_head: self.tiling.kv_head(head),
            lens: self.lens,
            row: m_block * self.tiling.tile_m(),
            kv: self.tiling.kv_range(m_block, self.lens),
            ranges: None,
            out: None,
            varlen: None,
        }
    }
}

impl<'k> Geometry<U32<'k>> {
    /// The work tile with this index.
    #[track_caller]
    pub(crate) fn work(&self, index: U32<'k>) -> WorkTile<'k> {
        let WorkTile { batch, head, kv_head, lens, row, kv, ranges, out, varlen } = self.decode(index);
        let [batch, head, kv_head, row] = [batch, head, kv_head, row].map(V::in_register);
        WorkTile { batch, head, kv_head, lens, row, kv: in_registers(kv), ranges, out, varlen }
    }

    /// The work tile that begins with row `row`. It visits no block yet; the caller sets the blocks.
    #[track_caller]
    pub(crate) fn work_of(&self, batch: U32<'k>, head: U32<'k>, row: U32<'k>) -> WorkTile<'k> {
        let (kv_head, zero) = (self.tiling.kv_head(head), batch.constant(0));
        let kv = KvRange { first: zero, unmasked_first: zero, unmasked_end: zero, end: zero };
        WorkTile { batch, head, kv_head, lens: self.lens, row, kv, ranges: None, out: None, varlen: None }
    }
}

/// The keys that query row `row` may see in a sequence of lengths `lens`; unspecified for a row beyond the end.
#[track_caller]
pub(super) fn keys<'k>(
    tiling: &Tiling<U32<'k>>,
    row: U32<'k>,
    lens: SeqLens<U32<'k>>,
) -> VisibleKeys<U32<'k>> {
    let VisibleKeys { start, end } = tiling.keys(row, lens);
    VisibleKeys { start: start.in_register(), end: end.in_register() }
}

/// A copy of the range in registers, so that none of its numbers is a constant.
#[track_caller]
pub(super) fn in_registers<'k>(kv: KvRange<U32<'k>>) -> KvRange<U32<'k>> {
    let [first, unmasked_first, unmasked_end, end] =
        [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end].map(V::in_register);
    KvRange { first, unmasked_first, unmasked_end, end }
}

/// The part of a mask that a kernel's code depends on: every bounded side at 0, and chunks of one key.
pub(crate) fn sides(mask: Mask) -> Mask {
    // Strides, not the form, say whether sequences and heads have their own bounds.
    let intervals = mask.intervals();
    let intervals = intervals.map(|form| Intervals {
        of_row: form.of_row.in_code(),
        per_sequence: false,
        per_head: false,
    });
    // Both sides are bounded by a chunk of one key.
    let chunk = mask.chunks().map(|chunk| Chunk { keys: NonZeroU32::MIN, ..chunk });
    let (left, right) = mask.reach();
    Mask::of(intervals, chunk, left.map(|_| 0), right.map(|_| 0))
}

/// The part of an order that a kernel's code depends on: the order itself, with sections of one head.
pub(crate) fn form(order: Order) -> Order {
    match order {
        Order::Linear => Order::Linear,
        Order::LongestFirst { section: _, longest } => Order::LongestFirst { section: 1, longest },
    }
}

#[cfg(test)]
mod tests {
    use fa3_ir::{BufferRole, Passed, Program};
    use fa3_sched::{DeviceLimits, Longest, Scheduler};
    use fa3_sim::{Mode, ProgramSimulation};
    use proptest::prelude::*;

    use super::*;

    /// The numbers of each tile, as a kernel computes them.
    fn in_a_kernel(geometry: Geometry<u32>, form: Geometry<()>) -> Vec<[u32; 8]> {
        let kernel = Kernel::build("tiles", Launch::threads(32), |b| {
            let numbers = b.param_pointer("numbers", Elem::U32);
            let WorkTile { batch, head, kv_head, row, kv, .. } =
                form.map_named(&mut |name, ()| b.param_u32(name)).work(b.cta_x());
            let at = b.cta_x().mad_wide(32, numbers);
            b.once_per_warp(|| {
                b.store_vector(at.at(0), [batch, head, kv_head, row]);
                b.store_vector(at.at(16), [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]);
            });
        });
        let mut program = Program::new();
        let numbers = program.buffer("numbers", Elem::U32, &[geometry.tiles, 8], BufferRole::Output);
        let mut args = vec![("numbers".to_owned(), Passed::Pointer(numbers))];
        _ = geometry.map_named(&mut |name, x| args.push((name.to_owned(), Passed::U32(x))));
        program.step(kernel, [geometry.tiles, 1, 1], args);
        let outcome = ProgramSimulation::new(&program).mode(Mode::Fast).run(&[vec![]]).unwrap();
        let numbers = outcome.buffers[0].as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes);
        numbers.collect::<Vec<_>>().as_chunks::<8>().0.to_vec()
    }

    /// The numbers of each tile, as the host computes them.
    fn on_the_host(geometry: Geometry<u32>) -> Vec<[u32; 8]> {
        let numbers = (0..geometry.tiles).map(|index| {
            let WorkTileOf { batch, head, kv_head, row, kv, .. } = geometry.decode(index);
            [batch, head, kv_head, row, kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]
        });
        numbers.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn kernels_decode_tiles_as_the_host_does(
            (q, k) in (1_u32..200, 1_u32..200),
            (left, right) in (proptest::option::of(0_u32..130), proptest::option::of(0_u32..130)),
            (chunk, transposed) in (prop_oneof![Just(0), 1_i64..130], any::<bool>()),
            (batch, kv_heads, group) in (1_u32..4, 1_u32..4, 1_u32..4),
            (sections, longest_first) in (proptest::option::of(1_u32..20), any::<bool>()),
        ) {
            let longest = if longest_first { Longest::First } else { Longest::Last };
            let order = sections.map_or(Order::Linear, |section| Order::LongestFirst { section, longest });
            let counts = TileCounts { m_blocks: q.div_ceil(64), heads: kv_heads * group, batch };
            let sms = DeviceLimits::h100_sxm().sms;
            let schedule = Schedule::new(counts, order, Scheduler::StaticPersistent, sms).unwrap();
            let mask = Mask::window(left, right).and(Mask::from_chunk(chunk).unwrap()).unwrap();
            let mask = if transposed { mask.transposed() } else { mask };
            let geometry = Geometry::of(&schedule, Tiling::new(64, 32, group, mask), SeqLens { q, k });
            let tiles = in_a_kernel(geometry, Geometry::form(order, sides(mask)));
            prop_assert_eq!(tiles, on_the_host(geometry));
        }
    }
}
