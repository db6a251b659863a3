//! The forward kernels in the simulator.

use fa3_ref::Forward;
use fa3_sched::forward::{CtaTile, PlanError, PlanOptions};
use fa3_sim::{Mode, Policy};

use super::{Answer, Arithmetic, Engine, NoAnswer, Skip};
use crate::fwd::{Fault, Launch, device, with_tile};
use crate::{Case, Values};

/// Multiply-add limit of a case: half a second in the simulator.
const MACS: u64 = 1 << 27;

pub(super) struct Sim {
    /// The tile, or `None` for the planner's choice.
    pub(super) tile: Option<CtaTile>,
}

impl Sim {
    fn launch(&self, case: &Case) -> Result<Launch, Fault> {
        let options = self.tile.map_or_else(PlanOptions::default, with_tile);
        // With 3 SMs most cases have more tiles than SMs, so that CTAs are persistent.
        Launch::new(&case.problem, &device(3), &options)
    }
}

impl Engine for Sim {
    fn name(&self) -> String {
        "kernel, simulated".to_owned()
    }

    fn arithmetic(&self, case: &Case) -> Arithmetic {
        Arithmetic::of_kernels(case.problem.dtype())
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        if case.hides_a_poisoned_value() {
            return Err(Skip::PoisonedValue.into());
        }
        let launch = self.launch(case).map_err(no_kernel)?;
        let macs = launch.macs();
        if macs > MACS {
            return Err(Skip::Size { macs, limit: MACS }.into());
        }
        launch.simulate(values, Policy::Random(case.seed), Mode::Exact).map_err(failed)
    }

    fn with_tile_of(&self, case: &Case) -> Option<Box<dyn Engine>> {
        let launch = self.launch(case).ok()?;
        Some(Box::new(Sim { tile: Some(launch.plan.tile()) }))
    }
}

fn no_kernel(fault: Fault) -> NoAnswer {
    match fault {
        Fault::Plan(PlanError::Dtype { dtype }) => Skip::Dtype(dtype).into(),
        Fault::Plan(PlanError::Rows(_)) => Skip::Rows.into(),
        Fault::Plan(PlanError::Unknown(_) | PlanError::VarlenRows { .. }) => Skip::Sequences.into(),
        Fault::Plan(PlanError::HeadDim { head_dim, head_dim_v, .. }) => {
            Skip::HeadDim { head_dim, head_dim_v }.into()
        }
        Fault::Plan(PlanError::Latent { head_dim, head_dim_v, .. }) => {
            Skip::Latent { head_dim, head_dim_v }.into()
        }
        other @ (Fault::Plan(_) | Fault::Run { .. }) => failed(other),
    }
}

fn failed(fault: Fault) -> NoAnswer {
    NoAnswer::Failed(Box::new(fault))
}
