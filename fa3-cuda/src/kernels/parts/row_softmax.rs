//! The softmax over blocks of keys, in base 2: A1:18-19, and the end, A1:24.
//!
//! P = exp(S - r), ℓ = Σ P and O = Σ P V give the same O / ℓ and the same r + ln ℓ for any reference r of a row. The
//! paper's is the largest score so far, the row_max. Any other serves that lets no exponential overflow, an older one
//! in particular: [`RowSoftmax::step_lazily`] keeps it and looks for a larger one only where it must (lazy rescaling).

use fa3_ir::lang::*;

use super::p_operand::{P, POperand};

/// The running row_max and row_sum of each row. A thread has its own part of the sum until the end.
pub(crate) struct RowSoftmax<'k> {
    builder: &'k Builder,
    /// softmax_scale · log₂e: what a unit of a score is worth in the exponent of 2.
    scale_log2: V<'k, F32>,
    /// In base 2, and perhaps of some blocks ago; the smallest number there is for a row that has seen no key, so that
    /// it differs from every score of one.
    row_max: RowsVar<'k>,
    row_sum: RowsVar<'k>,
}

/// A row gets a new row_max where a thread's part of its P adds up to more than so many times what the thread has added
/// up before: a key that outweighs these others is the row_max then, and its P exactly 1, as it would be in the paper.
/// Another one's rounding would be the error of the whole row.
const GROWTH: f32 = 4.0;
/// But never below this: parts are small where another thread has the keys that matter.
const LEAST: f32 = 1.0;
/// And always above this: little enough for f16.
const MOST: f32 = 1024.0;

impl<'k> RowSoftmax<'k> {
    /// Nothing seen, a sum of 0.
    #[track_caller]
    pub(crate) fn new(builder: &'k Builder, scale_log2: V<'k, F32>) -> RowSoftmax<'k> {
        let (row_max, row_sum) = (builder.rows_var("row_max", f32::MIN), builder.rows_var("row_sum", 0.0));
        RowSoftmax { builder, scale_log2, row_max, row_sum }
    }

    /// Turns the scores of a block into P = exp(S - row_max), with the maximum so far, and gives exp(old row_max -
    /// row_max), by which what was summed up so far must be multiplied.
    #[track_caller]
    pub(crate) fn step(&self, s: &mut Frag<'k>) -> Rows<'k> {
        let old = self.row_max.get();
        let row_max = self.maximum(s);
        self.row_max.set(row_max);
        let shrink = shrink(old, row_max);
        let shift = -row_max;
        s.map(|s, at| s.fma(self.scale_log2, shift[at]).ex2()); // A1:19
        let sum = s.partial_row_sum();
        self.row_sum.set(self.row_sum.get().fma(shrink, sum)); // A1:19
        shrink
    }

    /// The same, but row_max stays what it was and the scores stay what they are. Only where that makes P too large,
    /// maxima are computed, P once more, and `o` is multiplied. A row's row_max depends on nothing but its own scores.
    #[track_caller]
    pub(crate) fn step_lazily(&self, s: &Frag<'k>, place: &POperand<'k>, o: &mut Frag<'k>) -> P<'k> {
        let b = self.builder;
        let old = self.row_max.get();
        let (mut p, parts) = self.exponentials(s, old, place);
        let sum = b.rows_var("sum", 0.0);
        sum.set(parts);
        let row_sum = self.row_sum.get();
        let excess = parts.zip(row_sum, |part, sum| part - (sum * GROWTH).max(LEAST).min(MOST));
        let too_large = excess.gt(0.0).any().vote_any();
        b.if_uniform(too_large, || {
            let maximum = self.maximum(s); // A1:18
            let excess = excess.over_quad(|x, y| x.max(y));
            let row_max = Rows(Half::BOTH.map(|half| excess[half].gt(0.0).select(maximum[half], old[half])));
            self.row_max.set(row_max);
            let shrink = shrink(old, row_max);
            self.row_sum.set(row_sum * shrink);
            o.scale_rows(shrink); // A1:21
            let (again, parts) = self.exponentials(s, row_max, place);
            p.set(&again);
            sum.set(parts);
        });
        place.publish();
        let sum = sum.get();
        self.row_sum.set(self.row_sum.get() + sum); // A1:19
        p
    }

    /// The maximum of the row, with all keys up to this block, in base 2.
    #[track_caller]
    fn maximum(&self, s: &Frag<'k>) -> Rows<'k> {
        let block = s.row_max();
        self.row_max.get().zip(block, |old, new| old.max(new * self.scale_log2)) // A1:18
    }

    /// P relative to this row_max, and what the thread's part of each row adds up to. Each exponential is added and
    /// rounded as soon as it is there: there are not enough registers for a whole block.
    #[track_caller]
    fn exponentials(&self, s: &Frag<'k>, row_max: Rows<'k>, place: &POperand<'k>) -> (P<'k>, Rows<'k>) {
        let shift = -row_max;
        let mut sums = [Chains::default(), Chains::default()];
        let p = place.put(s, |s, at| {
            let p = s.fma(self.scale_log2, shift[at]).ex2(); // A1:19
            sums[at.half as usize].add(p);
            p
        });
        (p, Rows(sums.map(|chains| chains.total(self.builder))))
    }

    /// 1 / row_sum, by which O must be multiplied, and LSE = row_max + ln row_sum. For a row without keys: 0 and -inf.
    #[track_caller]
    pub(crate) fn finish(self) -> (Rows<'k>, Rows<'k>) {
        let row_sum = self.row_sum.get().over_quad(|x, y| x + y);
        let inverse = row_sum.map(|sum| sum.eq(0.0).select(0.0, sum.rcp()));
        let lse =
            self.row_max.get().zip(row_sum, |row_max, sum| (row_max + sum.lg2()) * std::f32::consts::LN_2);
        (inverse, lse)
    }
}

/// By what sums relative to `old` must be multiplied to be relative to `new`: 1 where nothing changed.
#[track_caller]
fn shrink<'k>(old: Rows<'k>, new: Rows<'k>) -> Rows<'k> {
    old.zip(new, |old, new| (old - new).ex2())
}

/// A sum in four parts, so that additions do not wait for each other.
#[derive(Default)]
struct Chains<'k>([Option<V<'k, F32>>; 4], usize);

impl<'k> Chains<'k> {
    #[track_caller]
    fn add(&mut self, x: V<'k, F32>) {
        let Chains(parts, next) = self;
        parts[*next] = Some(parts[*next].map_or(x, |sum| sum + x));
        *next = (*next + 1) % 4;
    }

    #[track_caller]
    fn total(self, b: &'k Builder) -> V<'k, F32> {
        let parts = self.0.into_iter().flatten();
        parts.reduce(|x, y| x + y).unwrap_or_else(|| b.copy(0.0))
    }
}
