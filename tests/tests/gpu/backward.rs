//! The backward kernels on a GPU.

mod bench;
mod form;
mod large;
mod periodic;
pub(crate) mod plans;
mod refusals;
mod repeated;
mod tensors;

use fa3_tests::bwd::BwdCase;
use fa3_types::{BackwardProblem, BackwardSpec, ProblemSpec};

use crate::{Check, random};

/// The checks that take long; the others are those of [`plans`].
pub(crate) const CHECKS: [(&str, Check); 5] = [
    ("backward::random_problems", |device| random::problems(device, BwdCase::random)),
    ("backward::random_packed_problems", |device| random::problems(device, BwdCase::random_packed)),
    ("backward::large_rows", large::rows),
    ("backward::large_keys", large::keys),
    ("backward::bits_1000_times", repeated::repetitions),
];

fn valid(spec: ProblemSpec) -> BackwardProblem {
    BackwardSpec::contiguous(spec).validate().expect("the problems of these checks are valid")
}
