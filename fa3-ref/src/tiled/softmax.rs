//! Softmax over blocks of scores (lines 18 and 19 of Algorithm 1), in base 2.

use std::f64::consts::{LN_2, LOG2_E};

use fa3_types::{Problem, softcap};
use ndarray::{Array1, Array2, Axis};

use crate::output::HeadForward;
use crate::sink::exp_from;

/// The unit of scores. One unit is `log2` in the exponent of 2, so that P = exp2(s · log2 − m · log2).
///
/// Without a soft cap the unit is the plain dot product. With a cap c it is tanh(scale · Q·K / c), and the factor c
/// moves into `log2`.
#[derive(Clone, Copy)]
pub(super) struct ScoreUnit {
    /// softmax_scale / c, with a soft cap c.
    into_cap: Option<f32>,
    /// softmax_scale · log2 e, or, with a soft cap c, c · log2 e. It is log2 e with a function of scores, whose values
    /// are in natural units.
    pub(super) log2: f32,
    /// The factor that turns a capped score into natural units.
    pub(super) natural: f32,
}

impl ScoreUnit {
    pub(super) fn of(problem: &Problem) -> ScoreUnit {
        let scale = problem.softmax_scale();
        let (into_cap, natural, log2) = match problem.softcap() {
            None => (None, scale.natural(), scale.log2()),
            Some(cap) => (Some((scale.natural() / cap.bound()) as f32), cap.bound(), cap.bound() * LOG2_E),
        };
        let log2 = if problem.score().is_some() { LOG2_E } else { log2 };
        ScoreUnit { into_cap, log2: log2 as f32, natural: natural as f32 }
    }

    /// The score in this unit.
    pub(super) fn cap(self, dot: f32) -> f32 {
        self.into_cap.map_or(dot, |factor| softcap(dot, factor))
    }

    /// Derivative d score / d (Q·K · scale), where the score is `s` in this unit: 1, or 1 − tanh².
    pub(super) fn slope(self, s: f32) -> f32 {
        self.into_cap.map_or(1.0, |_| 1.0 - s * s)
    }
}

/// Running row maximum m (in [`ScoreUnit`]s) and row sum ℓ.
pub(super) struct OnlineSoftmax {
    unit: ScoreUnit,
    m: Array1<f32>,
    l: Array1<f32>,
}

/// Results of the online softmax for one block of scores.
pub(super) struct Step {
    /// P, not yet rounded.
    pub(super) p: Array2<f32>,
    /// exp(m_old − m), the rescale factor of the previous blocks' O and ℓ.
    pub(super) rescale: Array1<f32>,
}

impl OnlineSoftmax {
    /// The state before the first block: m = -inf, ℓ = 0.
    pub(super) fn new(rows: usize, unit: ScoreUnit) -> OnlineSoftmax {
        OnlineSoftmax { unit, m: Array1::from_elem(rows, f32::NEG_INFINITY), l: Array1::zeros(rows) }
    }

    /// Adds the scores `s` of one block.
    pub(super) fn step(&mut self, mut s: Array2<f32>) -> Step {
        let log2 = self.unit.log2;
        let mut rescale = Array1::zeros(s.nrows());
        for (i, mut row) in s.rows_mut().into_iter().enumerate() {
            let m_old = self.m[i];
            self.m[i] = row.fold(m_old, |max, &s| max.max(s)); // A1:18
            // A row that has seen no key yet keeps m = -inf; 0 in its place makes every exponential 0.
            let reference = if self.m[i] == f32::NEG_INFINITY { 0.0 } else { self.m[i] * log2 };
            row.mapv_inplace(|s| s.mul_add(log2, -reference).exp2()); // A1:19
            // The rounded references make this factor exactly 1 where m stays.
            rescale[i] = (m_old * log2 - reference).exp2();
            self.l[i] = rescale[i] * self.l[i] + row.sum(); // A1:19
        }
        Step { p: s, rescale }
    }

    /// O = diag(ℓ)⁻¹ O and L = m + log ℓ, in the natural logarithm. If ℓ = 0, O = 0 and L = -inf. A sink is first added
    /// to ℓ, relative to the larger of m and the sink.
    pub(super) fn finish(&self, mut o: Array2<f32>, sink: f32) -> HeadForward<f32> {
        let sink = f64::from(sink);
        let mut lse = Array1::from_elem(o.nrows(), f32::NEG_INFINITY);
        for (i, mut row) in o.rows_mut().into_iter().enumerate() {
            if self.l[i] == 0.0 && sink == f64::NEG_INFINITY {
                row.fill(0.0);
                continue;
            }
            let m = f64::from(self.m[i]) * f64::from(self.unit.log2) * LN_2;
            let largest = m.max(sink);
            let shrink = (m - largest).exp();
            let l = shrink * f64::from(self.l[i]) + exp_from(sink, largest);
            row.mapv_inplace(|o| (f64::from(o) * shrink / l) as f32);
            lse[i] = (largest + l.ln()) as f32;
        }
        HeadForward { o, lse }
    }
}

/// diag(factors) · O
pub(super) fn scale_rows(o: &mut Array2<f32>, factors: &Array1<f32>) {
    *o *= &factors.view().insert_axis(Axis(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    const UNIT: ScoreUnit = ScoreUnit { into_cap: None, log2: 1.0, natural: 1.0 };

    #[test]
    fn blocks_add_up_to_the_whole_row() {
        let mut softmax = OnlineSoftmax::new(2, UNIT);
        let first = softmax.step(array![[0.0, 1.0], [3.0, f32::NEG_INFINITY]]);
        assert_eq!(first.p, array![[0.5, 1.0], [1.0, 0.0]]);
        assert_eq!(first.rescale, array![0.0, 0.0]);
        let second = softmax.step(array![[3.0], [2.0]]);
        assert_eq!(second.p, array![[1.0], [0.5]]);
        assert_eq!(second.rescale, array![0.25, 1.0]);
        let out = softmax.finish(array![[2.75], [3.0]], f32::NEG_INFINITY);
        assert_eq!(out.o, array![[2.0], [2.0]]);
        let expected = [(1.0f64 + 2.0 + 8.0).ln(), 12.0f64.ln()];
        assert!(out.lse.iter().zip(expected).all(|(&x, y)| (f64::from(x) - y).abs() < 1e-6), "{}", out.lse);
    }

    #[test]
    fn a_row_may_see_its_first_key_late_or_never() {
        let hidden = array![[f32::NEG_INFINITY], [f32::NEG_INFINITY]];
        let mut softmax = OnlineSoftmax::new(2, UNIT);
        assert_eq!(softmax.step(hidden).p, array![[0.0], [0.0]]);
        let late = softmax.step(array![[5.0], [f32::NEG_INFINITY]]);
        assert_eq!((late.p, late.rescale), (array![[1.0], [0.0]], array![0.0, 0.0]));
        let out = softmax.finish(array![[7.0], [0.0]], f32::NEG_INFINITY);
        assert_eq!((out.o, out.lse[1]), (array![[7.0], [0.0]], f32::NEG_INFINITY));
        let out = softmax.finish(array![[7.0], [0.0]], -2.5);
        assert_eq!((out.o[[1, 0]], out.lse[1]), (0.0, -2.5));
        // Both m and the sink are 5 in base 2.
        let out = softmax.finish(array![[7.0], [0.0]], (5.0 * LN_2) as f32);
        assert!((out.o[[0, 0]] - 3.5).abs() < 1e-6 && (out.lse[0] - (6.0 * LN_2) as f32).abs() < 1e-6);
    }
}
