//! Transposes e4m3 V before a forward pass that reads each block of V many times (see
//! [`ValueLayout::Transposed`](fa3_types::ValueLayout)). Codes keep their bits. A CTA has 128 keys of a head.
//!
//! Keys are rows of the tile in their natural order, as TMA writes them. So reads of shared memory take four times as
//! long as in the order of the quantizer, but still less time than the loads of the tile from global memory.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::forward::V_TILE_KEYS;
use fa3_sched::{Decoder, Order, TileCounts};
use fa3_types::TensorDesc;

use super::key_rows::KeyRows;
use crate::kernels::params::{Declare, Fill, Form, Host, Pass, RowDims, Side, TensorForm, param, params};
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::view;
use crate::kernels::{KernelSpec, Spec};

const THREADS: u32 = 256;

/// Everything that the kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransposeSpec {
    /// Number of columns of V, a multiple of 16.
    pub head_dim: u32,
}

params! {
    struct Params {
        v: tensor,
        codes: named Strided = "v_transposed",
        decoder: numbers Decoder,
    }
}

impl KernelSpec for TransposeSpec {
    fn kernel(&self) -> Kernel {
        let head_dim = self.head_dim;
        // The tile has whole panels, in which columns that V does not have are zeros.
        let cols = head_dim.next_multiple_of(if head_dim <= 64 { 64 } else { 128 });
        let shape = TileShape::new(Elem::E4m3, V_TILE_KEYS, cols);
        Kernel::build("transpose_v", Launch::threads(THREADS), |b| {
            let form = Params::<Form> {
                v: TensorForm { tile: shape, rank: 4, rows: RowDims::One(2) },
                codes: Strided::form(Elem::E4m3),
                decoder: Form::decoder(Order::HEADS_FASTEST),
            };
            let params = form.pass(&mut Declare(b));
            let (tile, arrived) = (b.tile("v", shape), b.mbarriers("arrived", 1, 1));
            b.init_mbarriers();
            // PDL: CTAs of the next kernel become resident as CTAs of this one leave, and wait until all of these have
            // ended.
            b.launch_dependents();
            b.grid_dependency_wait();
            let fa3_sched::TileCoord { m_block, head, batch } = params.decoder.decode(b.cta_x());
            b.once_per_role(|| {
                b.mbarrier_arrive_expect(arrived, shape.bytes());
                let row = m_block * V_TILE_KEYS;
                b.load_tile(tile, &params.v, (0, head, row, batch), arrived, LoadOptions::default());
            });
            b.mbarrier_wait(arrived, 0);
            let codes = KeyRows { tile, row_of: |key| key, keys: V_TILE_KEYS, head_dim, threads: THREADS };
            codes.store(b, params.codes.global(), [batch, head, m_block], None);
        })
    }
}

/// Adds the step that transposes `tensor`, divided into `tiles`, into `codes`.
pub(crate) fn step(
    program: &mut Program<Spec>,
    (v, tensor): (BufferId, &TensorDesc),
    codes: BufferId,
    tiles: TileCounts,
) {
    let params = Params::<Host> {
        v: view(v, tensor),
        codes: Strided::transposed(codes, tensor.shape),
        decoder: Decoder::new(tiles, Order::HEADS_FASTEST),
    };
    let spec = TransposeSpec { head_dim: tensor.shape.head_dim as u32 };
    let grid = [tiles.m_blocks * tiles.heads * tiles.batch, 1, 1];
    program.step(spec.into(), grid, Fill::args(|by| _ = params.pass(by)));
}
