//! Problems for the combine kernel: a covering array of the features of its code.

use fa3_types::{Dtype, Shape};

use super::{Case, Spread};
use crate::fwd::Layout;
use crate::mutate::Target;
use crate::{Levels, Trial, covering_cases};

/// The covering array of features, and cases next to the limits.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let cases = covering_cases(of_features).into_iter();
    let cases = (seed..).zip(cases).map(|(seed, case)| Case { seed, ..case });
    // Rows of f32 whose length is a multiple of 4 only; and more than 256 splits.
    let of_f32 = [Dtype::F32; 2];
    let narrow = Case { dtypes: of_f32, shape: Shape { head_dim: 12, ..SMALL.shape }, ..SMALL };
    let many = Case { splits: 300, seed, ..SMALL };
    let no_rows = Case { shape: Shape { seqlen: 0, ..SMALL.shape }, ..SMALL };
    cases.chain([narrow, many, no_rows]).map(Case::trial).collect()
}

fn of_features(levels: &mut Levels) -> Case {
    // Numbers of splits: few, for one warp; more than some warps load at once; more than all warps load at once.
    let splits = levels.pick(&[1, 2, 3, 5, 12, 31, 33, 132]);
    // The lanes that a row needs: a part of a warp; half a warp; all lanes; all lanes with several chunks each, the
    // last one partial.
    let head_dim = levels.pick(&[8, 64, 96, 128, 136, 192, 256, 512]);
    let input = levels.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let output = levels.pick(&[Dtype::Bf16, Dtype::F32, Dtype::F16]);
    let spread = levels.pick(&Spread::ALL);
    let (empty, parts_inside) = (levels.pick(&[true, false]), levels.pick(&[false, true]));
    // One row; a packed tensor; several sequences.
    let (batch, seqlen, heads) = levels.pick(&[(1, 1, 1), (1, 5, 3), (2, 3, 2), (3, 1, 3)]);
    let shape = Shape { batch, seqlen, heads, head_dim };
    let layouts = [(); 4].map(|()| levels.pick(&Layout::ALL));
    Case { dtypes: [input, output], splits, shape, layouts, parts_inside, spread, empty, seed: 0 }
}

const SMALL: Case = Case {
    dtypes: [Dtype::F32, Dtype::Bf16],
    splits: 70,
    shape: Shape { batch: 2, seqlen: 2, heads: 3, head_dim: 128 },
    layouts: [Layout::Contiguous, Layout::HeadsFirst, Layout::Gaps, Layout::HeadsFirst],
    parts_inside: false,
    spread: Spread::Normal,
    empty: true,
    seed: 1,
};

/// Problems for teams of eight warps, of two warps that share a CTA, and of one warp.
pub(crate) fn small() -> Vec<Trial> {
    let wide = Case { shape: Shape { head_dim: 512, ..SMALL.shape }, ..SMALL };
    let cases = [SMALL, wide, Case { splits: 12, ..SMALL }, Case { splits: 3, ..SMALL }];
    cases.map(Case::trial).into()
}

/// Kernels whose warps synchronize, with one team per CTA and with two. Operators on bounds are not tried, because the
/// trials compare every number.
pub(crate) fn targets() -> Vec<Target> {
    let target = |name, splits| Target::of_trial(name, &Case { splits, ..SMALL }.trial(), &[]);
    vec![target("combine", 70), target("combine: two rows", 12)]
}
