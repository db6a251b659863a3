//! [`super::gemm`] by clusters of two CTAs, whose tiles lie one below the other. Each CTA loads half of B's tile for
//! both CTAs.

use fa3_ir::{Elem, Kernel, Program};

use super::GemmSize;
use super::gemm::{A, B, BLOCK_M, Config, Gemm, consumer, pipelined};
use crate::kernels::Spec;

const CLUSTER: u32 = 2;

fn config(elem: Elem) -> Config {
    Config { elems: [elem; 2], block_n: 256, stages: 4, cluster: CLUSTER }
}

/// The kernel for 16-bit elements.
pub fn kernel(elem: Elem) -> Kernel {
    config(elem).kernel(
        "gemm_cluster",
        |gemm| {
            producer(gemm);
            // The other CTA may still load into this CTA's shared memory, or arrive at its mbarriers.
            gemm.builder.cluster_sync();
        },
        |gemm| {
            consumer(gemm, pipelined);
            gemm.builder.cluster_sync();
        },
    )
}

fn producer(gemm: &Gemm<'_>) {
    let b = gemm.builder;
    b.once_per_role(|| {
        let me = b.cluster_cta_rank();
        let mut pipeline = gemm.pipeline.producer();
        let part = gemm.config.block_n / CLUSTER;
        gemm.order.for_each(b, |row, col| {
            let (row, col) = (row * BLOCK_M, col * gemm.config.block_n);
            let col = me.mad(part, col);
            b.for_each((0, gemm.k), gemm.block_k, |k| {
                let mut stage = pipeline.acquire();
                stage.load(A, &gemm.a, (k, row));
                stage.load_part(B, &gemm.b, (k, col), me, 0b11u16);
                stage.commit();
            });
        });
    });
}

/// The program of a product of size `size` on a grid of `ctas` CTAs; `n` and `k` must be multiples of 8.
pub fn program(elem: Elem, size: GemmSize, ctas: u32) -> Program<Spec> {
    config(elem).program(super::Spec::GemmCluster(elem), size, ctas)
}
