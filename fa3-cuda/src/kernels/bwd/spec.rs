//! Specs: all that makes one backward kernel differ from another.

use fa3_ir::{Elem, WgmmaType};
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, Part, Plan};
use fa3_sched::{Order, Scheduler};
use fa3_types::Mask;

use crate::kernels::parts::geometry::{form, sides};
use crate::kernels::tensors::elem;

/// Everything that a backward kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BwdSpec {
    /// D of every row, and LSE in base 2.
    Stats(StatsSpec),
    /// dK and dV.
    Dkv(PartSpec<DkvTile>),
    /// dQ.
    Dq(PartSpec<DqTile>),
    /// dQ from sums.
    Round(RoundSpec),
    /// The gradient of sinks.
    Sink,
}

/// The spec of the kernel of row statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatsSpec {
    /// The elements of O and dO: f16 or bf16.
    pub elem: Elem,
    /// Their columns.
    pub head_dim_v: u32,
    /// The memory that it clears.
    pub cleared: Cleared,
}

/// Memory that must hold zeros before parts of dQ are added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cleared {
    /// Nothing: dQ is not added up.
    Nothing,
    /// Sums of so many columns, if parts are added in any order.
    Sums(u32),
    /// Who has added last, if they are added in order, and dQ of rows that no tile visits, which has so many columns.
    /// The first part is stored, so the sums may hold anything.
    InOrder(u32),
}

/// The spec of the kernel that rounds sums of dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundSpec {
    /// The elements of dQ: f16 or bf16.
    pub elem: Elem,
    /// Its columns.
    pub head_dim: u32,
    /// Columns of the sums, at least as many.
    pub cols: u32,
}

/// The spec of a kernel with products. Problems of equal specs share a kernel: lengths, heads, strides, scales and the
/// reach of a window are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartSpec<T> {
    /// The elements of all tensors: f16 or bf16.
    pub elem: Elem,
    /// The tile.
    pub tile: T,
    /// Columns of Q and K, at most the tile's.
    pub head_dim: u32,
    /// Columns of V and dO, at most the tile's.
    pub head_dim_v: u32,
    /// Which sides of the mask are bounded, as the kernel's rows see it; how far they reach does not matter here.
    pub mask: Mask,
    /// Whether scores are capped.
    pub softcap: bool,
    /// The order of tiles; the size of its sections does not matter here.
    pub order: Order,
    /// How tiles reach CTAs.
    pub scheduler: Scheduler,
}

impl BwdSpec {
    /// The specs of a plan's kernels, in the order in which they run.
    pub fn of(plan: &Plan) -> Vec<BwdSpec> {
        let sink = plan.problem().forward().has_sink().then_some(BwdSpec::Sink);
        let first = [BwdSpec::stats(plan), BwdSpec::dkv(plan)].into_iter();
        first.chain(BwdSpec::dq(plan)).chain(sink).collect()
    }

    /// The elements of Q, K and V: f16 or bf16. `None` if it reads numbers in f32 alone.
    pub fn elem(&self) -> Option<Elem> {
        match self {
            BwdSpec::Stats(spec) => Some(spec.elem),
            BwdSpec::Dkv(spec) => Some(spec.elem),
            BwdSpec::Dq(spec) => Some(spec.elem),
            BwdSpec::Round(spec) => Some(spec.elem),
            BwdSpec::Sink => None,
        }
    }

    /// The spec of row statistics.
    pub(super) fn stats(plan: &Plan) -> BwdSpec {
        let forward = plan.problem().forward();
        let cleared = match plan.dkv().tile.adds_dq {
            None => Cleared::Nothing,
            Some(AddOrder::Any) => Cleared::Sums(plan.dkv().tile.head_dim),
            Some(AddOrder::LastKeysFirst) => Cleared::InOrder(forward.head_dim() as u32),
        };
        let (elem, head_dim_v) = (elem(forward.dtype()), forward.head_dim_v() as u32);
        BwdSpec::Stats(StatsSpec { elem, head_dim_v, cleared })
    }

    /// The spec of dK and dV.
    pub(super) fn dkv(plan: &Plan) -> BwdSpec {
        BwdSpec::Dkv(PartSpec::of(plan, plan.dkv(), plan.problem().forward().mask().transposed()))
    }

    /// The spec of dQ, if it has a kernel of its own.
    pub(super) fn dq(plan: &Plan) -> Option<BwdSpec> {
        let forward = plan.problem().forward();
        let (elem, head_dim) = (elem(forward.dtype()), forward.head_dim() as u32);
        match plan.dq() {
            DqBy::Kernel(part) => Some(BwdSpec::Dq(PartSpec::of(plan, part, forward.mask()))),
            DqBy::Additions(_) => {
                Some(BwdSpec::Round(RoundSpec { elem, head_dim, cols: plan.dkv().tile.head_dim }))
            }
            DqBy::AdditionsInOrder => None,
        }
    }
}

impl<T: Copy> PartSpec<T> {
    fn of(plan: &Plan, part: &Part<T>, mask: Mask) -> PartSpec<T> {
        let forward = plan.problem().forward();
        PartSpec {
            elem: elem(forward.dtype()),
            tile: part.tile,
            head_dim: forward.head_dim() as u32,
            head_dim_v: forward.head_dim_v() as u32,
            mask: sides(mask),
            softcap: forward.softcap().is_some(),
            order: form(part.schedule.order()),
            scheduler: part.schedule.scheduler(),
        }
    }

    /// The type of its products.
    pub(super) fn product_type(&self) -> WgmmaType {
        if self.elem == Elem::F16 { WgmmaType::F16 } else { WgmmaType::Bf16 }
    }
}
