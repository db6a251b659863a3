//! How FlashAttention-3 quantizes Q, K and V to FP8.

use fa3_quant::{Granularity, Incoherent, Preparation};

/// Rows per scale in block quantization, and keys per first-level sum in two-level accumulation.
pub(super) const BLOCK: usize = 128;

/// Which of the paper's two techniques are used, and how V is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recipe {
    /// Block quantization: each block of rows has a scale. Otherwise the tensor has one.
    pub(super) blocks: bool,
    /// Incoherent processing: Q and K are multiplied by a random orthogonal matrix first.
    pub(super) incoherent: bool,
    /// Each channel of V has a mean, which is subtracted and added to O, and a scale.
    pub(super) v_channels: bool,
}

impl Recipe {
    /// Block quantization and incoherent processing.
    pub(super) const PAPER: Recipe = Recipe { blocks: true, incoherent: true, v_channels: false };
    /// Incoherent processing only.
    pub(super) const ONE_SCALE: Recipe = Recipe { blocks: false, ..Recipe::PAPER };
    /// Block quantization only.
    pub(super) const AS_IT_IS: Recipe = Recipe { incoherent: false, ..Recipe::PAPER };
    /// Both techniques, and V quantized per channel.
    pub(super) const V_CHANNELS: Recipe = Recipe { v_channels: true, ..Recipe::PAPER };

    /// The orthogonal matrix that Q and K are multiplied by, with incoherent processing.
    pub(super) fn transform(self, head_dim: usize, seed: u64) -> Option<Incoherent> {
        self.incoherent.then(|| Incoherent::new(head_dim, seed))
    }

    /// How one tensor is quantized.
    pub(super) fn preparation(self, transform: Option<&Incoherent>) -> Preparation<'_> {
        let granularity = if self.blocks { Granularity::Block { rows: BLOCK } } else { Granularity::Tensor };
        let plain = Preparation::new(granularity);
        transform.map_or(plain, |transform| plain.incoherent(transform))
    }
}
