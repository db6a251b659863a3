//! The softmax over blocks of keys, in base 2: A1:18-19, and the end, A1:24.

use fa3_ir::{Builder, F32, Frag, Rows, RowsVar, V};

/// Running maximum m, in units of scores, and sum ℓ of each row. A thread has its own part of ℓ until the end.
pub(super) struct Softmax {
    /// What a unit of a score is worth in the exponent of 2.
    unit: V<F32>,
    m: RowsVar,
    l: RowsVar,
}

impl Softmax {
    /// m = -inf, ℓ = 0.
    #[track_caller]
    pub(super) fn new(b: &mut Builder, unit: V<F32>) -> Softmax {
        Softmax { unit, m: b.rows_var("m", f32::NEG_INFINITY), l: b.rows_var("l", 0.0) }
    }

    /// Turns the scores of a block into P = exp(S - m), and gives exp(m_old - m), by which what was summed up so far must be
    /// multiplied.
    #[track_caller]
    pub(super) fn step(&self, b: &mut Builder, s: &mut Frag) -> Rows {
        let old = self.m.get(b);
        let block = s.row_max(b);
        let m = old.zip(b, block, |b, old, new| b.max_f32(old, new)); // A1:18
        self.m.set(b, m);
        // A row that has seen no key yet keeps m = -inf; 0 in its place makes every exponential 0.
        let reference = m.map(b, |b, m| {
            let none = b.eq_f32(m, f32::NEG_INFINITY);
            let reference = b.mul(m, self.unit);
            b.select(none, 0.0, reference)
        });
        // From the rounded references, so that it is 1 where m stays: a factor that is off by one rounding would add up.
        let shrink = old.zip(b, reference, |b, old, reference| {
            let old = b.mul(old, self.unit);
            let exponent = b.sub(old, reference);
            b.ex2(exponent)
        });
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

    /// 1 / ℓ, by which O must be multiplied, and L = m + ln ℓ. Of a row that has seen no key: 0 and -inf.
    #[track_caller]
    pub(super) fn finish(self, b: &mut Builder) -> (Rows, Rows) {
        let l = self.l.get(b).over_quad(b, |b, x, y| b.add(x, y));
        let inverse = l.map(b, |b, l| {
            let none = b.eq_f32(l, 0.0);
            let inverse = b.rcp(l);
            b.select(none, 0.0, inverse)
        });
        let lse = self.m.get(b).zip(b, l, |b, m, l| {
            let (reference, log2) = (b.mul(m, self.unit), b.lg2(l));
            let log2 = b.add(reference, log2);
            b.mul(log2, std::f32::consts::LN_2)
        });
        (inverse, lse)
    }
}
