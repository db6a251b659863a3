//! Functions of scores between QKᵀ and the softmax, with which the kernel is built.

use fa3_ir::lang::*;
use fa3_sched::VisibleKeys;
use fa3_types::Problem;

use super::kv_blocks::KvBlock;

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
    /// The keys that a row may see.
    pub(crate) visible: Box<dyn Fn(V<'k, B32>) -> Visible<'k> + 'k>,
    /// Whether keys are made bits of a word before scores are looked at: that takes fewer instructions a score than
    /// bounds, of which two intervals have four, and some for each row.
    pub(crate) in_bits: bool,
}

/// The keys that a row may see, `start .. end`; a mask without a left side has no start.
pub(crate) struct Visible<'k> {
    pub(crate) start: Option<V<'k, B32>>,
    pub(crate) end: V<'k, B32>,
    /// Others that it may see, too, if it has a second interval.
    pub(crate) other: Option<VisibleKeys<V<'k, B32>>>,
}

impl<'k> Scores<'k> {
    /// Products of a block into scores: changed, and hidden where the mask says so. The thread's first row is `row`.
    #[track_caller]
    pub(crate) fn apply(&self, s: &mut Frag<'k>, row: V<'k, B32>, block: &KvBlock<'k>, unit: &Unit<'k>) {
        if let (Some(modify), Some(into)) = (&self.modify, unit.into_cap) {
            s.map_in_place(|product, _| modify(product, into));
        }
        if !block.masked {
            return;
        }
        // Computed again for each block, a row at a time: they would take registers to keep.
        let first = block.key + s.builder().frag_col();
        for half in Half::BOTH {
            let visible = (self.visible)(row + half.rows()).from(first);
            if self.in_bits {
                let seen = visible.bits(s.cols());
                s.map_row_in_place(half, |score, at| seen.hide(score, at.col, f32::NEG_INFINITY));
            } else {
                s.map_row_in_place(half, |score, at| visible.hide(score, at.col, f32::NEG_INFINITY));
            }
        }
    }
}

impl<'k> Visible<'k> {
    /// The same, counted from key `first`: signed numbers.
    #[track_caller]
    pub(crate) fn from(self, first: V<'k, B32>) -> Visible<'k> {
        let other = self
            .other
            .map(|VisibleKeys { start, end }| VisibleKeys { start: start - first, end: end - first });
        Visible { start: self.start.map(|start| start - first), end: self.end - first, other }
    }

    /// The thread's columns that the row sees, of so many columns of a fragment. Keys are counted from the thread's
    /// first column.
    #[track_caller]
    fn bits(&self, cols: u32) -> SeenBits<'k> {
        let words = (0..cols.div_ceil(COLS_OF_WORD)).map(|word| {
            let first = word * COLS_OF_WORD;
            let before = |key: V<'k, B32>| {
                // How many of the word's columns come before the key: two of each eight.
                let key = (key - first).max_s32(0).min(COLS_OF_WORD);
                (key & 7).min(2) + ((key >> 3) << 1)
            };
            let from = |key: V<'k, B32>| key.constant(u32::MAX) << before(key);
            let of = |start, end| from(start) & (from(end) ^ u32::MAX);
            let start = self.start.unwrap_or(self.end.constant(0));
            let one = of(start, self.end);
            self.other.map_or(one, |other| one | of(other.start, other.end))
        });
        SeenBits(words.collect())
    }

    /// `hidden` in place of what a key has that the row does not see.
    #[track_caller]
    pub(crate) fn hide(&self, x: V<'k, F32>, key: u32, hidden: f32) -> V<'k, F32> {
        let after = self.end.le_s32(key);
        let outside = self.start.map_or(after, |start| after | start.gt_s32(key));
        let outside = match &self.other {
            None => outside,
            Some(other) => outside & (other.end.le_s32(key) | other.start.gt_s32(key)),
        };
        outside.select(hidden, x)
    }
}

/// Columns whose bits are in one word: of each eight a thread has two.
const COLS_OF_WORD: u32 = 128;

/// A bit for each of a thread's columns: whether a row sees it.
struct SeenBits<'k>(Vec<V<'k, B32>>);

impl<'k> SeenBits<'k> {
    /// `hidden` in place of what a column has that the row does not see.
    #[track_caller]
    fn hide(&self, x: V<'k, F32>, col: u32, hidden: f32) -> V<'k, F32> {
        let word = self.0[(col / COLS_OF_WORD) as usize];
        let bit = 2 * (col % COLS_OF_WORD / 8) + col % 2;
        (word & (1 << bit)).ne(0).select(x, hidden)
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
