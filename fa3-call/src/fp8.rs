//! A call of FP8 attention of 16-bit tensors.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_quant::Incoherent;
use fa3_sched::fp8::Plan;
use fa3_types::{Dtype, Fp8Problem, Fp8Spec, ProblemSpec, QkRotary, RopeStyle, Rotary};

use crate::attention::{self, Attention, Pass};
use crate::call::Call;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// FP8 attention of 16-bit tensors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Attention {
    /// The attention, whose tensors have 16-bit types.
    pub attention: Attention,
    /// The rotation of Q and K, if any.
    pub rotary: Option<QkRotary>,
    /// The seed of the Hadamard transform's signs; no transform if `None`.
    pub hadamard_seed: Option<u64>,
    /// Whether V has per-channel scales and means, in place of block scales.
    pub v_channels: bool,
}

/// The options of FP8 attention.
pub struct Numbers {
    attention: attention::Numbers,
    style: RopeStyle,
    /// The positions of the first rows of Q and of K, for tensors whose positions are not listed.
    firsts: [usize; 2],
    hadamard_seed: Option<u64>,
    v_channels: bool,
}

impl Fp8Attention {
    /// The problem, from the call's attention with other strides.
    ///
    /// # Errors
    /// The call is invalid.
    pub fn problem_of(&self, attention: ProblemSpec) -> Result<Fp8Problem, Error> {
        let mut spec = Fp8Spec::new(attention);
        (spec.rotary, spec.v_channels) = (self.rotary, self.v_channels);
        let problem = spec.clone().validate().map_err(OperationError::from)?;
        let Some(seed) = self.hadamard_seed else { return Ok(problem) };
        // `signs` is `None` only above 256 entries, and `validate` has refused such a head_dim.
        spec.signs = Incoherent::new(problem.attention().head_dim(), seed).signs();
        Ok(spec.validate().map_err(OperationError::from)?)
    }
}

impl Call for Fp8Attention {
    type Plan = Plan;

    type Numbers = Numbers;

    fn numbers(options: &Options<'_>) -> Result<Numbers, Error> {
        Ok(Numbers {
            attention: Attention::numbers(options)?,
            style: options.style()?,
            firsts: [options.integer("q_first")?.unwrap_or(0), options.integer("k_first")?.unwrap_or(0)],
            hadamard_seed: options.integer("hadamard_seed")?,
            v_channels: options.flag("v_channels")?,
        })
    }

    fn given(tensors: &mut Tensors<'_>, numbers: &Numbers) -> Result<Fp8Attention, Error> {
        let &Numbers { ref attention, style, firsts: [q, k], hadamard_seed, v_channels } = numbers;
        let attention = Attention::of(tensors, attention, Pass::Forward)?;
        tensors.has_output("lse", Dtype::F32)?;
        let rotary = tensors.rotary(style, [("q_positions", q), ("k_positions", k)])?;
        let rotary = rotary.map(|[Rotary { style, rotary_dim, table_rows, positions }, of_k]| QkRotary {
            style,
            rotary_dim,
            table_rows,
            q_positions: positions,
            k_positions: of_k.positions,
        });
        Ok(Fp8Attention { attention, rotary, hadamard_seed, v_channels })
    }

    fn problem(&self) -> Result<Fp8Problem, Error> {
        self.problem_of(self.attention.spec()?)
    }

    fn options(&self, _sms: NonZeroU32) -> Result<(), Error> {
        Ok(())
    }
}
