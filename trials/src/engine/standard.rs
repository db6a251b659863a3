//! Standard attention, the baseline of the error law. It shows that the harness applies the law correctly.

use fa3_ref::{Forward, Gradients, Precision, standard};

use super::{Answer, Arithmetic, Engine, Skip};
use crate::{Case, Values};

pub(super) struct Standard;

impl Engine for Standard {
    fn name(&self) -> String {
        "standard".to_owned()
    }

    fn arithmetic(&self, _case: &Case) -> Arithmetic {
        Arithmetic::RoundedScores
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        if case.hides_a_poisoned_value() {
            return Err(Skip::PoisonedValue.into());
        }
        Ok(standard::forward(&values.inputs(&case.problem), Precision::of_output(case.problem.dtype())))
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        let precision = Precision::of_output(case.problem.dtype());
        let gradients = standard::backward(&values.inputs(&case.problem), values.dout.view(), precision);
        Ok(gradients.expect("dO has the shape of the problem it was made for"))
    }
}
