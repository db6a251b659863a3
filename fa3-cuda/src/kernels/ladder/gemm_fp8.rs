//! [`super::gemm`] of e4m3, in two levels: the tensor core keeps 13 fraction bits of a sum of e4m3 products, so that no
//! sum in it is longer than 128; binary32 registers add these.

use fa3_ir::{B32, Builder, Consumer, Elem, Frag, Fresh, Kernel, Role, V, gemm_ss};

use super::GemmSize;
use super::gemm::{Config, Gemm, consumer, producer};
use crate::kernels::Job;

const CONFIG: Config = Config { elems: [Elem::E4m3, Elem::Bf16], block_n: 128, stages: 5, cluster: 1 };

/// The kernel; C is bf16.
pub fn kernel() -> Kernel {
    let (mut b, gemm) = Gemm::declare("gemm_fp8", CONFIG);
    b.role(Role::new("producer", 0..4).registers(40), |b| producer(b, &gemm));
    b.role(Role::new("consumer", 4..12).registers(232), |b| consumer(b, &gemm, two_levels));
    b.finish()
}

/// The sum over all slots of a tile, of products over 128 columns each.
fn two_levels(b: &mut Builder, gemm: &Gemm, ring: &mut Consumer<2>, me: V<B32>) -> Frag {
    let mut acc = Frag::zeros(b, gemm.config.block_n);
    b.for_each((0, gemm.k), gemm.block_k, |b, _| {
        let slot = ring.wait(b);
        let [a_tile, b_tile] = slot.tiles();
        let mine = a_tile.row_block(b, me, 64);
        let product = gemm_ss(b, mine, b_tile.t(), Fresh).wait(b);
        slot.release(b);
        acc.add(b, &product);
    });
    acc
}

/// A product of this size on a grid of `ctas`; `n` must be a multiple of 8, `k` of 16.
pub fn job(size: GemmSize, ctas: u32) -> Job {
    CONFIG.job(kernel(), size, ctas)
}
