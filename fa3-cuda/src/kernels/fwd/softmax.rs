//! The softmax over blocks of keys, in base 2: A1:18-19, and the end, A1:24.
//!
//! P = exp(S - r), ℓ = Σ P and O = Σ P V give the same O / ℓ and the same r + ln ℓ for any reference r of a row. The paper's is
//! the largest score so far. Any other will do that lets no exponential overflow, one that the row had some blocks ago in
//! particular: [`Softmax::step_lazily`] keeps it and looks for a larger one only where it must.

use fa3_ir::{Builder, F32, Frag, Rows, RowsVar, V};

use super::probabilities::{Place, Probabilities};

/// Running reference r and sum ℓ of each row. A thread has its own part of ℓ until the end.
pub(super) struct Softmax {
    /// What a unit of a score is worth in the exponent of 2.
    unit: V<F32>,
    /// r in base 2; the smallest number there is for a row that has seen no key, so that it differs from every score of one.
    reference: RowsVar,
    l: RowsVar,
}

/// A row gets a new reference where a thread's part of its P adds up to more than so many times what the thread has added up before:
/// a key that outweighs these others is the reference then, and its P exactly 1, as it would be in the paper. Another one's rounding would
/// be the error of the whole row.
const GROWTH: f32 = 4.0;
/// But never below this: parts are small where another thread has the keys that matter.
const LEAST: f32 = 1.0;
/// And always above this: little enough for f16.
const MOST: f32 = 1024.0;

impl Softmax {
    /// Nothing seen, ℓ = 0.
    #[track_caller]
    pub(super) fn new(b: &mut Builder, unit: V<F32>) -> Softmax {
        Softmax { unit, reference: b.rows_var("reference", f32::MIN), l: b.rows_var("l", 0.0) }
    }

    /// Turns the scores of a block into P = exp(S - m), where m is the maximum so far, and gives exp(m_old - m), by which what
    /// was summed up so far must be multiplied.
    #[track_caller]
    pub(super) fn step(&self, b: &mut Builder, s: &mut Frag) -> Rows {
        let old = self.reference.get(b);
        let reference = self.maximum(b, s);
        self.reference.set(b, reference);
        let shrink = shrink(b, old, reference);
        let shift = reference.map(b, |b, reference| b.neg_f32(reference));
        s.map(b, |b, s, at| {
            let exponent = b.fma_f32(s, self.unit, shift.0[at.half as usize]);
            b.ex2(exponent) // A1:19
        });
        let sum = s.partial_row_sum(b);
        let l = self.l.get(b);
        let l = Rows([0, 1].map(|half| b.fma_f32(l.0[half], shrink.0[half], sum.0[half]))); // A1:19
        self.l.set(b, l);
        shrink
    }

    /// The same, but the reference stays what it was and the scores stay what they are. Only where that makes P too large,
    /// maxima are computed, P once more, and `o` is multiplied. A row's reference depends on nothing but its own scores.
    #[track_caller]
    pub(super) fn step_lazily(
        &self,
        b: &mut Builder,
        s: &Frag,
        place: &Place,
        o: &mut Frag,
    ) -> Probabilities {
        let old = self.reference.get(b);
        let (mut p, parts) = self.weigh(b, s, old, place);
        let sum = b.rows_var("sum", 0.0);
        sum.set(b, parts);
        let l = self.l.get(b);
        let excess = parts.zip(b, l, |b, part, l| {
            let limit = b.mul(l, GROWTH);
            let limit = b.max_f32(limit, LEAST);
            let limit = b.min_f32(limit, MOST);
            b.sub(part, limit)
        });
        let over = excess.0.map(|excess| b.gt_f32(excess, 0.0));
        let over = b.or_pred(over[0], over[1]);
        let over = b.vote_any(over);
        b.if_uniform(over, |b| {
            let maximum = self.maximum(b, s); // A1:18
            let excess = excess.over_quad(b, |b, x, y| b.max_f32(x, y));
            let reference = Rows([0, 1].map(|half| {
                let over = b.gt_f32(excess.0[half], 0.0);
                b.select(over, maximum.0[half], old.0[half])
            }));
            self.reference.set(b, reference);
            let shrink = shrink(b, old, reference);
            let l = l.zip(b, shrink, |b, l, shrink| b.mul(l, shrink));
            self.l.set(b, l);
            o.scale_rows(b, shrink); // A1:21
            let (again, parts) = self.weigh(b, s, reference, place);
            p.set(b, &again);
            sum.set(b, parts);
        });
        place.publish(b);
        let sum = sum.get(b);
        let l = self.l.get(b).zip(b, sum, |b, l, sum| b.add(l, sum)); // A1:19
        self.l.set(b, l);
        p
    }

    /// The maximum of the row, with all keys up to this block, in base 2.
    #[track_caller]
    fn maximum(&self, b: &mut Builder, s: &Frag) -> Rows {
        let block = s.row_max(b);
        self.reference.get(b).zip(b, block, |b, old, new| {
            let new = b.mul(new, self.unit);
            b.max_f32(old, new) // A1:18
        })
    }

    /// P relative to this reference, and what the thread's part of each row adds up to. Each exponential is added and rounded as
    /// soon as it is there: registers for a block of them there are not.
    #[track_caller]
    fn weigh(&self, b: &mut Builder, s: &Frag, reference: Rows, place: &Place) -> (Probabilities, Rows) {
        let shift = reference.map(b, |b, reference| b.neg_f32(reference));
        let mut sums = [Chains::default(), Chains::default()];
        let p = place.put(b, s, |b, s, at| {
            let exponent = b.fma_f32(s, self.unit, shift.0[at.half as usize]);
            let p = b.ex2(exponent); // A1:19
            sums[at.half as usize].add(b, p);
            p
        });
        (p, Rows(sums.map(|chains| chains.total(b))))
    }

    /// 1 / ℓ, by which O must be multiplied, and L = r + ln ℓ. Of a row that has seen no key: 0 and -inf.
    #[track_caller]
    pub(super) fn finish(self, b: &mut Builder) -> (Rows, Rows) {
        let l = self.l.get(b).over_quad(b, |b, x, y| b.add(x, y));
        let inverse = l.map(b, |b, l| {
            let none = b.eq_f32(l, 0.0);
            let inverse = b.rcp(l);
            b.select(none, 0.0, inverse)
        });
        let lse = self.reference.get(b).zip(b, l, |b, reference, l| {
            let log2 = b.lg2(l);
            let log2 = b.add(reference, log2);
            b.mul(log2, std::f32::consts::LN_2)
        });
        (inverse, lse)
    }
}

/// By what sums relative to `old` must be multiplied to be relative to `new`: 1 where nothing changed.
#[track_caller]
fn shrink(b: &mut Builder, old: Rows, new: Rows) -> Rows {
    old.zip(b, new, |b, old, new| {
        let exponent = b.sub(old, new);
        b.ex2(exponent)
    })
}

/// A sum in four parts, so that additions do not wait for each other.
#[derive(Default)]
struct Chains([Option<V<F32>>; 4], usize);

impl Chains {
    #[track_caller]
    fn add(&mut self, b: &mut Builder, x: V<F32>) {
        let Chains(parts, next) = self;
        parts[*next] = Some(parts[*next].map_or(x, |sum| b.add(sum, x)));
        *next = (*next + 1) % 4;
    }

    #[track_caller]
    fn total(self, b: &mut Builder) -> V<F32> {
        let parts = self.0.into_iter().flatten();
        parts.reduce(|x, y| b.add(x, y)).unwrap_or_else(|| b.mov_f32(0.0))
    }
}
