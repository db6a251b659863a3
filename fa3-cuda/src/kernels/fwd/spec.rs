//! What makes one forward kernel differ from another.

use fa3_ir::Elem;
use fa3_sched::{CtaTile, Inputs, Loads, Order, PPlace, Plan, Scheduler};
use fa3_types::{Dtype, Mask};

/// Everything that a forward kernel's code depends on. Problems of equal specs share a kernel: lengths, heads, strides,
/// scales and the reach of a window are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FwdSpec {
    /// The elements of Q, K, V and O: f16 or bf16.
    pub elem: Elem,
    /// The tile, its pipeline among it.
    pub tile: CtaTile,
    /// Columns of V and O, at most the tile's.
    pub head_dim_v: u32,
    /// Which sides of the mask are bounded; how far they reach does not matter here.
    pub mask: Mask,
    /// Whether scores are capped.
    pub softcap: bool,
    /// The order of tiles; the size of its sections does not matter here.
    pub order: Order,
    /// How tiles reach CTAs.
    pub scheduler: Scheduler,
}

/// Plans that the forward kernels cannot compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum FwdError {
    #[error("the forward kernels take f16 and bf16, not {dtype}")]
    Dtype { dtype: Dtype },
    #[error("the forward kernels write O in the type of Q, {dtype}, not in {output}")]
    Output { dtype: Dtype, output: Dtype },
    #[error("the forward kernels take dense batches: sequences of one length, not packed, used in full")]
    Sequences,
    #[error("the forward kernels take one part of each KV range, not {splits}")]
    Splits { splits: u32 },
    #[error("the forward kernels take query heads in tiles of their own, not packed")]
    Packed,
    #[error(
        "the forward kernels take tiles whose warpgroups have 64 rows each, not {tile_m} rows for {consumers}"
    )]
    SharedRows { tile_m: u32, consumers: u32 },
    #[error(
        "without a producer the forward kernels take one tile a CTA or the static persistent scheduler, not \
         the {scheduler} one"
    )]
    NoProducer { scheduler: Scheduler },
}

impl FwdSpec {
    /// The spec of a plan's kernel.
    ///
    /// # Errors
    /// [`FwdError`] if there is no such kernel.
    pub fn of(plan: &Plan) -> Result<FwdSpec, FwdError> {
        let (problem, tile) = (&plan.problem, plan.row.shape);
        let dtype = problem.dtype();
        let elem = match dtype {
            Dtype::F16 => Elem::F16,
            Dtype::Bf16 => Elem::Bf16,
            Dtype::F32 | Dtype::E4m3 => return Err(FwdError::Dtype { dtype }),
        };
        let output = problem.o().dtype;
        if output != dtype {
            return Err(FwdError::Output { dtype, output });
        }
        let full = [(problem.seqs_q(), problem.q()), (problem.seqs_k(), problem.k())];
        let dense = full.iter().all(|(sequences, tensor)| {
            !sequences.is_packed()
                && (0..sequences.count()).all(|index| sequences.len(index) == tensor.shape.seqlen)
        });
        if !dense {
            return Err(FwdError::Sequences);
        }
        if plan.splits != 1 {
            return Err(FwdError::Splits { splits: plan.splits });
        }
        if plan.tiling.is_packed() {
            return Err(FwdError::Packed);
        }
        if tile.p_place == PPlace::Both || tile.tile_m != 64 * tile.consumers || tile.inputs != Inputs::Bits16
        {
            return Err(FwdError::SharedRows { tile_m: tile.tile_m, consumers: tile.consumers });
        }
        if tile.loads == Loads::Consumers && plan.scheduler == Scheduler::DynamicPersistent {
            return Err(FwdError::NoProducer { scheduler: plan.scheduler });
        }
        Ok(FwdSpec {
            elem,
            tile,
            head_dim_v: problem.head_dim_v() as u32,
            mask: sides(problem.mask()),
            softcap: problem.softcap().is_some(),
            order: form(plan.order),
            scheduler: plan.scheduler,
        })
    }
}

/// The mask with every bounded side at 0.
fn sides(mask: Mask) -> Mask {
    let (left, right) = mask.reach();
    Mask::window(left.map(|_| 0), right.map(|_| 0))
}

/// The order with sections of one head.
fn form(order: Order) -> Order {
    match order {
        Order::Linear => Order::Linear,
        Order::LongestFirst { section: _, longest } => Order::LongestFirst { section: 1, longest },
    }
}
