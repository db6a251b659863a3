//! Options that say how scores are computed.

use fa3_types::{
    KnownProblem, LseForm, Mask, Problem, ProblemError, ProblemSpec, ScoreFunction, Sequences, TensorDesc,
    TensorName, TokenScales,
};
use ndarray::ArrayView1;

use crate::Error;
use crate::attention::check_input;

/// How a call computes its scores: what [`Attention`](crate::Attention) and
/// [`CachedAttention`](crate::CachedAttention) have in common.
#[derive(Clone, Debug)]
pub(crate) struct Scores<'a> {
    pub(crate) mask: Result<Mask, ProblemError>,
    pub(crate) softmax_scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) function: Option<ScoreFunction>,
    pub(crate) sink: Option<ArrayView1<'a, f32>>,
    pub(crate) lse: LseForm,
    /// The problem that `for_problem` was given, if any: the call must be this problem.
    pub(crate) problem: Option<Problem>,
}

impl<'a> Scores<'a> {
    /// All keys, scaled by default.
    pub(crate) fn new() -> Scores<'a> {
        Scores {
            mask: Ok(Mask::None),
            softmax_scale: None,
            softcap: None,
            function: None,
            sink: None,
            lse: LseForm::default(),
            problem: None,
        }
    }

    /// The options of `problem`. Intervals are data, which are given apart.
    pub(crate) fn of(self, problem: &Problem) -> Scores<'a> {
        Scores {
            mask: Ok(problem.mask().without_intervals()),
            softmax_scale: Some(problem.softmax_scale().natural()),
            softcap: problem.softcap().map(|cap| cap.bound()),
            function: self.function,
            sink: self.sink,
            lse: problem.lse_form(),
            problem: Some(problem.clone()),
        }
    }

    /// `spec`, which has all other properties of the call, with these options. `used` says whether the call has
    /// `seqused` of Q and of K; `None` leaves `seqused` out of the comparison with the problem.
    ///
    /// # Errors
    /// The mask is invalid, the sinks have a wrong shape, or the call is not the problem that `for_problem` was given.
    pub(crate) fn given_to(&self, spec: ProblemSpec, used: [Option<bool>; 2]) -> Result<ProblemSpec, Error> {
        // No `..` here: how scores are computed must not be forgotten.
        let Scores { mask, softmax_scale, softcap, function, sink, lse, problem } = self;
        let mut spec = spec.mask(mask.clone()?);
        (spec.softmax_scale, spec.softcap, spec.sink) = (*softmax_scale, *softcap, sink.is_some());
        (spec.lse, spec.score) = (*lse, function.as_ref().map(|function| function.form().clone()));
        if let Some(sink) = sink {
            check_input(TensorName::Sink, sink.shape(), &[spec.q.shape.heads])?;
        }
        problem.as_ref().map_or(Ok(()), |problem| check_problem(problem, &spec, used))?;
        Ok(spec)
    }

    /// `problem`, which has no function of scores, with the call's function.
    pub(crate) fn known(&self, problem: KnownProblem) -> KnownProblem {
        match &self.function {
            Some(function) => problem.with_score(function),
            None => problem,
        }
    }
}

/// Checks that a call on contiguous tensors is `problem`. Strides and the lengths of sequences are not compared.
fn check_problem(problem: &Problem, call: &ProblemSpec, used: [Option<bool>; 2]) -> Result<(), Error> {
    let tensors = [
        (TensorName::Q, call.seqs_q, problem.seqs_q(), used[0]),
        (TensorName::K, call.seqs_k, problem.seqs_k(), used[1]),
    ];
    for (tensor, given, expected, used) in tensors {
        let form = |of: Sequences, used: Option<bool>| {
            let words = [
                (of.is_packed(), " packed"),
                (used == Some(true), " used in part"),
                (of.is_cache(), " cached"),
            ];
            let words = words.into_iter().filter_map(|(is_there, word)| is_there.then_some(word));
            format!("attention of {tensor}{}", words.collect::<String>())
        };
        let [given, expected] = [form(given, used), form(expected, used.map(|_| expected.has_used()))];
        if given != expected {
            return Err(Error::OtherProblem { given, expected });
        }
    }
    let mut expected = problem.spec().seqs_q(call.seqs_q).seqs_k(call.seqs_k);
    let tensors = [&mut expected.q, &mut expected.k, &mut expected.v, &mut expected.o];
    for x in tensors.into_iter().chain(&mut expected.qv) {
        *x = TensorDesc::contiguous(x.dtype, x.shape);
    }
    expected.token_scales = expected.token_scales.map(|_| TokenScales::contiguous(expected.k.shape));
    if let Some(extra) = &mut expected.extra {
        [extra.k, extra.v] = [extra.k, extra.v].map(|x| TensorDesc::contiguous(x.dtype, x.shape));
        extra.sequences = call.extra.map_or(extra.sequences, |extra| extra.sequences);
    }
    let [given, expected] = [call.clone(), expected].map(ProblemSpec::validate);
    match (given?, expected?) {
        (given, expected) if given != expected => {
            Err(Error::OtherProblem { given: given.to_string(), expected: expected.to_string() })
        }
        _ => Ok(()),
    }
}

/// Defines the setters of [`Scores`] for a builder that has them as `scores`. The builder documents its own `mask` and
/// `sink`, and `score`, if it has functions of scores.
macro_rules! score_setters {
    ($(#[$of_mask:meta])* mask; $(#[$of_sink:meta])* sink; $($(#[$of_score:meta])* score;)?) => {
        $(#[$of_mask])*
        pub fn mask(mut self, mask: Mask) -> Self {
            self.scores.mask = self.scores.mask.and_then(|other| other.and(mask));
            self
        }

        /// Applies a causal mask, aligned at the bottom right: each query sees keys up to its own position.
        pub fn causal(self) -> Self {
            self.mask(Mask::Causal)
        }

        /// Lets each query see at most `left` keys before its own position and `right` after it; `None` is unbounded.
        pub fn window(self, left: Option<u32>, right: Option<u32>) -> Self {
            self.mask(Mask::window(left, right))
        }

        /// Lets each query see the keys of its own chunk of `keys` keys, counted from the sequence's first key.
        pub fn chunk(self, keys: NonZeroU32) -> Self {
            self.mask(Mask::chunk(keys))
        }

        /// Sets the factor on Q·Kᵀ.
        pub fn softmax_scale(mut self, scale: f64) -> Self {
            self.scores.softmax_scale = Some(scale);
            self
        }

        /// Bounds scaled scores s to ±cap by cap · tanh(s / cap).
        pub fn softcap(mut self, cap: f64) -> Self {
            self.scores.softcap = Some(cap);
            self
        }

        $(#[$of_sink])*
        pub fn sink(mut self, sink: impl Into<ArrayView1<'a, f32>>) -> Self {
            self.scores.sink = Some(sink.into());
            self
        }

        $($(#[$of_score])*
        pub fn score(mut self, function: ScoreFunction) -> Self {
            self.scores.function = Some(function);
            self
        })?

        /// Sets the form of LSE. Gradients take the default one.
        pub fn lse_form(mut self, form: LseForm) -> Self {
            self.scores.lse = form;
            self
        }

        /// Takes mask, softmax scale, soft cap and the form of LSE from a problem, and checks the call against it: a
        /// call that lacks one of the problem's properties, such as sinks, or has another one, is refused with
        /// [`Error::OtherProblem`]. The problem's strides and sequences do not matter.
        ///
        /// This is for code that gets problems as plain data: a property that the code does not know is then an error.
        pub fn for_problem(mut self, problem: &Problem) -> Self {
            self.scores = self.scores.of(problem);
            self
        }
    };
}

pub(crate) use score_setters;
