//! The parameters of a forward kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed, Program};
use fa3_sched::FastDiv;
use fa3_sched::forward::{DensePlan, Plan, ReductionSource, RunningO, SplitKvPlan, VarlenPlan};
use fa3_sched::packed::MemoryRows;
use fa3_types::{Problem, TensorDesc, ValueLayout};

use super::buffers;
use super::descales::Descales;
use super::spec::FwdSpec;
use super::token_scales::TokenScales;
use crate::kernels::params::{Form, Host, Pass, RowDims, Side, TensorForm, param, params};
use crate::kernels::parts::gather::RowStrides;
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::intervals::{INTERVALS, IntervalRows};
use crate::kernels::parts::lists::Lists;
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::lse_form::StoredLse;
use crate::kernels::parts::pages::Pages;
use crate::kernels::parts::ragged;
use crate::kernels::parts::score::ScoreParams;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::shares::{ShareForm, Shares};
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::table::Table;
use crate::kernels::parts::walk::Walk;
use crate::kernels::tensors::{ragged_view, ragged_view_of_heads, transposed_view, view};

params! {
    /// The parameters of a forward kernel.
    struct Params {
        q: tensor,
        qv: maybe tensor,
        k: maybe tensor,
        v: maybe tensor,
        o: named Strided,
        /// The address of LSE; 0 if LSE is not to be written.
        lse: pointer,
        /// The form of LSE, if it is not the default.
        stored_lse: maybe all StoredLse,
        /// The array of largest scores, if they are a result.
        max_logits: maybe pointer,
        /// Sink logits of query heads, in natural units.
        sink: maybe pointer,
        /// Scales of e4m3 tensors.
        descales: maybe all Descales,
        /// Number of query heads.
        heads: u32,
        /// softmax_scale · log₂e, or cap · log₂e if scores are capped: turns a score into an exponent of 2.
        scale_log2: f32,
        /// softmax_scale / cap, if scores are capped.
        into_cap: maybe f32,
        walk: all Walk,
        /// The intervals of query rows, under a mask of intervals.
        intervals: maybe all IntervalRows,
        /// The tile counter of [`Scheduler::DynamicPersistent`], if sequences have one length.
        tile_counter: maybe pointer,
        /// Strides from sequence to sequence, if lengths are data.
        strides: maybe all BatchStrides,
        /// The page table, if K and V are paged.
        pages: maybe all Pages,
        /// K and V, if their rows are copied or converted one by one.
        gathered: maybe all Gathered,
        /// The lists and their caches, if keys are listed.
        lists: maybe all Lists,
        /// The buffers of splits, if CTAs split keys.
        partials: maybe all Partials,
        /// Number of keys of a piece, if consumers merge pieces.
        piece: maybe div,
        /// O of the pieces before, if it lies in the workspace: a tile for each CTA.
        running_o: maybe pointer,
        /// The function of scores, if there is one.
        score: maybe all ScoreParams,
        /// Scales of the rows of e4m3 K and V.
        token_scales: maybe all TokenScales,
    }

    /// The memory of K and V, for row-wise copies.
    struct Gathered {
        k: named RowStrides,
        v: named RowStrides,
    }

    /// The buffers of splits, in f32. O is (split, row of a tile, column of V), and LSE is (split, row of a tile). A
    /// split of fixed size has all rows of LSE instead of the rows of a tile.
    struct Partials {
        o: pointer = "o_partial",
        lse: pointer = "lse_partial",
        /// The largest scores, in the shape of LSE, if they are a result.
        max_logits: maybe pointer = "max_logits_partial",
        /// Number of rows of a split, which is the number of elements of LSE, if splits have a fixed size.
        rows: maybe u64 = "part_rows",
    }

    /// Strides from one sequence of a batch to the next; 0 for packed sequences.
    struct BatchStrides {
        /// Strides in rows of Q, K and V.
        q: u32 = "q_batch_stride",
        k: u32 = "k_batch_stride",
        v: u32 = "v_batch_stride",
        /// Stride in rows of `qv`, in latent attention.
        qv: maybe u32 = "qv_batch_stride",
        /// Stride in elements of LSE; `lse_head` is the stride from one head to the next.
        lse: u64 = "lse_batch",
        lse_head: u64,
    }
}

impl Params<Form> {
    /// The parameters that a kernel of this spec declares.
    pub(super) fn form(spec: &FwdSpec) -> Params<Form> {
        let tile = &spec.tile;
        let of = |elem, rows, cols| {
            let tile = TileShape::new(elem, rows, cols);
            match spec.sequences {
                SequenceForm::Dense => TensorForm { tile, rank: 4, rows: RowDims::One(2) },
                SequenceForm::Varlen => ragged::form(tile),
            }
        };
        let tensor = |rows, cols| of(spec.key_elem(), rows, cols);
        // Number of keys that one copy of a CTA loads: a block of rows of a page, or the CTA's part of a KV block.
        let keys = spec.page_block.unwrap_or(tile.tile_n / spec.cluster);
        let v = match spec.v_is_transposed() {
            false => tensor(keys, tile.head_dim_v),
            true => TensorForm { rows: RowDims::One(1), ..tensor(tile.head_dim_v, tile.tile_n) },
        };
        let elem = spec.query_elem();
        let queries = |cols| match spec.shares {
            None => of(elem, tile.tile_m, cols),
            Some(_) => ragged::form_of_heads(TileShape::new(elem, spec.q_rows(), cols), spec.q_heads()),
        };
        Params {
            q: queries(tile.head_dim),
            qv: tile.qv.then(|| queries(tile.head_dim_v)),
            k: (!spec.gathers()).then(|| tensor(keys, tile.head_dim)),
            v: (!spec.gathers()).then_some(v),
            o: Strided::form(spec.output),
            lse: Elem::F32,
            stored_lse: spec.stored_lse.then_some(StoredLse::FORM),
            max_logits: spec.max_logits.then_some(Elem::F32),
            sink: spec.sink.then_some(Elem::F32),
            descales: spec.has_scales().then(|| Descales::form(spec)),
            heads: (),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            walk: match (spec.shares, spec.sequences) {
                (Some(form), _) => Walk::Shares(Shares::form(form, spec.mask)),
                (None, SequenceForm::Dense) => {
                    Walk::Tiles(Lookup::Dense(Geometry::form(spec.order, spec.mask)))
                }
                (None, SequenceForm::Varlen) => {
                    let table = Table::form(spec.order, spec.mask, None);
                    let table = if spec.given_table { table.given() } else { table };
                    Walk::Tiles(Lookup::Varlen { table, tile_counter: Elem::U32 })
                }
            },
            intervals: spec.mask.intervals().map(|form| IntervalRows::form(form.of_row)),
            tile_counter: spec.fetches_indices().then_some(Elem::U32),
            strides: spec.lengths_are_data().then(|| {
                let qv = tile.qv.then_some(());
                BatchStrides { q: (), k: (), v: (), qv, lse: (), lse_head: () }
            }),
            pages: spec.page_block.map(|_| Pages::form(spec.indexed)),
            gathered: (spec.gathers() && spec.lists().is_none()).then(|| {
                let [k, v] = [RowStrides::form(spec.key_elem()); 2];
                Gathered { k, v }
            }),
            lists: spec.lists().map(|form| {
                let (k, scaled) = (spec.key_elem(), spec.row_scales);
                Lists::form([k, if scaled { Elem::E4m3 } else { k }], scaled, form)
            }),
            partials: spec.shares.filter(|_| spec.merges.is_none()).map(|shares| Partials {
                o: Elem::F32,
                lse: Elem::F32,
                max_logits: spec.max_logits.then_some(Elem::F32),
                rows: (shares.said_by == ReductionSource::Lengths).then_some(()),
            }),
            piece: spec.merges.map(|_| FastDiv::new(1).map(|_| ())),
            running_o: (spec.merges == Some(RunningO::Workspace)).then_some(Elem::F32),
            score: spec.score.as_ref().map(ScoreParams::form),
            token_scales: spec.token_scales.map(|_| TokenScales::form()),
        }
    }
}

impl Params<Host> {
    /// The arguments of a launch over sequences of one length.
    pub(super) fn numbered<K>(plan: &Plan, tiles: &DensePlan, program: &Program<K>) -> Params<Host> {
        let problem = plan.problem();
        let view_of = |buffer, tensor: &TensorDesc| {
            let (buffer, tensor) = something(problem, buffer, tensor);
            view(buffer, tensor)
        };
        let v = match (problem.v_layout(), program.find(buffers::V_TRANSPOSED)) {
            (_, Some(codes)) => transposed_view(codes, problem.v().shape),
            (ValueLayout::Transposed, _) if problem.v_bytes().0 > 0 => {
                transposed_view(buffers::V, problem.v().shape)
            }
            (ValueLayout::Rows | ValueLayout::Transposed, _) => view_of(buffers::V, problem.v()),
        };
        let geometry = Geometry::of(tiles.schedule(), plan.tiling(), tiles.lens());
        let qv = latent(problem, program).map(|(buffer, qv)| view(buffer, qv));
        let views = ([Some(view_of(buffers::K, problem.k())), Some(v)], qv);
        let views = (view(buffers::Q, problem.q()), views);
        Params {
            max_logits: program.find(buffers::MAX_LOGITS),
            sink: program.find(buffers::SINK),
            intervals: intervals(problem, program),
            tile_counter: program.find(buffers::TILE_COUNTER),
            ..Params::with(plan, program, views, Walk::Tiles(Lookup::Dense(geometry)))
        }
    }

    /// The arguments of a launch over the sequences of a table (varlen). The program has a tile counter.
    pub(super) fn listed<K>(
        plan: &Plan,
        tiles: &VarlenPlan,
        table: Table<Host>,
        program: &Program<K>,
    ) -> Params<Host> {
        let q = ragged_view(buffers::Q, plan.problem().q(), tiles.rows()[0]);
        let qv = latent(plan.problem(), program).zip(tiles.latent_rows());
        let qv = qv.map(|((buffer, qv), rows)| (ragged_view(buffer, qv, rows), rows));
        let tile_counter =
            program.find(buffers::TILE_COUNTER).expect("tiles of a table are fetched from a counter");
        let walk = Walk::Tiles(Lookup::Varlen { table, tile_counter });
        Params::by_rows(plan, (q, tiles.rows(), qv), walk, program)
    }

    /// The arguments of a split-KV launch. The program has the buffers for splits.
    pub(super) fn shared<K>(plan: &Plan, shared: &SplitKvPlan, program: &Program<K>) -> Params<Host> {
        let find = |name| program.find(name).expect("a program of shares has their results");
        let form = ShareForm::of(shared, plan.tile().tile_n);
        let begun = program.find(buffers::BEGUN);
        let walk = Walk::Shares(Shares::of((shared, form), plan.tiling(), begun, |name| program.find(name)));
        let q = ragged_view_of_heads(buffers::Q, plan.problem().q(), shared.rows()[0]);
        let qv = latent(plan.problem(), program).zip(shared.latent_rows());
        let qv = qv.map(|((buffer, qv), rows)| (ragged_view_of_heads(buffer, qv, rows), rows));
        let rows = part_rows(plan.problem(), shared);
        let partials = plan.pieces().is_none().then(|| Partials {
            o: find(buffers::O_PARTIAL),
            lse: find(buffers::LSE_PARTIAL),
            max_logits: program.find(buffers::MAX_LOGITS_PARTIAL),
            rows,
        });
        let lists = Lists::of(plan.problem(), shared, program);
        Params { partials, lists, ..Params::by_rows(plan, (q, shared.rows(), qv), walk, program) }
    }

    /// The arguments of a launch over sequences whose lengths are data: Q's view, the rows of Q, K and V in memory, and
    /// for latent attention the view and the rows of `qv`.
    fn by_rows<K>(
        plan: &Plan,
        (q, [of_q, of_k, of_v], latent): (Passed, [MemoryRows; 3], Option<(Passed, MemoryRows)>),
        walk: Walk<Host>,
        program: &Program<K>,
    ) -> Params<Host> {
        let problem = plan.problem();
        let view_of = |buffer, tensor: &TensorDesc, rows| {
            let is_empty = tensor.extent().0 == 0;
            let (buffer, tensor) = something(problem, buffer, tensor);
            ragged_view(buffer, tensor, if is_empty { of_q } else { rows })
        };
        let has_lists = problem.seqs_k().list().is_some();
        let gathers = (plan.tile().converts_rows() && !has_lists)
            || plan.pages().is_some_and(|pages| pages.is_gathered());
        let keys = [(buffers::K, problem.k(), of_k), (buffers::V, problem.v(), of_v)];
        let has_views = !gathers && !has_lists;
        let views = keys.map(|(buffer, x, rows)| has_views.then(|| view_of(buffer, x, rows)));
        let (o, [lse, lse_head]) = out_strides(problem);
        let (qv, qv_stride) = latent.map(|(view, rows)| (view, rows.batch)).unzip();
        let pages = plan.pages().map(|pages| {
            let table = program.find(buffers::PAGE_TABLE).expect("a program of pages has their table");
            Pages::of(&pages, table, program.find(buffers::BATCH_IDX))
        });
        Params {
            o,
            descales: problem.has_scales().then(|| Descales::of(problem, true)),
            max_logits: program.find(buffers::MAX_LOGITS),
            sink: program.find(buffers::SINK),
            intervals: intervals(problem, program),
            strides: Some(BatchStrides {
                q: of_q.batch,
                k: of_k.batch,
                v: of_v.batch,
                qv: qv_stride,
                lse,
                lse_head,
            }),
            pages,
            gathered: gathers.then(|| Gathered {
                k: RowStrides::of(buffers::K, problem.k(), of_k),
                v: RowStrides::of(buffers::V, problem.v(), of_v),
            }),
            ..Params::with(plan, program, (q, (views, qv)), walk)
        }
    }

    fn with<K>(
        plan: &Plan,
        program: &Program<K>,
        (q, ([k, v], qv)): Views,
        walk: Walk<Host>,
    ) -> Params<Host> {
        let problem = plan.problem();
        let (scale_log2, into_cap) = units(problem);
        Params {
            q,
            qv,
            k,
            v,
            o: Strided::of(buffers::O, problem.o()),
            lse: buffers::LSE,
            stored_lse: StoredLse::of(problem.lse_form()),
            max_logits: None,
            sink: None,
            descales: problem.has_scales().then(|| Descales::of(problem, false)),
            heads: problem.heads().q() as u32,
            scale_log2,
            into_cap,
            walk,
            intervals: None,
            tile_counter: None,
            strides: None,
            pages: None,
            gathered: None,
            lists: None,
            partials: None,
            piece: plan.pieces().map(|pieces| FastDiv::new(pieces.keys)),
            running_o: program.find(buffers::RUNNING_O),
            score: ScoreParams::of(problem, program),
            token_scales: TokenScales::of(problem, program),
        }
    }
}

/// Views of Q, of K and V (`None` if their rows are copied one by one), and of `qv` in latent attention.
type Views = (Passed, ([Option<Passed>; 2], Option<Passed>));

/// The buffer and the tensor `qv`, in latent attention.
fn latent<'a, K>(problem: &'a Problem, program: &Program<K>) -> Option<(BufferId, &'a TensorDesc)> {
    program.find(buffers::QV).zip(problem.qv())
}

/// The location of the bounds of rows, under a mask of intervals.
fn intervals<K>(problem: &Problem, program: &Program<K>) -> Option<IntervalRows<Host>> {
    let (form, buffer) = problem.mask().intervals().zip(program.find(INTERVALS))?;
    Some(IntervalRows::of(form, problem.q().shape, buffer))
}

/// Number of rows of a split of fixed size, which is the number of elements of LSE. `None` for other splits.
pub(super) fn part_rows(problem: &Problem, shared: &SplitKvPlan) -> Option<u64> {
    let rows = problem.lse_shape().into_iter().map(|extent| extent as u64).product();
    (shared.reduction_source() == ReductionSource::Lengths).then_some(rows)
}

/// Strides of O, and strides of LSE from sequence to sequence and from head to head, if lengths are data.
pub(super) fn out_strides(problem: &Problem) -> (Strided<Host>, [u64; 2]) {
    let [batch, heads, rows] = problem.lse_shape().map(|extent| extent as u64);
    // O of packed sequences has one batch entry, whose stride becomes 0.
    let mut o = *problem.o();
    if batch <= 1 {
        o.strides.batch = 0;
    }
    (Strided::of(buffers::O, &o), [if batch > 1 { heads * rows } else { 0 }, rows])
}

/// The tensor, or Q in place of a tensor without elements. Nothing is loaded from such a tensor, but its tensor map
/// needs an address.
fn something<'a>(
    problem: &'a Problem,
    buffer: BufferId,
    tensor: &'a TensorDesc,
) -> (BufferId, &'a TensorDesc) {
    if tensor.extent().0 == 0 { (buffers::Q, problem.q()) } else { (buffer, tensor) }
}
