//! Runs the oracle on a case with its sequences and heads in reverse order. Its results show that the oracle and the
//! harness find every head's rows by the layout.

use fa3_ref::{Forward, Gradients, oracle};

use super::{Answer, Engine};
use crate::reshape::Reversed;
use crate::{Case, Values};

pub(super) struct Rearranged;

impl Engine for Rearranged {
    fn name(&self) -> String {
        "oracle, reversed".to_owned()
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        let reversed = Reversed::new(&case.problem);
        let values = reversed.values(values);
        let result = oracle::forward(&values.inputs(&reversed.problem));
        let (o, lse) = (reversed.rows_q(&result.o), reversed.lse(&result.lse));
        Ok(Forward { o: o.mapv(|x| x as f32), lse: lse.mapv(|x| x as f32) })
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        let reversed = Reversed::new(&case.problem);
        let values = reversed.values(values);
        let result = oracle::backward(&values.inputs(&reversed.problem), values.dout.view())
            .expect("dO has the shape of the problem it was made for");
        Ok(Gradients {
            dq: reversed.rows_q(&result.dq).mapv(|x| x as f32),
            dk: reversed.rows_k(&result.dk).mapv(|x| x as f32),
            dv: reversed.rows_k(&result.dv).mapv(|x| x as f32),
            dtables: result.dtables.iter().map(|x| x.iter().map(|&x| x as f32).collect()).collect(),
            dsink: result.dsink.map(|dsink| reversed.sink(&dsink).mapv(|x| x as f32)),
        })
    }
}
