//! What happens to scores between QKᵀ and the softmax: functions that the kernel is built with.

use fa3_ir::{B32, Builder, F32, Frag, V};
use fa3_sched::VisibleKeys;

use super::Fwd;

/// The functions.
pub(super) struct Scores<'f> {
    /// Makes of each product of Q and K a score in the units of the softmax; none if they are the same.
    pub(super) modify: Option<&'f Modify<'f>>,
    /// Makes -inf of scores that a row may not see; called for blocks that some row does not see in full.
    pub(super) mask: &'f Mask<'f>,
}

/// Of one product.
pub(super) type Modify<'f> = dyn Fn(&mut Builder, V<F32>) -> V<F32> + 'f;
/// Of one score, in a column counted from the thread's first one, and the keys that its row may see.
pub(super) type Mask<'f> = dyn Fn(&mut Builder, V<F32>, u32, &Visible) -> V<F32> + 'f;

/// The keys that a row may see, `start .. end`, counted from the thread's first column; a mask without a left side has no
/// start.
pub(super) struct Visible {
    start: Option<V<B32>>,
    end: V<B32>,
}

impl Visible {
    /// Those of row `row`, where the thread's first column is key `first`.
    #[track_caller]
    fn of(b: &mut Builder, fwd: &Fwd, row: V<B32>, first: V<B32>) -> Visible {
        let VisibleKeys { start, end } = fwd.walk.geometry.keys(b, row);
        let (left, _) = fwd.spec.mask.reach();
        Visible { start: left.map(|_| b.sub(start, first)), end: b.sub(end, first) }
    }
}

impl Scores<'_> {
    /// Products of a block into scores: changed, and hidden where the mask says so. The thread's first row is `row`, the
    /// block's first key is `key`.
    #[track_caller]
    pub(super) fn of(
        &self,
        b: &mut Builder,
        fwd: &Fwd,
        s: &mut Frag,
        row: V<B32>,
        key: V<B32>,
        masked: bool,
    ) {
        if let Some(modify) = self.modify {
            s.map(b, |b, product, _| modify(b, product));
        }
        if !masked {
            return;
        }
        // Found out again for each block, a row at a time: they would take registers to keep.
        let col = b.frag_col();
        let first = b.add(key, col);
        for half in 0..2 {
            let row = b.add(row, 8 * half);
            let visible = Visible::of(b, fwd, row, first);
            s.map_row(b, half, |b, score, at| (self.mask)(b, score, at.col, &visible));
        }
    }
}

/// Hides the keys outside of what a row may see, an interval.
#[track_caller]
pub(super) fn hidden(b: &mut Builder, score: V<F32>, col: u32, visible: &Visible) -> V<F32> {
    let after = b.le_s32(visible.end, col);
    let outside = match visible.start {
        None => after,
        Some(start) => {
            let before = b.gt_s32(start, col);
            b.or_pred(after, before)
        }
    };
    b.select(outside, f32::NEG_INFINITY, score)
}

/// The soft cap: x = product · scale / c becomes tanh x, the score c · tanh x in units of c. `into` is scale / c.
///
/// By an exponential and a reciprocal, tanh x = 1 - 2 / (exp 2x + 1), because the special-function unit's own tanh has 11 bits;
/// and by the first terms of its series, x - x³ / 3 + 2x⁵ / 15, where the difference from 1 would leave few.
#[track_caller]
pub(super) fn capped(b: &mut Builder, product: V<F32>, into: V<F32>) -> V<F32> {
    let x = b.mul(product, into);
    let exponent = b.mul(x, 2.0 * std::f32::consts::LOG2_E);
    let power = b.ex2(exponent);
    let sum = b.add(power, 1.0);
    let inverse = b.rcp(sum);
    let far = b.fma_f32(inverse, -2.0, 1.0);

    let square = b.mul(x, x);
    let factor = b.fma_f32(square, 2.0 / 15.0, -1.0 / 3.0);
    let cube = b.mul(square, x);
    let near = b.fma_f32(factor, cube, x);

    let size = b.abs_f32(x);
    let is_near = b.lt_f32(size, 0.1);
    b.select(is_near, near, far)
}
