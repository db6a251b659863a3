//! Mutation targets of the forward kernels.

use fa3_ir::{Kernel, Program};
use fa3_sched::Scheduler::{DynamicPersistent, StaticPersistent};
use fa3_sched::forward::{CtaTile, Loads, Pipeline, PlanOptions};
use fa3_sched::{Order, Scheduler};
use fa3_sim::Rule;
use fa3_types::{BlockSide, KnownProblem, Mask, ProblemSpec, Shape};

use super::{Equivalent, LAST_TURN, TURNS, Target};
use crate::fwd::blocks::Listed;
use crate::fwd::listed::{self, Given};
use crate::fwd::shapes::{INPUTS, TINY, TINY_FP8, dtype, laid_out};
use crate::fwd::wide::HALVES;
use crate::fwd::{Launch, device, initial, with_tile};
use crate::intervals::Kind;
use crate::{Dist, Poison, Values};

/// Equivalent mutants of Algorithm 2 with two stages of K and V.
const TWO_STAGE: &[Equivalent] = &[
    ("wgmma.fence", 2, QK_FENCE),
    (
        "empty wait: after the first load",
        1,
        "a tile's first K comes after its forerunner's last V but one, given back later than that stage of K",
    ),
    (
        "wgmma.wait_group: after what it protects",
        1,
        "the stage of a tile's last V is loaded again after a load that waits for this warpgroup's next tile",
    ),
    ("named barrier: the first warpgroup's", 1, LAST_TURN),
];

/// Rules that notice that the warp that fetches work tiles does not wait. It waits for requests and not for data.
pub(crate) const UNASKED: &[(&str, &[Rule])] =
    &[("full wait: deleted", &[Rule::Deadlock, Rule::M3, Rule::M4])];

/// Equivalent mutants of the warp that fetches work tiles.
pub(crate) const ASKED: &[Equivalent] = &[(
    "bar.warp.sync: after the arrival",
    1,
    "the producer's stage of works is filled again when it has asked for another one, behind the barrier",
)];

/// Reason why the fence of the second of two products is redundant.
pub(crate) const QK_FENCE: &str = "two products are in flight together: the fence of the first is for both";

/// Equivalent mutants of Algorithm 1 with one stage of K and V.
const ONE_BY_ONE: &[Equivalent] = &[
    ("wgmma.commit_group", 1, NEXT_QK),
    ("wgmma.wait_group", 1, NEXT_QK),
    ("wgmma.fence", 1, PV_FENCE),
    (
        "empty wait: after the first load",
        1,
        "V's stage is given back before K's next one, which was waited for",
    ),
];

const NEXT_QK: &str =
    "before V's stage is loaded again or O is read, the wait for the next block's product retires this one";
const PV_FENCE: &str = "PV's fence lies between the softmax and the next product that overwrites the scores";

/// Equivalent mutants of Algorithm 1 with two stages of K and V, where each warpgroup has its own list.
const LISTS_OF_WARPGROUPS: &[Equivalent] = &[
    (
        "wgmma.wait_group: after what it protects",
        1,
        "before V's stage is loaded again, the producer waits for a stage of K or Q that is given back after the wait",
    ),
    ("further product overwrites", 1, "it is a tile's first product, before which O is 0"),
    (
        "full wait: deleted",
        2,
        "where K is passed over, the wait for V comes next, so that the warpgroup does not pass a stage twice",
    ),
    (
        "empty wait: after the first load",
        1,
        "V's stage is given back before K's next one, which was waited for",
    ),
];

/// Rules that notice that a warpgroup does not wait for a block that it passes over, which it does not read.
const PASSED_OVER: &[(&str, &[Rule])] = &[("full wait: deleted", &[Rule::M3, Rule::M4, Rule::W6])];

/// Equivalent mutants of two consumers that split O's columns, with one stage for parts of K and V.
const COLUMNS_SHARED: &[Equivalent] = &[
    ("fence.proxy.async: before the last write", 3, FACTORS),
    ("wgmma.fence", 5, QK_FENCE),
    ("wgmma.wait_group", 2, HAND_OVER),
    (
        "empty wait: after the first load",
        1,
        "the only stage of K, which was waited for before, is given back right before Q's",
    ),
];

/// Equivalent mutants of two consumers that split O's columns, with two stages and `qv`.
const LATENT_COLUMNS_SHARED: &[Equivalent] = &[
    ("fence.proxy.async: before the last write", 3, FACTORS),
    ("wgmma.fence", 12, QK_FENCE),
    ("wgmma.commit_group: deleted", 7, ONE_GROUP),
    ("wgmma.commit_group: before the last product", 9, ONE_GROUP),
    ("wgmma.commit_group: after the wait", 9, ONE_GROUP),
    ("wgmma.wait_group: deleted", 2, HAND_OVER),
    (
        "wgmma.wait_group: after what it protects",
        4,
        "one says when P is handed over; the stage of K is loaded again after a stage of V that is given back later",
    ),
    ("wgmma.wait_group: + 1", 2, HAND_OVER),
    (
        "full wait: deleted",
        2,
        "P of a block comes after its scores, for which both parts of V's second half were waited for, too",
    ),
    (
        "full wait: after the first read",
        3,
        "the first product behind the waits for Qv and V reads Q and K; scores have waited for all of V",
    ),
    ("empty wait: after the first load", 1, "Qv's stage is given back with Q's, which was waited for before"),
    ("mbarrier: full for empty, or empty for full", 6, HAND_OVER),
];

const FACTORS: &str = "what is stored last are factors of rows, which ordinary loads read";

const HAND_OVER: &str =
    "it says when P is handed over, and nothing of what is in memory or in registers then";

const ONE_GROUP: &str = "the products of a block's scores are waited for together: they may be of one group";

/// Equivalent mutants of Algorithm 4 with one stage of K and V.
const THREE_STAGE: &[Equivalent] = &[
    ("wgmma.fence", 1, PV_FENCE),
    (
        "wgmma.commit_group: after the wait",
        1,
        "before the wait for all products, only stages are given back whose loads come after that wait",
    ),
];

/// Equivalent mutants of Algorithm 2 with two stages of K and V, without a producer.
const ALONE: &[Equivalent] = &[
    ("wgmma.fence", 2, QK_FENCE),
    (
        "empty wait: after the first load",
        1,
        "a tile's second K comes after its Q, whose stage is given back when the last K has been read",
    ),
];

/// Equivalent mutants of Algorithm 2 for e4m3 with two stages of K and V.
const TWO_STAGE_FP8: &[Equivalent] = &[
    ("wgmma.fence", 2, QK_FENCE),
    ("empty wait: after the first load", 1, TRANSPOSED),
    ("wgmma.wait_group: after what it protects", 2, TURNS),
    ("named barrier: the first warpgroup's", 1, LAST_TURN),
];

/// Equivalent mutants of Algorithm 1 for e4m3 with one stage of K and V.
const ONE_BY_ONE_FP8: &[Equivalent] =
    &[("wgmma.fence", 1, PV_FENCE), ("empty wait: after the first load", 1, TRANSPOSED)];

/// Equivalent mutants of Algorithm 1 for e4m3 with ping-pong and two stages of K and V.
const IN_TURNS_FP8: &[Equivalent] = &[
    ("wgmma.fence", 2, PV_FENCE),
    ("empty wait: after the first load", 1, TRANSPOSED),
    ("named barrier: the first warpgroup's", 1, LAST_TURN),
];

/// Rules that notice a missing ping-pong turn after products. The operands of these products are not overwritten
/// afterwards, but another warpgroup waits for the turn or for its end.
const MISSING_TURNS: &[(&str, &[Rule])] = &[
    ("barrier after products: deleted", &[Rule::B2, Rule::Deadlock]),
    ("barrier after products: before their wait", &[Rule::Deadlock]),
];

/// Equivalent mutants of Algorithm 2 for e4m3 with two stages of K and V, where V is transposed in memory.
const TWO_STAGE_V_TRANSPOSED: &[Equivalent] = &[
    ("wgmma.fence", 2, QK_FENCE),
    ("accumulator not zeroed", 1, "the ratio of V's scales is set before it is read"),
];

const TRANSPOSED: &str = "the stage of K that was waited for before is given back by warps that have begun to read what \
                          was transposed from V's";

/// A small problem: query heads, rows of Q and of K, and the mask.
type Small = (usize, (usize, usize), Mask);

const CAUSAL: &[Small] =
    &[(5, (20, 70), Mask::Causal), (1, (130, 60), Mask::Causal), (3, (9, 10), Mask::Causal)];

/// Problems with more keys, for the larger blocks of e4m3.
const CAUSAL_FP8: &[Small] =
    &[(5, (20, 140), Mask::Causal), (1, (130, 120), Mask::Causal), (3, (9, 10), Mask::Causal)];

const WINDOWS: &[Small] = &[
    (3, (20, 150), window(90, 10)),
    (1, (70, 75), window(21, 10)),
    (3, (40, 3), window(1, 0)),
    (2, (130, 150), window(148, 10)),
    (3, (80, 20), window(15, 5)),
];

const fn window(left: u32, right: u32) -> Mask {
    Mask::Window { left: Some(left), right: Some(right) }
}

/// Two warpgroups with ping-pong.
const TWO: CtaTile = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY };
const TWO_FP8: CtaTile = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY_FP8 };

/// Forward kernels of every form, each on small problems with several tiles per CTA, more blocks than pipeline stages,
/// masked and unmasked blocks, and partial tiles. Off-by-one bounds are not among the mutants: the tests of the forward
/// kernels compare the rows and keys of each tile with the plan, problem by problem.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn forward_targets() -> Vec<Target> {
    let lazy = CtaTile { pipeline: Pipeline::TwoStage, ..TWO };
    let one = CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY };
    let three = CtaTile { pipeline: Pipeline::ThreeStage, stages: 1, ..TINY };
    let alone = CtaTile { ping_pong: false, loads: Loads::Consumers, ..TWO };
    let one_fp8 = CtaTile { pipeline: Pipeline::Serial, stages: 1, ..TINY_FP8 };
    let turns_fp8 = CtaTile { pipeline: Pipeline::Serial, ..TWO_FP8 };
    let blocks_fp8 = CtaTile { ping_pong: false, tile_n: 64, ..TWO_FP8 }.of_inputs(INPUTS[3]);
    let unmasked = [
        (4, (20, 100), Mask::None),
        (2, (65, 10), Mask::None),
        (3, (9, 30), Mask::None),
        (1, (2, 0), Mask::None),
    ];
    let more = [CAUSAL, &[(3, (20, 30), Mask::Causal)]].concat();
    let pairs = [(3, (140, 70), Mask::None), (2, (256, 10), Mask::None), (1, (130, 100), Mask::None)];
    let long = [(3, (20, 300), Mask::Causal), (1, (260, 250), Mask::Causal), (3, (9, 10), Mask::Causal)];
    vec![
        target("fwd 2, turns, dynamic", TWO, DynamicPersistent, CAUSAL, TWO_STAGE),
        target("fwd 2, rescaling in every block", lazy, StaticPersistent, CAUSAL, TWO_STAGE),
        target("fwd 1", one, StaticPersistent, WINDOWS, ONE_BY_ONE),
        target("fwd 4", three, StaticPersistent, &unmasked, THREE_STAGE),
        target("fwd 2, no producer", alone, StaticPersistent, &more, ALONE),
        target("fwd 2, e4m3, turns", TWO_FP8, DynamicPersistent, CAUSAL_FP8, TWO_STAGE_FP8),
        target("fwd 1, e4m3", one_fp8, StaticPersistent, WINDOWS, ONE_BY_ONE_FP8),
        target("fwd 1, e4m3, turns", turns_fp8, DynamicPersistent, CAUSAL_FP8, IN_TURNS_FP8)
            .also_noticed(MISSING_TURNS),
        transposing(),
        in_pairs("fwd 2, turns, clusters", TWO, &pairs, TWO_STAGE),
        target(
            "fwd 2, e4m3, V transposed, scales of blocks",
            blocks_fp8,
            StaticPersistent,
            &long,
            TWO_STAGE_V_TRANSPOSED,
        ),
    ]
}

/// Kernels whose warpgroups split O's columns, with and without `qv`, and under a mask of intervals.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn wide_targets() -> Vec<Target> {
    let causal = [(3, (20, 70), Mask::Causal), (1, (70, 60), Mask::Causal), (2, (9, 10), Mask::Causal)];
    let plain = CtaTile { head_dim: 192, ..HALVES };
    let latent = CtaTile { qv: true, stages: 2, head_dim_v: 256, ..HALVES };
    let kinds = [
        (3, (20, 70), Kind::FarApart),
        (1, (70, 150), Kind::Meeting),
        // The block of the first key is unmasked.
        (3, (2, 60), Kind::Meeting),
        (2, (9, 10), Kind::Random),
    ];
    let intervals = kinds.map(|(heads, rows, kind)| {
        let problem = kind.of(spec(&plain, heads, rows), false, true);
        program(&problem, 1, &with_tile(plain).order(Order::Linear))
    });
    let intervals = Target::new("fwd 2, columns shared, intervals", intervals, 0, COLUMNS_SHARED);
    vec![
        intervals.also_noticed(UNASKED).also_equivalent(ASKED),
        target("fwd 2, columns shared", plain, StaticPersistent, &causal, COLUMNS_SHARED),
        target("fwd 2, latent, columns shared", latent, DynamicPersistent, &causal, LATENT_COLUMNS_SHARED),
    ]
}

/// The file that turns a row's words into bits of a thread's columns.
const TREE_WORDS: &[&str] = &["parts/tree_words.rs"];

/// The file that finds the blocks that words show.
const BLOCK_WORDS: &[&str] = &["parts/block_words.rs"];

/// Equivalent mutants of these lines.
const SAME_WORD: &[Equivalent] = &[(
    "number: shuffle leaves each lane its own",
    4,
    "all lanes of the warp have the same word, and the shuffle tells the compiler so",
)];

/// Equivalent mutants of these lines.
const CLAMPED: &[Equivalent] = &[(
    "number: select, min or max gives",
    8,
    "a word that the row does not have is replaced once it is loaded, and no row here has bits in a third word",
)];

/// Kernels under an interval mask with several tiles per CTA, of dense and of packed sequences. One tile visits no
/// block, and other tiles skip some blocks.
///
/// # Panics
/// If the kernel cannot be built.
pub(crate) fn interval_targets() -> Vec<Target> {
    let kinds = [
        (5, (20, 70), Kind::FarApart),
        (1, (130, 150), Kind::Meeting),
        // The block of the first key is unmasked.
        (3, (2, 60), Kind::Meeting),
        (3, (9, 10), Kind::Random),
    ];
    let options = with_tile(TWO).order(Order::Linear);
    let programs =
        kinds.map(|(heads, rows, kind)| program(&kind.of(spec(&TWO, heads, rows), false, true), 1, &options));
    // All heads are one section: quotients by a number of sections are computed in floats, which mutants do without.
    let packed = |one: Option<Kind>| {
        kinds.map(|(heads, (rows, keys), kind)| {
            // Trees of five sequences have four words.
            let lengths = [(rows, keys), (0, 3), (rows, keys / 2), (0, 0), (0, 0)];
            let (spec, rows) =
                listed::spec(Given::Packed, dtype(&TWO), (heads, 1), TWO.head_dim as usize, &lengths);
            let spec = spec.head_dim_v(TWO.head_dim_v as usize);
            program(&one.unwrap_or(kind).of_sequences(spec, rows, false, true), 1, &options)
        })
    };
    let targets = [
        ("fwd 2, intervals", programs, 0),
        ("fwd 2, intervals, packed", packed(None), 1),
        ("fwd 2, trees, packed", packed(Some(Kind::Tree)), 1),
    ];
    let targets = targets.map(|(name, programs, step)| Target::new(name, programs, step, TWO_STAGE));
    let of_lists = |name, tile: CtaTile, (side, [one, other]): (_, [Listed; 2]), equivalent| {
        let options = with_tile(tile).order(Order::Linear);
        let programs =
            [((300, 440), one), ((129, 500), other), ((20, 400), Listed::Nothing)].map(|(rows, lists)| {
                program(&lists.of_side(side, spec(&tile, 2, rows), (false, true)), 1, &options)
            });
        let target = Target::new(name, programs, 0, equivalent).with("number", BLOCK_WORDS);
        target.also_equivalent(SAME_WORD)
    };
    let listed = CtaTile { tile_n: 128, ..TWO };
    let own = CtaTile { pipeline: Pipeline::Serial, ping_pong: false, tile_n: 64, ..TWO };
    let lists = of_lists(
        "fwd 2, listed blocks",
        listed,
        (BlockSide::Of128, [Listed::Diagonal, Listed::All]),
        TWO_STAGE,
    );
    let own_lists = of_lists(
        "fwd 1, a list for each warpgroup",
        own,
        (BlockSide::Of64, [Listed::Some, Listed::Last]),
        LISTS_OF_WARPGROUPS,
    );
    let own_lists = own_lists.also_noticed(PASSED_OVER);
    let [one, packed, tree] = targets.map(|target| target.also_noticed(UNASKED).also_equivalent(ASKED));
    vec![one, packed, tree.with("number", TREE_WORDS).also_equivalent(CLAMPED), lists, own_lists]
}

/// The kernel that transposes V before attention. Some heads have several tiles, of which the last one is partial;
/// other heads have one tile.
fn transposing() -> Target {
    let options = with_tile(TINY_FP8.of_inputs(INPUTS[1]));
    let programs = [(2, 300), (1, 128)].map(|(heads, keys)| {
        let problem = spec(&TINY_FP8, heads, (20, keys)).known();
        program(&problem.expect("the problem of a target is valid"), 1, &options)
    });
    Target::new("fwd, V transposed before", programs, 0, &[])
}

/// Specification of a problem with one sequence.
fn spec(shape: &CtaTile, heads: usize, (seqlen_q, seqlen_k): (usize, usize)) -> ProblemSpec {
    let q = Shape { batch: 1, seqlen: seqlen_q, heads, head_dim: shape.head_dim as usize };
    ProblemSpec::dense(dtype(shape), q, Shape { seqlen: seqlen_k, ..q }).head_dim_v(shape.head_dim_v as usize)
}

/// The kernel of a problem, and the bytes of its arrays.
fn program(problem: &KnownProblem, sms: u32, options: &PlanOptions) -> (Program<Kernel>, Vec<Vec<u8>>) {
    let program = Launch::new(problem, &device(sms), options).expect("there is such a kernel").program;
    let bytes = initial(problem, &program, &Values::new(problem, Dist::Normal, Poison::None, 1));
    (program, bytes)
}

/// A target on one SM, so that one CTA computes all tiles.
fn target(
    name: &str,
    shape: CtaTile,
    scheduler: Scheduler,
    problems: &[Small],
    equivalent: &'static [Equivalent],
) -> Target {
    on_device(name, (1, shape, scheduler), problems, equivalent)
}

/// A target on two SMs, so that one cluster of two computes all tiles.
fn in_pairs(name: &str, shape: CtaTile, problems: &[Small], equivalent: &'static [Equivalent]) -> Target {
    let target = on_device(name, (2, shape, StaticPersistent), problems, equivalent);
    assert_eq!(target.kernel().launch.cluster, 2, "{name} runs in clusters");
    target
}

fn on_device(
    name: &str,
    (sms, shape, scheduler): (u32, CtaTile, Scheduler),
    problems: &[Small],
    equivalent: &'static [Equivalent],
) -> Target {
    let options = with_tile(shape).scheduler(scheduler).order(Order::Linear).clusters(true);
    let programs = problems.iter().map(|&(heads, rows, mask)| {
        let problem = laid_out(&shape, spec(&shape, heads, rows).mask(mask)).known();
        program(&problem.expect("the problem of a target is valid"), sms, &options)
    });
    Target::new(name, programs, 0, equivalent)
}
