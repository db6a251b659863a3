//! C = A · Bᵀ by one warpgroup per tile of 64 x 128, which loads, multiplies and waits in turn.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};

use super::{GemmSize, launch};
use crate::kernels::Spec;

const BLOCK_M: u32 = 64;
const BLOCK_N: u32 = 128;

/// The kernel for 16-bit elements; C is binary32.
pub fn kernel(elem: Elem) -> Kernel {
    Kernel::build("gemm_simple", Launch::threads(128), |b| {
        let block_k = 128 / elem.bytes();
        let [a_shape, b_shape] = [BLOCK_M, BLOCK_N].map(|rows| TileShape::new(elem, rows, block_k));
        let (a_map, b_map) = (b.tile_map("a", a_shape), b.tile_map("b", b_shape));
        let c = b.param_pointer("c", Elem::F32);
        let (m, n, k) = (b.param_u32("m"), b.param_u32("n"), b.param_u32("k"));
        let arrived = b.mbarriers("arrived", 1, 1);
        let (a_tile, b_tile) = (b.tile("a", a_shape), b.tile("b", b_shape));

        b.init_mbarriers();
        let (i, j) = (b.cta_y(), b.cta_x());
        let (row, col) = (i * BLOCK_M, j * BLOCK_N);
        let parity = b.var("parity", 0);
        let mut acc = Frag::zeros(b, BLOCK_N);
        b.for_each((0, k), block_k, |k| {
            b.once_per_role(|| {
                b.mbarrier_arrive_expect(arrived, a_shape.bytes() + b_shape.bytes());
                b.load_tile(a_tile, &a_map, (k, row), arrived, LoadOptions::default());
                b.load_tile(b_tile, &b_map, (k, col), arrived, LoadOptions::default());
            });
            b.mbarrier_wait(arrived, parity);
            parity.update(|parity| parity ^ 1);
            gemm(a_tile, b_tile.t(), &mut acc).wait();
            // The next tiles of A and B may be loaded once every warp has read these.
            b.sync_cta();
        });
        write(&acc, [row, col], [m, n], c);
    })
}

/// Writes a fragment to a row-major matrix of `m` x `n` at `c`, from element (`row`, `col`) on, clipped to the matrix.
pub(super) fn write<'k>(acc: &Frag<'k>, [row, col]: [U32<'k>; 2], [m, n]: [U32<'k>; 2], c: U64<'k>) {
    let b = acc.builder();
    let (frag_row, frag_col) = (b.frag_row(), b.frag_col());
    let (row, col) = (row + frag_row, col + frag_col);
    for half in Half::BOTH {
        let row = row + half.rows();
        let in_rows = row.lt(m);
        let start = row.mul_wide(n);
        for (at, [x, y]) in acc.pairs().filter(|(at, _)| at.half == half) {
            let col = col + at.col;
            let inside = in_rows & col.lt(n);
            let to = c + ((start + col.to_u64()) << 2);
            b.guarded(inside, || b.store_vector::<F32, 2>(to, [x, y]));
        }
    }
}

/// The program of a product of size `size`; `n` must be even, and `k` a multiple of 8.
pub fn program(elem: Elem, size: GemmSize) -> Program<Spec> {
    launch_tiles(super::Spec::GemmSimple(elem), elem, size)
}

/// The program of a kernel with one CTA per tile of C. The kernel takes A and B as tensors, C as an address, and sizes.
pub(super) fn launch_tiles(spec: super::Spec, elem: Elem, size: GemmSize) -> Program<Spec> {
    let GemmSize { m, n, k } = size;
    let mut program = Program::new();
    let a = program.buffer("a", elem, &[m, k], BufferRole::Input);
    let b = program.buffer("b", elem, &[n, k], BufferRole::Input);
    let c = program.buffer("c", Elem::F32, &[m, n], BufferRole::Output);
    let args = [
        ("a", program.tensor(a)),
        ("b", program.tensor(b)),
        ("c", Passed::Pointer(c)),
        ("m", Passed::U32(m)),
        ("n", Passed::U32(n)),
        ("k", Passed::U32(k)),
    ];
    launch(program, spec, [n.div_ceil(BLOCK_N), m.div_ceil(BLOCK_M), 1], args)
}
