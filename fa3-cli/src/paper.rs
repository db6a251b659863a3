//! The numbers of the paper's Figures 5 to 7 (FlashAttention-3, arXiv 2407.08608), on an H100 80GB SXM5.

use fa3_types::{Dtype, Mask};
use serde::Serialize;

use crate::grid::{Pass, Setting};

/// The sequence lengths of the figures.
pub(crate) const SEQLENS: [usize; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// The figures' number of tokens and hidden size.
const TOKENS: usize = 16384;
const HIDDEN: usize = 2048;

/// The implementations, by the names of the figures' legends.
pub(crate) const STANDARD: &str = "standard attention";
pub(crate) const FA2: &str = "FlashAttention-2";
pub(crate) const TRITON: &str = "Triton";
pub(crate) const CUDNN: &str = "cuDNN";
pub(crate) const FA3: &str = "FlashAttention-3";

/// TFLOP/s of one setting in Figure 5, 6 or 7. Some implementations lack numbers, as where they ran out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Published {
    pub(crate) standard: Option<u32>,
    pub(crate) flash_attention_2: Option<u32>,
    pub(crate) triton: Option<u32>,
    pub(crate) cudnn: u32,
    pub(crate) flash_attention_3: u32,
}

/// One panel of a figure: TFLOP/s of each implementation, by the [`SEQLENS`] from the first on. Standard attention runs
/// out of memory at the last.
pub(crate) struct Panel {
    /// The number of the figure: 5 is the forward pass and 6 the backward pass in fp16, 7 the forward pass in FP8.
    pub(crate) figure: u32,
    pub(crate) head_dim: usize,
    pub(crate) mask: Mask,
    pub(crate) series: &'static [(&'static str, &'static [u32])],
}

pub(crate) const PANELS: [Panel; 10] = [
    Panel {
        figure: 5,
        head_dim: 64,
        mask: Mask::None,
        series: &[
            (STANDARD, &[52, 63, 67, 72, 73]),
            (FA2, &[282, 306, 318, 321, 322, 324]),
            (TRITON, &[340, 382, 396, 400, 401, 403]),
            (CUDNN, &[335, 373, 395, 408, 412, 413]),
            (FA3, &[333, 392, 460, 476, 496, 497]),
        ],
    },
    Panel {
        figure: 5,
        head_dim: 64,
        mask: Mask::Causal,
        series: &[
            (STANDARD, &[16, 18, 18, 18, 18]),
            (FA2, &[180, 229, 262, 284, 295, 299]),
            (TRITON, &[152, 291, 342, 363, 376, 363]),
            (CUDNN, &[225, 288, 334, 363, 379, 388]),
            (FA3, &[197, 265, 371, 420, 460, 473]),
        ],
    },
    Panel {
        figure: 5,
        head_dim: 128,
        mask: Mask::None,
        series: &[
            (STANDARD, &[74, 100, 119, 133, 139]),
            (FA2, &[309, 350, 362, 368, 370, 370]),
            (TRITON, &[323, 372, 389, 389, 392, 395]),
            (CUDNN, &[497, 574, 617, 609, 600, 595]),
            (FA3, &[467, 565, 625, 638, 646, 648]),
        ],
    },
    Panel {
        figure: 5,
        head_dim: 128,
        mask: Mask::Causal,
        series: &[
            (STANDARD, &[26, 31, 34, 35, 35]),
            (FA2, &[191, 260, 298, 319, 333, 335]),
            (TRITON, &[146, 273, 323, 353, 369, 378]),
            (CUDNN, &[315, 410, 484, 518, 529, 539]),
            (FA3, &[292, 423, 521, 579, 602, 616]),
        ],
    },
    Panel {
        figure: 5,
        head_dim: 256,
        mask: Mask::None,
        series: &[
            (FA2, &[275, 313, 321, 323, 324, 326]),
            (CUDNN, &[470, 546, 580, 581, 580, 581]),
            (FA3, &[482, 627, 707, 736, 746, 756]),
        ],
    },
    Panel {
        figure: 5,
        head_dim: 256,
        mask: Mask::Causal,
        series: &[
            (FA2, &[208, 251, 278, 293, 297, 298]),
            (CUDNN, &[308, 391, 450, 483, 497, 509]),
            (FA3, &[286, 427, 537, 612, 628, 642]),
        ],
    },
    Panel {
        figure: 6,
        head_dim: 64,
        mask: Mask::None,
        series: &[
            (STANDARD, &[68, 76, 88, 92, 95]),
            (FA2, &[198, 238, 264, 279, 287, 291]),
            (CUDNN, &[266, 348, 395, 417, 432, 433]),
            (FA3, &[272, 363, 422, 453, 472, 474]),
        ],
    },
    Panel {
        figure: 6,
        head_dim: 128,
        mask: Mask::None,
        series: &[
            (STANDARD, &[104, 131, 159, 174, 181]),
            (FA2, &[214, 260, 291, 310, 318, 322]),
            (CUDNN, &[305, 408, 465, 499, 518, 516]),
            (FA3, &[316, 424, 501, 542, 559, 561]),
        ],
    },
    Panel {
        figure: 7,
        head_dim: 256,
        mask: Mask::None,
        series: &[
            (TRITON, &[529, 664, 766, 854, 897, 903]),
            (CUDNN, &[686, 878, 1001, 1087, 1122, 1139]),
            (FA3, &[510, 744, 931, 966, 1151, 1171]),
        ],
    },
    Panel {
        figure: 7,
        head_dim: 256,
        mask: Mask::Causal,
        series: &[
            (TRITON, &[299, 425, 520, 591, 628, 663]),
            (CUDNN, &[304, 449, 768, 1015, 1056, 1099]),
            (FA3, &[329, 521, 703, 856, 960, 1024]),
        ],
    },
];

impl Panel {
    /// TFLOP/s of an implementation, by sequence length; none if the panel lacks it.
    pub(crate) fn tflops(&self, name: &str) -> &'static [u32] {
        self.series.iter().find(|series| series.0 == name).map_or(&[], |series| series.1)
    }
}

impl Published {
    /// The numbers of a setting, if Figure 7 has it with e4m3, or Figure 5 or 6 with 16 bits of any type.
    pub(crate) fn of(setting: &Setting) -> Option<Published> {
        let Setting { pass, dtype, head_dim, mask, seqlen, batch, heads, .. } = *setting;
        let plain = Setting { pass, ..Setting::plain(dtype, head_dim, mask, (batch, seqlen, heads)) };
        let is_plain = *setting == plain;
        let is_papers = batch * seqlen == TOKENS && heads * head_dim == HIDDEN && is_plain;
        let figure = match (dtype, pass) {
            (Dtype::E4m3, _) => 7,
            (Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::Int8, Pass::Forward) => 5,
            (Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::Int8, Pass::Backward) => 6,
        };
        let key = (figure, head_dim, mask);
        let panel = PANELS.iter().find(|panel| (panel.figure, panel.head_dim, panel.mask) == key);
        let index = SEQLENS.iter().position(|&of_figure| of_figure == seqlen);
        let (panel, index) = panel.zip(index).filter(|_| is_papers)?;
        let tflops = |name| panel.tflops(name).get(index).copied();
        Some(Published {
            standard: tflops(STANDARD),
            flash_attention_2: tflops(FA2),
            triton: tflops(TRITON),
            cudnn: tflops(CUDNN)?,
            flash_attention_3: tflops(FA3)?,
        })
    }

    /// The best TFLOP/s of all implementations but FlashAttention-3.
    pub(crate) fn best_other(&self) -> u32 {
        let Published { standard, flash_attention_2, triton, cudnn, .. } = *self;
        [standard, flash_attention_2, triton].into_iter().flatten().fold(cudnn, u32::max)
    }
}

/// The ratios of FlashAttention-3's TFLOP/s to another implementation's, in all cells of a figure that have both.
pub(crate) fn ratios(figure: u32, other: &str) -> Vec<f64> {
    let panels = PANELS.iter().filter(|panel| panel.figure == figure);
    let cells = panels.flat_map(|panel| panel.tflops(FA3).iter().zip(panel.tflops(other)));
    cells.map(|(&fa3, &other)| f64::from(fa3) / f64::from(other)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(head_dim: usize, mask: Mask, seqlen: usize) -> Setting {
        Setting::plain(Dtype::Bf16, head_dim, mask, (16384 / seqlen, seqlen, 2048 / head_dim))
    }

    #[test]
    fn numbers_stand_where_they_stand_in_the_figure() {
        let of = |head_dim, mask, seqlen| Published::of(&setting(head_dim, mask, seqlen)).unwrap();
        let first = Published {
            standard: Some(52),
            flash_attention_2: Some(282),
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
        let fp8 =
            |head_dim| Published::of(&Setting { dtype: Dtype::E4m3, ..setting(head_dim, Mask::None, 16384) });
        let fp8_256 = fp8(256).unwrap();
        assert_eq!((fp8_256.flash_attention_2, fp8_256.best_other()), (None, 1139));
        assert_eq!((fp8_256.flash_attention_3, fp8(128)), (1171, None));
        let backward = |mask| Published::of(&Setting { pass: Pass::Backward, ..setting(128, mask, 16384) });
        assert_eq!(backward(Mask::None).map(|paper| paper.flash_attention_3), Some(561));
        assert_eq!(backward(Mask::Causal), None);
    }

    /// Statements of the paper beside its figures: up to 740 (756) and close to 1200 TFLOP/s, 1.5 to 2 times
    /// FlashAttention-2 forward and up to 1.75 backward, ahead of cuDNN but in two of 30 cells from 1k on.
    #[test]
    fn numbers_are_what_the_text_says_of_them() {
        let most = |figure| {
            let panels = PANELS.iter().filter(|panel| panel.figure == figure);
            panels.flat_map(|panel| panel.tflops(FA3)).max().copied()
        };
        assert_eq!([5, 6, 7].map(most), [Some(756), Some(561), Some(1171)]);
        let span = |figure, other| {
            let ratios = ratios(figure, other).into_iter().map(|ratio| (100.0 * ratio).round() as u32);
            (ratios.clone().count(), ratios.clone().min().unwrap(), ratios.max().unwrap())
        };
        assert_eq!((span(5, FA2), span(6, FA2)), ((36, 109, 232), (12, 137, 176)));
        assert_eq!((span(5, STANDARD), span(6, STANDARD)), ((20, 465, 2556), (10, 304, 497)));
        assert_eq!((span(5, TRITON), span(7, CUDNN)), ((24, 91, 200), (12, 74, 116)));
        let behind =
            ratios(5, CUDNN).into_iter().enumerate().filter(|(cell, ratio)| cell % 6 > 0 && *ratio < 1.0);
        assert_eq!(behind.count(), 2);
        let all = PANELS.iter().flat_map(|panel| panel.series.iter().filter(|(name, _)| *name != TRITON));
        for (name, tflops) in all {
            let helps = tflops.windows(2).all(|pair| f64::from(pair[1]) > 0.96 * f64::from(pair[0]));
            assert!(helps && tflops.len() == if *name == STANDARD { 5 } else { 6 }, "{name} {tflops:?}");
        }
    }

    #[test]
    fn other_settings_have_none() {
        let papers = setting(128, Mask::Causal, 1024);
        assert!(Published::of(&papers).is_some());
        assert!(Published::of(&Setting { dtype: Dtype::F16, ..papers }).is_some());
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
        assert!(others.iter().all(|setting| Published::of(setting).is_none()));
    }
}
