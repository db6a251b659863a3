//! The unit of scores.

use std::f64::consts::LOG2_E;

use fa3_types::{Problem, softcap};

/// The unit of scores. Without a soft cap a score is the plain dot product. With a cap it is tanh(softmax_scale ·
/// product / cap).
#[derive(Clone, Copy)]
pub(super) struct ScoreUnit {
    /// The factor that turns a score into an exponent of 2.
    pub(super) log2: f32,
    /// softmax_scale / cap, if there is a cap.
    into_cap: Option<f32>,
}

impl ScoreUnit {
    pub(super) fn of(problem: &Problem) -> ScoreUnit {
        let scale = problem.softmax_scale();
        let (log2, into_cap) = match problem.softcap() {
            None => (scale.log2(), None),
            Some(cap) => (cap.bound() * LOG2_E, Some((scale.natural() / cap.bound()) as f32)),
        };
        ScoreUnit { log2: log2 as f32, into_cap }
    }

    /// Turns dot products into scores.
    pub(super) fn cap(self, scores: &mut [f32]) {
        if let Some(factor) = self.into_cap {
            scores.iter_mut().for_each(|score| *score = softcap(*score, factor));
        }
    }

    /// The derivative of the cap at the capped score `s`: 1 − tanh², and 1 without a cap.
    #[inline(always)]
    pub(super) fn slope(self, s: f32) -> f32 {
        self.into_cap.map_or(1.0, |_| 1.0 - s * s)
    }
}
