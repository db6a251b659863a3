//! [`super::gemm`] by clusters of two CTAs, whose tiles lie one below the other: each loads one half of B's tile for both.

use fa3_ir::{Builder, Elem, Kernel, Role};

use super::GemmSize;
use super::gemm::{A, B, BLOCK_M, Config, Gemm, consumer, pipelined};
use crate::kernels::Job;

const CLUSTER: u32 = 2;

fn config(elem: Elem) -> Config {
    Config { elems: [elem; 2], block_n: 256, stages: 4, cluster: CLUSTER }
}

/// The kernel for 16-bit elements.
pub fn kernel(elem: Elem) -> Kernel {
    let (mut b, gemm) = Gemm::declare("gemm_cluster", config(elem));
    b.role(Role::new("producer", 0..4).registers(40), |b| {
        producer(b, &gemm);
        // The other CTA may still load into this one's shared memory, or arrive at its mbarriers.
        b.cluster_sync();
    });
    b.role(Role::new("consumer", 4..12).registers(232), |b| {
        consumer(b, &gemm, pipelined);
        b.cluster_sync();
    });
    b.finish()
}

fn producer(b: &mut Builder, gemm: &Gemm) {
    b.once_per_role(|b| {
        let me = b.cluster_cta_rank();
        let mut ring = gemm.ring.producer(b);
        let part = gemm.config.block_n / CLUSTER;
        gemm.order.for_each(b, |b, row, col| {
            let (row, col) = (b.mul(row, BLOCK_M), b.mul(col, gemm.config.block_n));
            let col = b.mad_u32(me, part, col);
            b.for_each((0, gemm.k), gemm.block_k, |b, k| {
                let mut slot = ring.acquire(b);
                slot.load(b, A, &gemm.a, (k, row));
                slot.load_part(b, B, &gemm.b, (k, col), me, 0b11u16);
                slot.commit(b);
            });
        });
    });
}

/// A product of this size on a grid of `ctas`; `n` and `k` must be multiples of 8.
pub fn job(elem: Elem, size: GemmSize, ctas: u32) -> Job {
    config(elem).job(kernel(elem), size, ctas)
}
