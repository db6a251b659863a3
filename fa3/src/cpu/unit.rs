//! The unit of scores.

use std::f64::consts::LOG2_E;

use fa3_types::{KnownProblem, softcap};

/// The unit of scores. Without a soft cap a score is the plain dot product. With a cap it is tanh(softmax_scale ·
/// product / cap). With a function of scores it is the function's value, in natural units.
#[derive(Clone, Copy)]
pub(super) struct ScoreUnit<'a> {
    /// The factor that turns a score into an exponent of 2.
    pub(super) log2: f32,
    /// softmax_scale / cap, if there is a cap.
    into_cap: Option<f32>,
    /// The problem of a function of scores, and the factor that turns the function's argument into natural units.
    function: Option<(&'a KnownProblem, f32)>,
}

impl ScoreUnit<'_> {
    pub(super) fn of(problem: &KnownProblem) -> ScoreUnit<'_> {
        let scale = problem.softmax_scale();
        let (natural, log2, into_cap) = match problem.softcap() {
            None => (scale.natural(), scale.log2(), None),
            Some(cap) => {
                let bound = cap.bound();
                (bound, bound * LOG2_E, Some((scale.natural() / bound) as f32))
            }
        };
        let function = problem.score().map(|_| (problem, natural as f32));
        let log2 = if function.is_some() { LOG2_E } else { log2 };
        ScoreUnit { log2: log2 as f32, into_cap, function }
    }

    /// Turns the dot products of a row of a head of a sequence with the keys from `key` on into scores.
    pub(super) fn apply(self, row: [usize; 3], key: usize, scores: &mut [f32]) {
        self.cap(scores);
        if let Some((problem, natural)) = self.function
            && let Some(mut function) = problem.score_row::<f32>(row)
        {
            let scores = scores.iter_mut().zip(key..);
            scores.for_each(|(score, key)| *score = function.at(*score * natural, key));
        }
    }

    /// [`ScoreUnit::apply`]. With a function of scores, the derivatives of the scores by the scaled products go to
    /// `slopes`.
    pub(super) fn apply_with_slopes(
        self,
        row: [usize; 3],
        key: usize,
        scores: &mut [f32],
        slopes: &mut [f32],
    ) {
        self.cap(scores);
        if let Some((problem, natural)) = self.function
            && let Some(mut function) = problem.score_row(row)
        {
            for ((score, slope), key) in scores.iter_mut().zip(slopes).zip(key..) {
                (*score, *slope) = function.with_slope(*score * natural, self.slope_of_cap(*score), key);
            }
        }
    }

    /// The elements of tables with gradients that the row's scores with the keys from `key` on depend on, given the dot
    /// products: for each such element of the function, the element of each score, and the derivative by it.
    pub(super) fn reads(
        self,
        row: [usize; 3],
        key: usize,
        products: &[f32],
    ) -> Vec<Vec<(usize, usize, f32)>> {
        let Some((problem, natural)) = self.function else { return vec![] };
        let reads = problem.score_reads(row).into_iter();
        reads
            .map(|mut read| {
                let mut scores = products.to_vec();
                self.cap(&mut scores);
                scores.iter().zip(key..).map(|(score, key)| read.at(score * natural, key)).collect()
            })
            .collect()
    }

    /// Whether there is a function of scores.
    pub(super) fn has_function(self) -> bool {
        self.function.is_some()
    }

    fn cap(self, scores: &mut [f32]) {
        if let Some(factor) = self.into_cap {
            scores.iter_mut().for_each(|score| *score = softcap(*score, factor));
        }
    }

    /// The derivative of the cap at the capped score `s`: 1 − tanh², and 1 without a cap.
    #[inline(always)]
    fn slope_of_cap(self, s: f32) -> f32 {
        self.into_cap.map_or(1.0, |_| 1.0 - s * s)
    }

    /// The derivative at the score `s`, and 1 with a function of scores, whose derivatives are computed apart.
    #[inline(always)]
    pub(super) fn slope(self, s: f32) -> f32 {
        if self.has_function() { 1.0 } else { self.slope_of_cap(s) }
    }
}
