//! The parameters of the backward kernels.

use fa3_ir::lang::*;
use fa3_sched::backward::{AddOrder, DkvTile, DqTile};
use fa3_sched::{Longest, Order};

use super::line_sums::BlockSums;
use super::row_stats::RowStats;
use super::spec::{Cleared, PartSpec, RoundSpec, StatsSpec};

use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Form, InKernel, Pass, RowDims, Side, TensorForm, copies, param, params};
use crate::kernels::parts::geometry::{Geometry, WorkTile};
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::ragged::{self, RowSpan};
use crate::kernels::parts::row_blocks::{RowBlocks, RowsForm};
use crate::kernels::parts::score::ScoreParams;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::summaries::Summaries;
use crate::kernels::parts::table::{PaddedRows, Table};
use crate::kernels::parts::tma_pipeline::Sequence;

params! {
    /// The parameters that the dK/dV kernel and the dQ kernel share.
    struct Inputs {
        q: tensor,
        k: tensor,
        v: tensor,
        dout: tensor,
        /// softmax_scale · log₂e, cap · log₂e if scores are capped, or log₂e with a function of scores: turns a score
        /// into an exponent of 2.
        scale_log2: f32,
        /// softmax_scale / cap, if scores are capped.
        into_cap: maybe f32,
        /// softmax_scale, by which dQ and dK are multiplied at the end.
        softmax_scale: f32,
        lookup: all Lookup,
        /// The intervals of query rows, or bits of blocks, under a mask of intervals.
        intervals: maybe all IntervalRows,
        /// The tile counter of [`Scheduler::DynamicPersistent`], if sequences have one length.
        tile_counter: maybe pointer,
        /// Strides from sequence to sequence, if sequences are in a table.
        strides: maybe all BatchStrides,
        /// The function of scores, if there is one.
        score: maybe all ScoreParams,
    }

    /// Strides, in rows, from one sequence of a batch to the next; 0 for packed sequences.
    struct BatchStrides {
        q: u32 = "q_batch_stride",
        k: u32 = "k_batch_stride",
        v: u32 = "v_batch_stride",
        dout: u32 = "dout_batch_stride",
    }

    /// Strides of LSE in elements.
    struct LseStrides {
        /// The stride from one sequence to the next; 0 for packed sequences.
        batch: u64 = "lse_batch",
        head: u64 = "lse_head",
    }

    /// The parameters of the dQ accumulators, which are f32.
    struct DqAccumParams {
        address: pointer = "sums",
        /// Number of query heads.
        heads: u32 = "sums_heads",
        /// Number of blocks of accumulators of a head.
        blocks: u32 = "sums_blocks",
        in_order: maybe all InOrderParams,
    }

    /// The further parameters of deterministic additions to dQ.
    struct InOrderParams {
        /// The semaphore of each block of accumulators, which says which tile has added last.
        last_added: pointer,
        /// The tensor dQ, to which the rounded accumulators go.
        dq: named Strided,
    }

    /// The parameters of the dK/dV kernel.
    struct DkvParams {
        inputs: all Inputs,
        stats: tensor,
        /// Number of query heads that share a head of K and V.
        group: u32,
        dk: named Strided,
        dv: named Strided,
        dq_accum: maybe all DqAccumParams,
        /// The blocks of rows that see each tile of keys, and the split of tiles, where rows have bounds, if sequences
        /// have one length.
        tiles: maybe all KeyTiles,
        /// Summaries of blocks of rows, where rows have bounds, if sequences are in a table.
        summaries: maybe all Summaries,
        /// The buffers for dK and dV of the parts of split tiles.
        parts: maybe all Parts,
    }

    /// dK and dV of parts, in f32. A block has 64 keys, in the register layout of the warpgroup that computed it.
    struct Parts {
        dk: pointer = "dk_of_parts",
        dv: pointer = "dv_of_parts",
    }

    /// The parameters of the dQ kernel.
    struct DqParams {
        inputs: all Inputs,
        stats: all RowStats,
        dq: named Strided,
        /// The sums of gradients of the elements of tables that rows read, if these are asked for.
        sums: maybe all ReadSumsParams,
        /// The sums of keys and of diagonals, if these are asked for.
        line_sums: maybe all LineSumsParams,
    }

    /// Sums of groups of rows and blocks of keys.
    struct LineSumsParams {
        address: pointer = "line_sums",
        /// Number of groups of a head.
        groups: u32 = "line_groups",
        /// Number of blocks of a group.
        blocks: u32 = "line_blocks",
    }

    /// Sums of groups of rows.
    struct ReadSumsParams {
        address: pointer = "read_sums",
        /// Number of groups of a head.
        groups: u32 = "row_groups",
    }

    /// The parameters of the kernel of row statistics.
    struct StatsParams {
        o: named Strided,
        dout: named Strided,
        lse: pointer,
        /// The gradient of LSE, which is 0 if this address is 0.
        dlse: pointer,
        stats: pointer,
        pairs: u32,
        heads: u32,
        blocks: all RowBlocks,
        /// Strides of LSE, if sequences are in a table.
        lse_strides: maybe all LseStrides,
        /// The accumulators or semaphores that the kernel clears.
        dq_accum: maybe all DqAccumParams,
        /// The number of rows that no tile visits: the first rows of each sequence. Only for deterministic kernels and
        /// sequences of one length.
        unvisited: maybe u32 = "unvisited_rows",
        /// The destination of the block's summary of intervals, where rows have bounds.
        summary: maybe all SummaryParams,
    }

    /// The parameters that the kernel of row statistics has only where rows have bounds.
    struct SummaryParams {
        rows: all IntervalRows,
        to: all Summaries,
        /// Keys per sequence, if sequences have one length.
        keys: maybe u32 = "summary_keys",
    }

    /// The parameters of the kernel that rounds accumulators.
    struct RoundParams {
        dq_accum: all DqAccumParams,
        dq: named Strided,
        softmax_scale: f32,
        blocks: all RowBlocks,
    }
}

/// The order of blocks of rows in kernels with one CTA per block; the size of its sections is an argument.
const BLOCKS: Order = Order::LongestFirst { section: 1, longest: Longest::First };

impl DqAccumParams<Form> {
    /// The parameters of tiles that add to dQ in order `order`. The elements of dQ are `dq`.
    fn form(order: AddOrder, dq: Elem) -> DqAccumParams<Form> {
        let in_order = match order {
            AddOrder::Any => None,
            AddOrder::LastKeysFirst => Some(InOrderParams { last_added: Elem::U32, dq: Strided::form(dq) }),
        };
        DqAccumParams { address: Elem::F32, heads: (), blocks: (), in_order }
    }
}

impl RoundParams<Form> {
    pub(super) fn form(spec: &RoundSpec) -> RoundParams<Form> {
        RoundParams {
            dq_accum: DqAccumParams::form(AddOrder::Any, spec.elem),
            dq: Strided::form(spec.elem),
            softmax_scale: (),
            blocks: RowBlocks::form(spec.rows, BLOCKS),
        }
    }
}

impl Inputs<Form> {
    /// The parameters of a kernel whose tiles have `rows` rows of Q and dO, and `keys` keys. `places` says where the
    /// padded rows of a table's sequences are.
    pub(super) fn form<T: Copy>(
        spec: &PartSpec<T>,
        [rows, keys]: [u32; 2],
        [dim, dim_v]: [u32; 2],
        places: PaddedRows<Form>,
    ) -> Inputs<Form> {
        let tensor = |rows, cols| {
            let tile = TileShape::new(spec.elem, rows, cols);
            match spec.sequences {
                SequenceForm::Dense => TensorForm { tile, rank: 4, rows: RowDims::One(2) },
                SequenceForm::Varlen => ragged::form(tile),
            }
        };
        let places = (spec.sequences == SequenceForm::Varlen).then_some(places);
        Inputs {
            q: tensor(rows, dim),
            k: tensor(keys, dim),
            v: tensor(keys, dim_v),
            dout: tensor(rows, dim_v),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            softmax_scale: (),
            lookup: match places {
                None => Lookup::Dense(Geometry::form(spec.order, spec.mask)),
                Some(places) => {
                    let table = Table::form(spec.order, spec.mask, Some(places));
                    Lookup::Varlen { table, tile_counter: Elem::U32 }
                }
            },
            intervals: spec.mask.intervals().map(|form| IntervalRows::form(form.of_row)),
            tile_counter: spec.fetches_indices().then_some(Elem::U32),
            strides: places.is_some().then_some(BatchStrides { q: (), k: (), v: (), dout: () }),
            score: spec.score.as_ref().map(ScoreParams::form),
        }
    }
}

impl<'k> Inputs<InKernel<'k>> {
    /// The sequence of a work tile, as loads of Q and of dO address it. Tiles divide the side `of`.
    #[track_caller]
    pub(super) fn rows(&self, work: &WorkTile<'k>, of: TilesOf) -> [Sequence<'k>; 2] {
        self.sequence(work, of == TilesOf::Rows, |strides| [strides.q, strides.dout])
    }

    /// The sequence of a work tile, as loads of K and of V address it. Tiles divide the side `of`.
    #[track_caller]
    pub(super) fn keys(&self, work: &WorkTile<'k>, of: TilesOf) -> [Sequence<'k>; 2] {
        self.sequence(work, of == TilesOf::Keys, |strides| [strides.k, strides.v])
    }

    /// The sequence of a work tile in two tensors. `is_cut` says whether tiles divide the side of these tensors.
    #[track_caller]
    fn sequence(
        &self,
        work: &WorkTile<'k>,
        is_cut: bool,
        strides: impl Fn(&BatchStrides<InKernel<'k>>) -> [U32<'k>; 2],
    ) -> [Sequence<'k>; 2] {
        let (Some(varlen), Some(all)) = (work.varlen, &self.strides) else {
            return [work.batch.into(); 2];
        };
        let (first, count) = if is_cut { (varlen.q_row, work.lens.q) } else { (varlen.k_row, work.lens.k) };
        strides(all).map(|strides| Sequence::Rows(RowSpan::new(work.batch.mad(strides, first), count)))
    }
}

impl DkvParams<Form> {
    pub(super) fn form(spec: &PartSpec<DkvTile>) -> DkvParams<Form> {
        let DkvTile { head_dim, head_dim_v, tile_n, tile_m, .. } = spec.tile;
        let (bounds, is_dense) = (spec.mask.bounds(), spec.sequences == SequenceForm::Dense);
        let may_split = bounds.is_some() && is_dense;
        DkvParams {
            inputs: Inputs::form(
                spec,
                [tile_m, tile_n],
                [head_dim, head_dim_v],
                PaddedRows::Firsts { firsts: Elem::U32, most: () },
            ),
            stats: TensorForm { tile: stats_tile(tile_m), rank: 4, rows: RowDims::One(1) },
            group: (),
            dk: Strided::form(spec.elem),
            dv: Strided::form(spec.elem),
            dq_accum: spec.tile.adds_dq.map(|order| DqAccumParams::form(order, spec.elem)),
            tiles: may_split.then(KeyTiles::form),
            summaries: bounds.filter(|_| !is_dense).map(|form| Summaries::form(form.of_row)),
            parts: may_split.then_some(Parts { dk: Elem::F32, dv: Elem::F32 }),
        }
    }
}

/// The shape of a block's row statistics. A row of this shape holds the statistics of a pair of query rows.
pub(super) fn stats_tile(rows: u32) -> TileShape {
    TileShape::new(Elem::F32, rows / 2, 4)
}

impl DqParams<Form> {
    pub(super) fn form(spec: &PartSpec<DqTile>) -> DqParams<Form> {
        let DqTile { head_dim, head_dim_v, tile_m, tile_n, .. } = spec.tile;
        DqParams {
            inputs: Inputs::form(spec, [tile_m, tile_n], [head_dim, head_dim_v], PaddedRows::OfBlocks),
            stats: RowStats::FORM,
            dq: Strided::form(spec.elem),
            sums: (!spec.gradients.is_empty()).then_some(ReadSumsParams::FORM),
            line_sums: spec
                .score
                .as_ref()
                .filter(|expr| !BlockSums::of(expr, spec.gradients, tile_n).reads.is_empty())
                .map(|_| LineSumsParams::FORM),
        }
    }
}

copies!(ReadSumsParams, LineSumsParams);

impl ReadSumsParams<Form> {
    pub(super) const FORM: ReadSumsParams<Form> = ReadSumsParams { address: Elem::F32, groups: () };
}

impl LineSumsParams<Form> {
    pub(super) const FORM: LineSumsParams<Form> =
        LineSumsParams { address: Elem::F32, groups: (), blocks: () };
}

impl StatsParams<Form> {
    pub(super) fn form(spec: &StatsSpec) -> StatsParams<Form> {
        let is_varlen = spec.rows != RowsForm::Dense;
        StatsParams {
            o: Strided::form(spec.elem),
            dout: Strided::form(spec.elem),
            lse: Elem::F32,
            dlse: Elem::F32,
            stats: Elem::F32,
            pairs: (),
            heads: (),
            blocks: RowBlocks::form(spec.rows, BLOCKS),
            lse_strides: is_varlen.then_some(LseStrides { batch: (), head: () }),
            dq_accum: match spec.cleared {
                Cleared::Nothing => None,
                Cleared::Sums(_) => Some(DqAccumParams::form(AddOrder::Any, spec.elem)),
                Cleared::InOrder(_) => Some(DqAccumParams::form(AddOrder::LastKeysFirst, spec.elem)),
            },
            unvisited: (matches!(spec.cleared, Cleared::InOrder(_)) && !is_varlen).then_some(()),
            summary: spec.intervals.map(|of_row| SummaryParams {
                rows: IntervalRows::form(of_row),
                to: Summaries::form(of_row),
                keys: (!is_varlen).then_some(()),
            }),
        }
    }
}
