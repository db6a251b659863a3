//! Functions of scores between QKᵀ and the softmax, with which the kernel is built.

use fa3_ir::lang::*;
use fa3_types::Problem;

use super::kv_blocks::KvBlock;
use super::visible::{Position, Visible};

/// Makes a score of a product, and of what a product is worth.
type Modify<'k> = Box<dyn Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32> + 'k>;

/// The worth of a product of Q and K.
#[derive(Clone, Copy)]
pub(crate) struct Unit<'k> {
    /// In the exponent of 2: itself, or what it becomes by the soft cap.
    pub(crate) scale_log2: V<'k, F32>,
    /// In units of the soft cap, if there is one.
    pub(crate) into_cap: Option<V<'k, F32>>,
}

impl<'k> Unit<'k> {
    /// The unit of products that are to be multiplied by `factor`.
    #[track_caller]
    pub(crate) fn times(self, factor: V<'k, F32>) -> Unit<'k> {
        match self.into_cap {
            None => Unit { scale_log2: self.scale_log2 * factor, ..self },
            Some(into) => Unit { into_cap: Some(into * factor), ..self },
        }
    }

    /// The same, or the smallest number there is in place of 0: hidden scores are -inf, which times 0 is NaN. Where
    /// scores are capped they are hidden after that.
    #[track_caller]
    pub(crate) fn not_zero(self) -> Unit<'k> {
        match self.into_cap {
            None => {
                let is_zero = self.scale_log2.abs().lt(f32::MIN_POSITIVE);
                Unit { scale_log2: is_zero.select(f32::MIN_POSITIVE, self.scale_log2), ..self }
            }
            Some(_) => self,
        }
    }
}

/// The functions.
pub(crate) struct Scores<'k> {
    /// Makes of each product of Q and K, and its worth in units of the soft cap, a score in the units of the softmax;
    /// none if they are the same.
    pub(crate) modify: Option<Modify<'k>>,
    /// The positions of the thread's rows.
    pub(crate) position: Box<dyn Fn(Half) -> Position<'k> + 'k>,
    /// The keys that a row may see.
    pub(crate) visible: Box<dyn Fn(Position<'k>) -> Visible<'k> + 'k>,
    /// Whether keys are made bits of a word before scores are looked at: that takes fewer instructions a score than
    /// bounds, of which two intervals have four, and some for each row.
    pub(crate) in_bits: bool,
}

impl<'k> Scores<'k> {
    /// Products of a block into scores: changed, and hidden where the mask says so.
    #[track_caller]
    pub(crate) fn apply(&self, s: &mut Frag<'k>, block: &KvBlock<'k>, unit: &Unit<'k>) {
        if let (Some(modify), Some(into)) = (&self.modify, unit.into_cap) {
            s.map_in_place(|product, _| modify(product, into));
        }
        if !block.masked {
            return;
        }
        // Computed again for each block, a row at a time: they would take registers to keep.
        let first = block.key + s.builder().frag_col();
        for half in Half::BOTH {
            let visible = (self.visible)((self.position)(half)).from(first);
            if self.in_bits {
                let seen = visible.bits(s.cols());
                s.map_row_in_place(half, |score, at| seen.hide(score, at.col, f32::NEG_INFINITY));
            } else {
                s.map_row_in_place(half, |score, at| visible.hide(score, at.col, f32::NEG_INFINITY));
            }
        }
    }
}

/// The worth of a score's unit in the exponent of 2; and the factor that makes a product such a unit, if scores are
/// capped: s = c · tanh(Q·K · scale / c).
pub(crate) fn units(problem: &Problem) -> (f32, Option<f32>) {
    let scale = problem.softmax_scale();
    match problem.softcap() {
        None => (scale.log2() as f32, None),
        Some(cap) => {
            let into = scale.natural() / cap.bound();
            ((cap.bound() * std::f64::consts::LOG2_E) as f32, Some(into as f32))
        }
    }
}
