//! Runs engines without `qv` on cases that have it.

use fa3_ref::{Forward, Gradients};

use super::{Answer, Arithmetic, Engine, Skip};
use crate::{Case, Values};

/// An engine that computes the [joined](Case::joined) form of a case.
pub(super) struct Joined<E>(pub(super) E);

impl<E: Engine> Engine for Joined<E> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn arithmetic(&self, case: &Case) -> Arithmetic {
        self.0.arithmetic(case)
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        let (case, values) = case.joined(values);
        self.0.forward(&case, &values)
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        if case.problem.qv().is_some() {
            return Err(Skip::NoBackward.into());
        }
        self.0.backward(case, values)
    }
}
