//! Sums of dQ in f32, to which CTAs add in any order: blocks of 64 rows of a head, each as the registers of the four
//! warps that computed it, one warp's after the other's, four of a thread at a time. The last kernel, which rounds
//! them, has the same registers.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;
use fa3_sched::{Longest, Order, Tile};

use super::RoundSpec;
use super::gradients::{registers_tile, store_registers, write};
use super::params::{RoundParams, SumsParams};
use crate::kernels::params::{Declare, Form, InKernel};

/// Threads of a warp.
const WARP: u32 = 32;

/// In place of the number of a block.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// A thread's numbers of one block.
pub(super) struct Block<'k> {
    first: V<'k, B64>,
    cols: u32,
}

impl<'k> SumsParams<InKernel<'k>> {
    /// The number of a block of a head among all of them, which the plan has counted.
    #[track_caller]
    pub(super) fn number(&self, [batch, head, block]: [V<'k, B32>; 3]) -> V<'k, B32> {
        batch.mad(self.heads, head).mad(self.blocks, block)
    }

    /// Where the calling warp's numbers of the block of this number are.
    #[track_caller]
    fn address_of(&self, b: &'k Builder, number: V<'k, B32>, cols: u32) -> V<'k, B64> {
        let bytes = 4 * ADDED_ROWS * cols;
        let block = number.mad_wide(bytes, self.address);
        b.tid().bfe(5, 2).mad_wide(bytes / 4, block)
    }

    /// The calling thread's numbers of it.
    #[track_caller]
    pub(super) fn block(&self, b: &'k Builder, number: V<'k, B32>, cols: u32) -> Block<'k> {
        let lane = b.tid() & (WARP - 1);
        Block { first: lane.mad_wide(16, self.address_of(b, number, cols)), cols }
    }

    /// What a warp's numbers pass through.
    pub(super) fn draft_shape(cols: u32) -> TileShape {
        registers_tile(cols, WARP)
    }

    /// Begins to add a fragment to the block of this number, by way of shared memory; to [`NO_BLOCK`] nothing.
    #[track_caller]
    pub(super) fn add(&self, number: V<'k, B32>, dq: &Frag<'k>, through: &Outbox<'k>) {
        let draft = through.acquire();
        store_registers(dq, draft.tile(), WARP);
        let to = self.address_of(dq.builder(), number, dq.cols());
        draft.send_add_flat_if(number.ne(NO_BLOCK), to);
    }
}

impl<'k> Block<'k> {
    /// Where groups of four of the thread's numbers are.
    fn groups(&self) -> impl Iterator<Item = GlobalAddr> + use<'k> {
        let first = self.first;
        (0..self.cols / 8).map(move |group| first.at((16 * WARP * group) as i32))
    }

    /// Makes them zeros.
    #[track_caller]
    pub(super) fn clear(&self, b: &'k Builder) {
        self.groups().for_each(|at| b.store_vector(at, [0.0_f32; 4]));
    }

    /// The sums.
    #[track_caller]
    fn load(&self, b: &'k Builder) -> Frag<'k> {
        let mut frag = Frag::zeros(b, self.cols);
        let numbers: Vec<V<'k, F32>> = self.groups().flat_map(|at| b.load_vector::<F32, 4>(at)).collect();
        frag.map(|_, at| numbers[at.index()]);
        frag
    }
}

/// The kernel that rounds them.
pub(super) fn kernel(spec: &RoundSpec) -> Kernel {
    Kernel::build("bwd_round", Launch::threads(4 * WARP), |b| {
        let order = Order::LongestFirst { section: 1, longest: Longest::First };
        let params = RoundParams::<Form>::form(spec, order).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();
        let Tile { m_block, head, batch, split: _ } = params.decoder.decode(b.cta_x());
        let number = params.sums.number([batch, head, m_block]);
        let dq = params.sums.block(b, number, spec.cols).load(b);
        let to = [batch, head, m_block.mad(ADDED_ROWS, b.frag_row())];
        write(dq, Some(params.softmax_scale), &params.dq, to, params.seqlen, (spec.elem, spec.head_dim));
    })
}
