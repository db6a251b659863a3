//! The key of a forward kernel.

use fa3_ir::Elem;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Plan, Precision, Way, packed_positions};
use fa3_sched::{Order, Scheduler};
use fa3_types::Mask;

use crate::kernels::parts::geometry::{form, sides};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::shares::ShareForm;
use crate::kernels::tensors::elem;

/// Everything that a forward kernel's code depends on. Problems of equal specs share a kernel: lengths, heads, strides,
/// scales and the reach of a window are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FwdSpec {
    /// The elements of Q, and of K and V unless they are converted: f16, bf16 or e4m3.
    pub elem: Elem,
    /// The elements of O: the same, or of e4m3 either of the others.
    pub output: Elem,
    /// The tile, its pipeline among it.
    pub tile: CtaTile,
    /// Columns of V and O, at most the tile's.
    pub head_dim_v: u32,
    /// Which sides of the mask are bounded; how far they reach does not matter here.
    pub mask: Mask,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// The order of tiles; the size of its sections does not matter here.
    pub order: Order,
    /// How tiles reach CTAs.
    pub scheduler: Scheduler,
    /// CTAs of a cluster, which load K and V for each other.
    pub cluster: u32,
    /// The place where lengths of sequences are known.
    pub sequences: SequenceForm,
    /// Whether callers give the table of sequences, in which anything may be then.
    pub given_table: bool,
    /// How CTAs find their shares, if they have equal shares of all keys.
    pub shares: Option<ShareForm>,
    /// CTAs for which an SM has registers.
    pub per_sm: u32,
    /// Query heads whose rows are in one tile: more than one only where CTAs share keys.
    pub pack: u32,
    /// Rows of K and V that are copied at once, if they are in pages.
    pub page_block: Option<u32>,
    /// Columns of K, if its rows are copied one by one.
    pub gathered_cols: Option<u32>,
    /// Whether an array says which row of the page table is each sequence's.
    pub indexed: bool,
}

/// The warps of the producer that load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loading {
    /// One thread loads Q, K and V. The other warps transpose V, if that is to be done.
    Thread,
    /// One warp loads Q, K and V, and another finds the blocks of a mask of intervals.
    Stretches,
    /// A warp each loads Q, K and V.
    WarpEach,
    /// A warp loads Q, and one K and V. The other two transpose V.
    WarpForBoth,
    /// A warp loads Q, one each copies K and V row by row, and the last one passes on what these have copied.
    Gathered,
}

impl FwdSpec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> FwdSpec {
        let problem = plan.problem();
        let (per_sm, pack) = match plan.way() {
            Way::Shared(shared) => (shared.per_sm(), shared.pack()),
            Way::Numbered(_) | Way::Listed(_) => (1, 1),
        };
        let gathers = plan.pages().is_some_and(|pages| pages.is_gathered());
        FwdSpec {
            elem: elem(if plan.tile().precision.is_converted() {
                problem.o().dtype
            } else {
                problem.dtype()
            }),
            output: elem(problem.o().dtype),
            tile: plan.tile(),
            head_dim_v: problem.head_dim_v() as u32,
            mask: sides(problem.mask()),
            softcap: problem.softcap().is_some(),
            sink: problem.has_sink(),
            order: form(plan.order()),
            scheduler: plan.scheduler(),
            cluster: plan.cluster(),
            sequences: match plan.way() {
                Way::Numbered(_) => SequenceForm::Equal,
                Way::Listed(_) | Way::Shared(_) => SequenceForm::Listed,
            },
            given_table: matches!(plan.way(), Way::Listed(listed) if listed.has_given_table()),
            shares: match plan.way() {
                Way::Shared(shared) => Some(ShareForm::of(shared)),
                Way::Numbered(_) | Way::Listed(_) => None,
            },
            per_sm,
            pack,
            page_block: plan.pages().map(|pages| pages.block_rows),
            gathered_cols: gathers.then_some(problem.head_dim() as u32),
            indexed: plan.pages().is_some_and(|pages| pages.indexed.is_some()),
        }
    }
}

impl FwdSpec {
    /// Whether lengths of sequences are data.
    pub(super) fn lengths_are_data(&self) -> bool {
        self.sequences != SequenceForm::Equal
    }

    /// The warps of the producer that load.
    pub(super) fn loading(&self) -> Loading {
        // A tile takes many copies, or tiles take little time.
        let in_warps = self.shares.is_some() || self.page_block.is_some();
        match (in_warps, self.tile.precision.transposes_v()) {
            (true, true) => Loading::WarpForBoth,
            (true, false) if self.gathers() => Loading::Gathered,
            (true, false) => Loading::WarpEach,
            (false, false) if self.mask.intervals().is_some() => Loading::Stretches,
            (false, _) => Loading::Thread,
        }
    }

    /// Whether K and V are loaded row by row, by a warp each, and a third one passes their slots on.
    pub(super) fn gathers(&self) -> bool {
        self.gathered_cols.is_some()
    }

    /// Warps that load K and V, or pass them on, beside the one that loads Q.
    pub(super) fn loaders(&self) -> u32 {
        match self.loading() {
            Loading::Thread | Loading::Stretches => 0,
            Loading::WarpForBoth => 1,
            Loading::WarpEach => 2,
            Loading::Gathered => 3,
        }
    }

    /// Warps of the producer that transpose V: the warps that load nothing.
    pub(super) fn transposers(&self) -> u32 {
        if self.tile.precision.transposes_v() { 3 - self.loaders() } else { 0 }
    }

    /// Whether K and V are e4m3, of which warps make elements of Q's type.
    pub(super) fn converts(&self) -> bool {
        self.tile.precision.is_converted()
    }

    /// Whether Q is e4m3, of which warps make elements of O's type.
    pub(super) fn converts_q(&self) -> bool {
        self.tile.precision == Precision::Converted { q: true }
    }

    /// The elements of Q in memory.
    pub(super) fn query_elem(&self) -> Elem {
        if self.converts_q() { Elem::E4m3 } else { self.elem }
    }

    /// The elements of K and V in memory.
    pub(super) fn key_elem(&self) -> Elem {
        if self.converts() { Elem::E4m3 } else { self.elem }
    }

    /// Whether K and V have scales.
    pub(super) fn has_scales(&self) -> bool {
        self.key_elem() == Elem::E4m3
    }

    /// Rows of a tile of Q that are copied: all of them, or the rows of some positions of several heads.
    pub(super) fn q_rows(&self) -> u32 {
        match self.shares {
            None => self.tile.tile_m,
            Some(_) => self.pack * packed_positions(self.pack, self.tile.tile_m),
        }
    }

    /// Whether CTAs draw numbers of tiles, which say all of them.
    pub(super) fn draws_numbers(&self) -> bool {
        self.scheduler == Scheduler::DynamicPersistent && !self.lengths_are_data()
    }

    /// Whether V of e4m3 is transposed in memory.
    pub(super) fn v_is_transposed(&self) -> bool {
        self.is_fp8() && !self.tile.precision.transposes_v()
    }

    /// Whether blocks of e4m3 Q and K have scales.
    pub(super) fn has_block_scales(&self) -> bool {
        matches!(self.tile.precision, Precision::Fp8(Fp8Inputs { block_scales: true, .. }))
    }

    /// Whether channels of V of e4m3 have scales and means.
    pub(super) fn has_v_channels(&self) -> bool {
        matches!(self.tile.precision, Precision::Fp8(Fp8Inputs { v_channels: true, .. }))
    }

    /// Whether blocks of V have scales.
    pub(super) fn has_v_blocks(&self) -> bool {
        self.has_block_scales() && !self.has_v_channels()
    }

    /// Whether products are of e4m3.
    pub(super) fn is_fp8(&self) -> bool {
        self.tile.precision.is_fp8()
    }

    /// Whether what one thread of a warp does is predicated as a whole, by
    /// [`guard_all`](fa3_ir::lang::Builder::guard_all). Without it, ptxas waits for PV before most exponentials of 16
    /// bits with maxima in every block.
    pub(super) fn guards_all(&self) -> bool {
        !self.is_fp8() && !self.tile.rescales_lazily()
    }
}
