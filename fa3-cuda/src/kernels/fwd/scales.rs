//! The scales of an e4m3 work tile: a scale per head, which a tile reads once, or a scale per block of rows.
//!
//! An element is its code times its scale. Scales of Q and K are factors of softmax_scale; a scale of V is a factor of
//! O. Scales of heads and channels are applied at the end ([`channels`](super::channels)). Scales of blocks become part
//! of the factor by which each block rescales O ([`VScale`]).

use fa3_ir::lang::*;

use super::descales::{Blocks, Descales, K, Q, V_};
use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::scores::Unit;

/// The smallest ratio of a scale of V to the previous scale. O is kept in units of the scale, and would overflow with a
/// smaller ratio.
const LEAST_RATIO: f32 = 1.0 / (1u64 << 63) as f32;

/// The scales of a tile.
pub(super) struct TileScales<'f, 'k> {
    fwd: &'f Fwd<'k>,
    /// The unit of a product of Q and K, which does not include the scale of K's block.
    unit: Unit<'k>,
    /// The tile's head of K and V, if blocks have scales.
    head: Option<HeadOfBlocks<'k>>,
}

/// A head of a tensor whose blocks have scales.
#[derive(Clone, Copy)]
enum HeadOfBlocks<'k> {
    /// The head's index, counted over all sequences.
    Number(U32<'k>),
    /// The head of a sequence whose length is data, and the sequence's first row.
    Of { sequence: U32<'k>, head: U32<'k>, first: U32<'k> },
}

/// The scales of a block of keys.
pub(super) struct BlockScales<'k> {
    /// The unit of products of Q and K.
    pub(super) unit: Unit<'k>,
    /// The scale of V's block, if blocks of V have scales.
    v: Option<V<'k, F32>>,
}

impl<'f, 'k> TileScales<'f, 'k> {
    /// The factor that turns a score into an exponent of 2, without scales of blocks.
    pub(super) fn scale_log2(&self) -> V<'k, F32> {
        self.unit.scale_log2
    }

    /// The unit of products of rows of Q that must be multiplied by `factor`, too, without scales of blocks.
    #[track_caller]
    pub(super) fn of_rows_times(&self, factor: V<'k, F32>) -> Unit<'k> {
        self.unit.times(factor).not_zero()
    }

    /// Loads the scales of a tile. This warpgroup has the 64 rows from `row` on.
    #[track_caller]
    pub(super) fn new(
        fwd: &'f Fwd<'k>,
        work: &WorkTile<'k>,
        row: impl FnOnce() -> U32<'k>,
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
                // Rows beyond the last row have no scale block.
                let row = match work.varlen {
                    None => row().min(work.lens.q - 1),
                    Some(varlen) => row().min(varlen.q_rows.max(1) - 1),
                };
                (of_block(fwd, Q, of_q, row), Some(HeadOfBlocks::new(work, K, descales.heads_kv)))
            }
        };
        TileScales { fwd, unit: unit.times(scale).not_zero(), head }
    }

    /// Loads the scales of a block of keys. Call this early, because the loads from global memory take long.
    #[track_caller]
    pub(super) fn of(&self, block: &KvBlock<'k>) -> BlockScales<'k> {
        let Some(head) = self.head else { return BlockScales { unit: self.unit, v: None } };
        let unit = self.unit.times(of_block(self.fwd, K, head, block.key));
        let has_v = self.fwd.spec.has_v_blocks();
        BlockScales { unit: unit.not_zero(), v: has_v.then(|| of_block(self.fwd, V_, head, block.key)) }
    }
}

/// The scale of e4m3 V, by which O is multiplied at the end, if all columns have one scale.
#[track_caller]
pub(super) fn of_v<'k>(
    fwd: &Fwd<'k>,
    work: &WorkTile<'k>,
    in_blocks: Option<VScale<'k>>,
) -> Option<V<'k, F32>> {
    if fwd.params.descales?.mean.is_some() {
        return None;
    }
    Some(in_blocks.map_or_else(|| of_head(fwd, V_, work), |v_scale| v_scale.last.get()))
}

/// The scale of a tensor for the tile's head; 1 if the tensor has none.
#[track_caller]
fn of_head<'k>(fwd: &Fwd<'k>, tensor: usize, work: &WorkTile<'k>) -> V<'k, F32> {
    let (b, scale) = (fwd.builder, fwd.builder.var("descale", 1.0));
    if let Some(Descales { pointers, heads_kv, .. }) = fwd.params.descales
        && let Some(pointer) = pointers[tensor]
    {
        let at = sequence_of_scales(work).mad(heads_kv, work.kv_head).mad_wide(4, pointer);
        b.guarded(pointer.ne(0u64), || scale.set(b.load::<F32>(at)));
    }
    scale.get()
}

/// The sequence whose scales a tile reads. Rows behind all sequences of a table, and rows of a sequence without keys,
/// see no key. Their results do not depend on scales, so they read the scales of sequence 0.
#[track_caller]
pub(super) fn sequence_of_scales<'k>(work: &WorkTile<'k>) -> U32<'k> {
    work.varlen.map_or(work.batch, |_| work.lens.k.eq(0).select(0, work.batch))
}

impl<'k> HeadOfBlocks<'k> {
    /// The tile's head of Q, or its head of K and V. The tensor has `heads` heads.
    #[track_caller]
    fn new(work: &WorkTile<'k>, tensor: usize, heads: U32<'k>) -> HeadOfBlocks<'k> {
        let (sequence, head) = (work.batch, if tensor == Q { work.head } else { work.kv_head });
        match work.varlen {
            None => HeadOfBlocks::Number(sequence.mad(heads, head)),
            Some(varlen) => {
                let first = if tensor == Q { varlen.q_row } else { varlen.k_row };
                HeadOfBlocks::Of { sequence, head, first }
            }
        }
    }
}

/// The scale of the block that contains row `row` of a tensor.
#[track_caller]
fn of_block<'k>(fwd: &Fwd<'k>, tensor: usize, head: HeadOfBlocks<'k>, row: U32<'k>) -> V<'k, F32> {
    let b = fwd.builder;
    let Some((Some(Blocks { count, shift, apart }), Some(pointer))) =
        fwd.params.descales.map(|descales| (descales.blocks[tensor], descales.pointers[tensor]))
    else {
        return b.value(1.0);
    };
    // This must not be a read-only load: with PDL, the quantizer may still write the scales when this kernel starts.
    let number = match (head, apart) {
        (HeadOfBlocks::Of { sequence, head, first }, Some(apart)) => {
            sequence.mad(apart, head.mad(count, (first >> shift) + (row >> shift)))
        }
        (HeadOfBlocks::Number(head) | HeadOfBlocks::Of { head, .. }, _) => head.mad(count, row >> shift),
    };
    b.load(number.mad_wide(4, pointer).at(0))
}

/// The scale of V in units of which O is kept: the scale of the last block that was added.
pub(super) struct VScale<'k> {
    last: Var<'k, F32>,
    /// The scale before `last`, divided by `last`.
    ratio: Var<'k, F32>,
}

impl<'k> VScale<'k> {
    /// The state before the first block; `None` if blocks of V have no scales.
    #[track_caller]
    pub(super) fn new(fwd: &Fwd<'k>) -> Option<VScale<'k>> {
        let b = fwd.builder;
        let var = |name| b.var(name, 0.0);
        fwd.spec.has_v_blocks().then(|| VScale { last: var("v scale"), ratio: var("ratio of v scales") })
    }

    /// Makes the scale of the next block of V current.
    #[track_caller]
    pub(super) fn enter(&self, block: &BlockScales<'k>) {
        if let Some(next) = block.v {
            let last = self.last.get();
            // A block with a smaller ratio is negligible beside the sum so far.
            let next = next.max(last * LEAST_RATIO);
            // Equal scales give exactly 1: a product with a rounded reciprocal would drift over thousands of them.
            self.ratio.set(last.eq(next).select(1.0, last * next.rcp()));
            self.last.set(next);
        }
    }

    /// The factor by which O must be multiplied before the next block is added.
    #[track_caller]
    pub(super) fn ratio(&self) -> V<'k, F32> {
        self.ratio.get()
    }
}
