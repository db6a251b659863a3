//! C = A · Bᵀ by one warpgroup per tile of 64 x 128, whose loads run ahead of its products through a pipeline.

use fa3_ir::Program;
use fa3_ir::lang::*;

use super::{GemmSize, gemm_simple};
use crate::kernels::Spec;

pub(super) const BLOCK_M: u32 = 64;
pub(super) const BLOCK_N: u32 = 128;
const STAGES: u32 = 4;

/// Indices of the tiles of a stage.
const A: usize = 0;
const B: usize = 1;

/// The loads of a tile's product.
pub(super) struct Loads<'k> {
    builder: &'k Builder,
    maps: [TileMap; 2],
    pub(super) k: U32<'k>,
    block_k: u32,
    pipeline: Pipeline<'k, 2>,
}

/// The kernel for 16-bit elements; C is binary32.
pub fn kernel(elem: Elem) -> Kernel {
    Kernel::build("gemm_pipeline", Launch::threads(128), |b| {
        let loads = Loads::declare(b, elem);
        let c = b.param_pointer("c", Elem::F32);
        let (m, n) = (b.param_u32("m"), b.param_u32("n"));

        b.init_mbarriers();
        let (i, j) = (b.cta_y(), b.cta_x());
        let (row, col) = (i * BLOCK_M, j * BLOCK_N);
        let acc = loads.product([row, col], (b.copy(0), loads.k));
        gemm_simple::write(&acc, [row, col], [m, n], c);
    })
}

impl<'k> Loads<'k> {
    pub(super) fn declare(b: &'k Builder, elem: Elem) -> Loads<'k> {
        let block_k = 128 / elem.bytes();
        let [a, right] = [BLOCK_M, BLOCK_N].map(|rows| TileShape::new(elem, rows, block_k));
        Loads {
            builder: b,
            maps: [b.tile_map("a", a), b.tile_map("b", right)],
            k: b.param_u32("k"),
            block_k,
            pipeline: b.pipeline("ab", STAGES, 4, [("a", a), ("b", right)]),
        }
    }

    /// The product of the tile at `corner` over the columns `first` .. `end` (at least one) of A and B.
    pub(super) fn product(&self, corner: [U32<'k>; 2], (first, end): (U32<'k>, U32<'k>)) -> Frag<'k> {
        let b = self.builder;
        let (mut producer, mut consumer) = (self.pipeline.producer(), self.pipeline.consumer());
        // Loads run ahead by one stage less than there are: while a product reads a stage, the previous one is freed.
        for ahead in 0..STAGES - 1 {
            self.fill(&mut producer, corner, first + ahead * self.block_k, end);
        }
        let mut products = Chain::new(b, BLOCK_N);
        let stage = consumer.wait();
        let [a_tile, b_tile] = stage.tiles();
        products.gemm(a_tile, b_tile.t());
        let mut held = stage.hold();
        b.for_each((first + self.block_k, end), self.block_k, |k| {
            let stage = consumer.wait();
            let [a_tile, b_tile] = stage.tiles();
            products.gemm(a_tile, b_tile.t()); // in flight
            products.wait_older();
            held.replace(stage);
            self.fill(&mut producer, corner, k + (STAGES - 2) * self.block_k, end);
        });
        let acc = products.wait();
        held.release();
        acc
    }

    /// Begins to load the columns from `k` on, unless `k` reaches `end`.
    fn fill(&self, producer: &mut Producer<'k, 2>, [row, col]: [U32<'k>; 2], k: U32<'k>, end: U32<'k>) {
        let b = self.builder;
        b.if_uniform(k.lt(end), || {
            b.once_per_role(|| {
                let mut stage = producer.acquire();
                stage.load(A, &self.maps[A], (k, row));
                stage.load(B, &self.maps[B], (k, col));
                stage.commit();
            });
        });
    }
}

/// The program of a product of size `size`; `n` must be even, and `k` a multiple of 8.
pub fn program(elem: Elem, size: GemmSize) -> Program<Spec> {
    gemm_simple::launch_tiles(super::Spec::GemmPipeline(elem), elem, size)
}
