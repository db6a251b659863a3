//! The online softmax over KV blocks, in base 2: A1:18-19, and its end, A1:24.
//!
//! P = exp(S - r), ℓ = Σ P and O = Σ P V give the same O / ℓ and the same r + ln ℓ for any reference r of a row. The
//! paper's reference is the largest score so far, the row_max. Any other reference serves as long as no exponential
//! overflows, in particular an older row_max. [`RowSoftmax::step_lazily`] keeps the old one, and looks for a larger one
//! only where it must (lazy rescaling).
//!
//! With an older reference, P of the largest score is no longer 1, so it has a rounding error. Where one key has most
//! of a row's weight, this would be a relative error of the whole row. It cancels if O is divided by the sum of the
//! rounded P. So LSE comes from ℓ, and O is divided by ℓ + the rounding errors of P of such keys. A thread counts only
//! the key with the largest score of each block. Rounding errors of many keys of similar weight have both signs; keys
//! of exactly equal weight err by half a unit in the last place at most. In e4m3, one sum serves both purposes: the sum
//! of the rounded P.

use fa3_ir::lang::*;

use super::chains::Chains;
use super::p_type::PType;
use crate::kernels::parts::score::Exponents;
use crate::kernels::parts::scores::Unit;

/// The running row_max and row_sum of each row. Each thread keeps its own part of row_sum until the end.
pub struct RowSoftmax<'k> {
    builder: &'k Builder,
    /// softmax_scale · log₂e: turns a score into an exponent of 2.
    scale_log2: V<'k, F32>,
    /// softmax_scale · log₂e of each row, in place of `scale_log2`, if rows have scales of their own.
    scales_log2: Option<RowsVar<'k>>,
    /// Distance of references above the largest score, in base 2. It is a whole number, so P of that score is still a
    /// power of 2. If it is negative, that P is larger than 1.
    headroom: f32,
    /// The reference of each row in base 2, possibly of an earlier block. In a row that has seen no key, it is the
    /// smallest finite number, which no row with keys has.
    row_max: RowsVar<'k>,
    row_sum: RowsVar<'k>,
    /// The sum of rounding errors of P, over keys that may outweigh all keys before them.
    rounding: RowsVar<'k>,
    /// The factor by which the last block rescaled the previous sums, if another warpgroup must use it for its part of
    /// O.
    scores_scale: Option<RowsVar<'k>>,
    lse_without_sink: bool,
    /// The thread's largest scores, if they are a result: not scaled.
    max_logits: Option<RowsVar<'k>>,
}

/// The results of a tile's softmax.
pub struct Finished<'k> {
    /// The factor that O must be multiplied by: 1 / row_sum.
    pub inverse: Rows<'k>,
    /// The log-sum-exp of the rows, in natural units.
    pub lse: Rows<'k>,
    /// The sum of normalized P over keys, if there is a sink: 1 less the sink's share.
    pub of_keys: Option<Rows<'k>>,
    /// The largest score of the rows, scaled, if it is a result.
    pub max_logits: Option<Rows<'k>>,
}

/// A block under lazy rescaling.
struct LazyBlock<'a, 't, 'k> {
    s: &'a Frag<'k>,
    /// The exponents of `s`, if a function of scores gives them.
    exponents: Option<&'a Exponents<'t, 'k>>,
    /// P of the scores `s`, rounded.
    p: AFrag<'k>,
    ty: PType,
    /// The thread's partial row sums of P.
    parts: RowsVar<'k>,
}

/// A key may outweigh all keys before it if a thread's partial row sum of P exceeds this factor times the thread's
/// previous sum, and also exceeds P of the score that set the reference. Partial sums are small in a thread whose keys
/// do not matter.
const GROWTH: f32 = 4.0;

/// The largest sum of a thread's part of a row of P from which the new reference follows. The factor of that rise is a
/// normal bf16.
const MOST_PART: f32 = (1_u128 << 100) as f32;

impl<'k> RowSoftmax<'k> {
    /// A softmax that has seen no key: its sum is 0. The paper's softmax in 16 bits has a `headroom` of 0.
    #[track_caller]
    pub fn new(builder: &'k Builder, scale_log2: V<'k, F32>, headroom: f32) -> RowSoftmax<'k> {
        let zeros = |name| builder.rows_var(name, 0.0);
        RowSoftmax {
            builder,
            scale_log2,
            scales_log2: None,
            headroom,
            row_max: builder.rows_var("row_max", f32::MIN),
            row_sum: zeros("row_sum"),
            rounding: zeros("rounding"),
            scores_scale: None,
            lse_without_sink: false,
            max_logits: None,
        }
    }

    /// Makes rows have scales of their own, under lazy rescaling: to be set before the first block.
    #[track_caller]
    pub(super) fn with_scales_of_rows(self) -> RowSoftmax<'k> {
        let scales_log2 = Some(self.builder.rows_var("scales_log2", 1.0));
        RowSoftmax { scales_log2, ..self }
    }

    /// Sets the rows' own scales.
    #[track_caller]
    pub(super) fn set_scales_of_rows(&self, scales: Rows<'k>) {
        if let Some(scales_log2) = self.scales_log2 {
            scales_log2.set(scales);
        }
    }

    /// The factors that turn scores of both rows into exponents of 2.
    #[track_caller]
    fn scales(&self) -> Rows<'k> {
        self.scales_log2.map_or(Rows([self.scale_log2; 2]), RowsVar::get)
    }

    /// Makes the softmax keep the largest score of each row.
    #[track_caller]
    pub(super) fn with_max_logits(self) -> RowSoftmax<'k> {
        let max_logits = Some(self.builder.rows_var("max_logits", f32::NEG_INFINITY));
        RowSoftmax { max_logits, ..self }
    }

    /// Notes the largest scores of a block, if they are a result.
    #[track_caller]
    fn note(&self, largest: Rows<'k>) {
        if let Some(max_logits) = self.max_logits {
            max_logits.set(max_logits.get().zip(largest, |old, new| old.max(new)));
        }
    }

    /// Makes LSE leave out the sink.
    pub(super) fn with_lse_without_sink(self) -> RowSoftmax<'k> {
        RowSoftmax { lse_without_sink: true, ..self }
    }

    /// Makes the softmax publish the factor by which each block under lazy rescaling rescales the previous sums.
    #[track_caller]
    pub(super) fn with_scores_scale(self) -> RowSoftmax<'k> {
        let scores_scale = Some(self.builder.rows_var("scores_scale", 1.0));
        RowSoftmax { scores_scale, ..self }
    }

    /// The factor by which the last block rescaled the previous sums, if the softmax publishes it.
    pub(super) fn scores_scale(&self) -> Option<RowsVar<'k>> {
        self.scores_scale
    }

    /// Forgets all keys; [`RowSoftmax::first`] follows.
    #[track_caller]
    pub(super) fn restart(&self) {
        self.row_max.set(Rows([self.builder.copy(f32::MIN); 2]));
    }

    /// P of a tile's first block, or of the first block of a piece, relative to the block's maximum. Counts the
    /// rounding error of P of each thread's largest score, as [`RowSoftmax::step_lazily`] does in the first block in
    /// which a row sees a key.
    #[track_caller]
    pub(super) fn first(
        &self,
        s: &mut Frag<'k>,
        exponents: Option<&Exponents<'_, 'k>>,
        ty: PType,
    ) -> AFrag<'k> {
        let largest = match exponents {
            None => s.partial_row_max(),
            Some(exponents) => self.largest_of(s, exponents, Rows([self.builder.value(0.0); 2])),
        };
        self.note(largest);
        let scales = self.scales();
        let row_max = self.maximum(largest.over_quad(|x, y| x.max(y)), scales);
        self.row_max.set(row_max);
        let shift = -row_max;
        let (p, largest) = match exponents {
            None => {
                s.map_in_place(|s, at| exponential(s, scales[at], shift[at]));
                let (p, parts) = self.round_and_add(s, ty, |p, _| p);
                self.row_sum.set(parts);
                (p, self.largest_exponential(largest))
            }
            Some(exponents) => {
                s.map_in_place(exponents.plus(shift));
                let largest = s.partial_row_max();
                let (p, parts) = self.round_and_add(s, ty, |exponent, _| exponent.ex2());
                self.row_sum.set(parts);
                (p, largest.map(|exponent| exponent.ex2()))
            }
        };
        self.rounding.set(ty.rounded(largest) - largest);
        p
    }

    /// The thread's largest exponents in a block, plus `shift`.
    #[track_caller]
    fn largest_of(&self, s: &Frag<'k>, exponents: &Exponents<'_, 'k>, shift: Rows<'k>) -> Rows<'k> {
        s.partial_row_max_of(exponents.plus(shift))
    }

    /// P of the thread's largest scores in a block.
    #[track_caller]
    fn largest_exponential(&self, largest: Rows<'k>) -> Rows<'k> {
        let (row_max, scales) = (self.row_max.get(), self.scales());
        Rows(Half::BOTH.map(|half| exponential(largest[half], scales[half], -row_max[half])))
    }

    /// Replaces the scores of a block by P = exp(S - row_max), with the maximum so far. Gives exp(old row_max -
    /// row_max), the factor by which sums so far must be rescaled.
    #[track_caller]
    pub fn step(&self, s: &mut Frag<'k>) -> Rows<'k> {
        let unit = Unit { scale_log2: self.scale_log2, into_cap: None };
        let shrink = self.step_uncounted(s, &unit);
        self.count(shrink, s.partial_row_sum());
        shrink
    }

    /// Like `step`, with the scale of `unit`. The caller must still call `count` to add the row sums of P.
    #[track_caller]
    pub(super) fn step_uncounted(&self, s: &mut Frag<'k>, unit: &Unit<'k>) -> Rows<'k> {
        let old = self.row_max.get();
        let largest = s.row_max();
        self.note(largest);
        let row_max = self.maximum(largest, Rows([unit.scale_log2; 2]));
        self.row_max.set(row_max);
        let shrink = shrink(old, row_max);
        let shift = -row_max;
        s.map_in_place(|s, at| s.fma(unit.scale_log2, shift[at]).ex2()); // A1:19
        shrink
    }

    /// Rescales row_sum by `shrink`, and adds the thread's partial row sums of P.
    #[track_caller]
    pub(super) fn count(&self, shrink: Rows<'k>, sums: Rows<'k>) {
        self.row_sum.set(self.row_sum.get().fma(shrink, sums)); // A1:19
    }

    /// Like [`RowSoftmax::step`], but leaves row_max and the scores as they are. Only where P would become too large,
    /// it raises row_max and rescales P and `o`. A row's results depend only on its own scores: the first block in
    /// which a row sees a key is treated as in [`RowSoftmax::first`], even if it is not the tile's first block.
    #[track_caller]
    pub(super) fn step_lazily(
        &self,
        s: &Frag<'k>,
        exponents: Option<&Exponents<'_, 'k>>,
        ty: PType,
        o: &mut Frag<'k>,
    ) -> AFrag<'k> {
        let b = self.builder;
        if let Some(scores_scale) = self.scores_scale {
            scores_scale.set(Rows([b.value(1.0); 2]));
        }
        let find_largest = || match exponents {
            None => s.partial_row_max_of_bits(),
            Some(exponents) => self.largest_of(s, exponents, Rows([b.value(0.0); 2])),
        };
        let largest = self.max_logits.map(|_| find_largest());
        largest.into_iter().for_each(|largest| self.note(largest));
        let (p, parts) = self.exponentials((s, exponents), self.row_max.get(), ty);
        let mut block = LazyBlock { s, exponents, p, ty, parts: b.rows_var("parts", 0.0) };
        block.parts.set(parts);
        let (least, most) = ((-self.headroom).exp2(), ty.most());
        let row_sum = self.row_sum.get();
        let outweighs = parts.zip(row_sum, |part, sum| part.gt((sum * GROWTH).max(least).min(most)));
        b.if_uniform(outweighs.any().vote_any(), || {
            // Exponents must be computed again, for the reference that P has.
            let largest = largest.or_else(|| exponents.is_none().then(find_largest));
            b.if_uniform(parts.gt(most).any().vote_any(), || {
                self.make_smaller(&mut block, &|| largest.unwrap_or_else(find_largest), o);
            });
            let largest = match exponents {
                None => self.largest_exponential(largest.unwrap_or_else(find_largest)),
                Some(exponents) => {
                    self.largest_of(s, exponents, -self.row_max.get()).map(|exponent| exponent.ex2())
                }
            };
            self.count_rounding(largest, ty, outweighs);
        });
        self.row_sum.set(self.row_sum.get() + block.parts.get()); // A1:19
        block.p
    }

    /// Raises row_max where P is too large. `largest` are the thread's largest scores. Where multiplying by a power of
    /// 2 is exact, the sums are multiplied, and so is P if its type has the range; otherwise P alone is computed again.
    /// Elsewhere P and its sums are.
    #[track_caller]
    fn make_smaller(
        &self,
        block: &mut LazyBlock<'_, '_, 'k>,
        largest: &dyn Fn() -> Rows<'k>,
        o: &mut Frag<'k>,
    ) {
        let largest_part = block.parts.get().over_quad(|x, y| x.max(y));
        let too_large = largest_part.gt(block.ty.most());
        if !block.ty.has_range() && self.scales_log2.is_some() {
            // Kernels whose rows have scales of their own have no registers for more.
            return self.compute_again(block, too_large, largest(), o);
        }
        // Rescaling brings the largest partial sum to between 2^-headroom and twice that.
        let (headroom, old) = (self.headroom as u32, self.row_max.get());
        let exponent = largest_part.map(|part| part.as_bits() >> 23);
        let rise = exponent.map(|exponent| (exponent - (127 - headroom)).to_f32_signed());
        let factor = exponent.map(|exponent| ((-exponent + (254 - headroom)) << 23).as_f32());
        let row_max = old + rise;
        let is_exact = (row_max - old).zip(rise, |risen, rise| risen.eq(rise));
        let is_possible = is_exact.zip(largest_part, |is_exact, part| is_exact & part.le(MOST_PART));

        let again = too_large.zip(is_possible, |too_large, possible| too_large & possible.negated());
        self.builder.if_uniform(again.any().vote_any(), || {
            self.compute_again(block, again, largest(), o);
        });
        let multiplied = too_large.zip(is_possible, |too_large, possible| too_large & possible);
        let factor = multiplied.zip(factor, |multiplied, factor| multiplied.select(factor, 1.0));
        self.raise(multiplied.select(row_max, self.row_max.get()), factor, o);
        if block.ty.has_range() {
            block.p.scale_rows(factor);
        } else {
            let (p, _) = self.exponentials((block.s, block.exponents), self.row_max.get(), block.ty);
            block.p.set(&p);
        }
        block.parts.set(block.parts.get() * factor);
    }

    /// Computes P of a block again, with new maxima in the rows of `rows`.
    #[track_caller]
    fn compute_again(
        &self,
        block: &mut LazyBlock<'_, '_, 'k>,
        rows: Rows<'k, Pred>,
        largest: Rows<'k>,
        o: &mut Frag<'k>,
    ) {
        let old = self.row_max.get();
        let maximum = self.maximum(largest.over_quad(|x, y| x.max(y)), self.scales()); // A1:18
        let row_max = rows.select(maximum, old);
        self.raise(row_max, shrink(old, row_max), o);
        let (p, parts) = self.exponentials((block.s, block.exponents), row_max, block.ty);
        block.p.set(&p);
        block.parts.set(parts);
    }

    /// Sets row_max, and rescales all sums so far by `shrink`.
    #[track_caller]
    fn raise(&self, row_max: Rows<'k>, shrink: Rows<'k>, o: &mut Frag<'k>) {
        self.row_max.set(row_max);
        self.row_sum.set(self.row_sum.get() * shrink);
        self.rounding.set(self.rounding.get() * shrink);
        if let Some(scores_scale) = self.scores_scale {
            scores_scale.set(scores_scale.get() * shrink);
        }
        o.scale_rows(shrink); // A1:21
    }

    /// Adds the rounding error of `p`, which is P of the thread's largest scores, in the rows of `rows`.
    #[track_caller]
    fn count_rounding(&self, p: Rows<'k>, ty: PType, rows: Rows<'k, Pred>) {
        let rounding = self.rounding.get();
        self.rounding.set(rows.select(rounding + (ty.rounded(p) - p), rounding));
    }

    /// The maximum of each row over all keys so far, in base 2, plus the headroom. `block` is this block's maximum.
    #[track_caller]
    fn maximum(&self, block: Rows<'k>, scales: Rows<'k>) -> Rows<'k> {
        let scaled = |half: Half| match self.headroom {
            0.0 => block[half] * scales[half],
            headroom => block[half].fma(scales[half], headroom),
        };
        let old = self.row_max.get();
        Rows(Half::BOTH.map(|half| old[half].max(scaled(half)))) // A1:18
    }

    /// P relative to `row_max`, rounded, and the thread's partial row sums.
    #[track_caller]
    fn exponentials(
        &self,
        (s, exponents): (&Frag<'k>, Option<&Exponents<'_, 'k>>),
        row_max: Rows<'k>,
        ty: PType,
    ) -> (AFrag<'k>, Rows<'k>) {
        let (scales, shift) = (self.scales(), -row_max);
        match exponents {
            None => self.round_and_add(s, ty, |s, at| exponential(s, scales[at], shift[at])),
            Some(exponents) => {
                let exponent = exponents.plus(shift);
                self.round_and_add(s, ty, |kept, at| exponent(kept, at).ex2())
            }
        }
    }

    /// Rounded P, and the thread's partial row sums. `p` computes P of each element. Each P is added and rounded at
    /// once, because registers do not hold an unrounded block beside the rounded one.
    #[track_caller]
    fn round_and_add(
        &self,
        s: &Frag<'k>,
        ty: PType,
        p: impl Fn(V<'k, F32>, At) -> V<'k, F32>,
    ) -> (AFrag<'k>, Rows<'k>) {
        let mut sums = [Chains::default(), Chains::default()];
        let p = s.map_to_a(ty.0, |s, at| {
            let p = p(s, at);
            sums[at.half as usize].add(p);
            p
        });
        (p, Rows(sums.map(|chains| chains.total(self.builder))))
    }

    /// Finishes the rows: computes the factor of O, which is 1 over the sum of the rounded P, and LSE = row_max + ln
    /// row_sum. In a row without keys, the factor is 0 and LSE is -inf.
    ///
    /// A sink, in base 2, is one more score whose P is not multiplied by any value. It may exceed row_max by any
    /// amount, so the sums become relative to the larger of the two. LSE of a row without keys is then the sink. A sink
    /// of -inf changes no bit, and with a sink of +inf O is 0 and LSE +inf.
    #[track_caller]
    pub fn finish(&self, sink: Option<Rows<'k>>) -> Finished<'k> {
        let parts = self.row_sum.get();
        let [row_sum, rounded] =
            [parts, parts + self.rounding.get()].map(|parts| parts.over_quad(|x, y| x + y));
        let max_logits = self.max_logits.map(|largest| {
            let largest = largest.get().over_quad(|x, y| x.max(y));
            largest.zip(self.scales(), |largest, scale| largest * scale * std::f32::consts::LN_2)
        });
        let Some(sink) = sink else {
            let inverse = row_sum.zip(rounded, |sum, rounded| sum.eq(0.0).select(0.0, rounded.rcp()));
            return Finished {
                inverse,
                lse: self.lse(self.row_max.get(), row_sum),
                of_keys: None,
                max_logits,
            };
        };
        let old = self.row_max.get();
        let row_max = old.zip(sink, |row_max, sink| row_max.max(sink + self.headroom));
        let shrink = shrink(old, row_max);
        let of_sink =
            row_max.zip(sink, |row_max, sink| row_max.eq(f32::INFINITY).select(1.0, (sink - row_max).ex2()));
        let keys = row_sum * shrink;
        let sum = keys + of_sink;
        let inverse = shrink * rounded.fma(shrink, of_sink).map(|rounded| rounded.rcp());
        Finished {
            inverse: row_sum.zip(inverse, |sum, inverse| sum.eq(0.0).select(0.0, inverse)),
            lse: if self.lse_without_sink { self.lse(old, row_sum) } else { self.lse(row_max, sum) },
            of_keys: Some(keys * sum.map(|sum| sum.rcp())),
            max_logits,
        }
    }

    /// The log-sum-exp of rows, in natural units. Reference and sum leave out the headroom first, which is exact: the
    /// logarithm of a sum of 2⁻¹⁶ has a unit in the last place of 2⁻¹⁹, which stays in an LSE near 0.
    #[track_caller]
    fn lse(&self, row_max: Rows<'k>, row_sum: Rows<'k>) -> Rows<'k> {
        let largest = row_max.map(|row_max| row_max - self.headroom);
        let sum = row_sum.map(|sum| sum * self.headroom.exp2());
        largest.zip(sum, |largest, sum| (largest + sum.lg2()) * std::f32::consts::LN_2)
    }
}

/// P of a score, which is to be multiplied by `scale_log2`; `shift` is minus the reference.
#[track_caller]
fn exponential<'k>(score: V<'k, F32>, scale_log2: V<'k, F32>, shift: V<'k, F32>) -> V<'k, F32> {
    score.fma(scale_log2, shift).ex2() // A1:19
}

/// The factor that turns sums relative to `old` into sums relative to `new`: 1 where the reference has not changed.
#[track_caller]
fn shrink<'k>(old: Rows<'k>, new: Rows<'k>) -> Rows<'k> {
    old.zip(new, |old, new| (old - new).ex2())
}
