//! The spec of a forward kernel, which is its key in caches.

use fa3_ir::Elem;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Plan, PlanKind, Precision, RunningO, packed_positions};
use fa3_sched::{Order, Scheduler};
use fa3_types::{Intervals, Mask, ScoreExpr, ScoreForm};

use crate::kernels::parts::geometry::{form, sides};
use crate::kernels::parts::lists::ListForm;
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::lse_form::StoredLse;
use crate::kernels::parts::seen::COPIERS;
use crate::kernels::parts::shares::ShareForm;
use crate::kernels::tensors::elem;

/// Everything that a forward kernel's code depends on. Problems with equal specs share a kernel: lengths, heads,
/// strides, scales, the reach of a window, and the numbers and tables of a function of scores are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FwdSpec {
    /// The elements of Q as products read them: f16, bf16 or e4m3. K and V have the same type, or are dequantized to
    /// it. f16 beside O of bf16: Q of bf16 is rewritten.
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
    /// The function of scores, if there is one.
    pub score: Option<ScoreExpr>,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// Whether LSE leaves out the sinks.
    pub lse_without_sink: bool,
    /// Whether LSE is stored in another form than the default one. Its numbers are arguments, which not all kernels
    /// have registers for.
    pub stored_lse: bool,
    /// Whether the largest score of each row is a result.
    pub max_logits: bool,
    /// The order of tiles; the size of its sections is an argument.
    pub order: Order,
    /// The tile scheduler.
    pub scheduler: Scheduler,
    /// Number of CTAs of a cluster, which multicast K and V to each other.
    pub cluster: u32,
    /// Where lengths of sequences are known.
    pub sequences: SequenceForm,
    /// Whether callers give the table of sequences, which may then hold any numbers.
    pub given_table: bool,
    /// How CTAs find their shares of the keys, in a split-KV kernel.
    pub shares: Option<ShareForm>,
    /// Where consumers keep O of the pieces before, if they merge pieces of a fixed size; the size is an argument.
    pub merges: Option<RunningO>,
    /// Number of CTAs that an SM's registers must hold.
    pub per_sm: u32,
    /// Number of query heads whose rows share a tile (PackGQA): 1 except in split-KV kernels.
    pub pack: u32,
    /// Number of rows of K and V that are copied at once, if the cache is paged.
    pub page_block: Option<u32>,
    /// Number of columns of K, if rows are copied or converted one by one.
    pub gathered_cols: Option<u32>,
    /// Whether V is e4m3 beside K of 16 bits, and each of its rows has its own scales.
    pub row_scales: bool,
    /// The elements of K and V beside Q of 16 bits, if each of their rows has a scale for each head: e4m3, or bytes for
    /// int8.
    pub token_scales: Option<Elem>,
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
    /// One thread loads Q, and the blocks of K and V that bits show.
    Blocks,
    /// Three warps load: one loads Q, one K, and one V.
    WarpEach,
    /// One warp loads Q, and one loads K and V. The other two transpose V.
    WarpForBoth,
    /// Three warps copy K and V row by row. One thread of another loads Q, and fences and commits what these have
    /// copied.
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
        let shares = shared.map(|shared| ShareForm::of(shared, plan.tile().tile_n));
        let is_gathered = pages.is_some_and(|pages| pages.is_gathered())
            || shares.is_some_and(|shares| shares.lists.is_some());
        FwdSpec {
            elem: match plan.tile() {
                tile if tile.converts_rows() && problem.v_scales().is_none() => Elem::F16,
                tile if tile.precision.is_converted() => output,
                _ => elem(problem.dtype()),
            },
            output,
            tile: plan.tile(),
            head_dim_v: problem.head_dim_v() as u32,
            mask: sides(problem.mask()),
            softcap: problem.softcap().is_some(),
            score: problem.score().map(ScoreForm::expr).cloned(),
            sink: problem.has_sink(),
            lse_without_sink: problem.lse_form().without_sink,
            stored_lse: StoredLse::of(problem.lse_form()).is_some(),
            max_logits: problem.has_max_logits(),
            order: form(plan.order()),
            scheduler: plan.scheduler(),
            cluster: plan.cluster(),
            sequences,
            given_table,
            shares,
            merges: plan.pieces().map(|pieces| pieces.running),
            per_sm: shared.map_or(1, |shared| shared.per_sm()),
            pack: shared.map_or(1, |shared| shared.pack()),
            page_block: pages.map(|pages| pages.block_rows),
            gathered_cols: (is_gathered || plan.tile().converts_rows()).then(|| problem.head_dim() as u32),
            row_scales: problem.v_scales().is_some(),
            token_scales: problem.token_scales().map(|_| elem(problem.k().dtype)),
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
        // Several warps load if a tile takes many copies, or if tiles are short.
        let in_warps = self.shares.is_some() || self.page_block.is_some();
        match (in_warps, self.tile.precision.transposes_v()) {
            _ if self.tile.converts_rows() => Loading::Converted,
            (true, true) => Loading::WarpForBoth,
            (true, false) if self.gathers() => Loading::Gathered,
            (true, false) => Loading::WarpEach,
            (false, false) if self.finds_ranges() => Loading::Ranges,
            (false, false) if self.lists_blocks() => Loading::Blocks,
            (false, _) => Loading::Thread,
        }
    }

    /// Whether a warp finds the blocks that a tile visits under a mask of intervals. Otherwise tiles visit all blocks,
    /// with the mask: where CTAs share keys, and where all warps of the producer copy rows. If all rows see all keys
    /// but the new ones, only blocks with new keys have the mask there.
    pub(super) fn finds_ranges(&self) -> bool {
        let has_intervals = self.mask.intervals().is_some() && !self.lists_blocks();
        has_intervals && self.shares.is_none() && !self.gathers()
    }

    /// Whether bits say which blocks of keys a tile visits.
    pub(super) fn lists_blocks(&self) -> bool {
        self.mask.intervals().is_some_and(Intervals::are_blocks)
    }

    /// The form of lists, if keys are listed.
    pub(super) fn lists(&self) -> Option<ListForm> {
        self.shares.and_then(|shares| shares.lists)
    }

    /// Whether K and V are copied or converted row by row.
    pub(super) fn gathers(&self) -> bool {
        self.gathered_cols.is_some()
    }

    /// Whether warps that load K and V need more registers than a producer thread has: where they load row by row, and
    /// where they find pages beside consumers that merge pieces, whose blocks are short.
    pub(super) fn has_busy_loaders(&self) -> bool {
        self.gathers() || self.merges.is_some() && self.page_block.is_some()
    }

    /// Rows of the first of two parts in which a block's second half of V's columns is copied, if rows are copied one
    /// by one and scores read them, too: each part is released as soon as it has been multiplied. `None` with a single
    /// part.
    pub fn first_rows_of_second_half(&self) -> Option<u32> {
        // A product takes 16 rows at a time.
        let first = (self.tile.tile_n / 16).div_ceil(2) * 16;
        (self.tile.qv && self.loading() == Loading::Gathered && first < self.tile.tile_n).then_some(first)
    }

    /// Number of warps that load K and V, beside the warp that loads Q or together with it. Each of them receives work
    /// tiles.
    pub(super) fn loaders(&self) -> u32 {
        match self.loading() {
            Loading::Thread | Loading::Ranges | Loading::Blocks => 0,
            Loading::WarpForBoth => 1,
            Loading::WarpEach => 2,
            Loading::Gathered => COPIERS,
            Loading::Converted => 4,
        }
    }

    /// Number of the producer's warps that transpose V: all warps that load nothing.
    pub(super) fn transposers(&self) -> u32 {
        if self.tile.precision.transposes_v() { 3 - self.loaders() } else { 0 }
    }

    /// Whether K and V are e4m3 or int8 in memory, and warps convert them to the type of Q.
    pub(super) fn converts(&self) -> bool {
        self.tile.precision.is_converted()
    }

    /// Whether Q is e4m3 in memory, and dequantizing warps convert it to the type of O.
    pub(super) fn converts_q(&self) -> bool {
        self.tile.precision == Precision::Converted { q: true }
    }

    /// Whether Q is bf16 in memory, and the first consumer rewrites it to f16, to which rows of K and V are converted.
    pub fn rewrites_q(&self) -> bool {
        self.tile.converts_rows() && self.elem != self.output
    }

    /// The elements of Q in memory.
    pub(super) fn query_elem(&self) -> Elem {
        match (self.converts_q(), self.rewrites_q()) {
            (true, _) => Elem::E4m3,
            (false, true) => self.output,
            (false, false) => self.elem,
        }
    }

    /// The elements of K in memory, and of V unless rows have their own scales.
    pub(super) fn key_elem(&self) -> Elem {
        match self.token_scales {
            Some(codes) => codes,
            None if self.converts() && !self.row_scales => Elem::E4m3,
            None => self.elem,
        }
    }

    /// Whether K and V have scales of heads, blocks or channels.
    pub(super) fn has_scales(&self) -> bool {
        self.key_elem() == Elem::E4m3 && self.token_scales.is_none()
    }

    /// Number of rows of a tile of Q that are copied: all rows, or with PackGQA only the rows of whole positions.
    pub(super) fn q_rows(&self) -> u32 {
        match self.shares {
            None => self.tile.tile_m,
            Some(_) if self.lists().is_some() => self.q_heads(),
            Some(_) => self.pack * packed_positions(self.pack, self.tile.tile_m),
        }
    }

    /// Query heads of a tile of Q that are copied, with PackGQA. A position that has its own list is all of a tile, and
    /// whole periods of the swizzle are copied: rows of further heads, or zeros, which give no results.
    pub(super) fn q_heads(&self) -> u32 {
        if self.lists().is_some() { self.pack.next_multiple_of(8) } else { self.pack }
    }

    /// Whether CTAs fetch the number of a tile from a counter, and the number alone determines the work tile.
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
    /// [`guard_all`](fa3_ir::lang::Builder::guard_all). Otherwise, in 16-bit kernels that compute the maxima of every
    /// block, ptxas waits for PV before most exponentials.
    pub(super) fn guards_all(&self) -> bool {
        !self.is_fp8() && !self.tile.rescales_lazily()
    }
}
