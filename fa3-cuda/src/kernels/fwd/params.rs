//! The parameters of a forward kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed, Program};
use fa3_sched::forward::{Listed, Numbered, Plan};
use fa3_types::{Dtype, Problem, TensorDesc, ValueLayout};

use super::FwdSpec;
use super::descales::Descales;
use super::program::buffers;
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm, param, params};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::rows_view;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::table::Table;
use crate::kernels::tensors::{rows_view, transposed_view, view};

params! {
    /// The parameters of a forward kernel.
    struct Params {
        q: tensor,
        k: tensor,
        v: tensor,
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
        lookup: all Lookup,
        /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`], if sequences are equal.
        ticket: maybe pointer,
        /// How far sequences lie apart, if they are listed.
        apart: maybe all Apart,
    }

    /// Distances between sequences of a batch; 0 where they are packed.
    struct Apart {
        /// In rows of Q, K, V.
        q: u32 = "q_rows_apart",
        k: u32 = "k_rows_apart",
        v: u32 = "v_rows_apart",
        /// In numbers of LSE; and those from a head to the next.
        lse: u64 = "lse_batch",
        lse_head: u64,
    }
}

impl Params<Form> {
    /// The arguments' form in a kernel of this spec.
    pub(super) fn form(spec: &FwdSpec) -> Params<Form> {
        let tile = &spec.tile;
        let tensor = |rows, cols| {
            let tile = TileShape::new(spec.elem, rows, cols);
            match spec.sequences {
                SequenceForm::Equal => TensorForm { tile, rank: 4, rows: 2 },
                SequenceForm::Listed => rows_view::form(tile),
            }
        };
        // What a CTA loads of a block.
        let keys = tile.tile_n / spec.cluster;
        let v = match spec.v_is_transposed() {
            false => tensor(keys, tile.head_dim_v),
            true => TensorForm { rows: 1, ..tensor(tile.head_dim_v, tile.tile_n) },
        };
        Params {
            q: tensor(tile.tile_m, tile.head_dim),
            k: tensor(keys, tile.head_dim),
            v,
            o: Strided::form("o", spec.output),
            lse: Elem::F32,
            sink: spec.sink.then_some(Elem::F32),
            descales: spec.is_fp8().then(|| Descales::form(spec)),
            heads: (),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            lookup: match spec.sequences {
                SequenceForm::Equal => Lookup::Equal(Geometry::form(spec.order, spec.mask)),
                SequenceForm::Listed => {
                    Lookup::Listed { table: Table::form(spec.order, spec.mask, None), ticket: Elem::U32 }
                }
            },
            ticket: spec.draws_numbers().then_some(Elem::U32),
            apart: spec.is_listed().then_some(Apart { q: (), k: (), v: (), lse: (), lse_head: () }),
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
        let views = [view(buffers::Q, problem.q()), view_of(buffers::K, problem.k()), v];
        Params {
            sink: program.find(buffers::SINK),
            ticket: program.find(buffers::TICKET),
            ..Params::with(problem, views, Lookup::Equal(geometry))
        }
    }

    /// The values of a launch over the sequences of a table. The program has a counter of tiles.
    pub(super) fn listed<K>(
        problem: &Problem,
        tiles: &Listed,
        table: Table<Host>,
        program: &Program<K>,
    ) -> Params<Host> {
        let [of_q, of_k, of_v] = tiles.rows();
        let view_of = |buffer, tensor: &TensorDesc, rows| {
            let is_empty = tensor.extent().0 == 0;
            let (buffer, tensor) = something(problem, buffer, tensor);
            rows_view(buffer, tensor, if is_empty { of_q } else { rows })
        };
        let views = [
            rows_view(buffers::Q, problem.q(), of_q),
            view_of(buffers::K, problem.k(), of_k),
            view_of(buffers::V, problem.v(), of_v),
        ];
        let [batch, heads, rows] = problem.lse_shape().map(|extent| extent as u64);
        let lse = if batch > 1 { heads * rows } else { 0 };
        // Packed sequences are one entry of the batch, whatever their numbers.
        let mut o = *problem.o();
        if batch <= 1 {
            o.strides.batch = 0;
        }
        let ticket = program.find(buffers::TICKET).expect("tiles of a table are drawn from a counter");
        Params {
            o: Strided::of("o", buffers::O, &o),
            sink: program.find(buffers::SINK),
            apart: Some(Apart { q: of_q.batch, k: of_k.batch, v: of_v.batch, lse, lse_head: rows }),
            ..Params::with(problem, views, Lookup::Listed { table, ticket })
        }
    }

    fn with(problem: &Problem, [q, k, v]: [Passed; 3], lookup: Lookup<Host>) -> Params<Host> {
        let (scale_log2, into_cap) = units(problem);
        Params {
            q,
            k,
            v,
            o: Strided::of("o", buffers::O, problem.o()),
            lse: buffers::LSE,
            sink: None,
            descales: (problem.dtype() == Dtype::E4m3).then(|| Descales::of(problem)),
            heads: problem.heads().q() as u32,
            scale_log2,
            into_cap,
            lookup,
            ticket: None,
            apart: None,
        }
    }
}

/// The tensor, or Q in place of one without elements: nothing is loaded of it, but a tensor map must be of something.
fn something<'a>(
    problem: &'a Problem,
    buffer: BufferId,
    tensor: &'a TensorDesc,
) -> (BufferId, &'a TensorDesc) {
    if tensor.extent().0 == 0 { (buffers::Q, problem.q()) } else { (buffer, tensor) }
}
