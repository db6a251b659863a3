//! Problems for the quantization kernels: a covering array of the features of their code.

use fa3_types::{Dtype, RopeStyle, Scaling, Shape, ValueLayout};

use super::{Case, Rows, Spread};
use crate::fwd::Layout;
use crate::mutate::{Equivalent, Target};
use crate::{Levels, Trial, covering_cases};

/// The covering array of features.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let cases = covering_cases(of_features).into_iter();
    (seed..).zip(cases).map(|(seed, (case, sms))| Case { seed, ..case }.trial(sms)).collect()
}

/// A case and the number of SMs.
fn of_features(levels: &mut Levels) -> (Case, u32) {
    // head_dim: one chunk per thread; one panel, and one and a half; powers of two and other numbers; partial panels.
    let head_dim = levels.pick(&[16, 64, 80, 96, 128, 176, 192, 256]);
    // The pairing style, and whether a whole row or half of it rotates.
    let rotation = levels.pick(&[
        None,
        Some((RopeStyle::Interleaved, true)),
        Some((RopeStyle::HalfSplit, true)),
        Some((RopeStyle::Interleaved, false)),
        Some((RopeStyle::HalfSplit, false)),
    ]);
    let hadamard = levels.pick(&[true, false]);
    let scaling = levels.pick(&[
        Scaling::Block { rows: 64 },
        Scaling::Block { rows: 128 },
        Scaling::Given(0.037),
        Scaling::Channel,
        Scaling::Heads { heads: 1 },
        Scaling::Tensor,
    ]);
    let value_layout = levels.pick(&[ValueLayout::Rows, ValueLayout::Transposed]);
    // Lengths of packed sequences: not packed; one; several, some of them empty; many short ones.
    let packed: Option<&[usize]> =
        levels.pick(&[None, Some(&[]), Some(&[300]), Some(&[64, 0, 100, 129, 0, 1, 70]), Some(&[3; 40])]);
    let dtype = levels.pick(&[Dtype::F16, Dtype::Bf16]);
    let rows = levels.pick(&[Rows::From(0), Rows::From(7), Rows::Listed]);
    let spread = levels.pick(&Spread::ALL);
    // One row; less than a block; more than one block; several blocks. Some have an odd number of 64-row blocks, others
    // an even number.
    let seqlen = levels.pick(&[1, 50, 100, 129, 300]);
    let (batch, heads) = levels.pick(&[(1, 1), (2, 3), (1, 5)]);
    let layouts = [(); 2].map(|()| levels.pick(&Layout::ALL));
    // Fewer and more SMs than tiles.
    let sms = levels.pick(&[2, 100]);
    let rotary_dim = |whole: bool| if whole { head_dim } else { (head_dim / 32 * 16).max(16) };
    let case = Case {
        dtype,
        shape: Shape { batch, seqlen, heads, head_dim },
        layouts,
        value_layout,
        scaling,
        rotation: rotation.map(|(style, whole)| (style, rotary_dim(whole), rows)),
        hadamard,
        packed,
        spread,
        seed: 0,
    };
    (case.allowed(), sms)
}

const SMALL: Case = Case {
    dtype: Dtype::Bf16,
    shape: Shape { batch: 1, seqlen: 200, heads: 3, head_dim: 128 },
    layouts: [Layout::Gaps, Layout::HeadsFirst],
    value_layout: ValueLayout::Rows,
    scaling: Scaling::Block { rows: 64 },
    rotation: Some((RopeStyle::HalfSplit, 128, Rows::Listed)),
    hadamard: true,
    packed: None,
    spread: Spread::Normal,
    seed: 1,
};

/// Problems with more tiles per CTA than pipeline stages.
pub(crate) fn small() -> Vec<Trial> {
    let case = SMALL;
    let narrow = Case {
        shape: Shape { batch: 2, seqlen: 700, heads: 2, head_dim: 80 },
        rotation: Some((RopeStyle::Interleaved, 48, Rows::From(3))),
        ..case
    };
    let given = Case { scaling: Scaling::Given(0.01), rotation: None, spread: Spread::Outliers, ..case };
    // Each of the two CTAs of a cluster has half of a block. The last block has rows in its first half only.
    let clusters = Case {
        shape: Shape { batch: 1, seqlen: 300, heads: 3, head_dim: 256 },
        scaling: Scaling::Block { rows: 128 },
        rotation: Some((RopeStyle::HalfSplit, 256, Rows::Listed)),
        ..case
    };
    let transposed = Case { value_layout: ValueLayout::Transposed, rotation: None, hadamard: false, ..case };
    let transposed_given = Case { value_layout: ValueLayout::Transposed, ..given };
    // One split is partial, the others are full.
    let channels = Case { shape: Shape { seqlen: 600, ..case.shape }, scaling: Scaling::Channel, ..case };
    let transposed_channels = Case { value_layout: ValueLayout::Transposed, ..channels };
    let heads = Case { scaling: Scaling::Heads { heads: 3 }, ..case };
    let of_tensor = Case { scaling: Scaling::Tensor, ..transposed };
    let packed = Case { packed: Some(&[65, 0, 130, 1]), ..case };
    let packed_clusters = Case { packed: Some(&[129, 0, 70]), ..clusters };
    let cases = [
        case,
        narrow,
        given,
        clusters,
        transposed,
        transposed_given,
        channels,
        transposed_channels,
        heads,
        of_tensor,
        packed,
        packed_clusters,
    ];
    cases.map(|case| case.allowed().trial(2)).into()
}

/// Equivalent mutants with block scales. A CTA barrier separates the reads of a tile from the next load into its stage.
const BLOCKS: &[Equivalent] = &[
    ("empty wait: after the first load", 1, MET),
    ("empty wait: parity not toggled", 1, MET),
    ("bar.warp.sync", 1, MET),
    ("fence.mbarrier_init: before the last init", 1, EMPTY),
];

/// Equivalent mutants with given scales. No CTA barrier separates the reads of a tile from the next load.
const GIVEN: &[Equivalent] = &[("fence.mbarrier_init: before the last init", 1, EMPTY)];

/// Equivalent mutants in clusters. Threads of both CTAs synchronize, and the last mbarriers are for the maxima.
const CLUSTERS: &[Equivalent] = &[
    ("empty wait: after the first load", 1, MET),
    ("empty wait: parity not toggled", 1, MET),
    ("bar.warp.sync: after the arrival", 1, MET),
    ("fence.mbarrier_init: before the last init", 1, SECOND),
];

const MET: &str = "the barrier of the maxima lies between the last read of a stage and the next load into it";
const SECOND: &str =
    "the last mbarrier is of the second maximum: the first stage was released behind a fence before";
const EMPTY: &str = "the last mbarrier is an empty stage's, which no copy signals";

/// Kernels with more tiles per CTA than stages. Operators on bounds are not tried, because the trials compare rows and
/// positions with fa3-quant.
pub(crate) fn targets() -> Vec<Target> {
    let case = Case {
        dtype: Dtype::F16,
        shape: Shape { batch: 1, seqlen: 150, heads: 5, head_dim: 64 },
        layouts: [Layout::Contiguous; 2],
        rotation: Some((RopeStyle::HalfSplit, 32, Rows::Listed)),
        ..SMALL
    };
    let clusters = Case {
        shape: Shape { batch: 1, seqlen: 300, heads: 3, head_dim: 128 },
        scaling: Scaling::Block { rows: 128 },
        rotation: None,
        ..case
    };
    let given = Case { scaling: Scaling::Given(0.01), rotation: None, hadamard: false, ..case };
    let given = Case { shape: Shape { seqlen: 300, ..case.shape }, ..given };
    let transposed = Case { value_layout: ValueLayout::Transposed, rotation: None, hadamard: false, ..case };
    let transposed_given = Case { value_layout: ValueLayout::Transposed, ..given };
    let channels = [Case { scaling: Scaling::Channel, ..given }.trial(1)];
    // Without a transform, the largest magnitude would not depend on the order of the numbers.
    let heads = Case { scaling: Scaling::Heads { heads: 5 }, hadamard: true, ..given };
    let heads = [heads.trial(1)];
    vec![
        Target::of_trial("quantize", &case.trial(1), BLOCKS),
        Target::of_trial("quantize in clusters", &clusters.trial(2), CLUSTERS),
        Target::of_trial("quantize with a scale", &given.trial(1), GIVEN),
        Target::of_trial("quantize transposed", &transposed.trial(1), BLOCKS),
        Target::of_trial("quantize transposed with a scale", &transposed_given.trial(1), GIVEN),
        Target::of_step("quantize: parts of channels", &channels, 0, &[]),
        Target::of_step("quantize: channels", &channels, 1, &[]),
        Target::of_step("quantize: maxima", &heads, 0, BLOCKS),
        Target::of_step("quantize: heads", &heads, 1, &[]),
        Target::of_step("quantize by heads", &heads, 2, GIVEN),
        Target::of_step("quantize by channels", &channels, 2, GIVEN),
    ]
}
