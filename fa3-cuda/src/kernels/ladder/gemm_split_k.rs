//! C = A · Bᵀ where C has few tiles: several CTAs share one, each with a part of K, and copies add their sums.

use fa3_ir::{Elem, Kernel, Launch, TileShape};

use super::GemmSize;
use super::gemm_ring::{BLOCK_M, BLOCK_N, Loads};
use crate::kernels::{Array, Job, JobArg};

/// The kernel for 16-bit elements; C is binary32, and must be zero before.
pub fn kernel(elem: Elem) -> Kernel {
    Kernel::build("gemm_split_k", Launch::threads(128), |b| {
        let loads = Loads::declare(b, elem);
        let out = TileShape::new(Elem::F32, BLOCK_M, BLOCK_N);
        let (c, part) = (b.tile_map("c", out), b.param_u32("part"));
        let outboxes = b.outboxes("out", out, 1);

        b.init_mbarriers();
        let (i, j, split) = (b.cta_y(), b.cta_x(), b.cta_z());
        let (row, col) = (i * BLOCK_M, j * BLOCK_N);
        let first = split * part;
        let end = (first + part).min(loads.k);
        let acc = loads.product([row, col], (first, end));

        let outbox = outboxes.of(0);
        let draft = outbox.acquire();
        acc.store(draft.tile());
        draft.send_add(&c, (col, row));
        outbox.drain();
    })
}

/// A product of this size with K in at most `splits` parts; `n` must be a multiple of 4 and `k` of 8.
pub fn job(elem: Elem, size: GemmSize, splits: u32) -> Job {
    let GemmSize { m, n, k } = size;
    let arrays = vec![
        Array::input("a", elem, &[m, k]),
        Array::input("b", elem, &[n, k]),
        Array::sum("c", Elem::F32, &[m, n]),
    ];
    let block_k = 128 / elem.bytes();
    let part = k.div_ceil(block_k).div_ceil(splits.max(1)) * block_k;
    let args = vec![
        Job::tensor(&arrays, 0),
        Job::tensor(&arrays, 1),
        JobArg::U32(k),
        Job::tensor(&arrays, 2),
        JobArg::U32(part),
    ];
    let grid = [n.div_ceil(BLOCK_N), m.div_ceil(BLOCK_M), k.div_ceil(part)];
    Job { kernel: kernel(elem), grid, arrays, args }
}
