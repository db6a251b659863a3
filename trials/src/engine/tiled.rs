//! The paper's algorithms from `fa3_ref::tiled`. Algorithm 3 follows each of the forward algorithms.

use fa3_ref::tiled::{self, Algorithm, Tiles};
use fa3_ref::{Forward, Gradients, Precision};

use super::{Answer, Engine, Skip};
use crate::{Case, Values};

pub(super) struct Tiled {
    algorithm: Algorithm,
    tiles: Tiles,
}

impl Tiled {
    pub(super) fn new(algorithm: Algorithm, rows: usize, keys: usize) -> Tiled {
        let tiles = Tiles::new(rows, keys).expect("tiles have rows and keys");
        Tiled { algorithm, tiles }
    }
}

impl Engine for Tiled {
    fn name(&self) -> String {
        let number = match self.algorithm {
            Algorithm::Basic => 1,
            Algorithm::TwoStage => 2,
            Algorithm::ThreeStage => 4,
        };
        format!("algorithm {number} {}x{}", self.tiles.rows(), self.tiles.keys())
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        if case.hides_a_poisoned_value() {
            return Err(Skip::PoisonedValue.into());
        }
        let precision = Precision::of_output(case.problem.dtype());
        Ok(tiled::forward(&values.inputs(&case.problem), self.algorithm, self.tiles, precision))
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        let Forward { o, lse } = self.forward(case, values)?;
        let precision = Precision::of_output(case.problem.dtype());
        let (inputs, dout) = (values.inputs(&case.problem), values.dout.view());
        let gradients = tiled::backward(&inputs, dout, o.view(), lse.view(), self.tiles, precision);
        Ok(gradients.expect("O, LSE and dO have the shape of the problem they were made for"))
    }
}
