//! The dQ accumulators in f32, to which CTAs add. A block of accumulators has 64 rows of a head, in the register layout
//! of the warpgroup that computed them: four registers of a thread are adjacent. The kernel that rounds the
//! accumulators has the same register layout.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::gradients::{WARPGROUP, clear_unused, registers, write};
use super::params::{DqAccumParams, InOrderParams, RoundParams};
use super::spec::RoundSpec;
use crate::kernels::params::{Declare, Form, InKernel};

/// The address of block `number`, where blocks have `cols` columns.
#[track_caller]
fn address_of<'k>(blocks: U64<'k>, number: U32<'k>, cols: u32) -> U64<'k> {
    number.mad_wide(4 * ADDED_ROWS * cols, blocks)
}

/// A thread's elements of a block.
pub(super) struct AccumBlock<'k> {
    first: U64<'k>,
    cols: u32,
}

impl<'k> DqAccumParams<InKernel<'k>> {
    /// The index, among the blocks of all heads, of the block that begins with this row (or padded position) of a head.
    #[track_caller]
    pub(super) fn number(&self, [batch, head, row]: [U32<'k>; 3]) -> U32<'k> {
        let block = row >> ADDED_ROWS.ilog2();
        batch.mad(self.heads, head).mad(self.blocks, block)
    }

    /// The address of block `number`.
    #[track_caller]
    pub(super) fn address_of(&self, number: U32<'k>, cols: u32) -> U64<'k> {
        address_of(self.address, number, cols)
    }

    /// The calling thread's elements of block `number`.
    #[track_caller]
    pub(super) fn block(&self, b: &'k Builder, number: U32<'k>, cols: u32) -> AccumBlock<'k> {
        AccumBlock::at(b, self.address, number, cols)
    }
}

impl<'k> InOrderParams<InKernel<'k>> {
    /// The semaphore of block `number`.
    #[track_caller]
    pub(super) fn last(&self, number: U32<'k>) -> LastAdded<'k> {
        LastAdded(number.mad_wide(4, self.last_added))
    }
}

/// The semaphore of a block: 0 before any tile has added, then 1 + the first key of the tile that has added last.
pub(super) struct LastAdded<'k>(U64<'k>);

impl<'k> LastAdded<'k> {
    /// Resets the semaphore.
    #[track_caller]
    pub(super) fn clear(&self, b: &'k Builder) {
        b.if_lanes(b.tid().eq(0), || b.store(self.0, 0_u32));
    }

    /// Waits, in one thread, until the tile that begins with `key` has added to the block.
    #[track_caller]
    pub(super) fn wait(&self, b: &'k Builder, key: U32<'k>) {
        b.repeat(|| b.break_if(b.load_acquire(self.0).eq(key + 1)));
    }

    /// Waits until the thread's addition is complete, and signals that the tile that begins with `key` has added.
    #[track_caller]
    pub(super) fn set(&self, b: &'k Builder, key: U32<'k>) {
        b.bulk_wait(0);
        b.store_release(self.0, key + 1);
    }
}

impl<'k> AccumBlock<'k> {
    /// The calling thread's elements of block `number`, where blocks have `cols` columns.
    #[track_caller]
    pub(super) fn at(b: &'k Builder, blocks: U64<'k>, number: U32<'k>, cols: u32) -> AccumBlock<'k> {
        let thread = b.tid() & (WARPGROUP - 1);
        AccumBlock { first: thread.mad_wide(16, address_of(blocks, number, cols)), cols }
    }

    /// Stores the registers of a fragment of 64 rows.
    #[track_caller]
    pub(super) fn store(&self, frag: &Frag<'k>) {
        let b = frag.builder();
        for (at, four) in self.groups().zip(registers(frag).chunks_exact(4)) {
            b.store_vector(at, [four[0], four[1], four[2], four[3]]);
        }
    }

    /// Adds the block's elements to `frag`.
    #[track_caller]
    pub(super) fn add_to(&self, frag: &mut Frag<'k>) {
        let numbers = self.numbers(frag.builder());
        frag.map_in_place(|x, at| x + numbers[at.index()]);
    }

    /// The addresses of the thread's groups of four elements.
    fn groups(&self) -> impl Iterator<Item = GlobalAddr> + use<'k> {
        let first = self.first;
        (0..self.cols / 8).map(move |group| first.at((16 * WARPGROUP * group) as i32))
    }

    /// Stores zeros to the block.
    #[track_caller]
    pub(super) fn clear(&self, b: &'k Builder) {
        self.groups().for_each(|at| b.store_vector(at, [0.0_f32; 4]));
    }

    /// Loads the thread's elements.
    #[track_caller]
    fn numbers(&self, b: &'k Builder) -> Vec<V<'k, F32>> {
        self.groups().flat_map(|at| b.load_vector::<F32, 4>(at)).collect()
    }

    /// Loads the block into `frag`.
    #[track_caller]
    fn load(&self, frag: &mut Frag<'k>) {
        let numbers = self.numbers(frag.builder());
        frag.map_in_place(|_, at| numbers[at.index()]);
    }
}

/// Builds the kernel that rounds the accumulators to dQ.
pub(super) fn kernel(spec: &RoundSpec) -> Kernel {
    Kernel::build("bwd_round", Launch::threads(WARPGROUP), |b| {
        let params = RoundParams::<Form>::form(spec).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();
        params.blocks.run(b, ADDED_ROWS, |block| {
            let number = params.dq_accum.number(block.padded_row(block.row));
            let mut dq = Frag::zeros(b, spec.cols);
            params.dq_accum.block(b, number, spec.cols).load(&mut dq);
            let row = block.row + b.frag_row();
            if block.varlen.is_some() {
                clear_unused(&mut dq, row, block.used);
            }
            let (to, end) = ([block.batch, block.head, block.in_memory(row)], block.in_memory(block.rows));
            write(dq, Some(params.softmax_scale), &params.dq, to, end, (spec.elem, spec.head_dim));
        });
    })
}
