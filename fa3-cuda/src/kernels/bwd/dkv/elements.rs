//! P and dS of a block, element by element.

use fa3_ir::lang::*;

use super::columns::Columns;
use super::interval_columns::IntervalColumns;
use super::state::Dkv;
use crate::kernels::bwd::gradients::{Scores, registers, visible};
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::visible::Visible;

impl<'k> Dkv<'k> {
    pub(super) fn scores(&self) -> Scores<'k> {
        let inputs = &self.params.inputs;
        Scores { scale_log2: inputs.scale_log2, into_cap: inputs.into_cap }
    }

    /// Rows of the block that see the thread's two keys; `None` if all do. If dQ is added, no row sees a key beyond the
    /// end: its dS is multiplied by a row of K, zeros, and would have to be finite.
    #[track_caller]
    pub(super) fn hidden(
        &self,
        work: &Work<V<'k, B32>>,
        head: V<'k, B32>,
        key: V<'k, B32>,
        block: &KvBlock<'k>,
    ) -> Option<Hidden<'k>> {
        let (inputs, mask) = (&self.params.inputs, self.spec.mask);
        if let Some(rows) = inputs.intervals {
            let (b, of_head) = (self.builder, rows.of_head(work.batch, head));
            let columns = || IntervalColumns::new(b, rows, of_head, work.lens.transposed(), [key, block.key]);
            return block.masked.then(|| Hidden::Columns(columns()));
        }
        let seen = block.masked.then(|| visible(self.builder, inputs, work, mask, [key, block.key]))?;
        if self.spec.tile.adds_dq.is_none() {
            return Some(Hidden::Rows(seen));
        }
        let [upper, lower] = seen;
        Some(Hidden::Rows([(upper, Half::Upper), (lower, Half::Lower)].map(|(seen, half)| {
            let inside = (key + half.rows()).lt(work.lens.q);
            Visible { end: inside.select(seen.end, 0), ..seen }
        })))
    }

    /// Makes Pᵀ of the products of a block, in their registers, if scores are not capped.
    #[track_caller]
    pub(super) fn begin_p(&self, s: &mut Frag<'k>, shifts: &Columns<'k>, hidden: Option<&Hidden<'k>>) {
        let scores = self.scores();
        if scores.into_cap.is_none() {
            s.map_in_place(|product, at| {
                let [p, _] = scores.p(product, shifts.of(at));
                hide(hidden, at, p)
            });
        }
    }

    /// Pᵀ of what [`Dkv::begin_p`] made, and dSᵀ of that and dPᵀ, rounded, as operands.
    #[track_caller]
    pub(super) fn end_p(
        &self,
        s: &Frag<'k>,
        dp: &mut Frag<'k>,
        [shifts, minus_delta]: [&Columns<'k>; 2],
        hidden: Option<&Hidden<'k>>,
    ) -> [AFrag<'k>; 2] {
        let (scores, ty) = (self.scores(), self.spec.product_type());
        let Some(into_cap) = scores.into_cap else {
            dp.map_in_place(|dp, at| dp + minus_delta.of(at)); // A3:25
            // In this order dSᵀ takes the registers of dPᵀ, and Pᵀ those of Sᵀ.
            let ds = self.ds(dp, &registers(s));
            return [s.to_a(ty), ds];
        };
        // Element by element, otherwise ptxas spills: capped scores, their P and dP do not fit into the registers.
        let dp = registers(dp);
        s.map_to_two_a(ty, |product, at| {
            let [p, slope] = scores.capped_p(product, into_cap, shifts.of(at));
            let p = hide(hidden, at, p);
            let slope_of_delta = minus_delta.of(at) * slope;
            [p, p * dp[at.index()].fma(slope, slope_of_delta)]
        })
    }

    /// Pᵀ of the products of a block, rounded, as an operand. What dPᵀ - D is multiplied by stays in `s`.
    #[track_caller]
    pub(super) fn p(&self, s: &mut Frag<'k>, shifts: &Columns<'k>, hidden: Option<&Hidden<'k>>) -> AFrag<'k> {
        let scores = self.scores();
        s.split_to_a(self.spec.product_type(), |product, at| {
            let [p, weight] = scores.p(product, shifts.of(at));
            match scores.into_cap {
                None => [hide(hidden, at, p); 2],
                Some(_) => [p, weight].map(|x| hide(hidden, at, x)),
            }
        })
    }

    /// dSᵀ of a block's dPᵀ - D, rounded, as an operand.
    #[track_caller]
    pub(super) fn ds(&self, dp: &Frag<'k>, weights: &[V<'k, F32>]) -> AFrag<'k> {
        dp.map_to_a(self.spec.product_type(), |dp, at| dp * weights[at.index()])
    }
}

/// Which rows of Q see a key.
pub(super) enum Hidden<'k> {
    /// Rows that the thread's two keys say, which are rows of Sᵀ.
    Rows([Visible<'k>; 2]),
    /// Rows whose intervals have it, which are columns of Sᵀ.
    Columns(IntervalColumns<'k>),
}

/// Zero in place of what a row of Q does not see.
#[track_caller]
fn hide<'k>(hidden: Option<&Hidden<'k>>, at: At, x: V<'k, F32>) -> V<'k, F32> {
    match hidden {
        None => x,
        Some(Hidden::Rows(visible)) => visible[at.half as usize].hide(x, at.col, 0.0),
        Some(Hidden::Columns(columns)) => columns.hide(x, at),
    }
}
