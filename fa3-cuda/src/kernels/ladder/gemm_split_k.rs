//! C = A · Bᵀ where C has few tiles (split-K). Several CTAs share a tile, and each has a part of the columns of A and
//! B. TMA reductions add their sums.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};

use super::gemm_pipeline::{BLOCK_M, BLOCK_N, Loads};
use super::{GemmSize, launch};
use crate::kernels::Spec;

/// The kernel for 16-bit elements; C is binary32, and must be zero before the launch.
pub fn kernel(elem: Elem) -> Kernel {
    Kernel::build("gemm_split_k", Launch::threads(128), |b| {
        let loads = Loads::declare(b, elem);
        let out = TileShape::new(Elem::F32, BLOCK_M, BLOCK_N);
        let (c, part) = (b.tile_map("c", out), b.param_u32("part"));
        let staging_buffers = b.staging_buffers("out", out, 1);

        b.init_mbarriers();
        let (i, j, split) = (b.cta_y(), b.cta_x(), b.cta_z());
        let (row, col) = (i * BLOCK_M, j * BLOCK_N);
        let first = split * part;
        let end = (first + part).min(loads.k);
        let acc = loads.product([row, col], (first, end));

        let staging_buffer = staging_buffers.of(0);
        let staged = staging_buffer.acquire();
        acc.store(staged.tile());
        staged.store_add(&c, (col, row));
        staging_buffer.drain();
    })
}

/// The program of a product of size `size` with K in at most `splits` parts; `n` must be a multiple of 4, and `k` of 8.
pub fn program(elem: Elem, size: GemmSize, splits: u32) -> Program<Spec> {
    let GemmSize { m, n, k } = size;
    let mut program = Program::new();
    let a = program.buffer("a", elem, &[m, k], BufferRole::Input);
    let b = program.buffer("b", elem, &[n, k], BufferRole::Input);
    let c = program.buffer("c", Elem::F32, &[m, n], BufferRole::InOut);
    let block_k = 128 / elem.bytes();
    let part = k.div_ceil(block_k).div_ceil(splits.max(1)).max(1).saturating_mul(block_k);
    let args = [
        ("a", program.tensor(a)),
        ("b", program.tensor(b)),
        ("k", Passed::U32(k)),
        ("c", program.tensor(c)),
        ("part", Passed::U32(part)),
    ];
    let grid = [n.div_ceil(BLOCK_N), m.div_ceil(BLOCK_M), k.div_ceil(part)];
    launch(program, super::Spec::GemmSplitK(elem), grid, args)
}
