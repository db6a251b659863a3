//! The key of a forward kernel.

use fa3_ir::Elem;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Plan, PlanKind, Precision, packed_positions};
use fa3_sched::{Order, Scheduler};
use fa3_types::Mask;

use crate::kernels::parts::geometry::{form, sides};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::shares::ShareForm;
use crate::kernels::tensors::elem;

/// Everything that a forward kernel's code depends on. Problems with equal specs share a kernel: lengths, heads,
/// strides, scales and the reach of a window are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FwdSpec {
    /// The elements of Q as products read them, and of K and V unless these are dequantized: f16, bf16 or e4m3.
    pub elem: Elem,
    /// The elements of O: the elements of Q, or f16 or bf16 if Q is e4m3.
    pub output: Elem,
    /// The tile and its pipeline.
    pub tile: CtaTile,
    /// Columns of V and O, at most the tile's.
    pub head_dim_v: u32,
    /// The bounded sides of the mask; the reach of each side is an argument.
    pub mask: Mask,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// The order of tiles; the size of its sections is an argument.
    pub order: Order,
    /// The tile scheduler.
    pub scheduler: Scheduler,
    /// CTAs of a cluster, which multicast K and V to each other.
    pub cluster: u32,
    /// Where lengths of sequences are known.
    pub sequences: SequenceForm,
    /// Whether callers give the table of sequences, which may then hold any numbers.
    pub given_table: bool,
    /// How CTAs find their shares of the keys, in a split-KV kernel.
    pub shares: Option<ShareForm>,
    /// CTAs that an SM's registers must hold.
    pub per_sm: u32,
    /// Query heads whose rows share a tile (PackGQA): 1 except in split-KV kernels.
    pub pack: u32,
    /// Rows of K and V that are copied at once, if the cache is paged.
    pub page_block: Option<u32>,
    /// Columns of K, if rows are copied or converted one by one.
    pub gathered_cols: Option<u32>,
    /// Whether the page table is indirect: cache_batch_idx has the row of each sequence.
    pub indexed: bool,
}

/// The division of loads among the producer's warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loading {
    /// One thread loads Q, K and V. The other warps transpose V, if V needs it.
    Thread,
    /// One warp loads Q, K and V, and another finds the blocks that a tile visits under a mask of intervals.
    Ranges,
    /// Three warps load: one Q, one K, one V.
    WarpEach,
    /// One warp loads Q, and one K and V. The other two transpose V.
    WarpForBoth,
    /// One warp loads Q, two copy K and V row by row, and the last fences and commits what these have copied.
    Gathered,
    /// All warps convert rows of K and V, and one thread loads Q.
    Converted,
}

impl FwdSpec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> FwdSpec {
        let problem = plan.problem();
        let (sequences, given_table, shared) = match plan.kind() {
            PlanKind::Dense(_) => (SequenceForm::Dense, false, None),
            PlanKind::Varlen(listed) => (SequenceForm::Varlen, listed.has_given_table(), None),
            PlanKind::SplitKv(shared) => (SequenceForm::Varlen, false, Some(shared)),
        };
        let (output, pages) = (elem(problem.o().dtype), plan.pages());
        FwdSpec {
            elem: if plan.tile().precision.is_converted() { output } else { elem(problem.dtype()) },
            output,
            tile: plan.tile(),
            head_dim_v: problem.head_dim_v() as u32,
            mask: sides(problem.mask()),
            softcap: problem.softcap().is_some(),
            sink: problem.has_sink(),
            order: form(plan.order()),
            scheduler: plan.scheduler(),
            cluster: plan.cluster(),
            sequences,
            given_table,
            shares: shared.map(ShareForm::of),
            per_sm: shared.map_or(1, |shared| shared.per_sm()),
            pack: shared.map_or(1, |shared| shared.pack()),
            page_block: pages.map(|pages| pages.block_rows),
            gathered_cols: (plan.tile().converts_rows() || pages.is_some_and(|pages| pages.is_gathered()))
                .then_some(problem.head_dim() as u32),
            indexed: pages.is_some_and(|pages| pages.indexed.is_some()),
        }
    }
}

impl FwdSpec {
    /// Whether lengths of sequences are data.
    pub(super) fn lengths_are_data(&self) -> bool {
        self.sequences != SequenceForm::Dense
    }

    /// The division of loads among the producer's warps.
    pub(super) fn loading(&self) -> Loading {
        // Loads are spread over warps where a tile takes many copies, or where tiles are short.
        let in_warps = self.shares.is_some() || self.page_block.is_some();
        match (in_warps, self.tile.precision.transposes_v()) {
            _ if self.tile.converts_rows() => Loading::Converted,
            (true, true) => Loading::WarpForBoth,
            (true, false) if self.gathers() => Loading::Gathered,
            (true, false) => Loading::WarpEach,
            (false, false) if self.mask.intervals().is_some() => Loading::Ranges,
            (false, _) => Loading::Thread,
        }
    }

    /// Whether K and V are addressed row by row: by one warp each, while a third warp commits their stages, or by all
    /// warps of the producer, which convert rows.
    pub(super) fn gathers(&self) -> bool {
        self.gathered_cols.is_some()
    }

    /// Warps that load K and V, or commit their stages, beside the warp that loads Q. All warps that convert rows
    /// receive work tiles.
    pub(super) fn loaders(&self) -> u32 {
        match self.loading() {
            Loading::Thread | Loading::Ranges => 0,
            Loading::WarpForBoth => 1,
            Loading::WarpEach => 2,
            Loading::Gathered => 3,
            Loading::Converted => 4,
        }
    }

    /// Warps of the producer that transpose V: all warps that load nothing.
    pub(super) fn transposers(&self) -> u32 {
        if self.tile.precision.transposes_v() { 3 - self.loaders() } else { 0 }
    }

    /// Whether K and V are e4m3 in memory, and warps convert them to the type of Q.
    pub(super) fn converts(&self) -> bool {
        self.tile.precision.is_converted()
    }

    /// Whether Q is e4m3 in memory, and dequantizing warps convert it to the type of O.
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

    /// Rows of a tile of Q that are copied: all rows, or with PackGQA the rows of whole positions.
    pub(super) fn q_rows(&self) -> u32 {
        match self.shares {
            None => self.tile.tile_m,
            Some(_) => self.pack * packed_positions(self.pack, self.tile.tile_m),
        }
    }

    /// Whether CTAs fetch tile numbers from a counter, and a number alone gives the work tile.
    pub(super) fn fetches_indices(&self) -> bool {
        self.scheduler == Scheduler::DynamicPersistent && !self.lengths_are_data()
    }

    /// Whether e4m3 V is transposed in memory.
    pub(super) fn v_is_transposed(&self) -> bool {
        self.is_fp8() && !self.tile.precision.transposes_v()
    }

    /// Whether blocks of e4m3 Q and K have scales.
    pub(super) fn has_block_scales(&self) -> bool {
        matches!(self.tile.precision, Precision::Fp8(Fp8Inputs { block_scales: true, .. }))
    }

    /// Whether channels of e4m3 V have scales and means.
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

    /// Whether code of one thread of a warp is predicated as a whole, by
    /// [`guard_all`](fa3_ir::lang::Builder::guard_all). Without it, ptxas waits for PV before most exponentials, in
    /// 16-bit kernels that compute the maxima of every block.
    pub(super) fn guards_all(&self) -> bool {
        !self.is_fp8() && !self.tile.rescales_lazily()
    }
}
