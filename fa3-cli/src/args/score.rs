//! Options that affect scores.

use fa3_types::{Mask, ProblemSpec};

use super::mask::MaskArgs;
use super::number::factor;

/// Mask, softmax scale and soft cap.
#[derive(Debug, clap::Args)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    mask: MaskArgs,
    /// Factor on Q·Kᵀ, above 0, such as 0.125 or 1/8; 1/√head_dim if absent
    #[arg(long, alias = "scale", value_name = "S", allow_hyphen_values = true, value_parser = factor)]
    pub(crate) softmax_scale: Option<f64>,
    /// Bounds scores s to ±C by C · tanh(s / C)
    #[arg(long, value_name = "C", allow_hyphen_values = true, value_parser = factor)]
    pub(crate) softcap: Option<f64>,
}

impl ScoreArgs {
    pub(crate) fn mask(&self) -> Mask {
        self.mask.mask()
    }

    /// `spec` with these options applied.
    pub(crate) fn of(&self, spec: ProblemSpec) -> ProblemSpec {
        let mut spec = spec.mask(self.mask());
        spec.softmax_scale = self.softmax_scale;
        spec.softcap = self.softcap;
        spec
    }
}
