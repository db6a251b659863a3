//! Specs of the backward kernels: a spec is everything in which one kernel differs from another.

use fa3_ir::{Elem, WgmmaType};
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, Part, Plan, PlanKind, STATS_ROWS};
use fa3_sched::packed::Tiles;
use fa3_sched::{Order, Schedule, Scheduler};
use fa3_types::{IntervalsOfRow, Mask, ScoreExpr, ScoreForm, ScoreGradients};

use super::bias::BiasSpec;
use super::dtable::TableSpec;
use super::lines::{self, LinesSpec};
use crate::kernels::parts::geometry::{form, sides};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::row_blocks::RowsForm;
use crate::kernels::tensors::elem;

/// Everything that a backward kernel's code depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BwdSpec {
    /// Computes D and LSE in base 2 of every row.
    Stats(StatsSpec),
    /// Finds the blocks of rows that see each tile of keys, under a mask of intervals.
    QBlocks(QBlocksSpec),
    /// Splits the tiles of keys that many blocks see, under a mask of intervals.
    SplitTiles,
    /// Computes dK and dV.
    Dkv(PartSpec<DkvTile>),
    /// Reduces dK and dV of the parts of split tiles.
    Reduce(ReduceSpec),
    /// Computes dQ.
    Dq(PartSpec<DqTile>),
    /// Rounds dQ from its accumulators.
    Round(RoundSpec),
    /// Adds up the sums of keys or of diagonals.
    Lines(LinesSpec),
    /// Computes the gradient of a table that is read by query and key.
    Bias(BiasSpec),
    /// Computes the gradient of another table.
    Table(TableSpec),
    /// Computes the gradient of sinks; the field says where lengths of sequences are known.
    Sink(SequenceForm),
}

/// The spec of the kernel of row statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatsSpec {
    /// The elements of O and dO: f16 or bf16.
    pub elem: Elem,
    /// Columns of O and dO.
    pub head_dim_v: u32,
    /// The memory that the kernel clears.
    pub cleared: Cleared,
    /// The kernel's blocks of rows.
    pub rows: RowsForm,
    /// Number of intervals of a row, where rows have bounds: the kernel summarizes the intervals of each block.
    pub intervals: Option<IntervalsOfRow>,
}

/// Memory that must hold zeros before tiles add to dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cleared {
    /// No memory: tiles do not add to dQ.
    Nothing,
    /// Accumulators with this number of columns, if tiles add in any order.
    Sums(u32),
    /// Semaphores, if tiles add in order, and the rows of dQ that no tile visits; dQ has this number of columns. The
    /// first tile that adds to a block stores its part, so accumulators need not be cleared.
    InOrder(u32),
}

/// The spec of the kernel that rounds the dQ accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoundSpec {
    /// The elements of dQ: f16 or bf16.
    pub elem: Elem,
    /// Columns of dQ.
    pub head_dim: u32,
    /// Columns of the accumulators; at least as many as dQ has.
    pub cols: u32,
    /// The kernel's blocks of rows.
    pub rows: RowsForm,
}

/// The spec of the kernel that finds the blocks of rows that see each tile of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QBlocksSpec {
    /// Number of intervals of a row.
    pub of_row: IntervalsOfRow,
    /// The bounded sides of the mask beside the intervals, transposed.
    pub mask: Mask,
    /// Keys of a tile, and rows of a block.
    pub tile: [u32; 2],
    /// The order of tiles; the size of its sections is an argument.
    pub order: Order,
}

/// The spec of the kernel that reduces parts of split tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReduceSpec {
    /// The elements of dK and dV: f16 or bf16.
    pub elem: Elem,
    /// Keys of a tile.
    pub tile_n: u32,
    /// Columns of dK: in the buffer of parts, and in dK itself.
    pub cols_of_k: [u32; 2],
    /// Columns of dV: in the buffer of parts, and in dV itself.
    pub cols_of_v: [u32; 2],
    /// The order of tiles; the size of its sections is an argument.
    pub order: Order,
}

/// The spec of the dK/dV kernel or the dQ kernel. Problems with equal specs share a kernel: lengths, heads, strides,
/// scales, the reach of a window, and the numbers and tables of a function of scores are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartSpec<T> {
    /// The elements of all tensors: f16 or bf16.
    pub elem: Elem,
    /// The tile.
    pub tile: T,
    /// Columns of Q and K, at most the tile's.
    pub head_dim: u32,
    /// Columns of V and dO, at most the tile's.
    pub head_dim_v: u32,
    /// The bounded sides of the mask, which is transposed in the dK/dV kernel. The reach of each side is an argument.
    pub mask: Mask,
    /// Whether scores are capped.
    pub softcap: bool,
    /// The function of scores, if there is one.
    pub score: Option<ScoreExpr>,
    /// The tables of the function for whose gradients the dQ kernel writes sums.
    pub gradients: ScoreGradients,
    /// The order of tiles; the size of its sections is an argument.
    pub order: Order,
    /// The tile scheduler.
    pub scheduler: Scheduler,
    /// Where lengths of sequences are known.
    pub sequences: SequenceForm,
}

impl BwdSpec {
    /// The specs of a plan's kernels, in the order in which they run.
    pub fn of(plan: &Plan) -> Vec<BwdSpec> {
        let sink = plan.problem().forward().has_sink().then(|| BwdSpec::sink(plan));
        let seeing = BwdSpec::q_blocks(plan);
        let of_keys = [
            seeing.clone(),
            seeing.map(|_| BwdSpec::SplitTiles),
            Some(BwdSpec::dkv(plan)),
            BwdSpec::reduce(plan),
        ];
        let of_keys = of_keys.into_iter().flatten();
        let score = plan.problem().forward().score();
        let tables = score.into_iter().flat_map(|form| {
            let tables = (0..form.extents().len()).filter(|&table| form.gradients().has(table));
            let tables = tables.map(|table| {
                let bias = BwdSpec::bias(plan, form, table).map(BwdSpec::Bias);
                bias.unwrap_or_else(|| BwdSpec::Table(BwdSpec::of_table(plan, form, table)))
            });
            lines::specs(plan, form).into_iter().map(BwdSpec::Lines).chain(tables)
        });
        let first = [BwdSpec::stats(plan)].into_iter();
        first.chain(of_keys).chain(BwdSpec::dq(plan)).chain(tables).chain(sink).collect()
    }

    /// The elements of Q, K and V: f16 or bf16. `None` for a kernel that reads only f32 and integers.
    pub fn elem(&self) -> Option<Elem> {
        match self {
            BwdSpec::Stats(spec) => Some(spec.elem),
            BwdSpec::Dkv(spec) => Some(spec.elem),
            BwdSpec::Dq(spec) => Some(spec.elem),
            BwdSpec::Bias(spec) => Some(spec.part.elem),
            BwdSpec::Round(spec) => Some(spec.elem),
            BwdSpec::Reduce(spec) => Some(spec.elem),
            BwdSpec::QBlocks(_)
            | BwdSpec::SplitTiles
            | BwdSpec::Lines(_)
            | BwdSpec::Table(_)
            | BwdSpec::Sink(_) => None,
        }
    }

    /// Whether CTAs fetch tiles from a counter.
    pub(super) fn fetches_tiles(&self) -> bool {
        const DYNAMIC: Scheduler = Scheduler::DynamicPersistent;
        matches!(
            self,
            BwdSpec::Dkv(PartSpec { scheduler: DYNAMIC, .. })
                | BwdSpec::Dq(PartSpec { scheduler: DYNAMIC, .. })
        )
    }

    /// The spec of the kernel that computes the gradient of sinks.
    pub(super) fn sink(plan: &Plan) -> BwdSpec {
        BwdSpec::Sink(sequences(plan))
    }

    /// The spec of the kernel that computes the gradient of a table that is read by query and key; `None` for another
    /// table, and without any rows.
    pub(super) fn bias(plan: &Plan, form: &ScoreForm, table: usize) -> Option<BiasSpec> {
        let part = plan.bias().filter(|_| form.bias_gradients().has(table))?;
        let order = TileOrder(Order::HEADS_FASTEST, Scheduler::StaticPersistent, sequences(plan));
        let part = PartSpec::of(plan, part, plan.problem().forward().mask(), order);
        let gradients = ScoreGradients::of((0..=table).map(|other| other == table));
        Some(BiasSpec { part: PartSpec { gradients, ..part }, table })
    }

    /// The spec of the kernel that computes the gradient of another table.
    pub(super) fn of_table(plan: &Plan, form: &ScoreForm, table: usize) -> TableSpec {
        let (score, gradients) = (form.expr().clone(), form.summed_gradients());
        TableSpec { score, gradients, table, sequences: sequences(plan) }
    }

    /// The spec of the kernel of row statistics.
    pub(super) fn stats(plan: &Plan) -> BwdSpec {
        let forward = plan.problem().forward();
        let cleared = match plan.dkv().tile.adds_dq {
            None => Cleared::Nothing,
            Some(AddOrder::Any) => Cleared::Sums(plan.dkv().tile.head_dim),
            Some(AddOrder::LastKeysFirst) => Cleared::InOrder(forward.head_dim() as u32),
        };
        let mask = sides(cleared_mask(plan));
        let (elem, head_dim_v) = (elem(forward.dtype()), forward.head_dim_v() as u32);
        let intervals = forward.mask().bounds().map(|form| form.of_row.in_code());
        BwdSpec::Stats(StatsSpec { elem, head_dim_v, cleared, rows: rows_form(plan, mask), intervals })
    }

    /// The spec of the dK/dV kernel.
    pub(super) fn dkv(plan: &Plan) -> BwdSpec {
        let mask = plan.problem().forward().mask().transposed();
        let order = match plan.kind() {
            PlanKind::Dense(tiles) => TileOrder::numbered(tiles.dkv()),
            PlanKind::Varlen(tiles) => TileOrder::listed(tiles.dkv()),
        };
        BwdSpec::Dkv(PartSpec::of(plan, plan.dkv(), mask, order))
    }

    /// The spec of the kernel that finds which blocks of rows see each tile of keys, where rows have bounds.
    pub(super) fn q_blocks(plan: &Plan) -> Option<BwdSpec> {
        let mask = plan.problem().forward().mask();
        let (numbered, intervals) = plan.dense().zip(mask.bounds())?;
        let DkvTile { tile_n, tile_m, .. } = plan.dkv().tile;
        let order = form(numbered.dkv().order());
        let mask = sides(mask.without_intervals().transposed());
        let of_row = intervals.of_row.in_code();
        Some(BwdSpec::QBlocks(QBlocksSpec { of_row, mask, tile: [tile_n, tile_m], order }))
    }

    /// The spec of the kernel that reduces dK and dV of split tiles, where rows have bounds.
    pub(super) fn reduce(plan: &Plan) -> Option<BwdSpec> {
        let (forward, numbered) = (plan.problem().forward(), plan.dense()?);
        let DkvTile { tile_n, head_dim, head_dim_v, .. } = plan.dkv().tile;
        forward.mask().bounds().map(|_| {
            BwdSpec::Reduce(ReduceSpec {
                elem: elem(forward.dtype()),
                tile_n,
                cols_of_k: [head_dim, forward.head_dim() as u32],
                cols_of_v: [head_dim_v, forward.head_dim_v() as u32],
                order: form(numbered.dkv().order()),
            })
        })
    }

    /// The spec of the kernel that computes dQ, or of the kernel that rounds the dQ accumulators. `None` if the dK/dV
    /// kernel writes dQ.
    pub(super) fn dq(plan: &Plan) -> Option<BwdSpec> {
        let forward = plan.problem().forward();
        let (elem, head_dim) = (elem(forward.dtype()), forward.head_dim() as u32);
        match plan.dq() {
            DqBy::Kernel(part) => {
                let order = match plan.kind() {
                    PlanKind::Dense(tiles) => tiles.dq().map(TileOrder::numbered),
                    PlanKind::Varlen(tiles) => tiles.dq().map(TileOrder::listed),
                };
                let gradients = forward.score().map(ScoreForm::summed_gradients).unwrap_or_default();
                Some(BwdSpec::Dq(PartSpec { gradients, ..PartSpec::of(plan, part, forward.mask(), order?) }))
            }
            DqBy::Additions => {
                let (cols, rows) = (plan.dkv().tile.head_dim, rows_form(plan, Mask::None));
                Some(BwdSpec::Round(RoundSpec { elem, head_dim, cols, rows }))
            }
            DqBy::AdditionsInOrder => None,
        }
    }
}

/// The place where a plan's kernels know the lengths of sequences.
pub(super) fn sequences(plan: &Plan) -> SequenceForm {
    match plan.kind() {
        PlanKind::Dense(_) => SequenceForm::Dense,
        PlanKind::Varlen(_) => SequenceForm::Varlen,
    }
}

/// The mask by which the kernel of row statistics finds the rows of dQ that see no key, and clears them.
pub(super) fn cleared_mask(plan: &Plan) -> Mask {
    if plan.dkv().tile.adds_in_order() { plan.problem().forward().mask() } else { Mask::None }
}

/// The kernel's blocks of [`STATS_ROWS`] rows. The kernel must know which rows see no key under `mask`.
fn rows_form(plan: &Plan, mask: Mask) -> RowsForm {
    match plan.kind() {
        PlanKind::Dense(_) => RowsForm::Dense,
        PlanKind::Varlen(tiles) => RowsForm::Varlen { parts: tiles.block_rows() / STATS_ROWS, mask },
    }
}

/// The order of tiles, their scheduler, and where lengths are known.
struct TileOrder(Order, Scheduler, SequenceForm);

impl TileOrder {
    fn numbered(schedule: &Schedule) -> TileOrder {
        TileOrder(form(schedule.order()), schedule.scheduler(), SequenceForm::Dense)
    }

    fn listed(tiles: &Tiles) -> TileOrder {
        TileOrder(form(tiles.order()), Scheduler::DynamicPersistent, SequenceForm::Varlen)
    }
}

impl<T: Copy> PartSpec<T> {
    fn of(plan: &Plan, part: &Part<T>, mask: Mask, found: TileOrder) -> PartSpec<T> {
        let TileOrder(order, scheduler, sequences) = found;
        let forward = plan.problem().forward();
        PartSpec {
            elem: elem(forward.dtype()),
            tile: part.tile,
            head_dim: forward.head_dim() as u32,
            head_dim_v: forward.head_dim_v() as u32,
            mask: sides(mask),
            softcap: forward.softcap().is_some(),
            score: forward.score().map(ScoreForm::expr).cloned(),
            gradients: ScoreGradients::default(),
            order,
            scheduler,
            sequences,
        }
    }

    /// Whether CTAs fetch tile numbers from a counter, and a number alone gives the work tile.
    pub(super) fn fetches_indices(&self) -> bool {
        self.scheduler == Scheduler::DynamicPersistent && self.sequences == SequenceForm::Dense
    }

    /// The type of the kernel's products.
    pub(super) fn product_type(&self) -> WgmmaType {
        if self.elem == Elem::F16 { WgmmaType::F16 } else { WgmmaType::Bf16 }
    }
}
