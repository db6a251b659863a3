//! The rows of sequences on one side, Q or K and V, according to the arrays of lengths.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::packed::{Arrays, ClampedRows, Plan};

use crate::kernels::params::{Form, Host, InKernel, Pass, Side};

/// The names of the arrays of lengths of Q: first rows, valid lengths, and padding on the left.
pub(crate) const ARRAYS_OF_Q: [&str; 3] = ["cu_seqlens_q", "seqused_q", "leftpad_q"];

/// The names of the arrays of lengths of K and V.
pub(crate) const ARRAYS_OF_K: [&str; 3] = ["cu_seqlens_k", "seqused_k", "leftpad_k"];

/// The arrays that say where the rows of Q, or of K and V, are.
#[derive(Clone, Copy)]
pub(crate) struct SideRows<S: Side> {
    pub(crate) cu_seqlens: Option<S::Pointer>,
    pub(crate) seqused: Option<S::Pointer>,
    pub(crate) leftpad: Option<S::Pointer>,
    /// Number of rows of the packed tensor, or of each sequence of a dense tensor.
    pub(crate) rows: S::U32,
}

impl SideRows<Form> {
    /// The parameters of a side with these arrays.
    pub(crate) fn form(arrays: Arrays) -> SideRows<Form> {
        let array = |is_there: bool| is_there.then_some(Elem::U32);
        SideRows {
            cu_seqlens: array(arrays.cu_seqlens),
            seqused: array(arrays.seqused),
            leftpad: array(arrays.leftpad),
            rows: (),
        }
    }
}

impl SideRows<Host> {
    /// The two sides of a launch, Q first. `find` gives the buffers of arrays by their names.
    pub(crate) fn of(plan: &Plan, find: impl Fn(&str) -> Option<BufferId>) -> [SideRows<Host>; 2] {
        let side = |[cu_seqlens, seqused, leftpad]: [&str; 3], rows: usize| SideRows {
            cu_seqlens: find(cu_seqlens),
            seqused: find(seqused),
            leftpad: find(leftpad),
            rows: rows as u32,
        };
        [side(ARRAYS_OF_Q, plan.q().rows), side(ARRAYS_OF_K, plan.k().rows)]
    }
}

impl<A: Side> SideRows<A> {
    /// Passes the fields in the order of the kernel's signature. `name` is the suffix of their names.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>, name: &str) -> SideRows<B> {
        let mut array = |what: &str, array: Option<A::Pointer>| {
            array.map(|array| by.pointer(&format!("{what}_{name}"), array))
        };
        SideRows {
            cu_seqlens: array("cu_seqlens", self.cu_seqlens),
            seqused: array("seqused", self.seqused),
            leftpad: array("leftpad", self.leftpad),
            rows: by.u32(&format!("rows_{name}"), self.rows),
        }
    }
}

impl<'k> SideRows<InKernel<'k>> {
    /// The rows of sequence `sequence`; no rows if `counts` is false.
    #[track_caller]
    pub(crate) fn of_sequence(
        &self,
        b: &'k Builder,
        sequence: U32<'k>,
        counts: V<'k, Pred>,
    ) -> ClampedRows<U32<'k>> {
        let all = counts.select::<B32>(self.rows, 0);
        let rows = match self.cu_seqlens {
            Some(array) => {
                let at = sequence.mad_wide(4, array);
                ClampedRows::packed([b.load(at), b.load(at.at(4))], all)
            }
            None => ClampedRows::dense(all),
        };
        let rows = match self.seqused {
            Some(array) => rows.used(b.load(sequence.mad_wide(4, array))),
            None => rows,
        };
        match self.leftpad {
            Some(array) => rows.left_padded(b.load(sequence.mad_wide(4, array))),
            None => rows,
        }
    }

    /// The last entry of `cu_seqlens`, if the side has that array; `count` is the number of sequences.
    #[track_caller]
    pub(crate) fn end(&self, b: &'k Builder, count: U32<'k>) -> Option<U32<'k>> {
        self.cu_seqlens.map(|array| b.load(count.mad_wide(4, array)))
    }
}
