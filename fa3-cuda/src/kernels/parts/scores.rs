//! The functions that a kernel applies to scores between QKᵀ and the softmax.

use std::f64::consts::LOG2_E;

use fa3_ir::lang::*;
use fa3_types::Problem;

use super::kv_blocks::KvBlock;
use super::score::{Exponents, TileFunction, VisibleOfRow};

/// Turns a product of Q and K into a score; the second argument is the scale of the product.
type Modify<'k> = Box<dyn Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32> + 'k>;

/// The scale of a product of Q and K.
#[derive(Clone, Copy)]
pub(crate) struct Unit<'k> {
    /// The factor that turns the product, or the capped score, into an exponent of 2.
    pub(crate) scale_log2: V<'k, F32>,
    /// The factor that turns a product into units of the soft cap, if scores are capped.
    pub(crate) into_cap: Option<V<'k, F32>>,
}

impl<'k> Unit<'k> {
    /// The unit of products that must be multiplied by `factor`, too.
    #[track_caller]
    pub(crate) fn times(self, factor: V<'k, F32>) -> Unit<'k> {
        match self.into_cap {
            None => Unit { scale_log2: self.scale_log2 * factor, ..self },
            Some(into) => Unit { into_cap: Some(into * factor), ..self },
        }
    }

    /// Replaces a scale of 0 by the smallest positive number, because hidden scores are -inf, and -inf · 0 is NaN.
    /// Capped scores are scaled before they are hidden, and need no replacement.
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

/// The soft cap, the function of scores and the mask.
pub(crate) struct Scores<'k> {
    /// Turns a product of Q and K into a score in units of the softmax. The second argument is the product's scale in
    /// units of the soft cap. `None` without a soft cap.
    pub(crate) modify: Option<Modify<'k>>,
    /// The function of scores, if there is one.
    pub(crate) function: Option<TileFunction<'k>>,
    /// Whether the softmax takes exponents of the function.
    pub(crate) takes_exponents: bool,
    /// The keys that each of the thread's rows may see.
    pub(crate) visible: Box<VisibleOfRow<'k>>,
    /// Whether visible keys are first turned into bits of words. Two intervals have four bounds, and testing a bit for
    /// each score takes fewer instructions than comparing with four bounds.
    pub(crate) in_bits: bool,
}

impl<'k> Scores<'k> {
    /// Turns products of a block into scores: caps them, applies the function of scores, and hides keys where the mask
    /// does. `units` are the units of products of the thread's rows. If the softmax takes exponents of the function, it
    /// gets them, and `s` has what they are computed of.
    #[track_caller]
    pub(crate) fn apply(
        &self,
        s: &mut Frag<'k>,
        block: &KvBlock<'k>,
        units: [Unit<'k>; 2],
    ) -> Option<Exponents<'_, 'k>> {
        if let (Some(modify), [Some(upper), Some(lower)]) = (&self.modify, units.map(|unit| unit.into_cap)) {
            let into = Rows([upper, lower]);
            s.map_in_place(|product, at| modify(product, into[at]));
        }
        let exponents = match &self.function {
            Some(function) if self.takes_exponents => Some(function.begin(s, block, units[0].scale_log2)),
            Some(function) => {
                function.apply(s, block);
                None
            }
            None => None,
        };
        if !block.masked {
            return exponents;
        }
        // Bounds are computed again for each block, one row at a time, because keeping them would take registers.
        let first = block.key + s.builder().frag_col();
        let exponents = match exponents {
            Some(exponents) if exponents.change_hidden() && !self.in_bits => {
                return Some(exponents.seen(&*self.visible, first));
            }
            exponents => exponents.map(|exponents| exponents.hidden_if(true)),
        };
        for half in Half::BOTH {
            let visible = (self.visible)(half).from(first);
            if self.in_bits {
                let seen = visible.bits(s.cols());
                s.map_row_in_place(half, |score, at| seen.hide(score, at.col, f32::NEG_INFINITY));
            } else {
                s.map_row_in_place(half, |score, at| visible.hide(score, at.col, f32::NEG_INFINITY));
            }
        }
        exponents
    }
}

/// The factor that turns a product, or a capped score in units of the cap, into an exponent of 2, and with a soft cap c
/// the factor `scale` / c of a product Q·K: s = c · tanh(Q·K · scale / c).
pub(crate) fn units(problem: &Problem) -> (f32, Option<f32>) {
    let (scale, cap) = (problem.softmax_scale(), problem.softcap());
    let into = cap.map(|cap| (scale.natural() / cap.bound()) as f32);
    let natural = cap.map_or(scale.natural(), |cap| cap.bound());
    ((natural * LOG2_E) as f32, into)
}
