//! The problems of shipped kernels with functions of scores.

use fa3_types::{Dtype, ProblemSpec, ScoreExpr, ScoreForm, ScoreFunction, ScoreTable};

use super::forward::{MANY_HEADS, problem};

/// ALiBi, whose derivative is 1.
pub(super) const ALIBI: &str = "s + slope[h] * (k - q)";
/// A soft cap, whose derivative is not.
pub(super) const CAP: &str = "cap * tanh(s / cap)";
/// A bias of each score.
pub(super) const BIAS: &str = "s + bias[h, q, k]";

/// Problems with ALiBi.
pub(super) fn scored() -> impl Iterator<Item = ProblemSpec> {
    [64, 128].into_iter().map(|head_dim| {
        problem(Dtype::Bf16, (8192, 8192), MANY_HEADS, head_dim).causal().score(score_form(ALIBI))
    })
}

/// The form of a text with a table `slope` of one axis, a table `bias` of heads, queries and keys, and a number `cap`.
pub(super) fn score_form(text: &str) -> ScoreForm {
    let table = |extents: [usize; 3]| {
        let count = extents.iter().product();
        ScoreTable::new(&extents, vec![1.0; count]).expect("there are as many elements")
    };
    let slopes = ScoreTable::new(&[1], [1.0]).expect("there is one");
    let values = [("slope", slopes.into()), ("bias", table([1, 100, 100]).into()), ("cap", 30.0.into())];
    let function = ScoreFunction::parse(text, values);
    function.expect("the text is valid").form().clone()
}

/// The word of an expression in a kernel's name: its text without spaces.
pub(super) fn score_word(expr: &ScoreExpr) -> String {
    expr.to_string().replace(' ', "")
}
