//! The parameters of the kernel that writes the table of packed sequences.

use fa3_ir::lang::Elem;
use fa3_ir::{BufferId, Program};
use fa3_sched::packed::{Cut, Plan};

use super::spec::Spec;
use crate::kernels;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::side_rows::{ARRAYS_OF_K, ARRAYS_OF_Q, SideRows};

/// The dimension of the attention matrix that a table's tiles divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TilesOf {
    /// Rows of Q.
    Rows,
    /// Keys. The table's plan is then for the transposed attention matrix.
    Keys,
}

params! {
    /// The parameters. Each side has the arrays that the spec names.
    struct Params {
        cu_seqlens_q: maybe pointer,
        cu_seqlens_k: maybe pointer,
        seqused_q: maybe pointer,
        seqused_k: maybe pointer,
        leftpad_k: maybe pointer,
        table: pointer,
        /// The position of each sequence's first row in arrays that pad sequences to whole row blocks. The last entry
        /// is for the rows behind all sequences.
        firsts: maybe pointer = "first_places",
        /// Number of sequences.
        count: u32,
        /// Number of rows of Q: of the packed tensor, or of each sequence of a dense tensor.
        rows_q: u32,
        /// Number of rows of K and V: of the packed tensor, or of each sequence of a dense tensor.
        rows_k: u32,
        /// The largest number of row blocks.
        capacity: u32,
        cut: numbers Cut,
    }
}

impl Spec {
    pub(super) fn form(&self) -> Params<Form> {
        let array = |is_there: bool| is_there.then_some(Elem::U32);
        Params {
            cu_seqlens_q: array(self.q.cu_seqlens),
            cu_seqlens_k: array(self.k.cu_seqlens),
            seqused_q: array(self.q.seqused),
            seqused_k: array(self.k.seqused),
            leftpad_k: array(self.k.leftpad),
            table: Elem::U32,
            firsts: array(self.firsts),
            count: (),
            rows_q: (),
            rows_k: (),
            capacity: (),
            cut: Cut::new(1, 1, self.mask).map_named(&mut |_, _| ()),
        }
    }
}

impl Params<Host> {
    /// The arguments of a launch that writes a table, whose tiles divide the dimension `of`. The program must have the
    /// plan's arrays.
    pub(super) fn of(
        plan: &Plan,
        program: &Program<kernels::Spec>,
        of: TilesOf,
        (table, firsts): (BufferId, Option<BufferId>),
    ) -> Params<Host> {
        let [q, k] = match of {
            TilesOf::Rows => [ARRAYS_OF_Q, ARRAYS_OF_K],
            TilesOf::Keys => [ARRAYS_OF_K, ARRAYS_OF_Q],
        };
        Params {
            cu_seqlens_q: program.find(q[0]),
            cu_seqlens_k: program.find(k[0]),
            seqused_q: program.find(q[1]),
            seqused_k: program.find(k[1]),
            leftpad_k: program.find(k[2]),
            table,
            firsts,
            count: plan.count(),
            rows_q: plan.q().rows as u32,
            rows_k: plan.k().rows as u32,
            capacity: plan.capacity(),
            cut: plan.cut(),
        }
    }
}

impl<'k> Params<InKernel<'k>> {
    /// The arrays that say where the rows of Q are.
    pub(super) fn side_q(&self) -> SideRows<InKernel<'k>> {
        SideRows { cu_seqlens: self.cu_seqlens_q, seqused: self.seqused_q, leftpad: None, rows: self.rows_q }
    }

    /// The arrays that say where the rows of K and V are.
    pub(super) fn side_k(&self) -> SideRows<InKernel<'k>> {
        SideRows {
            cu_seqlens: self.cu_seqlens_k,
            seqused: self.seqused_k,
            leftpad: self.leftpad_k,
            rows: self.rows_k,
        }
    }
}
