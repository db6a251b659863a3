//! Options that replace decisions of the plan.

use std::num::NonZeroU32;

use clap::ValueEnum;
use fa3_sched::forward::{CtaTile, Loads, Pipeline, Plan, PlanError, PlanOptions, SplitKeys, TileError};
use fa3_sched::{DeviceLimits, Scheduler};
use fa3_types::Problem;

use super::number::sms;

/// A plan. The library makes the decisions that are not given.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// How a consumer warpgroup overlaps GEMMs and softmax
    #[arg(long, value_name = "HOW")]
    pipeline: Option<Stages>,
    /// Ping-pong scheduling: whether consumer warpgroups take turns on the tensor cores
    #[arg(long, value_name = "WHETHER")]
    ping_pong: Option<Switch>,
    /// Who loads Q, K and V
    #[arg(long, value_name = "WHO")]
    loads: Option<Who>,
    /// How tiles are assigned to CTAs
    #[arg(long, value_name = "HOW")]
    scheduler: Option<How>,
    /// Whether pairs of CTAs share loads of K and V by multicast, where they can
    #[arg(long, value_name = "WHETHER")]
    clusters: Option<Switch>,
    /// Split-KV: CTAs share the keys of all sequences equally, where rows of Q are few
    #[arg(long, conflicts_with_all = ["pipeline", "ping_pong", "loads", "scheduler", "clusters"])]
    split_keys: bool,
    /// Number of streaming multiprocessors of the GPU
    #[arg(long, value_name = "N", default_value_t = DeviceLimits::h100_sxm().sms, value_parser = sms())]
    sms: NonZeroU32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stages {
    /// No overlap: one after the other, Algorithm 1 of the paper
    Serial,
    /// QK of a block and PV of the previous block together, then the softmax
    Paired,
    /// The softmax overlaps PV of the previous block, Algorithm 2
    TwoStage,
    /// The softmax also overlaps QK of the next block, Algorithm 4
    ThreeStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    Off,
    On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    /// A warpgroup that only loads
    Producer,
    /// A thread of a consumer warpgroup
    Consumers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum How {
    /// One tile per CTA, in a grid of all tiles
    One,
    /// Assigned to persistent CTAs in turn
    Static,
    /// Drawn by persistent CTAs from a counter
    Dynamic,
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
    ///
    /// # Errors
    /// If no kernel computes the problem.
    pub(crate) fn options(&self, problem: &Problem) -> Result<PlanOptions, PlanError> {
        let mut options = PlanOptions::default();
        if self.decides_tile() {
            let table = Plan::new(problem, &self.limits())?;
            options = options.tile(self.tile(table.tile()));
        }
        options.scheduler = self.scheduler.map(|how| match how {
            How::One => Scheduler::OneTile,
            How::Static => Scheduler::StaticPersistent,
            How::Dynamic => Scheduler::DynamicPersistent,
        });
        options.clusters = self.clusters.map(|switch| switch == Switch::On);
        Ok(if self.split_keys { options.split_keys(SplitKeys::Even) } else { options })
    }

    /// Plans `problem` with the given decisions.
    ///
    /// # Errors
    /// If no kernel computes the problem with these decisions.
    pub(crate) fn plan(&self, problem: &Problem) -> Result<Plan, PlanError> {
        Plan::with(problem, &self.limits(), &self.options(problem)?)
    }

    /// `tile` with the given pipeline and loads, and the largest key block that registers and shared memory then allow.
    fn tile(&self, mut tile: CtaTile) -> CtaTile {
        match self.pipeline {
            Some(Stages::Serial) => tile.pipeline = Pipeline::Serial,
            Some(Stages::Paired) => tile.pipeline = Pipeline::Paired,
            Some(Stages::TwoStage) => tile.pipeline = Pipeline::TwoStage,
            Some(Stages::ThreeStage) => tile.pipeline = Pipeline::ThreeStage,
            None => {}
        }
        if let Some(switch) = self.ping_pong {
            tile.ping_pong = switch == Switch::On;
        }
        match self.loads {
            Some(Who::Producer) => tile.loads = Loads::Producer,
            Some(Who::Consumers) => tile.loads = Loads::Consumers,
            None => {}
        }
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
