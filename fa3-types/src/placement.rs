//! Where the tensors of a problem lie in memory.

use crate::{Dtype, Problem, ProblemError, TensorName};

/// A byte address, of the device or of the host. Plain data: nothing here dereferences it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub u64);

/// Tensor maps and vector loads need addresses at multiples of this.
const ALIGNMENT: u64 = 16;

/// The addresses of the tensors of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Addresses {
    /// Queries.
    pub q: Address,
    /// Keys.
    pub k: Address,
    /// Values.
    pub v: Address,
    /// Output.
    pub o: Address,
    /// Log-sum-exp, f32 of [`Problem::lse_shape`], contiguous. `None`: LSE is not written.
    pub lse: Option<Address>,
    /// Scales of e4m3 Q, K and V, f32 of [`Problem::descale_shapes`], contiguous: x = descale · code. Those
    /// of heads are not negative, and `None` means that all are 1. Those of blocks are positive, normal and given.
    /// Those of channels are not negative and given.
    pub descales: [Option<Address>; 3],
    /// Means of V's channels, f32 of [`Problem::v_mean_shape`], contiguous, where channels have scales: V = mean +
    /// descale · code.
    pub v_mean: Option<Address>,
}

impl Addresses {
    /// The addresses of the tensors that every call has, without LSE.
    pub fn new(q: Address, k: Address, v: Address, o: Address) -> Addresses {
        Addresses { q, k, v, o, lse: None, descales: [None; 3], v_mean: None }
    }

    /// Sets where LSE goes.
    #[must_use]
    pub fn lse(mut self, lse: Address) -> Addresses {
        self.lse = Some(lse);
        self
    }

    /// Sets where the scales of Q, K and V are.
    #[must_use]
    pub fn descales(mut self, descales: [Option<Address>; 3]) -> Addresses {
        self.descales = descales;
        self
    }

    /// Sets where the means of V's channels are.
    #[must_use]
    pub fn v_mean(mut self, v_mean: Address) -> Addresses {
        self.v_mean = Some(v_mean);
        self
    }
}

/// Addresses that a [`Problem`]'s tensors may have: none null or misaligned, no output over another tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement(Addresses);

impl Placement {
    /// Checks `at` against the extents of the problem's tensors. A tensor without elements may lie
    /// anywhere. Inputs may overlap each other (Q, K and V are often slices of one tensor); an output
    /// must keep clear of all others, judged by the whole interval from its first to its last byte.
    ///
    /// # Errors
    /// [`ProblemError::NullAddress`], also of scales of blocks and of channels and means, [`ProblemError::Misaligned`],
    /// [`ProblemError::AddressOverflow`] or [`ProblemError::Overlap`]; [`ProblemError::Descale`] if there are scales of
    /// tensors that are not e4m3; [`ProblemError::Unwanted`] if there are means and channels of V have no scales.
    pub fn new(problem: &Problem, at: Addresses) -> Result<Placement, ProblemError> {
        let f32_bytes = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>() * 4;
        let q = Interval::new(TensorName::Q, at.q, problem.q().extent_bytes().0)?;
        let k = Interval::new(TensorName::K, at.k, problem.k().extent_bytes().0)?;
        let v = Interval::new(TensorName::V, at.v, problem.v_bytes().0)?;
        let o = Interval::new(TensorName::O, at.o, problem.o().extent_bytes().0)?;
        let lse = match at.lse {
            Some(lse) => Interval::new(TensorName::Lse, lse, f32_bytes(&problem.lse_shape()))?,
            None => Interval::new(TensorName::Lse, Address(0), 0)?,
        };
        let descale = |tensor, shape: &[usize], address: Option<Address>| match address {
            Some(address) if problem.dtype() == Dtype::E4m3 => {
                // Those of channels are read four at a time, others one by one.
                let are_channels = tensor == TensorName::VDescale && problem.has_v_channels();
                let alignment = if are_channels { ALIGNMENT } else { 4 };
                Interval::aligned(tensor, address, f32_bytes(shape), alignment)
            }
            Some(_) => Err(ProblemError::Descale { tensor, dtype: problem.dtype() }),
            None if must_be_given(problem, tensor) && shape.iter().all(|&extent| extent > 0) => {
                Err(ProblemError::NullAddress { tensor })
            }
            None => Interval::new(tensor, Address(0), 0),
        };
        let ([q_descale, k_descale, v_descale], [q_shape, k_shape, v_shape]) =
            (at.descales, problem.descale_shapes());
        let v_mean = match (at.v_mean, problem.v_mean_shape()) {
            (Some(_), None) => return Err(ProblemError::Unwanted { tensor: TensorName::VMean }),
            (address, shape) => {
                let bytes = shape.map_or(0, |shape| f32_bytes(&shape));
                Interval::new(TensorName::VMean, address.unwrap_or(Address(0)), bytes)?
            }
        };
        let all = [
            q,
            k,
            v,
            o,
            lse,
            descale(TensorName::QDescale, &q_shape, q_descale)?,
            descale(TensorName::KDescale, &k_shape, k_descale)?,
            descale(TensorName::VDescale, &v_shape, v_descale)?,
            v_mean,
        ];
        Interval::check_outputs(&all, &[TensorName::O, TensorName::Lse])?;
        Ok(Placement(at))
    }

    /// The checked addresses.
    pub fn addresses(&self) -> Addresses {
        self.0
    }
}

/// Whether the scales of a tensor are those of blocks or of channels.
fn must_be_given(problem: &Problem, tensor: TensorName) -> bool {
    problem.has_block_scales() || (tensor == TensorName::VDescale && problem.has_v_channels())
}

/// The bytes of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Interval {
    tensor: TensorName,
    start: u64,
    end: u64,
}

impl Interval {
    /// `bytes` bytes at an address.
    pub(crate) fn new(tensor: TensorName, address: Address, bytes: u64) -> Result<Interval, ProblemError> {
        Interval::aligned(tensor, address, bytes, ALIGNMENT)
    }

    /// The same at a multiple of `alignment`.
    pub(crate) fn aligned(
        tensor: TensorName,
        Address(start): Address,
        bytes: u64,
        alignment: u64,
    ) -> Result<Interval, ProblemError> {
        if bytes == 0 {
            return Ok(Interval { tensor, start, end: start });
        }
        if start == 0 {
            return Err(ProblemError::NullAddress { tensor });
        }
        if !start.is_multiple_of(alignment) {
            return Err(ProblemError::Misaligned { tensor, address: start, alignment });
        }
        let overflow = ProblemError::AddressOverflow { tensor, address: start, bytes };
        let end = start.checked_add(bytes).ok_or(overflow)?;
        Ok(Interval { tensor, start, end })
    }

    /// That each of `outputs` shares no byte with any other tensor.
    pub(crate) fn check_outputs(all: &[Interval], outputs: &[TensorName]) -> Result<(), ProblemError> {
        for output in all.iter().filter(|interval| outputs.contains(&interval.tensor)) {
            for other in all.iter().filter(|other| other.tensor != output.tensor) {
                output.check_apart(*other)?;
            }
        }
        Ok(())
    }

    /// That they share no byte. An empty one shares none.
    fn check_apart(self, other: Interval) -> Result<(), ProblemError> {
        let either_is_empty = self.start == self.end || other.start == other.end;
        if either_is_empty || self.end <= other.start || other.end <= self.start {
            return Ok(());
        }
        Err(ProblemError::Overlap {
            output: self.tensor,
            output_start: self.start,
            output_end: self.end,
            other: other.tensor,
            other_start: other.start,
            other_end: other.end,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ProblemSpec, Shape};

    const SHAPE: Shape = Shape { batch: 1, seqlen: 16, heads: 1, head_dim: 64 };
    const GOOD: Addresses = Addresses {
        q: Address(0x1000),
        k: Address(0x2000),
        v: Address(0x3000),
        o: Address(0x4000),
        lse: Some(Address(0x5000)),
        descales: [None; 3],
        v_mean: None,
    };

    fn place(at: Addresses) -> Result<Placement, ProblemError> {
        let problem = ProblemSpec::dense(Dtype::F16, SHAPE, SHAPE).validate().unwrap();
        Placement::new(&problem, at)
    }

    #[test]
    fn good_addresses() {
        assert_eq!(place(GOOD).unwrap().addresses(), GOOD);
        assert!(place(Addresses { k: GOOD.q, v: GOOD.q, ..GOOD }).is_ok(), "inputs may overlap");
        assert!(
            place(Addresses { o: Address(GOOD.v.0 + 16 * 64 * 2), ..GOOD }).is_ok(),
            "touching is not overlapping"
        );
    }

    #[test]
    fn null_misaligned_and_wrapping_addresses_are_rejected() {
        let tensor = TensorName::V;
        assert_eq!(place(Addresses { v: Address(0), ..GOOD }), Err(ProblemError::NullAddress { tensor }));
        let misaligned = ProblemError::Misaligned { tensor, address: 0x3008, alignment: 16 };
        assert_eq!(place(Addresses { v: Address(0x3008), ..GOOD }), Err(misaligned));
        let address = u64::MAX - 15;
        let wraps = ProblemError::AddressOverflow { tensor, address, bytes: 2048 };
        assert_eq!(place(Addresses { v: Address(address), ..GOOD }), Err(wraps));
    }

    #[test]
    fn outputs_must_keep_clear() {
        let overlap = |output, output_start, output_end, other, other_start, other_end| {
            Err(ProblemError::Overlap { output, output_start, output_end, other, other_start, other_end })
        };
        let o_on_q = overlap(TensorName::O, 0x1010, 0x1810, TensorName::Q, 0x1000, 0x1800);
        assert_eq!(place(Addresses { o: Address(0x1010), ..GOOD }), o_on_q);
        let lse_in_k = overlap(TensorName::Lse, 0x2100, 0x2140, TensorName::K, 0x2000, 0x2800);
        assert_eq!(place(Addresses { lse: Some(Address(0x2100)), ..GOOD }), lse_in_k);
        let o_on_lse = overlap(TensorName::O, 0x4000, 0x4800, TensorName::Lse, 0x4000, 0x4040);
        assert_eq!(place(Addresses { lse: Some(GOOD.o), ..GOOD }), o_on_lse);
    }

    #[test]
    fn scales_are_of_e4m3() {
        let tensor = TensorName::KDescale;
        let at = |address| GOOD.descales([None, Some(Address(address)), None]);
        assert_eq!(place(at(0x6004)), Err(ProblemError::Descale { tensor, dtype: Dtype::F16 }));
        let problem = ProblemSpec::dense(Dtype::E4m3, SHAPE, SHAPE).validate().unwrap();
        let place = |address| Placement::new(&problem, at(address));
        assert_eq!(place(0x6004).map(|at| at.addresses().descales[1]), Ok(Some(Address(0x6004))));
        assert_eq!(place(0), Err(ProblemError::NullAddress { tensor }));
        assert_eq!(place(0x6002), Err(ProblemError::Misaligned { tensor, address: 0x6002, alignment: 4 }));
        assert!(matches!(place(0x4004), Err(ProblemError::Overlap { other: TensorName::KDescale, .. })));
        let blocks = ProblemSpec::dense(Dtype::E4m3, SHAPE, SHAPE).block_scales(64).validate().unwrap();
        let missing = ProblemError::NullAddress { tensor: TensorName::QDescale };
        assert_eq!(Placement::new(&blocks, at(0x6004)), Err(missing));
    }

    #[test]
    fn means_are_of_channels() {
        let tensor = TensorName::VMean;
        let spec = ProblemSpec::dense(Dtype::E4m3, SHAPE, SHAPE);
        let place = |spec: &ProblemSpec, at| Placement::new(&spec.clone().validate().unwrap(), at);
        let scales = |v| GOOD.descales([None, None, Some(Address(v))]);
        let good = scales(0x7000).v_mean(Address(0x6010));
        assert_eq!(place(&spec, good), Err(ProblemError::Unwanted { tensor }));
        let channels = spec.v_channels();
        assert_eq!(place(&channels, good).map(|at| at.addresses()), Ok(good));
        assert_eq!(place(&channels, scales(0x7000)), Err(ProblemError::NullAddress { tensor }));
        assert_eq!(
            place(&channels, scales(0x7000).v_mean(Address(0x6004))),
            Err(ProblemError::Misaligned { tensor, address: 0x6004, alignment: 16 })
        );
        let tensor = TensorName::VDescale;
        assert_eq!(
            place(&channels, scales(0x6004).v_mean(Address(0x6010))),
            Err(ProblemError::Misaligned { tensor, address: 0x6004, alignment: 16 })
        );
        let missing = place(&channels, GOOD.v_mean(Address(0x6010)));
        assert_eq!(missing, Err(ProblemError::NullAddress { tensor }));
        // 64 numbers, of which the last is within O.
        let over = place(&channels, scales(0x7000).v_mean(Address(0x3f10)));
        assert!(matches!(over, Err(ProblemError::Overlap { other: TensorName::VMean, .. })), "{over:?}");
    }

    #[test]
    fn empty_tensors_may_lie_anywhere() {
        let none = Shape { seqlen: 0, ..SHAPE };
        let problem = ProblemSpec::dense(Dtype::F16, SHAPE, none).validate().unwrap();
        let at = Addresses { k: Address(0), v: Address(0), ..GOOD };
        assert!(Placement::new(&problem, at).is_ok());
    }
}
