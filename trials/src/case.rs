//! A test case: a problem and a description of its inputs.

use std::borrow::Cow;

use fa3_ref::Inputs;
use fa3_types::{KnownProblem, Lengths};
use ndarray::{Array4, Axis, concatenate};

use crate::{Dist, Poison, Values};

/// A problem with reproducible inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name, unique among the chosen cases.
    pub name: String,
    /// The problem.
    pub problem: KnownProblem,
    /// The distribution of the numbers.
    pub dist: Dist,
    /// The rows that hold NaN or infinities.
    pub poison: Poison,
    /// The seed of the numbers.
    pub seed: u64,
}

impl Case {
    /// A problem with standard normal numbers.
    pub fn normal(name: &str, problem: KnownProblem, seed: u64) -> Case {
        Case { name: name.to_owned(), problem, dist: Dist::Normal, poison: Poison::None, seed }
    }

    /// The inputs.
    pub fn values(&self) -> Values {
        Values::new(&self.problem, self.dist, self.poison, self.seed)
    }

    /// The equivalent case without `qv` (see [`Problem::joined`]), and its values. A case without `qv` stays as it is.
    ///
    /// [`Problem::joined`]: fa3_types::Problem::joined
    pub fn joined<'a>(&'a self, values: &'a Values) -> (Cow<'a, Case>, Cow<'a, Values>) {
        match &values.qv {
            None => (Cow::Borrowed(self), Cow::Borrowed(values)),
            Some(qv) => {
                let case = Case { problem: self.problem.joined(), ..self.clone() };
                let (q, k) = (side_by_side(qv, &values.q), side_by_side(&values.v, &values.k));
                (Cow::Owned(case), Cow::Owned(Values { q, k, qv: None, ..values.clone() }))
            }
        }
    }

    /// The command that reruns a module of the suite. `FA3_CASE` restricts it to this case, if this is a chosen case.
    pub fn replay(&self, test: &str) -> String {
        format!("FA3_CASE={} cargo test -p fa3-tests --test suite {test}::", self.name)
    }

    /// Whether a value row is NaN and some query row does not see it. An engine that multiplies whole blocks of V,
    /// masked keys included, may turn O of that query row into NaN, since 0 · NaN = NaN.
    pub fn hides_a_poisoned_value(&self) -> bool {
        let Poison::ValueRow(key) = self.poison else { return false };
        (0..self.problem.batch()).any(|index| {
            let Lengths { q, k } = self.problem.lengths(index);
            let heads = if self.problem.intervals().is_some() { self.problem.heads().q() } else { 1 };
            let mut rows = (0..heads).flat_map(|head| (0..q).map(move |row| [index, head, row]));
            key < k && rows.any(|row| !self.problem.allows(row, key))
        })
    }
}

/// Concatenates two tensors along their columns.
fn side_by_side(first: &Array4<f32>, second: &Array4<f32>) -> Array4<f32> {
    concatenate(Axis(3), &[first.view(), second.view()]).expect("both have the same rows")
}

impl Values {
    /// Q, K and V as inputs of `problem`.
    ///
    /// # Panics
    /// If the shapes differ from the problem's, or the problem has `qv`: see [`Case::joined`].
    pub fn inputs<'a>(&'a self, problem: &'a KnownProblem) -> Inputs<'a, f32> {
        let qkv = [self.q.view(), self.k.view(), self.v.view()];
        Inputs::with_sink(problem, qkv, self.sink.as_ref().map(|sink| sink.view()))
            .expect("values have the shape of the problem they were made for")
    }
}
