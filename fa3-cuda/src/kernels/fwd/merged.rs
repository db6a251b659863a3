//! The splits of a unit that its CTA merges, one after the other: the recurrence of the reduction
//! ([`parts::combine`](crate::kernels::parts::combine)), with the same bits.
//!
//! ```text
//! M' = max(M, lse)      a = exp(M - M')      b = exp(lse - M')      L = L a + b      O = O a + b o
//! ```
//!
//! A warpgroup's registers hold M and L from split to split. O lies in the CTA's part of the workspace, in f32, where
//! each thread reads what it wrote itself.

use fa3_ir::lang::*;

use crate::kernels::parts::combine::{end, reference, weight};
use crate::kernels::parts::out::Out;

/// The rows of a unit so far.
#[derive(Clone, Copy)]
pub(super) struct Merged<'k> {
    /// The largest LSE: -inf if all splits are empty.
    max: RowsVar<'k>,
    /// Sum of exp(LSE - max) over the splits.
    sum: RowsVar<'k>,
    /// The largest scores, if they are a result.
    largest: Option<RowsVar<'k>>,
}

impl<'k> Merged<'k> {
    /// No rows yet.
    #[track_caller]
    pub(super) fn new(b: &'k Builder, max_logits: bool) -> Merged<'k> {
        let none = |name| b.rows_var(name, f32::NEG_INFINITY);
        let (max, sum) = (none("merged_max"), b.rows_var("merged_sum", 0.0));
        Merged { max, sum, largest: max_logits.then(|| none("merged_largest")) }
    }

    /// Merges a split's largest scores, and gives the largest scores of all splits so far, if they are a result.
    #[track_caller]
    pub(super) fn largest(self, out: Out<U32<'k>>, of_split: Option<Rows<'k>>) -> Option<Rows<'k>> {
        let (largest, of_split) = self.largest.zip(of_split)?;
        let before = largest.get().map(|x| out.begins().select(f32::NEG_INFINITY, x));
        largest.set(before.zip(of_split, |x, y| x.max(y)));
        Some(largest.get())
    }

    /// Merges a split's `o`, whose sums are divided already, and `lse`. `columns` are the addresses of the thread's
    /// first columns of O, of which `count` columns exist. Afterwards `o` is O of all splits so far, and is stored
    /// there unless the unit ends.
    #[track_caller]
    pub(super) fn add(
        self,
        b: &'k Builder,
        out: Out<U32<'k>>,
        (o, lse): (&Frag<'k>, Rows<'k>),
        (columns, count): ([U64<'k>; 2], u32),
    ) {
        let begins = out.begins();
        let max = self.max.get().map(|max| begins.select(f32::NEG_INFINITY, max));
        let sum = self.sum.get().map(|sum| begins.select(0.0, sum));
        let highest = max.zip(lse, |max, lse| max.max(lse));
        let reference = highest.map(reference);
        let [of_before, of_split] = [max, lse].map(|lse| lse.zip(reference, weight));
        self.max.set(highest);
        self.sum.set(sum * of_before + of_split);
        let places = || {
            o.pairs().filter(|(at, _)| at.col < count).map(|(at, pair)| {
                let half = at.half as usize;
                (at.half, columns[half].at(4 * at.col as i32), pair)
            })
        };
        b.if_uniform(begins.negated(), || {
            for (half, place, pair) in places() {
                let before = b.load_vector::<F32, 2>(place);
                for (o, before) in pair.into_iter().zip(before) {
                    // As in the reduction, a split without weight does not count, even if its O is NaN.
                    let factor = of_split[half];
                    o.update(|o| factor.fma(factor.neu(0.0).select(o, 0.0), before * of_before[half]));
                }
            }
        });
        b.if_uniform(out.ends().negated(), || {
            for (_, place, pair) in places() {
                b.store_vector(place, pair.map(|o| o.now()));
            }
        });
    }

    /// The factors of O, and LSE, of the whole unit, with the sinks of the rows.
    #[track_caller]
    pub(super) fn end(self, sinks: Option<Rows<'k>>, lse_without_sink: bool) -> (Rows<'k>, Rows<'k>) {
        let (max, sum) = (self.max.get(), self.sum.get());
        let ends = Half::BOTH.map(|half| {
            let sink = sinks.map(|sinks| sinks[half]);
            end((max[half], sum[half]), sink, lse_without_sink)
        });
        (Rows(ends.map(|(scale, _)| scale)), Rows(ends.map(|(_, lse)| lse)))
    }
}
