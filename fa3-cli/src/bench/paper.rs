//! The numbers of the paper (FlashAttention-3, arXiv 2407.08608), on an H100 80GB SXM5, in fp16.

use fa3_types::Mask;
use serde::Serialize;

use crate::grid::Setting;

/// The sequence lengths of Figure 5.
const SEQLENS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Figure 5's number of tokens and hidden size.
const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;

/// TFLOP/s of one setting in Figure 5. Standard attention and Triton lack some numbers, for example where they ran out
/// of memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Figure5 {
    pub(super) standard: Option<u32>,
    pub(super) flash_attention_2: u32,
    pub(super) triton: Option<u32>,
    pub(super) cudnn: u32,
    pub(super) flash_attention_3: u32,
}

/// One of Figure 5's six panels, with a number for each of [`SEQLENS`].
struct Panel {
    head_dim: usize,
    mask: Mask,
    standard: &'static [u32],
    flash_attention_2: [u32; 6],
    triton: &'static [u32],
    cudnn: [u32; 6],
    flash_attention_3: [u32; 6],
}

const PANELS: [Panel; 6] = [
    Panel {
        head_dim: 64,
        mask: Mask::None,
        standard: &[52, 63, 67, 72, 73],
        flash_attention_2: [282, 306, 318, 321, 322, 324],
        triton: &[340, 382, 396, 400, 401, 403],
        cudnn: [335, 373, 395, 408, 412, 413],
        flash_attention_3: [333, 392, 460, 476, 496, 497],
    },
    Panel {
        head_dim: 64,
        mask: Mask::Causal,
        standard: &[16, 18, 18, 18, 18],
        flash_attention_2: [180, 229, 262, 284, 295, 299],
        triton: &[152, 291, 342, 363, 376, 363],
        cudnn: [225, 288, 334, 363, 379, 388],
        flash_attention_3: [197, 265, 371, 420, 460, 473],
    },
    Panel {
        head_dim: 128,
        mask: Mask::None,
        standard: &[74, 100, 119, 133, 139],
        flash_attention_2: [309, 350, 362, 368, 370, 370],
        triton: &[323, 372, 389, 389, 392, 395],
        cudnn: [497, 574, 617, 609, 600, 595],
        flash_attention_3: [467, 565, 625, 638, 646, 648],
    },
    Panel {
        head_dim: 128,
        mask: Mask::Causal,
        standard: &[26, 31, 34, 35, 35],
        flash_attention_2: [191, 260, 298, 319, 333, 335],
        triton: &[146, 273, 323, 353, 369, 378],
        cudnn: [315, 410, 484, 518, 529, 539],
        flash_attention_3: [292, 423, 521, 579, 602, 616],
    },
    Panel {
        head_dim: 256,
        mask: Mask::None,
        standard: &[],
        flash_attention_2: [275, 313, 321, 323, 324, 326],
        triton: &[],
        cudnn: [470, 546, 580, 581, 580, 581],
        flash_attention_3: [482, 627, 707, 736, 746, 756],
    },
    Panel {
        head_dim: 256,
        mask: Mask::Causal,
        standard: &[],
        flash_attention_2: [208, 251, 278, 293, 297, 298],
        triton: &[],
        cudnn: [308, 391, 450, 483, 497, 509],
        flash_attention_3: [286, 427, 537, 612, 628, 642],
    },
];

impl Figure5 {
    /// The numbers of a setting, if Figure 5 has it; the element type may differ.
    pub(super) fn of(setting: &Setting) -> Option<Figure5> {
        let Setting { dtype, head_dim, mask, seqlen, batch, heads, .. } = *setting;
        let is_plain = *setting == Setting::plain(dtype, head_dim, mask, (batch, seqlen, heads));
        let is_papers = batch * seqlen == TOKENS && heads * head_dim == HIDDEN && is_plain;
        let panel = PANELS.iter().find(|panel| (panel.head_dim, panel.mask) == (head_dim, mask));
        let index = SEQLENS.iter().position(|&of_figure| of_figure == seqlen);
        let (panel, index) = panel.zip(index).filter(|_| is_papers)?;
        Some(Figure5 {
            standard: panel.standard.get(index).copied(),
            flash_attention_2: panel.flash_attention_2[index],
            triton: panel.triton.get(index).copied(),
            cudnn: panel.cudnn[index],
            flash_attention_3: panel.flash_attention_3[index],
        })
    }

    /// The best TFLOP/s of all implementations but FlashAttention-3.
    pub(super) fn best_other(&self) -> u32 {
        let Figure5 { standard, flash_attention_2, triton, cudnn, .. } = *self;
        [standard.unwrap_or(0), flash_attention_2, triton.unwrap_or(0), cudnn].into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::Dtype;

    fn setting(head_dim: usize, mask: Mask, seqlen: usize) -> Setting {
        Setting::plain(Dtype::Bf16, head_dim, mask, (16384 / seqlen, seqlen, 2048 / head_dim))
    }

    #[test]
    fn numbers_stand_where_they_stand_in_the_figure() {
        let of = |head_dim, mask, seqlen| Figure5::of(&setting(head_dim, mask, seqlen)).unwrap();
        let first = Figure5 {
            standard: Some(52),
            flash_attention_2: 282,
            triton: Some(340),
            cudnn: 335,
            flash_attention_3: 333,
        };
        assert_eq!((of(64, Mask::None, 512), first.best_other()), (first, 340));
        let last = of(256, Mask::Causal, 16384);
        assert_eq!((last.standard, last.triton, last.cudnn, last.flash_attention_3), (None, None, 509, 642));
        // The paper's run of standard attention is out of memory.
        let longest = of(128, Mask::Causal, 16384);
        assert_eq!((longest.standard, longest.best_other(), longest.flash_attention_3), (None, 539, 616));
        assert_eq!(of(64, Mask::Causal, 2048).best_other(), 342);
        assert_eq!(of(128, Mask::None, 2048).flash_attention_3, 625);
    }

    /// Statements of §4.1: up to 740 (the figure has 756), 1.5 to 2 times FlashAttention-2 (slightly less at 512),
    /// ahead of cuDNN for medium and long sequences at head_dim 256.
    #[test]
    fn numbers_are_what_the_text_says_of_them() {
        for panel in &PANELS {
            for index in 0..6 {
                let (fa3, fa2) = (panel.flash_attention_3[index], panel.flash_attention_2[index]);
                let ratio = f64::from(fa3) / f64::from(fa2);
                assert!((1.08..2.4).contains(&ratio), "{} {} {index}: {ratio}", panel.head_dim, panel.mask);
                assert!(fa3 <= 756 && (index < 2 || fa3 > panel.cudnn[index]), "{fa3}");
            }
            let most =
                |series: &[u32]| series.windows(2).all(|pair| f64::from(pair[1]) > 0.96 * f64::from(pair[0]));
            assert!(most(panel.standard) && most(panel.triton) && most(&panel.cudnn), "lengths help");
            assert!(most(&panel.flash_attention_2) && most(&panel.flash_attention_3), "lengths help");
        }
    }

    #[test]
    fn other_settings_have_none() {
        let papers = setting(128, Mask::Causal, 1024);
        assert!(Figure5::of(&papers).is_some());
        assert!(Figure5::of(&Setting { dtype: Dtype::F16, ..papers }).is_some());
        let others = [
            Setting { batch: 15, ..papers },
            Setting { heads: 8, heads_kv: 8, ..papers },
            Setting { heads_kv: 4, ..papers },
            Setting { head_dim_v: 64, ..papers },
            Setting { softcap: Some(30.0), ..papers },
            Setting { seqlen_k: 2048, ..papers },
            Setting { seqlen: 256, seqlen_k: 256, batch: 64, ..papers },
            Setting { head_dim: 32, head_dim_v: 32, heads: 64, heads_kv: 64, ..papers },
            Setting { mask: Mask::Window { left: Some(1), right: Some(0) }, ..papers },
        ];
        assert!(others.iter().all(|setting| Figure5::of(setting).is_none()));
    }
}
