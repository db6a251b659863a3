//! The parameters of a forward kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed, Program};
use fa3_sched::forward::{Listed, Numbered, PartsSaidBy, Plan, Shared};
use fa3_sched::packed::MemoryRows;
use fa3_types::{Problem, TensorDesc, ValueLayout};

use super::buffers;
use super::descales::Descales;
use super::spec::FwdSpec;
use crate::kernels::params::{Form, Host, Pass, RowDims, Side, TensorForm, param, params};
use crate::kernels::parts::gather::EvenRows;
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::intervals::{INTERVALS, IntervalRows};
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::pages::Pages;
use crate::kernels::parts::rows_view;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::shares::Shares;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::table::Table;
use crate::kernels::parts::walk::Walk;
use crate::kernels::tensors::{rows_view, rows_view_of_heads, transposed_view, view};

params! {
    /// The parameters of a forward kernel.
    struct Params {
        q: tensor,
        qv: maybe tensor,
        k: maybe tensor,
        v: maybe tensor,
        o: all Strided,
        /// At address 0, LSE is not written.
        lse: pointer,
        /// The sinks of query heads, in natural units.
        sink: maybe pointer,
        /// Where scales of e4m3 Q, K and V are.
        descales: maybe all Descales,
        /// Query heads.
        heads: u32,
        /// softmax_scale · log₂e, or of capped scores cap · log₂e: the worth of a score's unit in the exponent of 2.
        scale_log2: f32,
        /// softmax_scale / cap, if scores are capped.
        into_cap: maybe f32,
        walk: all Walk,
        /// The bounds of rows, under a mask of intervals.
        intervals: maybe all IntervalRows,
        /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`], if sequences are equal.
        ticket: maybe pointer,
        /// How far sequences lie apart, if their lengths are data.
        apart: maybe all Apart,
        /// The pages of K and V, if they are in pages.
        pages: maybe all Pages,
        /// K and V, if their rows are loaded one by one.
        gathered: maybe all Gathered,
        /// Where parts of results go, if CTAs share keys.
        slots: maybe all Slots,
    }

    /// K and V in memory.
    struct Gathered {
        k: all EvenRows,
        v: all EvenRows,
    }

    /// Results of parts of units, in slots: O in f32 (slot, row of a tile, column of V) and LSE (slot, row of a tile).
    /// Or in as many rows for each piece as LSE has: LSE (piece, ...) and O (piece, ..., column of V).
    struct Slots {
        o: pointer = "o_slots",
        lse: pointer = "lse_slots",
        /// Numbers of LSE, if units are cut into pieces.
        rows: maybe u64 = "part_rows",
    }

    /// Distances between sequences of a batch; 0 where they are packed.
    struct Apart {
        /// In rows of Q, K, V.
        q: u32 = "q_rows_apart",
        k: u32 = "k_rows_apart",
        v: u32 = "v_rows_apart",
        /// In rows of `qv`, if there is one.
        qv: maybe u32 = "qv_rows_apart",
        /// In numbers of LSE; and those from a head to the next.
        lse: u64 = "lse_batch",
        lse_head: u64,
    }
}

impl Params<Form> {
    /// The arguments' form in a kernel of this spec.
    pub(super) fn form(spec: &FwdSpec) -> Params<Form> {
        let tile = &spec.tile;
        let of = |elem, rows, cols| {
            let tile = TileShape::new(elem, rows, cols);
            match spec.sequences {
                SequenceForm::Equal => TensorForm { tile, rank: 4, rows: RowDims::One(2) },
                SequenceForm::Listed => rows_view::form(tile),
            }
        };
        let tensor = |rows, cols| of(spec.key_elem(), rows, cols);
        // What a CTA loads of a block at once.
        let keys = spec.page_block.unwrap_or(tile.tile_n / spec.cluster);
        let v = match spec.v_is_transposed() {
            false => tensor(keys, tile.head_dim_v),
            true => TensorForm { rows: RowDims::One(1), ..tensor(tile.head_dim_v, tile.tile_n) },
        };
        let elem = spec.query_elem();
        let queries = |cols| match spec.shares {
            None => of(elem, tile.tile_m, cols),
            Some(_) => rows_view::form_of_heads(TileShape::new(elem, spec.q_rows(), cols), spec.pack),
        };
        Params {
            q: queries(tile.head_dim),
            qv: tile.qv.then(|| queries(tile.head_dim_v)),
            k: (!spec.gathers()).then(|| tensor(keys, tile.head_dim)),
            v: (!spec.gathers()).then_some(v),
            o: Strided::form("o", spec.output),
            lse: Elem::F32,
            sink: spec.sink.then_some(Elem::F32),
            descales: spec.has_scales().then(|| Descales::form(spec)),
            heads: (),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            walk: match (spec.shares, spec.sequences) {
                (Some(form), _) => Walk::Shares(Shares::form(form, spec.mask)),
                (None, SequenceForm::Equal) => {
                    Walk::Tiles(Lookup::Equal(Geometry::form(spec.order, spec.mask)))
                }
                (None, SequenceForm::Listed) => {
                    let table = Table::form(spec.order, spec.mask, None);
                    let table = if spec.given_table { table.given() } else { table };
                    Walk::Tiles(Lookup::Listed { table, ticket: Elem::U32 })
                }
            },
            intervals: spec.mask.intervals().map(|form| IntervalRows::form(form.of_row)),
            ticket: spec.draws_numbers().then_some(Elem::U32),
            apart: spec.lengths_are_data().then_some(Apart {
                q: (),
                k: (),
                v: (),
                qv: tile.qv.then_some(()),
                lse: (),
                lse_head: (),
            }),
            pages: spec.page_block.map(|_| Pages::form(spec.indexed)),
            gathered: spec
                .gathers()
                .then(|| ["k", "v"].map(|name| EvenRows::form(name, spec.key_elem())))
                .map(|[k, v]| Gathered { k, v }),
            slots: spec.shares.map(|shares| Slots {
                o: Elem::F32,
                lse: Elem::F32,
                rows: (shares.said_by == PartsSaidBy::Lengths).then_some(()),
            }),
        }
    }
}

impl Params<Host> {
    /// The values of a launch over sequences of one length.
    pub(super) fn numbered<K>(plan: &Plan, tiles: &Numbered, program: &Program<K>) -> Params<Host> {
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
        let intervals = problem.mask().intervals().zip(program.find(INTERVALS));
        let intervals = intervals.map(|(form, buffer)| IntervalRows::of(form, problem.q().shape, buffer));
        Params {
            sink: program.find(buffers::SINK),
            intervals,
            ticket: program.find(buffers::TICKET),
            ..Params::with(problem, views, Walk::Tiles(Lookup::Equal(geometry)))
        }
    }

    /// The values of a launch over the sequences of a table. The program has a counter of tiles.
    pub(super) fn listed<K>(
        plan: &Plan,
        tiles: &Listed,
        table: Table<Host>,
        program: &Program<K>,
    ) -> Params<Host> {
        let q = rows_view(buffers::Q, plan.problem().q(), tiles.rows()[0]);
        let qv = latent(plan.problem(), program).zip(tiles.latent_rows());
        let qv = qv.map(|((buffer, qv), rows)| (rows_view(buffer, qv, rows), rows));
        let ticket = program.find(buffers::TICKET).expect("tiles of a table are drawn from a counter");
        let walk = Walk::Tiles(Lookup::Listed { table, ticket });
        Params::by_rows(plan, (q, tiles.rows(), qv), walk, program)
    }

    /// The values of a launch in which CTAs share keys. The program has the scratch of their results.
    pub(super) fn shared<K>(plan: &Plan, shared: &Shared, program: &Program<K>) -> Params<Host> {
        let find = |name| program.find(name).expect("a program of shares has their results");
        let walk = Walk::Shares(Shares::of(shared, plan.tiling(), program.find(buffers::BEGUN), |name| {
            program.find(name)
        }));
        let q = rows_view_of_heads(buffers::Q, plan.problem().q(), shared.rows()[0]);
        let qv = latent(plan.problem(), program).zip(shared.latent_rows());
        let qv = qv.map(|((buffer, qv), rows)| (rows_view_of_heads(buffer, qv, rows), rows));
        let rows = part_rows(plan.problem(), shared);
        let slots = Slots { o: find(buffers::O_SLOTS), lse: find(buffers::LSE_SLOTS), rows };
        Params { slots: Some(slots), ..Params::by_rows(plan, (q, shared.rows(), qv), walk, program) }
    }

    /// The values of a launch over sequences whose lengths are data, with this view of Q, these rows in memory, and the
    /// view and the rows of `qv`, if there is one.
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
            rows_view(buffer, tensor, if is_empty { of_q } else { rows })
        };
        let gathers = plan.pages().is_some_and(|pages| pages.is_gathered());
        let keys = [(buffers::K, problem.k(), of_k), (buffers::V, problem.v(), of_v)];
        let views = keys.map(|(buffer, x, rows)| (!gathers).then(|| view_of(buffer, x, rows)));
        let (o, [lse, lse_head]) = out_strides(problem);
        let (qv, apart_qv) = latent.map(|(view, rows)| (view, rows.batch)).unzip();
        let pages = plan.pages().map(|pages| {
            let table = program.find(buffers::PAGE_TABLE).expect("a program of pages has their table");
            Pages::of(&pages, table, program.find(buffers::BATCH_IDX))
        });
        Params {
            o,
            descales: problem.has_scales().then(|| Descales::of(problem, true)),
            sink: program.find(buffers::SINK),
            apart: Some(Apart { q: of_q.batch, k: of_k.batch, v: of_v.batch, qv: apart_qv, lse, lse_head }),
            pages,
            gathered: gathers.then(|| Gathered {
                k: EvenRows::of("k", buffers::K, problem.k(), of_k),
                v: EvenRows::of("v", buffers::V, problem.v(), of_v),
            }),
            ..Params::with(problem, (q, (views, qv)), walk)
        }
    }

    fn with(problem: &Problem, (q, ([k, v], qv)): Views, walk: Walk<Host>) -> Params<Host> {
        let (scale_log2, into_cap) = units(problem);
        Params {
            q,
            qv,
            k,
            v,
            o: Strided::of("o", buffers::O, problem.o()),
            lse: buffers::LSE,
            sink: None,
            descales: problem.has_scales().then(|| Descales::of(problem, false)),
            heads: problem.heads().q() as u32,
            scale_log2,
            into_cap,
            walk,
            intervals: None,
            ticket: None,
            apart: None,
            pages: None,
            gathered: None,
            slots: None,
        }
    }
}

/// Views of Q, of K and V, if their rows are not loaded one by one, and of `qv`, if there is one.
type Views = (Passed, ([Option<Passed>; 2], Option<Passed>));

/// The buffer of `qv`, if there is one.
fn latent<'a, K>(problem: &'a Problem, program: &Program<K>) -> Option<(BufferId, &'a TensorDesc)> {
    program.find(buffers::QV).zip(problem.qv())
}

/// Rows of the results of each piece of units, if units are cut into pieces: numbers of LSE.
pub(super) fn part_rows(problem: &Problem, shared: &Shared) -> Option<u64> {
    let rows = problem.lse_shape().into_iter().map(|extent| extent as u64).product();
    (shared.parts_said_by() == PartsSaidBy::Lengths).then_some(rows)
}

/// Where rows of O are, and how far apart LSE of sequences and of heads are, if lengths are data.
pub(super) fn out_strides(problem: &Problem) -> (Strided<Host>, [u64; 2]) {
    let [batch, heads, rows] = problem.lse_shape().map(|extent| extent as u64);
    // Packed sequences are one entry of the batch, whatever their numbers.
    let mut o = *problem.o();
    if batch <= 1 {
        o.strides.batch = 0;
    }
    (Strided::of("o", buffers::O, &o), [if batch > 1 { heads * rows } else { 0 }, rows])
}

/// The tensor, or Q in place of one without elements: nothing is loaded of it, but a tensor map must be of something.
fn something<'a>(
    problem: &'a Problem,
    buffer: BufferId,
    tensor: &'a TensorDesc,
) -> (BufferId, &'a TensorDesc) {
    if tensor.extent().0 == 0 { (buffers::Q, problem.q()) } else { (buffer, tensor) }
}
