//! The rows of Table 3.

use std::fmt;

use serde::Serialize;

use super::recipe::Recipe;

/// A row of the table: a way to compute attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Method {
    StandardFp16,
    Flash2Fp16,
    Flash3Fp16,
    StandardFp8,
    Flash3Fp8,
    NoBlockQuantization,
    NoIncoherentProcessing,
    TwoLevel,
    VChannels,
}

/// The kernel that computes a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Attention in fp16.
    Fp16,
    /// Attention in FP8, with two-level accumulation.
    Fp8(Recipe),
}

impl Method {
    pub(super) const ALL: [Method; 9] = [
        Method::StandardFp16,
        Method::Flash2Fp16,
        Method::Flash3Fp16,
        Method::StandardFp8,
        Method::Flash3Fp8,
        Method::NoBlockQuantization,
        Method::NoIncoherentProcessing,
        Method::TwoLevel,
        Method::VChannels,
    ];

    /// The kernel that computes the method. The baselines have no kernel. `TwoLevel` has none of its own, since the FP8
    /// kernels always accumulate in two levels.
    pub(super) fn kernel(self) -> Option<Kernel> {
        match self {
            Method::Flash3Fp16 => Some(Kernel::Fp16),
            Method::Flash3Fp8 => Some(Kernel::Fp8(Recipe::PAPER)),
            Method::NoBlockQuantization => Some(Kernel::Fp8(Recipe::ONE_SCALE)),
            Method::NoIncoherentProcessing => Some(Kernel::Fp8(Recipe::AS_IT_IS)),
            Method::VChannels => Some(Kernel::Fp8(Recipe::V_CHANNELS)),
            Method::StandardFp16 | Method::Flash2Fp16 | Method::StandardFp8 | Method::TwoLevel => None,
        }
    }

    /// The precision, the algorithm, and the error in the paper's Table 3.
    fn parts(self) -> (&'static str, &'static str, Option<f64>) {
        match self {
            Method::StandardFp16 => ("fp16", "standard attention", Some(3.2e-4)),
            Method::Flash2Fp16 => ("fp16", "FlashAttention-2", Some(1.9e-4)),
            Method::Flash3Fp16 => ("fp16", "FlashAttention-3", Some(1.9e-4)),
            Method::StandardFp8 => ("fp8", "standard attention", Some(2.4e-2)),
            Method::Flash3Fp8 => ("fp8", "FlashAttention-3", Some(9.1e-3)),
            Method::NoBlockQuantization => ("fp8", "no block quantization", Some(9.3e-3)),
            Method::NoIncoherentProcessing => ("fp8", "no incoherent processing", Some(2.4e-2)),
            Method::TwoLevel => ("fp8", "two-level accumulation", None),
            Method::VChannels => ("fp8", "two levels, V by channels", None),
        }
    }

    /// Whether the method is FlashAttention-3 in FP8 with one change.
    fn is_variant(self) -> bool {
        use Method::{NoBlockQuantization, NoIncoherentProcessing, TwoLevel, VChannels};
        matches!(self, NoBlockQuantization | NoIncoherentProcessing | TwoLevel | VChannels)
    }

    pub(super) fn name(self) -> String {
        let (precision, what, _) = self.parts();
        format!("{precision}, {what}")
    }

    /// The error in the paper's Table 3.
    pub(super) fn paper(self) -> Option<f64> {
        self.parts().2
    }
}

/// Formatted for a list of methods: variants are indented.
impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (precision, what, _) = self.parts();
        let indent = if self.is_variant() { "  " } else { "" };
        f.pad(&format!("{precision:4} {indent}{what}"))
    }
}
