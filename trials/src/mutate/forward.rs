//! Forward kernels to hunt.

use fa3_sched::forward::{CtaTile, Loads, Pipeline};
use fa3_sched::{Order, Scheduler};
use fa3_sim::Rule;
use fa3_types::{Mask, ProblemSpec, Shape};

use super::{Argued, LAST_TURN, Prey, TURNS};
use crate::fwd::shapes::{INPUTS, TINY, TINY_FP8, dtype, laid_out};
use crate::fwd::wide::HALVES;
use crate::fwd::{Launch, device, initial, with_tile};
use crate::intervals::Kind;
use crate::{Dist, Poison, Values};

/// Arguments for Algorithm 2 with two slots for K and V.
const TWO_STAGE: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: QK_FENCE },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "a tile's first K comes after its forerunner's last V but one, given back later than that slot of K",
    },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 1,
        reason: "the slot of a tile's last V is loaded again after a load that waits for this warpgroup's next tile",
    },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
];

/// A warp that finds works waits for no data, but to be asked.
const UNASKED: &[(&str, &[Rule])] = &[("full wait: deleted", &[Rule::Deadlock, Rule::M3, Rule::M4])];

/// Arguments for it.
const ASKED: &[Argued] = &[Argued {
    operator: "bar.warp.sync: after the arrival",
    most: 1,
    reason: "the producer's slot of works is filled again when it has asked for another one, behind the barrier",
}];

/// Reason why mutants of the second fence of two products do what the kernel does.
pub(crate) const QK_FENCE: &str = "of the two products in flight together, the first one's fence is for both";

/// Arguments for Algorithm 1 with one slot for K and V.
const ONE_BY_ONE: &[Argued] = &[
    Argued { operator: "wgmma.commit_group: deleted", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.commit_group: before the last product", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.commit_group: after the wait", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.wait_group: deleted", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.wait_group: after what it protects", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.wait_group: + 1", most: 1, reason: NEXT_QK },
    Argued { operator: "wgmma.fence: deleted", most: 1, reason: PV_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 1, reason: PV_FENCE },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "V's slot is given back before K's next one, which was waited for",
    },
];

const NEXT_QK: &str =
    "before V's slot is loaded again or O is read, the wait for the next block's product retires this one";
const PV_FENCE: &str = "PV's fence lies between the softmax and the next product that overwrites the scores";

/// Arguments for two consumers that share O's columns, with one slot for parts of K and V.
const COLUMNS_SHARED: &[Argued] = &[
    Argued { operator: "fence.proxy.async: before the last write", most: 3, reason: FACTORS },
    Argued { operator: "wgmma.fence: deleted", most: 5, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 5, reason: QK_FENCE },
    Argued { operator: "wgmma.wait_group: deleted", most: 2, reason: HAND_OVER },
    Argued { operator: "wgmma.wait_group: after what it protects", most: 2, reason: HAND_OVER },
    Argued { operator: "wgmma.wait_group: + 1", most: 2, reason: HAND_OVER },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "the only slot of K, which was waited for before, is given back right before Q's",
    },
];

/// The same with two slots, and V that is multiplied twice.
const LATENT_COLUMNS_SHARED: &[Argued] = &[
    Argued { operator: "fence.proxy.async: before the last write", most: 3, reason: FACTORS },
    Argued { operator: "wgmma.fence: deleted", most: 12, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 12, reason: QK_FENCE },
    Argued { operator: "wgmma.commit_group: deleted", most: 7, reason: ONE_GROUP },
    Argued { operator: "wgmma.commit_group: before the last product", most: 9, reason: ONE_GROUP },
    Argued { operator: "wgmma.commit_group: after the wait", most: 9, reason: ONE_GROUP },
    Argued { operator: "wgmma.wait_group: deleted", most: 2, reason: HAND_OVER },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 4,
        reason: "one says when P is handed over; the slot of K is loaded again after a slot of V that is given back later",
    },
    Argued { operator: "wgmma.wait_group: + 1", most: 2, reason: HAND_OVER },
    Argued {
        operator: "full wait: deleted",
        most: 2,
        reason: "P of a block comes after its scores, for which both parts of V's second half were waited for, too",
    },
    Argued {
        operator: "full wait: after the first read",
        most: 3,
        reason: "the first product behind the waits for Qv and V reads Q and K; scores have waited for all of V",
    },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "Qv's slot is given back with Q's, which was waited for before",
    },
    Argued { operator: "mbarrier: full for empty, or empty for full", most: 6, reason: HAND_OVER },
];

const FACTORS: &str = "what is stored last are factors of rows, which ordinary loads read";

const HAND_OVER: &str =
    "it says when P is handed over, and nothing of what is in memory or in registers then";

const ONE_GROUP: &str = "the products of a block's scores are waited for together: they may be of one group";

/// Arguments for Algorithm 4 with one slot for K and V.
const THREE_STAGE: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 1, reason: PV_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 1, reason: PV_FENCE },
    Argued {
        operator: "wgmma.commit_group: after the wait",
        most: 1,
        reason: "before the wait for all products, only slots are given back whose loads come after that wait",
    },
];

/// Arguments for Algorithm 2 with two slots for K and V, where consumers load for themselves.
const ALONE: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: QK_FENCE },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "a tile's second K comes after its Q, whose slot is given back when the last K has been read",
    },
];

/// Arguments for Algorithm 2 for e4m3 with two slots for K and V.
const TWO_STAGE_FP8: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: QK_FENCE },
    Argued { operator: "empty wait: after the first load", most: 1, reason: TRANSPOSED },
    Argued { operator: "wgmma.wait_group: after what it protects", most: 2, reason: TURNS },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
];

/// Arguments for Algorithm 1 for e4m3 with one slot for K and V.
const ONE_BY_ONE_FP8: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 1, reason: PV_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 1, reason: PV_FENCE },
    Argued { operator: "empty wait: after the first load", most: 1, reason: TRANSPOSED },
];

/// Arguments for Algorithm 1 for e4m3 in turns with two slots for K and V.
const IN_TURNS_FP8: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: PV_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: PV_FENCE },
    Argued { operator: "empty wait: after the first load", most: 1, reason: TRANSPOSED },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
];

/// A turn comes after products, of which nothing is overwritten behind it: another warpgroup waits for it, or for its
/// end.
const MISSING_TURNS: &[(&str, &[Rule])] = &[
    ("barrier after products: deleted", &[Rule::B2, Rule::Deadlock]),
    ("barrier after products: before their wait", &[Rule::Deadlock]),
];

/// Arguments for Algorithm 2 for e4m3 with two slots for K and V, which is transposed in memory.
const TWO_STAGE_V_TRANSPOSED: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: QK_FENCE },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: QK_FENCE },
    Argued {
        operator: "accumulator not zeroed",
        most: 1,
        reason: "the ratio of V's scales is set before it is read",
    },
];

const TRANSPOSED: &str = "the slot of K that was waited for before is given back by warps that have begun to read what \
                          was transposed from V's";

/// A problem: query heads, rows of Q and of K, the mask.
type Small = (usize, (usize, usize), Mask);

/// Forward kernels of every form, each on small problems: several tiles a CTA, more blocks than there are
/// stages, blocks that need the mask and blocks that do not, tiles with rows to spare. Bounds that are off by
/// one are not among the mutants: which rows and keys a tile has, the tests of the forward kernels compare with
/// its plan, problem by problem.
///
/// # Panics
/// If one cannot be built.
pub(crate) fn forward_preys() -> Vec<Prey> {
    let window = |left, right| Mask::Window { left: Some(left), right: Some(right) };
    let two = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY };
    let one = CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY };
    let three = CtaTile { pipeline: Pipeline::ThreeStage, stages: 1, ..TINY };
    vec![
        prey(
            "fwd 2, turns, dynamic",
            two,
            Scheduler::DynamicPersistent,
            &[(5, (20, 70), Mask::Causal), (1, (130, 60), Mask::Causal), (3, (9, 10), Mask::Causal)],
            TWO_STAGE,
        ),
        prey(
            "fwd 2, rescaling in every block",
            CtaTile { pipeline: Pipeline::TwoStage, ..two },
            Scheduler::StaticPersistent,
            &[(5, (20, 70), Mask::Causal), (1, (130, 60), Mask::Causal), (3, (9, 10), Mask::Causal)],
            TWO_STAGE,
        ),
        prey(
            "fwd 1",
            one,
            Scheduler::StaticPersistent,
            &[
                (3, (20, 150), window(90, 10)),
                (1, (70, 75), window(21, 10)),
                (3, (40, 3), window(1, 0)),
                (2, (130, 150), window(148, 10)),
                (3, (80, 20), window(15, 5)),
            ],
            ONE_BY_ONE,
        ),
        prey(
            "fwd 4",
            three,
            Scheduler::StaticPersistent,
            &[
                (4, (20, 100), Mask::None),
                (2, (65, 10), Mask::None),
                (3, (9, 30), Mask::None),
                (1, (2, 0), Mask::None),
            ],
            THREE_STAGE,
        ),
        prey(
            "fwd 2, no producer",
            CtaTile { ping_pong: false, loads: Loads::Consumers, ..two },
            Scheduler::StaticPersistent,
            &[
                (5, (20, 70), Mask::Causal),
                (3, (20, 30), Mask::Causal),
                (1, (130, 60), Mask::Causal),
                (3, (9, 10), Mask::Causal),
            ],
            ALONE,
        ),
        prey(
            "fwd 2, e4m3, turns",
            CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY_FP8 },
            Scheduler::DynamicPersistent,
            &[(5, (20, 140), Mask::Causal), (1, (130, 120), Mask::Causal), (3, (9, 10), Mask::Causal)],
            TWO_STAGE_FP8,
        ),
        prey(
            "fwd 1, e4m3",
            CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY_FP8 },
            Scheduler::StaticPersistent,
            &[
                (3, (20, 150), window(90, 10)),
                (1, (70, 75), window(21, 10)),
                (3, (40, 3), window(1, 0)),
                (2, (130, 150), window(148, 10)),
                (3, (80, 20), window(15, 5)),
            ],
            ONE_BY_ONE_FP8,
        ),
        prey(
            "fwd 1, e4m3, turns",
            CtaTile { tile_m: 128, consumers: 2, pipeline: Pipeline::Serial, ping_pong: true, ..TINY_FP8 },
            Scheduler::DynamicPersistent,
            &[(5, (20, 140), Mask::Causal), (1, (130, 120), Mask::Causal), (3, (9, 10), Mask::Causal)],
            IN_TURNS_FP8,
        )
        .also_noticed(MISSING_TURNS),
        transposing(),
        pairs(
            "fwd 2, turns, clusters",
            two,
            &[(3, (140, 70), Mask::None), (2, (256, 10), Mask::None), (1, (130, 100), Mask::None)],
            TWO_STAGE,
        ),
        prey(
            "fwd 2, e4m3, V transposed, scales of blocks",
            CtaTile { tile_m: 128, consumers: 2, tile_n: 64, ..TINY_FP8 }.of_inputs(INPUTS[3]),
            Scheduler::StaticPersistent,
            &[(3, (20, 300), Mask::Causal), (1, (260, 250), Mask::Causal), (3, (9, 10), Mask::Causal)],
            TWO_STAGE_V_TRANSPOSED,
        ),
    ]
}

/// Kernels whose warpgroups share columns of O, without `qv` and with it.
///
/// # Panics
/// If one cannot be built.
pub(crate) fn wide_preys() -> Vec<Prey> {
    vec![
        prey(
            "fwd 2, columns shared",
            CtaTile { head_dim: 192, ..HALVES },
            Scheduler::StaticPersistent,
            &[(3, (20, 70), Mask::Causal), (1, (70, 60), Mask::Causal), (2, (9, 10), Mask::Causal)],
            COLUMNS_SHARED,
        ),
        prey(
            "fwd 2, latent, columns shared",
            CtaTile { qv: true, stages: 2, head_dim_v: 256, ..HALVES },
            Scheduler::DynamicPersistent,
            &[(3, (20, 70), Mask::Causal), (1, (70, 60), Mask::Causal), (2, (9, 10), Mask::Causal)],
            LATENT_COLUMNS_SHARED,
        ),
    ]
}

/// A kernel under a mask of intervals: several tiles a CTA, of which one visits no block, and others leave some out.
///
/// # Panics
/// If it cannot be built.
pub(crate) fn interval_preys() -> Vec<Prey> {
    let two = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY };
    let kinds = [
        (5, (20, 70), Kind::FarApart),
        (1, (130, 150), Kind::Meeting),
        // The block of the first key needs no mask.
        (3, (2, 60), Kind::Meeting),
        (3, (9, 10), Kind::Random),
    ];
    let programs = kinds.map(|(heads, (seqlen_q, seqlen_k), kind)| {
        let q = Shape { batch: 1, seqlen: seqlen_q, heads, head_dim: 64 };
        let spec = ProblemSpec::dense(dtype(&two), q, Shape { seqlen: seqlen_k, ..q });
        let problem = kind.of(spec, false, true);
        let options = with_tile(two).order(Order::Linear);
        let program = Launch::new(&problem, &device(1), &options).expect("there is such a kernel").program;
        let bytes = initial(&problem, &program, &Values::new(&problem, Dist::Normal, Poison::None, 1));
        (program, bytes)
    });
    let prey = Prey::new("fwd 2, intervals", programs, 0, TWO_STAGE);
    vec![prey.also_noticed(UNASKED).also_argued(ASKED)]
}

/// The kernel that transposes V before: heads of several tiles, the last of which has keys to spare, and of one.
fn transposing() -> Prey {
    let options = with_tile(TINY_FP8.of_inputs(INPUTS[1]));
    let programs = [(2, 300), (1, 128)].map(|(heads, keys)| {
        let q = Shape { batch: 1, seqlen: 20, heads, head_dim: 64 };
        let problem = ProblemSpec::dense(dtype(&TINY_FP8), q, Shape { seqlen: keys, ..q }).known();
        let problem = problem.expect("the problem of a prey is valid");
        let program = Launch::new(&problem, &device(1), &options).expect("there is such a kernel").program;
        let bytes = initial(&problem, &program, &Values::new(&problem, Dist::Normal, Poison::None, 1));
        (program, bytes)
    });
    Prey::new("fwd, V transposed before", programs, 0, &[])
}

/// On one SM, so that a CTA computes all tiles.
fn prey(
    name: &str,
    shape: CtaTile,
    scheduler: Scheduler,
    problems: &[Small],
    argued: &'static [Argued],
) -> Prey {
    on_device(name, (1, shape, scheduler), problems, argued)
}

/// On two SMs, so that a cluster of two computes all tiles.
fn pairs(name: &str, shape: CtaTile, problems: &[Small], argued: &'static [Argued]) -> Prey {
    let prey = on_device(name, (2, shape, Scheduler::StaticPersistent), problems, argued);
    assert_eq!(prey.kernel().launch.cluster, 2, "{name} runs in clusters");
    prey
}

fn on_device(
    name: &str,
    (sms, shape, scheduler): (u32, CtaTile, Scheduler),
    problems: &[Small],
    argued: &'static [Argued],
) -> Prey {
    let options = with_tile(shape).scheduler(scheduler).order(Order::Linear).clusters(true);
    let programs = problems.iter().map(|&(heads, (seqlen_q, seqlen_k), mask)| {
        let q = Shape { batch: 1, seqlen: seqlen_q, heads, head_dim: shape.head_dim as usize };
        let kv = Shape { seqlen: seqlen_k, ..q };
        let spec = ProblemSpec::dense(dtype(&shape), q, kv).head_dim_v(shape.head_dim_v as usize).mask(mask);
        let problem = laid_out(&shape, spec).known();
        let problem = problem.expect("the problem of a prey is valid");
        let launch = Launch::new(&problem, &device(sms), &options).expect("there is such a kernel");
        let program = launch.program;
        let bytes = initial(&problem, &program, &Values::new(&problem, Dist::Normal, Poison::None, 1));
        (program, bytes)
    });
    Prey::new(name, programs, 0, argued)
}
