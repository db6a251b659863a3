//! Attention problems from options.

use std::num::NonZeroU32;

use fa3_ir::{Elem, Program};
use fa3_sched::forward::{CtaTile, Loads, Overlap, Plan, PlanOptions, Rescale};
use fa3_sched::{DeviceLimits, Scheduler};
use fa3_types::{Dtype, Mask, ProblemSpec, Shape};

use super::option::{Domain, OptionInfo, Options};
use super::{CatalogueError, DTYPE, number};
use crate::kernels::{Spec, fwd};

/// A window: keys before and after a query.
const WINDOW: (u32, u32) = (100, 20);
/// A soft cap.
const CAP: f64 = 30.0;

/// What can be chosen of the forward pass.
pub(super) const FORWARD: &[OptionInfo] = &[
    DTYPE,
    number("batch", "Sequences", 1, 1),
    number("heads", "Query heads", 2, 1),
    number("heads-kv", "Heads of K and V, a divisor of the query heads", 1, 1),
    number("seqlen-q", "Rows of Q of a sequence", 200, 1),
    number("seqlen-k", "Rows of K and V of a sequence", 300, 1),
    OptionInfo {
        name: "head-dim",
        about: "Columns of Q and K",
        domain: Domain::Number { default: 128, multiple_of: 8, at_most: 256 },
    },
    OptionInfo {
        name: "head-dim-v",
        about: "Columns of V and O",
        domain: Domain::Number { default: 128, multiple_of: 8, at_most: 256 },
    },
    words(
        "mask",
        "Which keys a query sees: all, those up to itself, or 100 before it and 20 after it",
        &["none", "causal", "window"],
    ),
    words("softcap", "Whether scores are bounded, to 30", &["off", "on"]),
    words(
        "algorithm",
        "The consumer's pipeline: that of the tile table, or Algorithm 1, 2 or 4 of the paper",
        &["table", "1", "2", "4"],
    ),
    words(
        "ping-pong",
        "Whether consumers take turns: as in the tile table, or not, or yes",
        &["table", "off", "on"],
    ),
    words(
        "rescale",
        "When O is rescaled to new row maxima: as in the tile table, or lazily, or in every block",
        &["table", "lazy", "every"],
    ),
    words("loads", "Who loads Q, K and V", &["producer", "consumers"]),
    words("scheduler", "How tiles reach CTAs", &["plan", "one", "static", "dynamic"]),
    number("sms", "Streaming multiprocessors", 132, 1),
];

const fn words(name: &'static str, about: &'static str, values: &'static [&'static str]) -> OptionInfo {
    OptionInfo { name, about, domain: Domain::Word(values) }
}

/// The forward pass of a dense problem.
pub(super) fn forward(options: &Options) -> Result<Program<Spec>, CatalogueError> {
    let count = |name| options.number(name) as usize;
    let shape = |seqlen, heads| Shape {
        batch: count("batch"),
        seqlen: count(seqlen),
        heads: count(heads),
        head_dim: count("head-dim"),
    };
    let dtype = if options.dtype() == Elem::F16 { Dtype::F16 } else { Dtype::Bf16 };
    let mut spec = ProblemSpec::dense(dtype, shape("seqlen-q", "heads"), shape("seqlen-k", "heads-kv"))
        .head_dim_v(count("head-dim-v"))
        .mask(match options.word("mask") {
            "causal" => Mask::Causal,
            "window" => Mask::window(Some(WINDOW.0), Some(WINDOW.1)),
            _ => Mask::None,
        });
    if options.word("softcap") == "on" {
        spec = spec.softcap(CAP);
    }
    let problem = spec.validate()?;
    let sms = NonZeroU32::new(options.number("sms")).unwrap_or(NonZeroU32::MIN);
    let limits = DeviceLimits::h100_sxm().sms(sms);
    let table = Plan::new(&problem, &limits)?;
    let mut plan_options = PlanOptions::default().tile(tile(table.tile(), options, &limits));
    plan_options.scheduler = match options.word("scheduler") {
        "one" => Some(Scheduler::OneTile),
        "static" => Some(Scheduler::StaticPersistent),
        "dynamic" => Some(Scheduler::DynamicPersistent),
        _ => None,
    };
    Ok(fwd::program(&Plan::with(&problem, &limits, &plan_options)?))
}

/// The tile with another pipeline, and with as many keys as registers are left for then.
fn tile(mut tile: CtaTile, options: &Options, limits: &DeviceLimits) -> CtaTile {
    match options.word("ping-pong") {
        "on" if tile.consumers > 1 => tile.ping_pong = true,
        "off" => tile.ping_pong = false,
        _ => {}
    }
    match options.word("algorithm") {
        "1" => tile.overlap = Overlap::None,
        "2" => tile.overlap = Overlap::TwoStage,
        "4" => (tile.overlap, tile.rescale) = (Overlap::ThreeStage, Rescale::EveryBlock),
        _ => {}
    }
    match options.word("rescale") {
        "every" => tile.rescale = Rescale::EveryBlock,
        "lazy" => tile.rescale = Rescale::Lazy,
        _ => {}
    }
    if options.word("loads") == "consumers" {
        tile.loads = Loads::Consumers;
    }
    while tile.check(limits).is_err() && tile.tile_n > 16 {
        tile.tile_n -= 16;
    }
    tile
}
