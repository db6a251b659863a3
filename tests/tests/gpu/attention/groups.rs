//! Problems for the forward kernels.

use fa3_sched::forward::PlanOptions;
use fa3_tests::fwd::{Layout, dense, shapes};
use fa3_tests::pairs;
use fa3_types::{Dtype, Mask, Problem, ProblemSpec};

use super::trial::{DTYPES, Trial};

const HEAD_DIMS: [usize; 8] = [32, 64, 72, 96, 128, 160, 192, 256];

const MASKS: [Mask; 6] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(255), right: Some(0) },
    Mask::Window { left: Some(64), right: Some(130) },
    Mask::Window { left: Some(300), right: None },
    Mask::Window { left: None, right: Some(77) },
];

/// Query heads and KV heads: MHA, GQA with a group size that is not a power of two, and MQA.
const HEADS: [(usize, usize); 3] = [(3, 3), (6, 2), (5, 1)];

/// Lengths of Q and K: some are near a multiple of the tile and some far from it; some pairs are equal, some differ,
/// and some have one much longer length.
const LENGTHS: [(usize, usize); 20] = [
    (1, 3),
    (3, 1),
    (5, 7),
    (17, 33),
    (63, 65),
    (65, 63),
    (127, 129),
    (129, 255),
    (193, 191),
    (255, 1001),
    (257, 513),
    (511, 177),
    (1001, 1),
    (1, 1023),
    (1025, 2049),
    (2047, 1025),
    (1537, 4223),
    (4223, 321),
    (4223, 4221),
    (4224, 4224),
];

pub(super) fn valid(spec: ProblemSpec) -> Problem {
    spec.validate().expect("the problems of this file are valid")
}

/// Problems of all head dimensions, masks, head groups and lengths.
pub(super) fn sizes(dtype: Dtype) -> Vec<Trial> {
    let mut trials: Vec<Trial> = Vec::new();
    for (head_dim, mask) in pairs(HEAD_DIMS, MASKS) {
        for (heads, lengths) in pairs(HEADS, LENGTHS) {
            let batch = if lengths.0 > 2000 { 1 } else { 2 };
            trials.push(valid(dense(dtype, batch, lengths, heads, head_dim).mask(mask)).into());
        }
    }
    trials
}

pub(super) fn wide() -> Vec<Trial> {
    let dims = [(192, 128), (160, 128), (64, 256), (40, 136), (256, 64), (128, 8)];
    let lengths = [(1, 1), (65, 129), (301, 1003), (1025, 511), (2049, 2047)];
    let mut trials: Vec<Trial> = Vec::new();
    for (dtype, (head_dim, head_dim_v)) in pairs(DTYPES, dims) {
        for (mask, lengths) in pairs(MASKS, lengths) {
            let spec = dense(dtype, 1, lengths, (6, 2), head_dim).head_dim_v(head_dim_v).mask(mask);
            trials.push(valid(spec).into());
        }
    }
    trials
}

pub(super) fn capped() -> Vec<Trial> {
    let lengths = [(1, 1), (65, 129), (301, 1003), (2049, 2047)];
    let mut trials: Vec<Trial> = Vec::new();
    for (dtype, head_dim) in pairs(DTYPES, HEAD_DIMS) {
        for ((mask, lengths), cap) in pairs(pairs(MASKS, lengths), [0.5, 30.0]) {
            trials.push(valid(dense(dtype, 1, lengths, (3, 1), head_dim).mask(mask).softcap(cap)).into());
        }
    }
    trials
}

/// Problems with a scale for which softmax is uniform, one for which it is nearly one-hot, and scales in between.
pub(super) fn scaled() -> Vec<Trial> {
    let scales = [1e-18, 1e-6, 0.03, 1.0, 20.0, 1000.0];
    let trial = |dtype, scale, head_dim| {
        valid(dense(dtype, 1, (193, 517), (2, 1), head_dim).causal().softmax_scale(scale)).into()
    };
    let all = pairs(pairs(DTYPES, scales), [64, 128, 256]).into_iter();
    all.map(|((dtype, scale), head_dim)| trial(dtype, scale, head_dim)).collect()
}

pub(super) fn long() -> Vec<Trial> {
    let mut trials: Vec<Trial> = Vec::new();
    for (dtype, head_dim) in pairs(DTYPES, HEAD_DIMS) {
        for (mask, lengths) in pairs(MASKS, [(1, 1), (1, 16384), (16384, 1)]) {
            trials.push(valid(dense(dtype, 1, lengths, (6, 2), head_dim).mask(mask)).into());
        }
    }
    trials.push(valid(dense(Dtype::Bf16, 1, (150, 0), (2, 1), 128)).into());
    trials.push(valid(dense(Dtype::Bf16, 1, (100_003, 100_003), (2, 1), 128).causal()).into());
    trials.push(valid(dense(Dtype::F16, 300, (70, 90), (7, 7), 64).causal()).into());
    trials
}

pub(super) fn strided() -> Vec<Trial> {
    let mut trials: Vec<Trial> = Vec::new();
    for (dtype, head_dim) in pairs(DTYPES, HEAD_DIMS) {
        for (layout, mask) in pairs(Layout::ALL, MASKS) {
            let spec = dense(dtype, 3, (333, 457), (6, 2), head_dim).mask(mask);
            trials.push(valid(layout.of(spec)).into());
        }
    }
    // All sequences share one K and V, and all heads share one Q.
    let mut spec = dense(Dtype::F16, 3, (333, 457), (6, 2), 128).causal();
    (spec.k.strides.batch, spec.v.strides.batch, spec.q.strides.heads) = (0, 0, 0);
    trials.push(valid(spec).into());
    trials
}

/// Problems of e4m3 with up to 8192 keys: every head dimension of the planner's table and one in between, both output
/// types, and all masks.
pub(super) fn fp8() -> Vec<Trial> {
    let lengths = [(1, 8192), (1000, 1000), (1025, 2049), (2048, 2048), (4223, 4221), (8192, 8192)];
    let mut trials: Vec<Trial> = Vec::new();
    for (head_dim, mask) in pairs([64, 80, 128, 256], MASKS) {
        for (index, lengths) in lengths.into_iter().enumerate() {
            let mut spec = dense(Dtype::E4m3, 2, lengths, HEADS[index % HEADS.len()], head_dim).mask(mask);
            spec.o.dtype = DTYPES[index / HEADS.len()];
            trials.push(valid(spec).into());
        }
    }
    for layout in Layout::ALL {
        trials.push(valid(layout.of(dense(Dtype::E4m3, 3, (333, 457), (6, 2), 128).causal())).into());
    }
    trials.push(valid(dense(Dtype::E4m3, 1, (301, 1003), (6, 2), 64).head_dim_v(128).softcap(30.0)).into());
    trials
}

/// Every tile of the simulator's tests, with its own head dimensions.
pub(super) fn forms() -> Vec<Trial> {
    let mut trials = Vec::new();
    let masks = |index| [MASKS[index % MASKS.len()], MASKS[(index + 1) % MASKS.len()]];
    let pairs = shapes::all().into_iter().enumerate();
    for (shape, mask) in pairs.flat_map(|(index, shape)| masks(index).map(|mask| (shape, mask))) {
        let (head_dim, head_dim_v) = (shape.head_dim as usize, shape.head_dim_v as usize);
        let dtype = shapes::dtype(&shape);
        let spec = dense(dtype, 2, (517, 731), (3, 1), head_dim).head_dim_v(head_dim_v);
        let options = PlanOptions::default().tile(shape);
        trials.push(Trial { options, ..valid(shapes::laid_out(&shape, spec.mask(mask))).into() });
    }
    trials
}
