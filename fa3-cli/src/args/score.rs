//! Options of scores.

use fa3_types::{Mask, ProblemSpec};

use super::mask::MaskArgs;

/// Mask, softmax scale and soft cap.
#[derive(Debug, clap::Args)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    mask: MaskArgs,
    /// Factor on Q·Kᵀ, 1/√head_dim if absent
    #[arg(long, alias = "scale", value_name = "S", allow_hyphen_values = true)]
    pub(crate) softmax_scale: Option<f64>,
    /// Bounds scores s to ±C by C · tanh(s / C)
    #[arg(long, value_name = "C", allow_hyphen_values = true)]
    pub(crate) softcap: Option<f64>,
}

impl ScoreArgs {
    /// The mask.
    pub(crate) fn mask(&self) -> Mask {
        self.mask.mask()
    }

    /// A problem with these scores.
    pub(crate) fn of(&self, spec: ProblemSpec) -> ProblemSpec {
        let mut spec = spec.mask(self.mask());
        spec.softmax_scale = self.softmax_scale;
        spec.softcap = self.softcap;
        spec
    }
}
