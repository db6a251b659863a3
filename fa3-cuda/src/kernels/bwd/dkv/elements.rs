//! P and dS of a block of Sᵀ.

use fa3_ir::lang::*;
use fa3_types::ScoreRows;

use super::columns::StatColumns;
use super::state::Dkv;
use crate::kernels::bwd::elements::{Elements, ds};
use crate::kernels::bwd::hidden::{Hidden, visible_by_mask};
use crate::kernels::bwd::interval_columns::IntervalColumns;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::score::{ThreadRows, TileFunction};
use crate::kernels::parts::visible::{Position, Visible};

/// A query head of a work tile of keys.
pub(super) struct TileHead<'k> {
    head: U32<'k>,
    /// The first of the thread's two keys. The second is `key` + 8.
    key: U32<'k>,
    function: Option<TileFunction<'k>>,
}

impl<'k> Dkv<'k> {
    /// A query head of a work tile, for a thread whose keys are `key` and `key` + 8.
    #[track_caller]
    pub(super) fn tile_head(&self, work: &WorkTile<'k>, key: U32<'k>, head: U32<'k>) -> TileHead<'k> {
        let inputs = &self.params.inputs;
        let function = self.spec.score.as_ref().zip(inputs.score.as_ref()).map(|of| {
            let rows = ThreadRows {
                sequence: work.batch,
                lens: work.lens.transposed(),
                head: Box::new(move |_| head),
                position: Box::new(move |half| Position(key + half.rows())),
            };
            TileFunction::with_slopes(self.builder, of, self.spec.gradients, rows, ScoreRows::Keys)
        });
        TileHead { head, key, function }
    }

    /// The element-wise functions of a block.
    #[track_caller]
    pub(super) fn elements<'t>(
        &self,
        work: &WorkTile<'k>,
        of: &'t TileHead<'k>,
        block: &KvBlock<'k>,
    ) -> Elements<'t, 'k> {
        let hidden = block.masked.then(|| self.hidden(work, of.head, of.key, block));
        let function = of.function.as_ref().map(|function| function.block(block.key));
        Elements::new(&self.params.inputs, function, hidden)
    }

    /// The elements of a block that the mask hides. In a kernel that adds to dQ, keys beyond the end are hidden, too:
    /// dS of such a key is multiplied by a row of zeros of K, so it must be finite. With a function of scores, rows
    /// beyond the end are hidden for the same reason.
    #[track_caller]
    fn hidden(&self, work: &WorkTile<'k>, head: U32<'k>, key: U32<'k>, block: &KvBlock<'k>) -> Hidden<'k> {
        let (b, inputs, at) = (self.builder, &self.params.inputs, [key, block.key]);
        if let Some(rows) = inputs.intervals.and_then(IntervalRows::bounds) {
            // Q is on the other side of tiles of keys.
            let of_head = rows.of_sequence([work.batch, head], work.varlen.map(|varlen| varlen.k_row));
            let is_needed = inputs.lookup.tiling().has_mask() || self.spec.score.is_some();
            let by_mask = is_needed.then(|| visible_by_mask(b, inputs, work, self.spec.mask, at));
            let columns = IntervalColumns::new(b, rows, of_head, work.lens.transposed(), at);
            return Hidden::Columns(Box::new((columns, by_mask)));
        }
        let [upper, lower] = visible_by_mask(b, inputs, work, self.spec.mask, at);
        if self.spec.tile.adds_dq.is_none() {
            return Hidden::Rows([upper, lower]);
        }
        Hidden::Rows([(upper, Half::Upper), (lower, Half::Lower)].map(|(seen, half)| {
            let inside = (key + half.rows()).lt(work.lens.q);
            Visible { end: inside.select(seen.end, 0), ..seen }
        }))
    }

    /// Pᵀ of a block, rounded, as an operand in registers, given the products `s`. The weights of dS stay in `s`.
    #[track_caller]
    pub(super) fn p(
        &self,
        s: &mut Frag<'k>,
        shifts: &StatColumns<'k>,
        elements: &Elements<'_, 'k>,
    ) -> AFrag<'k> {
        s.split_to_a(self.spec.product_type(), |product, at| {
            let element = elements.of(product, shifts.of(at), at);
            [element.p, element.weight()]
        })
    }

    /// dSᵀ of a block, rounded, as an operand in registers: `dp` (dPᵀ - D) times the weights.
    #[track_caller]
    pub(super) fn ds(&self, dp: &Frag<'k>, weights: &[V<'k, F32>]) -> AFrag<'k> {
        dp.map_to_a(self.spec.product_type(), |dp, at| ds(dp, weights[at.index()]))
    }
}
