//! y = xᵀ, with one tile of 64 x 64 per CTA: matrices of 8 x 8 leave shared memory transposed and enter it again.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};

use super::launch;
use crate::kernels::Spec;

const SIDE: u32 = 64;

/// Builds the kernel.
pub fn kernel() -> Kernel {
    Kernel::build("transpose", Launch::threads(128), |b| {
        let shape = TileShape::new(Elem::Bf16, SIDE, SIDE);
        let (x, y) = (b.tile_map("x", shape), b.tile_map("y", shape));
        let arrived = b.mbarriers("arrived", 1, 1);
        let (from, to) = (b.tile("from", shape), b.tile("to", shape));

        b.init_mbarriers();
        let (i, j) = (b.cta_y(), b.cta_x());
        let (row, col) = (i * SIDE, j * SIDE);
        b.once_per_role(|| {
            b.mbarrier_arrive_expect(arrived, shape.bytes());
            b.load_tile(from, &x, (col, row), arrived, LoadOptions::default());
        });
        b.mbarrier_wait(arrived, 0);

        // Warp w transposes columns 16w to 16w + 15 into rows, four matrices at a time. Lane l has the address of row l
        // mod 8 of matrix l / 8.
        let (tid, lane) = (b.tid(), b.lane_id());
        let first = tid.bfe(5, 2) * 16;
        let (in_matrix, matrix) = (lane & 7, lane >> 3);
        let (left, right) = (matrix & 1, matrix >> 1);
        for block in 0..SIDE / 16 {
            // Each source matrix begins at row 16 block + 8 right and column 16 warp + 8 left.
            let source = from.element(right.mad(8, in_matrix) + 16 * block, left.mad(8, first));
            let matrices = b.ldmatrix::<4>(source, true);
            // Transposed, the matrix begins at row 16 warp + 8 left and column 16 block + 8 right.
            let target = to.element(left.mad(8, first + in_matrix), right.mad(8, 16 * block));
            b.stmatrix(target, matrices, false);
        }

        // Every thread orders its own writes before later copies; after the barrier, one thread may copy.
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        b.once_per_role(|| {
            b.store_tile(to, &y, (row, col));
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
}

/// The program for a matrix of `rows` x `cols`, both multiples of 8.
pub fn program(rows: u32, cols: u32) -> Program<Spec> {
    let mut program = Program::new();
    let x = program.buffer("x", Elem::Bf16, &[rows, cols], BufferRole::Input);
    let y = program.buffer("y", Elem::Bf16, &[cols, rows], BufferRole::Output);
    let args = [("x", program.tensor(x)), ("y", program.tensor(y))];
    launch(program, super::Spec::Transpose, [cols.div_ceil(SIDE), rows.div_ceil(SIDE), 1], args)
}
