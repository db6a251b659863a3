//! y = xᵀ, one tile of 64 x 64 a CTA: matrices of 8 x 8 leave shared memory transposed and enter it again.

use fa3_ir::{Builder, Elem, FenceInst, Kernel, Launch, LoadOptions, TileShape};

use crate::kernels::{Array, Job};

const SIDE: u32 = 64;

/// The kernel.
pub fn kernel() -> Kernel {
    let mut b = Builder::new("transpose", Launch::threads(128));
    let shape = TileShape::new(Elem::Bf16, SIDE, SIDE);
    let (x, y) = (b.tile_map("x", shape), b.tile_map("y", shape));
    let arrived = b.mbarriers("arrived", 1, 1);
    let (from, to) = (b.tile("from", shape), b.tile("to", shape));

    b.init_mbarriers();
    let (i, j) = (b.cta_y(), b.cta_x());
    let (row, col) = (b.mul(i, SIDE), b.mul(j, SIDE));
    b.once_per_role(|b| {
        b.mbarrier_arrive_expect(arrived, shape.bytes());
        b.load_tile(from, &x, (col, row), arrived, LoadOptions::default());
    });
    b.mbarrier_wait(arrived, 0);

    // Warp w transposes columns 16w to 16w + 15 into rows, four matrices at a time: lane l addresses row l mod 8 of
    // matrix l / 8.
    let (tid, lane) = (b.tid(), b.lane_id());
    let warp = b.bfe_u32(tid, 5, 2);
    let (in_matrix, matrix) = (b.and(lane, 7), b.shr_u32(lane, 3));
    let (left, right) = (b.and(matrix, 1), b.shr_u32(matrix, 1));
    for block in 0..SIDE / 16 {
        // Matrices of the source: rows 16 block + 8 right, columns 16 warp + 8 left.
        let source_row = b.mad_u32(right, 8, in_matrix);
        let source_row = b.add(source_row, 16 * block);
        let source_col = b.mad_u32(warp, 16, 0);
        let source_col = b.mad_u32(left, 8, source_col);
        let at = b.element_address(&from, source_row, source_col);
        let matrices = b.ldmatrix::<4>(at, true);
        // Transposed they are rows 16 warp + 8 left, columns 16 block + 8 right.
        let row = b.mad_u32(warp, 16, in_matrix);
        let row = b.mad_u32(left, 8, row);
        let col = b.mad_u32(right, 8, 16 * block);
        let at = b.element_address(&to, row, col);
        b.stmatrix(at, matrices, false);
    }

    // Every thread that wrote orders its writes before copies; then one may copy.
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
    b.once_per_role(|b| {
        b.store_tile(to, &y, (row, col));
        b.bulk_commit();
        b.bulk_wait_read(0);
    });
    b.finish()
}

/// A matrix of `rows` x `cols`, both multiples of 8.
pub fn job(rows: u32, cols: u32) -> Job {
    let arrays =
        vec![Array::input("x", Elem::Bf16, &[rows, cols]), Array::output("y", Elem::Bf16, &[cols, rows])];
    let args = vec![Job::tensor(&arrays, 0), Job::tensor(&arrays, 1)];
    Job { kernel: kernel(), grid: [cols.div_ceil(SIDE), rows.div_ceil(SIDE), 1], arrays, args }
}
