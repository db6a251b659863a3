//! Problems for the merging kernel: the features of which its code is made, each with each.

use fa3_types::{Dtype, Shape};

use super::{Case, Spread};
use crate::covering;
use crate::family::Trial;
use crate::fwd::Layout;
use crate::mutate::Target;

/// Few parts that a warp has, more than some warps load at once, more than all do.
const SPLITS: [usize; 8] = [1, 2, 3, 5, 12, 31, 33, 132];
/// Part of a warp; half of one; all of its lanes; several chunks a lane, the last of which not all lanes have.
const HEAD_DIMS: [usize; 8] = [8, 64, 96, 128, 136, 192, 256, 512];
const INPUTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const OUTPUTS: [Dtype; 3] = [Dtype::Bf16, Dtype::F32, Dtype::F16];
const SPREADS: [Spread; 6] =
    [Spread::Normal, Spread::Shifted, Spread::Far, Spread::Huge, Spread::Same, Spread::NotFinite];
const EMPTY: [bool; 2] = [true, false];
const PARTS_INSIDE: [bool; 2] = [false, true];
/// (batch, seqlen, heads): one row; a packed tensor; several sequences.
const ROWS: [(usize, usize, usize); 4] = [(1, 1, 1), (1, 5, 3), (2, 3, 2), (3, 1, 3)];

/// How many of the factors come first, of which any three levels meet.
const CLOSE: usize = 3;

/// Levels of all factors.
const LEVELS: [usize; 12] = [
    SPLITS.len(),
    HEAD_DIMS.len(),
    INPUTS.len(),
    OUTPUTS.len(),
    SPREADS.len(),
    EMPTY.len(),
    PARTS_INSIDE.len(),
    ROWS.len(),
    Layout::ALL.len(),
    Layout::ALL.len(),
    Layout::ALL.len(),
    Layout::ALL.len(),
];

/// The covering array of features, and what is next to their limits.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let rows = covering(&LEVELS, CLOSE);
    let cases = rows.iter().enumerate().map(|(index, row)| of_levels(row, seed + index as u64));
    // Rows of f32 may have 4 elements more; and more than 256 parts.
    let of_f32 = [Dtype::F32; 2];
    let narrow = Case { dtypes: of_f32, shape: Shape { head_dim: 12, ..SMALL.shape }, ..SMALL };
    let many = Case { splits: 300, seed, ..SMALL };
    let no_rows = Case { shape: Shape { seqlen: 0, ..SMALL.shape }, ..SMALL };
    cases.chain([narrow, many, no_rows]).map(Case::trial).collect()
}

fn of_levels(row: &[usize], seed: u64) -> Case {
    let &[splits, head_dim, input, output, spread, empty, parts_inside, rows, ref layouts @ ..] = row else {
        unreachable!("a row has a level for each feature");
    };
    let &[parts, lse_parts, o, lse] = layouts else {
        unreachable!("a row has a level for each layout");
    };
    let (batch, seqlen, heads) = ROWS[rows];
    Case {
        dtypes: [INPUTS[input], OUTPUTS[output]],
        splits: SPLITS[splits],
        shape: Shape { batch, seqlen, heads, head_dim: HEAD_DIMS[head_dim] },
        layouts: [parts, lse_parts, o, lse].map(|layout| Layout::ALL[layout]),
        parts_inside: PARTS_INSIDE[parts_inside],
        spread: SPREADS[spread],
        empty: EMPTY[empty],
        seed,
    }
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

/// Teams of eight warps, of two that share a CTA, and of one.
pub(super) fn small() -> Vec<Trial> {
    let wide = Case { shape: Shape { head_dim: 512, ..SMALL.shape }, ..SMALL };
    let cases = [SMALL, wide, Case { splits: 12, ..SMALL }, Case { splits: 3, ..SMALL }];
    cases.map(Case::trial).into()
}

/// Kernels whose warps meet: one team a CTA, and two. Bounds that are off by one are not among their mutants: the
/// trials compare every number.
pub(super) fn targets() -> Vec<Target> {
    let target = |name, splits| Target::of_trial(name, &Case { splits, ..SMALL }.trial(), &[]);
    vec![target("combine", 70), target("combine: two rows", 12)]
}
