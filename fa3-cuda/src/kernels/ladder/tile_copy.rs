//! y = x by tensor copies, with one tile per CTA: through shared memory with any swizzle, and clipped at the edges.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};

use super::launch;
use crate::kernels::Spec;

const ROWS: u32 = 64;

/// Builds the kernel for a swizzle.
pub fn kernel(swizzle: Swizzle) -> Kernel {
    Kernel::build("tile_copy", Launch::threads(128), |b| {
        let shape = TileShape::new(Elem::Bf16, ROWS, 64).swizzled(swizzle);
        let (x, y) = (b.tile_map("x", shape), b.tile_map("y", shape));
        let (arrived, tile) = (b.mbarriers("arrived", 1, 1), b.tile("tile", shape));

        b.init_mbarriers();
        let (i, j) = (b.cta_y(), b.cta_x());
        let (row, col) = (i * ROWS, j * 64);
        b.once_per_role(|| {
            b.mbarrier_arrive_expect(arrived, shape.bytes());
            b.load_tile(tile, &x, (col, row), arrived, LoadOptions::default());
            b.mbarrier_wait(arrived, 0);
            b.store_tile(tile, &y, (col, row));
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    })
}

/// The program for a matrix of `rows` x `cols`; `cols` must be a multiple of 8, as tensor maps demand.
pub fn program(swizzle: Swizzle, rows: u32, cols: u32) -> Program<Spec> {
    let mut program = Program::new();
    let x = program.buffer("x", Elem::Bf16, &[rows, cols], BufferRole::Input);
    let y = program.buffer("y", Elem::Bf16, &[rows, cols], BufferRole::Output);
    let args = [("x", program.tensor(x)), ("y", program.tensor(y))];
    let grid = [cols.div_ceil(64), rows.div_ceil(ROWS), 1];
    launch(program, super::Spec::TileCopy(swizzle), grid, args)
}
