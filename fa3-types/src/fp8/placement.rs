//! Where the tensors of attention in 8 bits lie in memory.

use super::Fp8Problem;
use crate::{Address, Interval, ProblemError, TensorName};

/// The addresses of the tensors of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Addresses {
    /// Queries, of 16 bits as all but LSE and tables.
    pub q: Address,
    /// Keys.
    pub k: Address,
    /// Values.
    pub v: Address,
    /// Output.
    pub o: Address,
    /// Log-sum-exp. `None`: LSE is not written.
    pub lse: Option<Address>,
    /// Cosines and sines, f32 (table_rows, rotary_dim / 2) and contiguous, if Q and K are rotated.
    pub tables: Option<[Address; 2]>,
}

/// Addresses that a [`Fp8Problem`]'s tensors may have: none null or misaligned, no output over another tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Placement(Fp8Addresses);

impl Fp8Placement {
    /// Checks `at` against the extents of the problem's tensors.
    ///
    /// # Errors
    /// [`ProblemError::NullAddress`], [`ProblemError::Misaligned`], [`ProblemError::AddressOverflow`] or
    /// [`ProblemError::Overlap`]; [`ProblemError::Unwanted`] if there are tables and no rotation.
    pub fn new(problem: &Fp8Problem, at: Fp8Addresses) -> Result<Fp8Placement, ProblemError> {
        if at.tables.is_some() && problem.rotary().is_none() {
            return Err(ProblemError::Unwanted { tensor: TensorName::Cos });
        }
        let [cos, sin] = at.tables.unwrap_or([Address(0); 2]);
        let addresses = [at.q, at.k, at.v, at.o, at.lse.unwrap_or(Address(0)), cos, sin];
        let mut intervals = Vec::new();
        for ((tensor, bytes), address) in problem.tensor_bytes().into_iter().zip(addresses) {
            let is_left_out = tensor == TensorName::Lse && at.lse.is_none();
            intervals.push(Interval::new(tensor, address, if is_left_out { 0 } else { bytes })?);
        }
        Interval::check_outputs(&intervals, &[TensorName::O, TensorName::Lse])?;
        Ok(Fp8Placement(at))
    }

    /// The checked addresses.
    pub fn addresses(&self) -> Fp8Addresses {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Fp8Spec, ProblemSpec, QkRotary, RopeStyle, Shape};

    #[test]
    fn tables_are_those_of_a_rotation() {
        let shape = Shape { batch: 1, seqlen: 100, heads: 2, head_dim: 64 };
        let plain = Fp8Spec::new(ProblemSpec::dense(Dtype::Bf16, shape, shape));
        let (style, rotary_dim, table_rows) = (RopeStyle::Interleaved, 32, 100);
        let rotary = QkRotary { style, rotary_dim, table_rows, q_position: 0, k_position: 0 };
        let [plain, rotated] = [plain.clone(), plain.rotary(rotary)].map(|spec| spec.validate().unwrap());
        let [q, k, v, o] = [1, 2, 3, 4].map(|place| Address(place << 20));
        let none = Fp8Addresses { q, k, v, o, lse: None, tables: None };
        let with = |cos, sin| Fp8Addresses { tables: Some([Address(cos), Address(sin)]), ..none };
        assert_eq!(Fp8Placement::new(&plain, none).map(|at| at.addresses()), Ok(none));
        assert!(Fp8Placement::new(&rotated, with(5 << 20, 6 << 20)).is_ok());
        let unwanted = Fp8Placement::new(&plain, with(5 << 20, 6 << 20));
        assert_eq!(unwanted, Err(ProblemError::Unwanted { tensor: TensorName::Cos }));
        let missing = Fp8Placement::new(&rotated, none);
        assert_eq!(missing, Err(ProblemError::NullAddress { tensor: TensorName::Cos }));
        // A table has 100 rows of 16 numbers.
        let over = Fp8Placement::new(&rotated, with(5 << 20, (4 << 20) - 6384));
        assert!(matches!(over, Err(ProblemError::Overlap { other: TensorName::Sin, .. })), "{over:?}");
        let over = Fp8Placement::new(&plain, Fp8Addresses { o: q, ..none });
        assert!(matches!(over, Err(ProblemError::Overlap { output: TensorName::O, .. })), "{over:?}");
    }
}
