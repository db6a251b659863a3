//! The parameters of the reduction kernel.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::combine::Plan;
use fa3_sched::{Decoder, Order};
use fa3_types::Partials;

use super::spec::Spec;
use crate::kernels::params::{Form, Host, Pass, Side, param, params};
use crate::kernels::parts::combine::{Combined, Part};
use crate::kernels::parts::store_rows::Global;
use crate::kernels::parts::strided::Strided;

params! {
    /// The parameters of the reduction kernel.
    struct Params {
        out_partial: named Strided,
        /// Bytes from one part to the next.
        out_partial_split: u64 = "out_partial_split_bytes",
        lse_partial: named Strided,
        lse_partial_split: u64 = "lse_partial_split_bytes",
        o: named Strided,
        lse: named Strided,
        splits: u32,
        /// Number of rows, over all heads of all sequences.
        rows: u32,
        decoder: numbers Decoder,
    }
}

impl Params<Form> {
    pub(super) fn form(spec: &Spec) -> Params<Form> {
        Params {
            out_partial: Strided::form(spec.input),
            out_partial_split: (),
            lse_partial: Strided::form(Elem::F32),
            lse_partial_split: (),
            o: Strided::form(spec.output),
            lse: Strided::form(Elem::F32),
            splits: (),
            rows: (),
            decoder: Form::decoder(Order::HEADS_FASTEST),
        }
    }
}

impl Params<Host> {
    /// The arguments of a launch with at least one row, over the buffers of its program.
    pub(super) fn of<K>(plan: &Plan, program: &Program<K>) -> Params<Host> {
        let problem = plan.problem();
        let buffer = |name| program.find(name).unwrap_or(BufferId(usize::MAX));
        let strided = |name, tensor| Strided::of(buffer(name), tensor);
        let bytes = |x: &Partials| x.stride.unsigned_abs() * x.first.dtype.bytes() as u64;
        Params {
            out_partial: strided("out_partial", &problem.out_partial().first),
            out_partial_split: bytes(problem.out_partial()),
            lse_partial: strided("lse_partial", &problem.lse_partial().first),
            lse_partial_split: bytes(problem.lse_partial()),
            o: strided("o", problem.o()),
            lse: strided("lse", problem.lse()),
            splits: problem.splits() as u32,
            rows: plan.num_rows(),
            decoder: plan.decoder().expect("there is a row"),
        }
    }
}

impl<'k, S> Params<S>
where
    S: Side<Pointer = U64<'k>, U64 = U64<'k>, U32 = U32<'k>>,
{
    /// The addresses of the parts of a row; `row` has the row's sequence, head and index.
    #[track_caller]
    pub(super) fn parts(&self, row: [U32<'k>; 3]) -> impl Fn(U32<'k>) -> Part<'k> {
        let first = |x: &Strided<S>, split| Global { address: x.global().at(row), strides: [split] };
        let o = first(&self.out_partial, self.out_partial_split);
        let lse = first(&self.lse_partial, self.lse_partial_split);
        move |part| Part { lse: lse.at([part]), o: o.at([part]) }
    }

    /// The destination of a row; `is_there` says whether the row exists.
    #[track_caller]
    pub(super) fn combined(&self, row: [U32<'k>; 3], elem: Elem, is_there: V<'k, Pred>) -> Combined<'k> {
        let [o, lse] = [&self.o, &self.lse].map(|x| x.global().at(row));
        Combined { lse, o, elem, is_there, stored_lse: None, lse_without_sink: false }
    }
}
