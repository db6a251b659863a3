//! C = A · Bᵀ by specialised warps: a producer loads, two consumers multiply, and every CTA walks over many tiles.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};

use super::GemmSize;
use super::tiles::TileOrder;
use crate::kernels::Spec;

/// Number of rows of a CTA's tile. Each consumer has half of them.
pub(super) const BLOCK_M: u32 = 128;
pub(super) const CONSUMERS: u32 = 2;
/// Number of columns that are stored through a staging buffer at once.
const OUT_COLS: u32 = 128;

/// Indices of the tiles of a stage.
pub(super) const A: usize = 0;
pub(super) const B: usize = 1;

/// The configuration of a warp-specialised GEMM.
#[derive(Clone, Copy)]
pub(super) struct Config {
    /// The element type of A and B, and that of C.
    pub(super) elems: [Elem; 2],
    /// Number of columns of a CTA's tile.
    pub(super) block_n: u32,
    /// Number of stages of the pipeline.
    pub(super) stages: u32,
    /// Number of CTAs of a cluster. They compute the same columns of C, and each loads a part of B's tile.
    pub(super) cluster: u32,
}

/// State that the roles of a kernel share.
pub(super) struct Gemm<'k> {
    pub(super) builder: &'k Builder,
    pub(super) config: Config,
    pub(super) a: TileMap,
    pub(super) b: TileMap,
    c: TileMap,
    pub(super) order: TileOrder<U32<'k>>,
    pub(super) k: U32<'k>,
    pub(super) block_k: u32,
    pub(super) pipeline: Pipeline<'k, 2>,
    staging_buffers: StagingBuffers<'k>,
}

fn config(elem: Elem) -> Config {
    Config { elems: [elem; 2], block_n: 256, stages: 4, cluster: 1 }
}

/// The kernel for 16-bit elements.
pub fn kernel(elem: Elem) -> Kernel {
    config(elem).kernel("gemm", producer, |gemm| consumer(gemm, pipelined))
}

pub(super) fn producer(gemm: &Gemm<'_>) {
    let b = gemm.builder;
    b.once_per_role(|| {
        let mut pipeline = gemm.pipeline.producer();
        gemm.order.for_each(b, |row, col| {
            let (row, col) = (row * BLOCK_M, col * gemm.config.block_n);
            b.for_each((0, gemm.k), gemm.block_k, |k| {
                let mut stage = pipeline.acquire();
                stage.load(A, &gemm.a, (k, row));
                stage.load(B, &gemm.b, (k, col));
                stage.commit();
            });
        });
    });
}

/// Runs a consumer; `product` gives the accumulators of a tile.
pub(super) fn consumer<'k>(
    gemm: &Gemm<'k>,
    product: impl FnOnce(&Gemm<'k>, &mut Consumer<'k, 2>, U32<'k>) -> Frag<'k>,
) {
    let b = gemm.builder;
    let me = b.warpgroup();
    let mut pipeline = gemm.pipeline.consumer();
    let staging_buffer = gemm.staging_buffers.of(me);
    gemm.order.for_each(b, |row, col| {
        let acc = product(gemm, &mut pipeline, me);
        let (row, col) = (row * BLOCK_M, col * gemm.config.block_n);
        let row = me.mad(64, row);
        for first in (0..gemm.config.block_n).step_by(OUT_COLS as usize) {
            let staged = staging_buffer.acquire();
            acc.store_cols(first, staged.tile());
            staged.store(&gemm.c, (col + first, row));
        }
    });
    staging_buffer.drain();
}

/// The sum of products over all stages of a tile. Each product is issued before the one before is complete.
pub(super) fn pipelined<'k>(gemm: &Gemm<'k>, pipeline: &mut Consumer<'k, 2>, me: U32<'k>) -> Frag<'k> {
    let b = gemm.builder;
    let mut products = Chain::new(b, gemm.config.block_n);
    let stage = pipeline.wait();
    multiply(&mut products, &stage, me);
    let mut held = stage.hold();
    b.for_each((gemm.block_k, gemm.k), gemm.block_k, |_| {
        let stage = pipeline.wait();
        multiply(&mut products, &stage, me); // in flight
        products.wait_older();
        held.replace(stage); // what the product before has read
    });
    let acc = products.wait();
    held.release();
    acc
}

/// Adds the product of this consumer's rows of A with B.
fn multiply<'k>(products: &mut Chain<'k>, stage: &FullStage<'k, 2>, me: U32<'k>) {
    let [a_tile, b_tile] = stage.tiles();
    products.gemm(a_tile.row_block(me, 64), b_tile.t());
}

impl<'k> Gemm<'k> {
    /// Declares parameters and pipelines, and builds the prologue.
    fn declare(b: &'k Builder, config: Config) -> Gemm<'k> {
        let Config { elems: [elem, out_elem], block_n, stages, cluster } = config;
        let block_k = 128 / elem.bytes();
        let shape = |rows| TileShape::new(elem, rows, block_k);
        let out = TileShape::new(out_elem, 64, OUT_COLS);
        let (a_shape, b_shape, b_part) = (shape(BLOCK_M), shape(block_n), shape(block_n / cluster));
        let gemm = Gemm {
            builder: b,
            config,
            a: b.tile_map("a", a_shape),
            b: b.tile_map("b", b_part),
            c: b.tile_map("c", out),
            order: TileOrder::declare(b),
            k: b.param_u32("k"),
            block_k,
            pipeline: b.cluster_pipeline("ab", stages, 4 * CONSUMERS, [("a", a_shape), ("b", b_shape)]),
            staging_buffers: b.staging_buffers("out", out, CONSUMERS),
        };
        b.init_mbarriers();
        gemm
    }
}

impl Config {
    /// Builds the kernel with this configuration and the given roles.
    pub(super) fn kernel(
        self,
        name: &str,
        producer: impl FnOnce(&Gemm<'_>),
        consumer: impl FnOnce(&Gemm<'_>),
    ) -> Kernel {
        let launch = Launch::threads(128 * (1 + CONSUMERS)).cluster(self.cluster);
        Kernel::build(name, launch, |b| {
            let gemm = Gemm::declare(b, self);
            b.role(Role::new("producer", 0..4).registers(40), || producer(&gemm));
            b.role(Role::new("consumer", 4..12).registers(232), || consumer(&gemm));
        })
    }

    /// The program of a product of size `size`, on a grid of `ctas` CTAs of the kernel `spec`.
    pub(super) fn program(self, spec: super::Spec, size: GemmSize, ctas: u32) -> Program<Spec> {
        let (GemmSize { m, n, k }, Config { elems: [elem, out_elem], block_n, cluster, .. }) = (size, self);
        let mut program = Program::new();
        let a = program.buffer("a", elem, &[m, k], BufferRole::Input);
        let b = program.buffer("b", elem, &[n, k], BufferRole::Input);
        let c = program.buffer("c", out_elem, &[m, n], BufferRole::Output);
        let order = TileOrder::new(m.div_ceil(cluster * BLOCK_M), n.div_ceil(block_n));
        let tensors = [("a", a), ("b", b), ("c", c)];
        let tensors = tensors.map(|(name, buffer)| (name.to_owned(), program.tensor(buffer)));
        let args = tensors.into_iter().chain(order.args()).chain([("k".to_owned(), Passed::U32(k))]);
        let clusters = (ctas / cluster).clamp(1, order.tiles().max(1));
        program.step(spec.into(), [clusters * cluster, 1, 1], args);
        program
    }
}

/// The program of a product of size `size` on a grid of `ctas` CTAs; `n` and `k` must be multiples of 8.
pub fn program(elem: Elem, size: GemmSize, ctas: u32) -> Program<Spec> {
    config(elem).program(super::Spec::Gemm(elem), size, ctas)
}
