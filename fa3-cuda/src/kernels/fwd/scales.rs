//! The scales of a work tile of e4m3: of heads, which a tile reads once, or of blocks of rows.
//!
//! A number is its code times its scale. Scales of Q and K are factors of softmax_scale. That of V is a factor of O: of
//! a head or a channel at the end ([`channels`](super::channels)), of blocks by what O is multiplied for each block in
//! any case ([`VScale`]).

use fa3_ir::lang::*;

use super::descales::{Blocks, Descales, K, Q, V_};
use super::state::Fwd;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::scores::Unit;

/// A scale of V counts as no smaller than this times the one before it, so that O, in units of it, does not overflow.
const LEAST_RATIO: f32 = 1.0 / (1u64 << 63) as f32;

/// The scales of a tile.
pub(super) struct TileScales<'f, 'k> {
    fwd: &'f Fwd<'k>,
    /// The unit of a product of Q and K, without the scale of K's block.
    unit: Unit<'k>,
    /// Its head of K and V, where blocks have scales.
    head: Option<HeadOfBlocks<'k>>,
}

/// The head of a tensor of which blocks have scales.
#[derive(Clone, Copy)]
enum HeadOfBlocks<'k> {
    /// This one, counted over all sequences.
    Number(V<'k, B32>),
    /// This one of a sequence whose length is data, which begins with this row.
    Of { sequence: V<'k, B32>, head: V<'k, B32>, first: V<'k, B32> },
}

/// The scales of a block of keys.
pub(super) struct BlockScales<'k> {
    /// The unit of products of Q and K.
    pub(super) unit: Unit<'k>,
    /// The scale of V, where blocks have some.
    v: Option<V<'k, F32>>,
}

impl<'f, 'k> TileScales<'f, 'k> {
    /// The worth of a score in the exponent of 2, but for the scales of blocks.
    pub(super) fn scale_log2(&self) -> V<'k, F32> {
        self.unit.scale_log2
    }

    /// Loads the scales of a tile. This warpgroup has the 64 rows from `row` on.
    #[track_caller]
    pub(super) fn new(
        fwd: &'f Fwd<'k>,
        work: &Work<V<'k, B32>>,
        row: impl FnOnce() -> V<'k, B32>,
    ) -> TileScales<'f, 'k> {
        let params = &fwd.params;
        let unit = Unit { scale_log2: params.scale_log2, into_cap: params.into_cap };
        let Some(descales) = params.descales else { return TileScales { fwd, unit, head: None } };
        let (scale, head) = match descales.blocks[Q] {
            None => {
                let of_k = |of_q: Option<V<'k, F32>>| {
                    let of_k = of_head(fwd, K, work);
                    of_q.map_or(of_k, |of_q| of_q * of_k)
                };
                (of_k(descales.pointers[Q].map(|_| of_head(fwd, Q, work))), None)
            }
            Some(_) => {
                let of_q = HeadOfBlocks::new(work, Q, params.heads);
                // Beyond the last row there is no block.
                let row = match work.listed {
                    None => row().min(work.lens.q - 1),
                    Some(listed) => row().min(listed.q_rows.max(1) - 1),
                };
                (of_block(fwd, Q, of_q, row), Some(HeadOfBlocks::new(work, K, descales.heads_kv)))
            }
        };
        TileScales { fwd, unit: unit.times(scale).not_zero(), head }
    }

    /// Loads the scales of a block of keys. Call it early: they come from memory.
    #[track_caller]
    pub(super) fn of(&self, block: &KvBlock<'k>) -> BlockScales<'k> {
        let Some(head) = self.head else { return BlockScales { unit: self.unit, v: None } };
        let unit = self.unit.times(of_block(self.fwd, K, head, block.key));
        let has_v = self.fwd.spec.has_v_blocks();
        BlockScales { unit: unit.not_zero(), v: has_v.then(|| of_block(self.fwd, V_, head, block.key)) }
    }
}

/// The scale of V of e4m3 by which O is to be multiplied at the end, if that is one for all columns.
#[track_caller]
pub(super) fn of_v<'k>(
    fwd: &Fwd<'k>,
    work: &Work<V<'k, B32>>,
    in_blocks: Option<VScale<'k>>,
) -> Option<V<'k, F32>> {
    if fwd.params.descales?.mean.is_some() {
        return None;
    }
    Some(in_blocks.map_or_else(|| of_head(fwd, V_, work), |v_scale| v_scale.last.get()))
}

/// The scale of a tensor for the tile's head; 1 if there is none.
#[track_caller]
fn of_head<'k>(fwd: &Fwd<'k>, tensor: usize, work: &Work<V<'k, B32>>) -> V<'k, F32> {
    let (b, scale) = (fwd.builder, fwd.builder.var("descale", 1.0));
    if let Some(Descales { pointers, heads_kv, .. }) = fwd.params.descales
        && let Some(pointer) = pointers[tensor]
    {
        let at = sequence_of_scales(work).mad(heads_kv, work.kv_head).mad_wide(4, pointer);
        b.guarded(pointer.ne(0u64), || scale.set(b.load::<F32>(at)));
    }
    scale.get()
}

/// The sequence of which a tile reads scales. The rows behind all sequences of a table are of none. They see no key,
/// and neither do those of a sequence without keys: their results do not depend on scales.
#[track_caller]
pub(super) fn sequence_of_scales<'k>(work: &Work<V<'k, B32>>) -> V<'k, B32> {
    work.listed.map_or(work.batch, |_| work.lens.k.eq(0).select(0, work.batch))
}

impl<'k> HeadOfBlocks<'k> {
    /// The head of Q, or of K and V, of a tile, which has so many heads.
    #[track_caller]
    fn new(work: &Work<V<'k, B32>>, tensor: usize, heads: V<'k, B32>) -> HeadOfBlocks<'k> {
        let (sequence, head) = (work.batch, if tensor == Q { work.head } else { work.kv_head });
        match work.listed {
            None => HeadOfBlocks::Number(sequence.mad(heads, head)),
            Some(listed) => {
                let first = if tensor == Q { listed.q_row } else { listed.k_row };
                HeadOfBlocks::Of { sequence, head, first }
            }
        }
    }
}

/// The scale of the block of a tensor that has this row.
#[track_caller]
fn of_block<'k>(fwd: &Fwd<'k>, tensor: usize, head: HeadOfBlocks<'k>, row: V<'k, B32>) -> V<'k, F32> {
    let b = fwd.builder;
    let Some((Some(Blocks { count, shift, apart }), Some(pointer))) =
        fwd.params.descales.map(|descales| (descales.blocks[tensor], descales.pointers[tensor]))
    else {
        return b.value(1.0);
    };
    // Not a read-only load: the quantizer may still be writing them when this kernel is launched.
    let number = match (head, apart) {
        (HeadOfBlocks::Of { sequence, head, first }, Some(apart)) => {
            sequence.mad(apart, head.mad(count, (first >> shift) + (row >> shift)))
        }
        (HeadOfBlocks::Number(head) | HeadOfBlocks::Of { head, .. }, _) => head.mad(count, row >> shift),
    };
    b.load(number.mad_wide(4, pointer).at(0))
}

/// The scale of V in units of which O is kept: that of the last block that was added.
pub(super) struct VScale<'k> {
    last: Var<'k, F32>,
    /// Previous scale / `last`.
    ratio: Var<'k, F32>,
}

impl<'k> VScale<'k> {
    /// Nothing added yet, if blocks have scales.
    #[track_caller]
    pub(super) fn new(fwd: &Fwd<'k>) -> Option<VScale<'k>> {
        let b = fwd.builder;
        let var = |name| b.var(name, 0.0);
        fwd.spec.has_v_blocks().then(|| VScale { last: var("v scale"), ratio: var("ratio of v scales") })
    }

    /// The next block to be added is this one.
    #[track_caller]
    pub(super) fn enter(&self, block: &BlockScales<'k>) {
        if let Some(next) = block.v {
            let last = self.last.get();
            // Of numbers as different as that, the smaller ones are nothing beside the larger ones.
            let next = next.max(last * LEAST_RATIO);
            // Equal scales, of which there may be thousands, must not drift.
            self.ratio.set(last.eq(next).select(1.0, last * next.rcp()));
            self.last.set(next);
        }
    }

    /// By what O is to be multiplied before a block is added.
    #[track_caller]
    pub(super) fn ratio(&self) -> V<'k, F32> {
        self.ratio.get()
    }
}
