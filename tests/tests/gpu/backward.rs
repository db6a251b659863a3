//! The backward kernels on a GPU.

mod bench;
mod form;
mod large;
mod periodic;
pub(crate) mod plans;
mod random;
mod refusals;
mod repeated;
mod tensors;

use fa3_types::{BackwardProblem, BackwardSpec, ProblemSpec};

use crate::Check;

/// The checks that take long; the others are those of [`plans`].
pub(crate) const CHECKS: [(&str, Check); 4] = [
    ("backward::random_problems", random::problems),
    ("backward::large_rows", large::rows),
    ("backward::large_keys", large::keys),
    ("backward::bits_1000_times", repeated::repetitions),
];

fn valid(spec: ProblemSpec) -> BackwardProblem {
    BackwardSpec::contiguous(spec).validate().expect("the problems of these checks are valid")
}
