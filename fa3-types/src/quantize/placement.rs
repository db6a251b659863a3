//! Where the tensors of a quantization lie in memory.

use super::QuantizeProblem;
use crate::{Address, Interval, ProblemError, TensorName};

/// The addresses of the tensors of one call: those that its [`QuantizeProblem`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizeAddresses {
    /// The tensor.
    pub x: Address,
    /// Its codes.
    pub codes: Address,
    /// The scales of its blocks or channels.
    pub scales: Option<Address>,
    /// The means of its channels.
    pub mean: Option<Address>,
    /// Cosines.
    pub cos: Option<Address>,
    /// Sines.
    pub sin: Option<Address>,
    /// Positions.
    pub positions: Option<Address>,
}

impl QuantizeAddresses {
    /// In the order of the fields.
    pub fn all(&self) -> [Option<Address>; 7] {
        [Some(self.x), Some(self.codes), self.scales, self.mean, self.cos, self.sin, self.positions]
    }
}

/// Addresses that a [`QuantizeProblem`]'s tensors may have: those that it has and no others, none null or misaligned,
/// no output over another tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizePlacement(QuantizeAddresses);

impl QuantizePlacement {
    /// Checks `at` against the extents of the problem's tensors.
    ///
    /// # Errors
    /// [`ProblemError::NullAddress`], [`ProblemError::Unwanted`], [`ProblemError::Misaligned`],
    /// [`ProblemError::AddressOverflow`] or [`ProblemError::Overlap`].
    pub fn new(problem: &QuantizeProblem, at: QuantizeAddresses) -> Result<QuantizePlacement, ProblemError> {
        let mut intervals = Vec::new();
        for ((tensor, bytes), address) in problem.tensor_bytes().into_iter().zip(at.all()) {
            match (bytes, address) {
                (Some(bytes), address) => {
                    intervals.push(Interval::new(tensor, address.unwrap_or(Address(0)), bytes)?);
                }
                (None, None) => {}
                (None, Some(_)) => return Err(ProblemError::Unwanted { tensor }),
            }
        }
        Interval::check_outputs(&intervals, &[TensorName::Codes, TensorName::Scales, TensorName::Mean])?;
        Ok(QuantizePlacement(at))
    }

    /// The checked addresses.
    pub fn addresses(&self) -> QuantizeAddresses {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Positions, QuantizeSpec, RopeStyle, Rotary, Shape};

    #[test]
    fn a_call_has_the_tensors_that_its_problem_has() {
        let shape = Shape { batch: 2, seqlen: 100, heads: 3, head_dim: 96 };
        let rotary = Rotary {
            style: RopeStyle::Interleaved,
            rotary_dim: 32,
            table_rows: 110,
            positions: Positions::From(10),
        };
        let problem = QuantizeSpec::contiguous(Dtype::F16, shape).rotary(rotary).validate().unwrap();
        let at = |start| Some(Address(start));
        let good = QuantizeAddresses {
            x: Address(0x10_0000),
            codes: Address(0x20_0000),
            scales: at(0x30_0000),
            mean: None,
            cos: at(0x40_0000),
            sin: at(0x40_0000),
            positions: None,
        };
        let place = |at| QuantizePlacement::new(&problem, at);
        assert_eq!(place(good).unwrap().addresses(), good);
        let missing = ProblemError::NullAddress { tensor: TensorName::Sin };
        assert_eq!(place(QuantizeAddresses { sin: None, ..good }), Err(missing));
        let unwanted = ProblemError::Unwanted { tensor: TensorName::Positions };
        assert_eq!(place(QuantizeAddresses { positions: good.cos, ..good }), Err(unwanted));
        let over = place(QuantizeAddresses { codes: good.x, ..good });
        assert!(matches!(over, Err(ProblemError::Overlap { output: TensorName::Codes, .. })), "{over:?}");
        let over = place(QuantizeAddresses { scales: good.cos, ..good });
        assert!(matches!(over, Err(ProblemError::Overlap { output: TensorName::Scales, .. })), "{over:?}");
    }
}
