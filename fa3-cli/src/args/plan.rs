//! Options that replace decisions of the plan.

use std::num::NonZeroU32;

use fa3_sched::forward::{CtaTile, Loads, Pipeline, Plan, PlanError, PlanOptions, SplitKeys, TileError};
use fa3_sched::{DeviceLimits, Scheduler};
use fa3_types::Problem;

use super::choice::{Choice, SWITCH, one_of};
use super::number::sms;

const PIPELINES: &[Choice<Pipeline>] = &[
    ("serial", "No overlap: one after the other, Algorithm 1 of the paper", Pipeline::Serial),
    ("paired", "QK of a block and PV of the previous block together, then the softmax", Pipeline::Paired),
    ("two-stage", "The softmax overlaps PV of the previous block, Algorithm 2", Pipeline::TwoStage),
    ("three-stage", "The softmax also overlaps QK of the next block, Algorithm 4", Pipeline::ThreeStage),
];
const LOADS: &[Choice<Loads>] = &[
    ("producer", "A warpgroup that only loads", Loads::Producer),
    ("consumers", "A thread of a consumer warpgroup", Loads::Consumers),
];
const SCHEDULERS: &[Choice<Scheduler>] = &[
    ("one", "One tile per CTA, in a grid of all tiles", Scheduler::OneTile),
    ("static", "Assigned to persistent CTAs in turn", Scheduler::StaticPersistent),
    ("dynamic", "Drawn by persistent CTAs from a counter", Scheduler::DynamicPersistent),
];

/// A plan. The library makes the decisions that are not given.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// How a consumer warpgroup overlaps GEMMs and softmax
    #[arg(long, value_name = "HOW", value_parser = one_of(PIPELINES))]
    pipeline: Option<Pipeline>,
    /// Ping-pong scheduling: whether consumer warpgroups take turns on the tensor cores
    #[arg(long, value_name = "WHETHER", value_parser = one_of(SWITCH))]
    ping_pong: Option<bool>,
    /// Who loads Q, K and V
    #[arg(long, value_name = "WHO", value_parser = one_of(LOADS))]
    loads: Option<Loads>,
    /// How tiles are assigned to CTAs
    #[arg(long, value_name = "HOW", value_parser = one_of(SCHEDULERS))]
    scheduler: Option<Scheduler>,
    /// Whether pairs of CTAs share loads of K and V by multicast, where they can
    #[arg(long, value_name = "WHETHER", value_parser = one_of(SWITCH))]
    clusters: Option<bool>,
    /// Split-KV: CTAs share the keys of all sequences equally, where rows of Q are few
    #[arg(long, conflicts_with_all = ["pipeline", "ping_pong", "loads", "scheduler", "clusters"])]
    split_keys: bool,
    /// Number of streaming multiprocessors of the GPU
    #[arg(long, value_name = "N", default_value_t = DeviceLimits::h100_sxm().sms, value_parser = sms())]
    sms: NonZeroU32,
}

impl PlanArgs {
    /// The limits of an H100 with the given number of SMs.
    pub(crate) fn limits(&self) -> DeviceLimits {
        DeviceLimits::h100_sxm().sms(self.sms)
    }

    /// Whether any decision is given.
    pub(crate) fn decides(&self) -> bool {
        self.decides_tile() || self.scheduler.is_some() || self.clusters.is_some() || self.split_keys
    }

    fn decides_tile(&self) -> bool {
        self.pipeline.is_some() || self.ping_pong.is_some() || self.loads.is_some()
    }

    /// The given decisions, as options for the plan of `problem`.
    pub(crate) fn options(&self, problem: &Problem) -> Result<PlanOptions, PlanError> {
        let mut options = PlanOptions::default();
        if self.decides_tile() {
            let table = Plan::new(problem, &self.limits())?;
            options = options.tile(self.tile(table.tile()));
        }
        (options.scheduler, options.clusters) = (self.scheduler, self.clusters);
        Ok(if self.split_keys { options.split_keys(SplitKeys::Even) } else { options })
    }

    /// Plans `problem` with the given decisions.
    pub(crate) fn plan(&self, problem: &Problem) -> Result<Plan, PlanError> {
        Plan::with(problem, &self.limits(), &self.options(problem)?)
    }

    /// `tile` with the given pipeline and loads, and the largest key block that registers and shared memory then allow.
    fn tile(&self, mut tile: CtaTile) -> CtaTile {
        tile.pipeline = self.pipeline.unwrap_or(tile.pipeline);
        tile.ping_pong = self.ping_pong.unwrap_or(tile.ping_pong);
        tile.loads = self.loads.unwrap_or(tile.loads);
        let is_short = |tile: &CtaTile| {
            matches!(
                tile.check(&self.limits()),
                Err(TileError::SharedMemory { .. } | TileError::Registers { .. })
            )
        };
        while is_short(&tile) && tile.tile_n > 16 {
            tile.tile_n -= 16;
        }
        tile
    }
}
