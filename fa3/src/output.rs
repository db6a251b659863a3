//! Results of the forward pass, with their call.

use fa3_types::{KnownProblem, Problem, SequenceRows, TensorName};
use ndarray::{Array3, Array4};

use crate::Error;

/// The result of attention. It remembers its call, so that [`Attention::backward`](crate::Attention::backward) can
/// refuse the output of another call.
#[derive(Clone, Debug)]
pub struct Output<T> {
    /// O (batch, seqlen_q, heads_q, head_dim_v). It is 0 in rows that see no key or lie outside every sequence.
    pub o: Array4<T>,
    /// Natural log-sum-exp of the scores, including the sink, if any, (batch, heads_q, seqlen_q). It is -inf in rows
    /// that see no key and rows outside every sequence. With a sink, rows of a sequence that see no key have the sink.
    /// [`LseForm`](crate::LseForm) has other forms.
    pub lse: Array3<f32>,
    /// The problem that this output was computed from, if known.
    call: Option<KnownProblem>,
}

/// Outputs are equal if O and LSE are.
impl<T: PartialEq> PartialEq for Output<T> {
    fn eq(&self, other: &Output<T>) -> bool {
        self.o == other.o && self.lse == other.lse
    }
}

impl<T> Output<T> {
    /// O and LSE that were not returned by [`Attention::forward`], of the shapes that the fields state: from
    /// [`Attention::forward_into`], from another library, or from a reduction. Their call is unknown, and is not
    /// checked.
    ///
    /// [`Attention::forward`]: crate::Attention::forward
    /// [`Attention::forward_into`]: crate::Attention::forward_into
    pub fn new(o: Array4<T>, lse: Array3<f32>) -> Output<T> {
        Output { o, lse, call: None }
    }

    /// O and LSE of this problem.
    pub(crate) fn of(call: &KnownProblem, o: Array4<T>, lse: Array3<f32>) -> Output<T> {
        Output { o, lse, call: Some(call.clone()) }
    }

    /// Checks that this is the output of `call`, unless its call is unknown. Values of Q, K and V are not compared.
    ///
    /// # Errors
    /// [`Error::OtherCall`] with the first difference.
    pub(crate) fn check_call(&self, call: &KnownProblem) -> Result<(), Error> {
        let difference = self.call.as_ref().and_then(|of| difference(of, call));
        difference.map_or(Ok(()), |[given, expected]| Err(Error::OtherCall { given, expected }))
    }
}

/// Describes the first difference of two calls: the property of `one`, and the property of `other`. If the problems
/// differ, but in no property of the list, shows the whole problems.
fn difference(one: &KnownProblem, other: &KnownProblem) -> Option<[String; 2]> {
    let facts: [fn(&Problem) -> String; 8] = [
        |problem| format!("elements of {}", problem.dtype()),
        |problem| format!("q of shape {}", problem.q().shape),
        |problem| format!("k of shape {}", problem.k().shape),
        |problem| format!("v of shape {}", problem.v().shape),
        |problem| format!("mask {}", problem.mask()),
        |problem| format!("softmax scale {}", problem.softmax_scale().natural()),
        |problem| {
            problem.softcap().map_or("no soft cap".to_owned(), |cap| format!("soft cap {}", cap.bound()))
        },
        |problem| {
            let features: Vec<String> = problem.features().map(|feature| feature.to_string()).collect();
            if features.is_empty() { "no features".to_owned() } else { features.join(", ") }
        },
    ];
    let both = |fact: fn(&Problem) -> String| [fact(one), fact(other)];
    facts
        .into_iter()
        .map(both)
        .find(|[one, other]| one != other)
        .or_else(|| other_rows(TensorName::Q, one.rows_q(), other.rows_q()))
        .or_else(|| other_rows(TensorName::K, one.rows_k(), other.rows_k()))
        .or_else(|| other_intervals(one.intervals()?.bounds(), other.intervals()?.bounds()))
        .or_else(|| other_score(one, other))
        .or_else(|| (**one != **other).then(|| [one, other].map(|problem| format!("the problem {problem}"))))
}

/// Describes the first bound that differs between two lists of intervals of equal length.
fn other_intervals(one: &[i32], other: &[i32]) -> Option<[String; 2]> {
    let (at, bounds) = one.iter().zip(other).enumerate().find(|(_, (one, other))| one != other)?;
    Some([bounds.0, bounds.1].map(|bound| format!("bound {bound} as number {at} of the intervals")))
}

/// Describes functions of scores that differ.
fn other_score(one: &KnownProblem, other: &KnownProblem) -> Option<[String; 2]> {
    let describe = |problem: &KnownProblem| {
        let function = problem.score_function();
        function.map(|of| format!("score {} of {:?} and {:?}", of.expr(), of.numbers(), of.tables()))
    };
    let both = [describe(one)?, describe(other)?];
    (one.score_function() != other.score_function()).then_some(both)
}

/// Compares a tensor's sequences in two calls. Describes the first difference: the sequence of `one`, and the sequence
/// of `other`.
fn other_rows(tensor: TensorName, one: &SequenceRows, other: &SequenceRows) -> Option<[String; 2]> {
    if one == other {
        return None;
    }
    if one.count() != other.count() {
        return Some([one, other].map(|sequences| format!("{} sequences", sequences.count())));
    }
    let rows = |sequences: &SequenceRows, index| {
        let (_, first) = sequences.start(index);
        first..first + sequences.len(index)
    };
    let index = (0..one.count()).find(|&index| rows(one, index) != rows(other, index))?;
    Some([one, other].map(|sequences| {
        let rows = rows(sequences, index);
        format!("rows {} to {} of {tensor} in sequence {index}", rows.start, rows.end)
    }))
}
