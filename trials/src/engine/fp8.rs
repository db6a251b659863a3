//! The emulator of Hopper's FP8 attention, on e4m3 cases.

use fa3_quant::{Accumulation, Fp8Attention, Output, QuantError, Quantized, add_sinks};
use fa3_ref::{Forward, Precision};
use fa3_types::Dtype;

use super::{Answer, Arithmetic, Engine, NoAnswer, Skip};
use crate::{Case, Scaled, Values};

pub(super) struct Fp8 {
    /// Keys per block, which is also the number of keys between two promotions to f32 registers.
    pub(super) key_block: usize,
}

impl Engine for Fp8 {
    fn name(&self) -> String {
        format!("fp8 emulator {}", self.key_block)
    }

    fn arithmetic(&self, _case: &Case) -> Arithmetic {
        Arithmetic::Fp8
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        if case.problem.dtype() != Dtype::E4m3 {
            return Err(Skip::Dtype(case.problem.dtype()).into());
        }
        if case.hides_a_poisoned_value() {
            return Err(Skip::PoisonedValue.into());
        }
        let attention = Fp8Attention::new(Accumulation::TwoLevel { keys: self.key_block }, self.key_block);
        let output = emulated(case, values, attention).map_err(|error| NoAnswer::Failed(Box::new(error)))?;
        let precision = Precision::of_output(case.problem.dtype());
        Ok(Forward { o: output.o.mapv(|x| precision.round(x)), lse: output.lse })
    }
}

/// O (not rounded) and LSE of an e4m3 case, computed by the emulator.
///
/// # Errors
/// See [`Fp8Attention::forward`].
pub fn emulated(case: &Case, values: &Values, attention: Fp8Attention) -> Result<Output, QuantError> {
    let [q, k, v] = codes(case, values);
    completed(case, values, attention.forward(&case.problem, &q, &k, &v)?)
}

/// Completes a result with the means and scales of V's channels and with the sinks of the case.
pub(crate) fn completed(case: &Case, values: &Values, mut output: Output) -> Result<Output, QuantError> {
    if let Some(channels) = Scaled::channels(&case.problem) {
        channels.restore(&case.problem, &mut output)?;
    }
    if let Some(sink) = &values.sink {
        add_sinks(&case.problem, sink.view(), &mut output)?;
    }
    Ok(output)
}

/// Q, K and V of an e4m3 case as quantized tensors, without the scales and means of V's channels.
pub(crate) fn codes(case: &Case, values: &Values) -> [Quantized; 3] {
    let tensors = [(Scaled::Q, &values.q), (Scaled::K, &values.k), (Scaled::V, &values.v)];
    tensors.map(|(of, x)| of.quantized(&case.problem, x))
}
