//! How FlashAttention-3 takes Q, K and V to FP8.

use fa3_quant::{Granularity, Incoherent, Preparation};

/// Rows that share a scale in block quantization, and keys that are summed apart in two levels.
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
    /// Both.
    pub(super) const PAPER: Recipe = Recipe { blocks: true, incoherent: true, v_channels: false };
    /// Without block quantization.
    pub(super) const ONE_SCALE: Recipe = Recipe { blocks: false, ..Recipe::PAPER };
    /// Without incoherent processing.
    pub(super) const AS_IT_IS: Recipe = Recipe { incoherent: false, ..Recipe::PAPER };
    /// Both, and V by channels.
    pub(super) const V_CHANNELS: Recipe = Recipe { v_channels: true, ..Recipe::PAPER };

    /// The matrix for Q and K, if there is one.
    pub(super) fn transform(self, head_dim: usize, seed: u64) -> Option<Incoherent> {
        self.incoherent.then(|| Incoherent::new(head_dim, seed))
    }

    /// The way of a tensor to FP8.
    pub(super) fn preparation(self, transform: Option<&Incoherent>) -> Preparation<'_> {
        let granularity = if self.blocks { Granularity::Block { rows: BLOCK } } else { Granularity::Tensor };
        let plain = Preparation::new(granularity);
        transform.map_or(plain, |transform| plain.incoherent(transform))
    }
}
