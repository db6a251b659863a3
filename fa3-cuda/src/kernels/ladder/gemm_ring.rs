//! C = A · Bᵀ by one warpgroup a tile of 64 x 128, whose loads run ahead of its products in a ring.

use fa3_ir::{B32, Builder, Chain, Elem, Frag, Kernel, Launch, Producer, Ring, TileMap, TileShape, V};

use super::{GemmSize, gemm_simple};
use crate::kernels::{Job, JobArg};

pub(super) const BLOCK_M: u32 = 64;
pub(super) const BLOCK_N: u32 = 128;
const STAGES: u32 = 4;

/// The tiles of a slot.
const A: usize = 0;
const B: usize = 1;

/// What a tile's product needs.
pub(super) struct Loads {
    maps: [TileMap; 2],
    pub(super) k: V<B32>,
    block_k: u32,
    ring: Ring<2>,
}

/// The kernel for 16-bit elements; C is binary32.
pub fn kernel(elem: Elem) -> Kernel {
    let mut b = Builder::new("gemm_ring", Launch::threads(128));
    let loads = Loads::declare(&mut b, elem);
    let c = b.param_pointer("c", Elem::F32);
    let (m, n) = (b.param_u32("m"), b.param_u32("n"));

    b.init_mbarriers();
    let (i, j) = (b.cta_y(), b.cta_x());
    let (row, col) = (b.mul(i, BLOCK_M), b.mul(j, BLOCK_N));
    let first = b.mov_b32(0);
    let acc = loads.product(&mut b, [row, col], (first, loads.k));
    gemm_simple::write(&mut b, &acc, [row, col], [m, n], c);
    b.finish()
}

impl Loads {
    pub(super) fn declare(b: &mut Builder, elem: Elem) -> Loads {
        let block_k = 128 / elem.bytes();
        let [a, right] = [BLOCK_M, BLOCK_N].map(|rows| TileShape::new(elem, rows, block_k));
        Loads {
            maps: [b.tile_map("a", a), b.tile_map("b", right)],
            k: b.param_u32("k"),
            block_k,
            ring: b.ring("ab", STAGES, 4, [("a", a), ("b", right)]),
        }
    }

    /// The product of the tile at `corner` over columns `first` to `end` of A and B, at least one.
    pub(super) fn product(
        &self,
        b: &mut Builder,
        corner: [V<B32>; 2],
        (first, end): (V<B32>, V<B32>),
    ) -> Frag {
        let (mut producer, mut consumer) = (self.ring.producer(b), self.ring.consumer(b));
        // One slot less than there are: while a product reads one, the one before it is given back.
        for ahead in 0..STAGES - 1 {
            let k = b.add(first, ahead * self.block_k);
            self.fill(b, &mut producer, corner, k, end);
        }
        let mut products = Chain::new(b, BLOCK_N);
        let slot = consumer.wait(b);
        let [a_tile, b_tile] = slot.tiles();
        products.gemm_ss(b, a_tile, b_tile.t());
        let mut held = slot.hold(b);
        let second = b.add(first, self.block_k);
        b.for_each((second, end), self.block_k, |b, k| {
            let slot = consumer.wait(b);
            let [a_tile, b_tile] = slot.tiles();
            products.gemm_ss(b, a_tile, b_tile.t()); // in flight
            products.wait_older(b);
            held.replace(b, slot).release(b);
            let k = b.add(k, (STAGES - 2) * self.block_k);
            self.fill(b, &mut producer, corner, k, end);
        });
        let acc = products.wait(b);
        held.take(b).release(b);
        acc
    }

    /// Begins to load columns `k` and following, if there are any.
    fn fill(
        &self,
        b: &mut Builder,
        producer: &mut Producer<2>,
        [row, col]: [V<B32>; 2],
        k: V<B32>,
        end: V<B32>,
    ) {
        let inside = b.lt_u32(k, end);
        b.if_uniform(inside, |b| {
            b.once_per_role(|b| {
                let mut slot = producer.acquire(b);
                slot.load(b, A, &self.maps[A], (k, row));
                slot.load(b, B, &self.maps[B], (k, col));
                slot.commit(b);
            });
        });
    }
}

/// A product of this size; `n` must be even and `k` a multiple of 8.
pub fn job(elem: Elem, size: GemmSize) -> Job {
    let Job { grid, arrays, .. } = gemm_simple::job(elem, size);
    let args = vec![
        Job::tensor(&arrays, 0),
        Job::tensor(&arrays, 1),
        JobArg::U32(size.k),
        JobArg::Pointer(2),
        JobArg::U32(size.m),
        JobArg::U32(size.n),
    ];
    Job { kernel: kernel(elem), grid, arrays, args }
}
