//! [`super::gemm`] for e4m3, with products summed in two levels. The tensor core keeps 13 fraction bits of a sum of
//! e4m3 products. So each of its sums spans only 128 columns, and the kernel adds these sums in binary32.

use fa3_ir::Program;
use fa3_ir::lang::gemm as gemm_tiles;
use fa3_ir::lang::*;

use super::GemmSize;
use super::gemm::{Config, Gemm, consumer, producer};
use crate::kernels::Spec;

const CONFIG: Config = Config { elems: [Elem::E4m3, Elem::Bf16], block_n: 128, stages: 5, cluster: 1 };

/// The kernel; C is bf16.
pub fn kernel() -> Kernel {
    CONFIG.kernel("gemm_fp8", producer, |gemm| consumer(gemm, two_levels))
}

/// The product of a tile: a sum, over all stages, of products over 128 columns each.
fn two_levels<'k>(gemm: &Gemm<'k>, pipeline: &mut Consumer<'k, 2>, me: U32<'k>) -> Frag<'k> {
    let b = gemm.builder;
    let mut acc = Frag::zeros(b, gemm.config.block_n);
    b.for_each((0, gemm.k), gemm.block_k, |_| {
        let stage = pipeline.wait();
        let [a_tile, b_tile] = stage.tiles();
        let product = gemm_tiles(a_tile.row_block(me, 64), b_tile.t(), Fresh).wait();
        stage.release();
        acc.add(&product);
    });
    acc
}

/// The program of a product of size `size` on a grid of `ctas` CTAs; `n` must be a multiple of 8, and `k` of 16.
pub fn program(size: GemmSize, ctas: u32) -> Program<Spec> {
    CONFIG.program(super::Spec::GemmFp8, size, ctas)
}
