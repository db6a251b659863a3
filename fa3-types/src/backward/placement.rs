//! Where the tensors of a backward pass lie in memory.

use super::BackwardProblem;
use crate::{Address, Interval, ProblemError, TensorName};

/// The addresses of the tensors of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardAddresses {
    /// Queries.
    pub q: Address,
    /// Keys.
    pub k: Address,
    /// Values.
    pub v: Address,
    /// The forward pass's output.
    pub o: Address,
    /// Its log-sum-exp.
    pub lse: Address,
    /// The gradient of O.
    pub dout: Address,
    /// The gradient of LSE. `None`: it is 0.
    pub dlse: Option<Address>,
    /// Where the gradient of Q goes.
    pub dq: Address,
    /// Where the gradient of K goes.
    pub dk: Address,
    /// Where the gradient of V goes.
    pub dv: Address,
}

impl BackwardAddresses {
    /// All of them, in the order of a program's buffers.
    pub fn all(&self) -> [Option<Address>; 10] {
        let BackwardAddresses { q, k, v, o, lse, dout, dlse, dq, dk, dv } = *self;
        let [q, k, v, o, lse, dout, dq, dk, dv] = [q, k, v, o, lse, dout, dq, dk, dv].map(Some);
        [q, k, v, o, lse, dout, dlse, dq, dk, dv]
    }
}

/// Addresses that a [`BackwardProblem`]'s tensors may have: none null or misaligned, no output over another tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlacement(BackwardAddresses);

impl BackwardPlacement {
    /// Checks `at` as [`Placement::new`](crate::Placement::new) does; dQ, dK and dV are the outputs.
    ///
    /// # Errors
    /// [`ProblemError::NullAddress`], [`ProblemError::Misaligned`], [`ProblemError::AddressOverflow`] or
    /// [`ProblemError::Overlap`].
    pub fn new(problem: &BackwardProblem, at: BackwardAddresses) -> Result<BackwardPlacement, ProblemError> {
        let mut intervals = Vec::new();
        for ((tensor, bytes), address) in problem.tensor_bytes().into_iter().zip(at.all()) {
            // Only dLSE may be absent.
            let Some(address) = address else { continue };
            // Numbers of these are read one by one.
            let is_f32 = matches!(tensor, TensorName::Lse | TensorName::DLse);
            intervals.push(match is_f32 {
                true => Interval::aligned(tensor, address, bytes, 4)?,
                false => Interval::new(tensor, address, bytes)?,
            });
        }
        Interval::check_outputs(&intervals, &[TensorName::DQ, TensorName::DK, TensorName::DV])?;
        Ok(BackwardPlacement(at))
    }

    /// The checked addresses.
    pub fn addresses(&self) -> BackwardAddresses {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackwardSpec, Dtype, ProblemSpec, Shape};

    #[test]
    fn outputs_keep_clear_and_the_gradient_of_lse_may_be_absent() {
        let shape = Shape { batch: 1, seqlen: 16, heads: 1, head_dim: 64 };
        let problem =
            BackwardSpec::contiguous(ProblemSpec::dense(Dtype::F16, shape, shape)).validate().unwrap();
        let at = |index: u64| Address(index << 12);
        let good = BackwardAddresses {
            q: at(1),
            k: at(2),
            v: at(3),
            o: at(4),
            lse: Address((5 << 12) + 4),
            dout: at(6),
            dlse: None,
            dq: at(8),
            dk: at(9),
            dv: at(10),
        };
        let place = |at| BackwardPlacement::new(&problem, at);
        assert_eq!(place(good).unwrap().addresses(), good);
        assert!(place(BackwardAddresses { dout: good.o, ..good }).is_ok(), "inputs may overlap");
        assert!(place(BackwardAddresses { dlse: Some(at(7)), ..good }).is_ok());
        let null = ProblemError::NullAddress { tensor: TensorName::DLse };
        assert_eq!(place(BackwardAddresses { dlse: Some(Address(0)), ..good }), Err(null));
        let null = ProblemError::NullAddress { tensor: TensorName::Lse };
        assert_eq!(place(BackwardAddresses { lse: Address(0), ..good }), Err(null));
        for over in [
            BackwardAddresses { dq: good.q, ..good },
            BackwardAddresses { dk: good.dv, ..good },
            BackwardAddresses { dv: good.dout, ..good },
        ] {
            assert!(matches!(place(over), Err(ProblemError::Overlap { .. })));
        }
    }
}
