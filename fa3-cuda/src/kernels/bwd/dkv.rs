//! dK and dV: a CTA has a tile of keys and walks over the blocks of rows that see them, of one query head after the
//! other that shares its head of K and V.

mod consumer;
mod divided;

use fa3_ir::lang::*;
use fa3_sched::backward::{Division, DkvTile};

use super::PartSpec;
use super::gradients::{Scores, registers_tile, visible, write};
use super::params::{DkvParams, stats_tile};
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};
use crate::kernels::parts::loader::Feed;
use crate::kernels::parts::scores::Visible;
use crate::kernels::parts::tiles::Tiles;

/// What the roles share.
struct Dkv<'k> {
    builder: &'k Builder,
    spec: PartSpec<DkvTile>,
    params: DkvParams<InKernel<'k>>,
    k: Feed<'k>,
    v: Feed<'k>,
    /// Blocks of Q, and of two numbers a row.
    q: Ring<'k, 2>,
    dout: Feed<'k>,
    /// If dQ is added up: dSᵀ of a block, a stage for each consumer, which take turns with the blocks; and what their
    /// dQ goes through.
    ds: Option<(Ring<'k, 1>, Outboxes<'k>)>,
    tiles: Tiles<'k>,
}

/// The two numbers that rows of Q have.
#[derive(Clone, Copy)]
enum Stat {
    /// -LSE in base 2.
    Shift = 0,
    /// -D.
    MinusDelta = 2,
}

/// Of each of the thread's columns, by 8.
struct Columns<'k>(Vec<[V<'k, F32>; 2]>);

/// The kernel.
pub(super) fn kernel(spec: &PartSpec<DkvTile>) -> Kernel {
    let tile = &spec.tile;
    Kernel::build("bwd_dkv", Launch::threads(tile.threads()), |b| {
        let params = DkvParams::<Form>::form(spec).pass(&mut Declare(b));
        let (warps, inputs) = (4 * tile.consumers(), &params.inputs);
        let of_one = match tile.division {
            Division::Keys => warps,
            Division::Gradients => 4,
        };
        let q = [("q", inputs.q.shape()), ("stats", stats_tile(tile.tile_m))];
        let dkv = Dkv {
            builder: b,
            spec: *spec,
            // A3:4
            k: Feed::declare(b, "k", inputs.k, 1, of_one),
            v: Feed::declare(b, "v", inputs.v, 1, of_one),
            q: b.ring("q", tile.stages, warps, q),
            dout: Feed::declare(b, "dout", inputs.dout, tile.stages, warps),
            ds: tile.adds_dq.then(|| {
                let shape = TileShape::new(spec.elem, tile.tile_n, tile.tile_m);
                let ring = b.stored_ring("ds", tile.consumers(), [warps, 4], [("ds", shape)]);
                (ring, b.outboxes("dq", registers_tile(tile.head_dim), tile.consumers()))
            }),
            tiles: Tiles::declare(b, spec.scheduler, inputs.geometry.tiles, inputs.ticket, warps),
            params,
        };
        let hand_over = match tile.division {
            Division::Keys => None,
            Division::Gradients => Some(divided::HandOver::declare(b, tile)),
        };
        b.init_mbarriers();
        b.launch_dependents();
        b.grid_dependency_wait();
        let [producer, registers] = tile.registers();
        b.role(Role::new("producer", 0..4).registers(producer), || dkv.load()); // A3:5-6
        match &hand_over {
            None => {
                let role = Role::new("consumer", 4..4 + warps).registers(registers);
                b.role(role, || consumer::run(&dkv));
            }
            Some(hand_over) => {
                b.role(Role::new("dv", 4..8).registers(registers), || divided::run_dv(&dkv, hand_over));
                b.role(Role::new("dk", 8..12).registers(registers), || divided::run_dk(&dkv, hand_over));
            }
        }
    })
}

impl<'k> Dkv<'k> {
    /// The producer, one thread.
    fn load(&self) {
        let b = self.builder;
        let params = &self.params;
        b.once_per_role(|| {
            let (mut k, mut v) = (self.k.loader(), self.v.loader());
            let (mut q, mut dout) = (self.q.producer(), self.dout.loader());
            let rows = self.spec.tile.tile_m;
            self.tiles.produce(|tile, fetch_next| {
                let Work { batch, head: kv_head, row: key, kv, .. } = params.inputs.geometry.work(tile);
                b.if_uniform(kv.first.lt(kv.end), || {
                    k.load(kv_head, key, batch); // A3:7-8
                    v.load(kv_head, key, batch); // A3:7-8
                    let (first, last) = (kv.first * rows, kv.end * rows - rows);
                    let head = kv_head * params.group;
                    b.for_each((head, head + params.group), 1, |head| {
                        b.for_each((0, last - first + 1), rows, |loaded| {
                            // A3:9
                            let row = last - loaded;
                            let mut slot = q.acquire(); // A3:10
                            slot.load(0, &params.inputs.q, (0, head, row, batch)); // A3:11
                            slot.load(1, &params.stats, (0, row >> 1, head, batch)); // A3:20
                            slot.commit(); // A3:12
                            dout.load(head, row, batch); // A3:10-12
                        });
                    });
                });
                fetch_next();
            });
        });
    }

    /// Runs `body` for every head of Q that shares a tile's keys, and every block of its rows that sees some.
    #[track_caller]
    fn for_each_block(&self, work: &Work<V<'k, B32>>, mut body: impl FnMut(V<'k, B32>, KvBlock<'k>)) {
        let b = self.builder;
        let blocks = KvBlocks::of(b, work.kv, self.spec.tile.tile_m, self.spec.mask);
        let head = work.head * self.params.group;
        b.for_each((head, head + self.params.group), 1, |head| blocks.for_each(0, |block| body(head, block)));
    }

    /// Whether a tile sees any.
    #[track_caller]
    fn visits(&self, work: &Work<V<'k, B32>>) -> V<'k, Pred> {
        work.kv.first.lt(work.kv.end)
    }

    fn scores(&self) -> Scores<'k> {
        let inputs = &self.params.inputs;
        Scores { scale_log2: inputs.scale_log2, into_cap: inputs.into_cap }
    }

    /// Pᵀ of the products of a block, rounded, as an operand. What dPᵀ - D is multiplied by stays in `s`.
    #[track_caller]
    fn p(&self, s: &mut Frag<'k>, shifts: &Columns<'k>, key: V<'k, B32>, block: &KvBlock<'k>) -> AFrag<'k> {
        let (scores, spec) = (self.scores(), &self.spec);
        let geometry = &self.params.inputs.geometry;
        let hidden: Option<[Visible<'k>; 2]> =
            block.masked.then(|| visible(self.builder, geometry, spec.mask, key, block.key));
        s.split_to_a(spec.product_type(), |product, at| {
            let [p, weight] = scores.p(product, shifts.of(at));
            let hide =
                |x| hidden.as_ref().map_or(x, |visible| visible[at.half as usize].hide(x, at.col, 0.0));
            match scores.into_cap {
                None => [hide(p); 2],
                Some(_) => [hide(p), hide(weight)],
            }
        })
    }

    /// dSᵀ of a block's dPᵀ - D, rounded, as an operand.
    #[track_caller]
    fn ds(&self, dp: &Frag<'k>, weights: &[V<'k, F32>]) -> AFrag<'k> {
        dp.map_to_a(self.spec.product_type(), |dp, at| dp * weights[at.index()])
    }

    /// Writes a tile's dK.
    #[track_caller]
    fn write_dk(&self, dk: Frag<'k>, work: &Work<V<'k, B32>>, key: V<'k, B32>) {
        let (inputs, spec) = (&self.params.inputs, &self.spec);
        let to = [work.batch, work.head, key];
        let scale = Some(inputs.softmax_scale);
        write(dk, scale, &self.params.dk, to, inputs.geometry.lens.q, (spec.elem, spec.head_dim));
    }

    /// Writes a tile's dV.
    #[track_caller]
    fn write_dv(&self, dv: Frag<'k>, work: &Work<V<'k, B32>>, key: V<'k, B32>) {
        let (inputs, spec) = (&self.params.inputs, &self.spec);
        let to = [work.batch, work.head, key];
        write(dv, None, &self.params.dv, to, inputs.geometry.lens.q, (spec.elem, spec.head_dim_v));
    }
}

impl<'k> Columns<'k> {
    /// One of the numbers of a block's rows, whose statistics are in `stats`.
    #[track_caller]
    fn load(b: &'k Builder, stats: Tile<'_, 'k>, which: Stat) -> Columns<'k> {
        let first = stats.element(b.tid() & 3, which as u32);
        // Four pairs of rows, 64 bytes, are eight columns.
        let groups =
            (0..stats.shape().rows / 4).map(|group| b.load_vector::<F32, 2>(first.at(64 * group as i32)));
        Columns(groups.collect())
    }

    /// A fragment that has it in every row: a product is added to it.
    #[track_caller]
    fn frag(&self, b: &'k Builder) -> Frag<'k> {
        let mut frag = Frag::zeros(b, 8 * self.0.len() as u32);
        frag.map(|_, at| self.of(at));
        frag
    }

    /// That of an element's column.
    fn of(&self, at: At) -> V<'k, F32> {
        self.0[at.col as usize / 8][at.col as usize % 2]
    }
}
