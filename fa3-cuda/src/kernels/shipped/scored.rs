//! The problems of shipped kernels with functions of scores.

use fa3_types::{Dtype, ProblemSpec, ScoreExpr, ScoreFunction, ScoreTable};

use super::forward::{MANY_HEADS, problem};

/// Problems with ALiBi.
pub(super) fn scored() -> impl Iterator<Item = ProblemSpec> {
    let slopes = ScoreTable::new(&[1], [1.0]).expect("there is one");
    let alibi = ScoreFunction::parse("s + slope[h] * (k - q)", [("slope", slopes.into())]);
    let form = alibi.expect("the text is valid").form().clone();
    [64, 128].into_iter().map(move |head_dim| {
        problem(Dtype::Bf16, (8192, 8192), MANY_HEADS, head_dim).causal().score(form.clone())
    })
}

/// The word of an expression in a kernel's name: its text without spaces.
pub(super) fn score_word(expr: &ScoreExpr) -> String {
    expr.to_string().replace(' ', "")
}
