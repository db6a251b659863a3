//! dK and dV: a CTA has a tile of keys and walks over the blocks of rows that see them, of one query head after the
//! other that shares its head of K and V.

mod columns;
mod consumer;
mod divided;
mod halves;
mod in_order;
mod interval_columns;
mod share;
mod writer;

use fa3_ir::lang::*;
use fa3_sched::backward::{Division, DkvTile};

use self::columns::Columns;
use self::in_order::InOrder;
use self::interval_columns::IntervalColumns;
use super::PartSpec;
use super::gradients::{Scores, registers, registers_tile, visible, write_tile};
use super::join;
use super::params::{DkvParams, SumsParams, stats_tile};
use super::sums::Block;
use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::intervals::{FINDER, TilesUnderIntervals};
use crate::kernels::parts::kv_blocks::{KvBlock, KvBlocks};
use crate::kernels::parts::loader::{Feed, Keys};
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::ping_pong::PingPong;
use crate::kernels::parts::scores::Visible;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::works::Works;

/// The state that the roles share.
struct Dkv<'k> {
    builder: &'k Builder,
    spec: PartSpec<DkvTile>,
    params: DkvParams<InKernel<'k>>,
    k: Feed<'k>,
    v: Feed<'k>,
    /// Blocks of Q, of two numbers a row, and of dO.
    rows: Ring<'k, 3>,
    works: Works<'k>,
}

/// Where dQ goes, if it is added up.
struct Adding<'k> {
    /// dSᵀ of a block and of the one before.
    ds: Ring<'k, 1>,
    /// Places for dQ of a block, or of half of one. Each consumer has a stage, which a writer of its own lends it.
    dq: Ring<'k, 1>,
    /// The order, if there is one.
    in_order: Option<InOrder<'k>>,
    /// Keeps the exponentials of one consumer under the products of the other.
    ping_pong: PingPong<'k>,
    sums: SumsParams<InKernel<'k>>,
}

/// The kernel.
pub(super) fn kernel(spec: &PartSpec<DkvTile>) -> Kernel {
    let tile = &spec.tile;
    Kernel::build("bwd_dkv", Launch::threads(tile.threads()), |b| {
        let mut params = DkvParams::<Form>::form(spec).pass(&mut Declare(b));
        let lookup = params.inputs.lookup;
        let adding = params.sums.take().map(|sums| Adding::declare(b, spec, &lookup, sums));
        let (warps, inputs) = (4 * tile.consumers(), &params.inputs);
        let of_one = match tile.division {
            Division::Keys => warps,
            Division::Gradients => 4,
        };
        let [q, dout] = [inputs.q.shape(), inputs.dout.shape()];
        let rows = [("q", q), ("stats", stats_tile(tile.tile_m)), ("dout", dout)];
        let walkers = warps + writer::warps(tile);
        let of_keys = params.tiles.map(TilesUnderIntervals::Keys);
        let works = match inputs.lookup.under_intervals(of_keys, inputs.ticket, [tile.tile_n, tile.tile_m]) {
            Some(tiles) => Works::declare_found(b, tiles, walkers),
            None => Works::declare(b, spec.scheduler, &inputs.lookup, inputs.ticket, walkers),
        };
        let dkv = Dkv {
            builder: b,
            spec: *spec,
            // A3:4
            k: Feed::declare(b, "k", inputs.k, tile.kv_stages, of_one),
            v: Feed::declare(b, "v", inputs.v, tile.kv_stages, of_one),
            rows: b.ring("rows", tile.stages, warps, rows),
            works: if tile.adds_in_order() { works.in_order() } else { works },
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
        b.role(Role::new("producer", 0..4).registers(producer), || {
            match spec.mask.intervals() {
                None => dkv.load(), // A3:5-6
                Some(_) => {
                    let warp = (b.tid() >> 5).shfl_idx(0);
                    b.if_uniform(warp.eq(0), || dkv.load_in_warp());
                    b.if_uniform(warp.eq(FINDER), || dkv.works.find());
                }
            }
            if let Some(adding) = &adding {
                writer::run(&dkv, adding);
            }
        });
        let consumer = || Role::new("consumer", 4..4 + warps).registers(registers);
        match (&hand_over, &adding) {
            (None, Some(adding)) if tile.adds_halves() => b.role(consumer(), || halves::run(&dkv, adding)),
            (None, adding) => b.role(consumer(), || consumer::run(&dkv, adding.as_ref())),
            (Some(hand_over), _) => {
                b.role(Role::new("dv", 4..8).registers(registers), || divided::run_dv(&dkv, hand_over));
                b.role(Role::new("dk", 8..12).registers(registers), || divided::run_dk(&dkv, hand_over));
            }
        }
    })
}

impl<'k> Adding<'k> {
    #[track_caller]
    fn declare(
        b: &'k Builder,
        spec: &PartSpec<DkvTile>,
        lookup: &Lookup<InKernel<'k>>,
        mut sums: SumsParams<InKernel<'k>>,
    ) -> Adding<'k> {
        let tile = &spec.tile;
        let warps = 4 * tile.consumers();
        let shape = TileShape::new(spec.elem, tile.tile_n, tile.tile_m);
        let readers = if tile.adds_halves() { warps } else { 4 };
        Adding {
            ds: b.stored_ring("ds", 2, [warps, readers], [("ds", shape)]),
            dq: b.stored_ring("dq", tile.consumers(), [1, 4], [("dq", registers_tile(tile.head_dim))]),
            in_order: sums.in_order.take().map(|order| InOrder::declare(b, tile, lookup, order)),
            ping_pong: PingPong::declare(b, tile.consumers()),
            sums,
        }
    }
}

impl<'k> Dkv<'k> {
    /// The producer, one thread.
    fn load(&self) {
        let b = self.builder;
        let params = &self.params;
        b.once_per_role(|| {
            let (mut k, mut v) = (self.k.loader(), self.v.loader());
            let mut slots = self.rows.producer();
            self.works.begin().produce(|work, again, fetch_next| {
                let Work { head: kv_head, row: key, .. } = work;
                b.if_uniform(self.visits(&work), || {
                    let [of_k, of_v] = params.inputs.keys(&work, TilesOf::Keys);
                    k.load(kv_head, key, of_k); // A3:7-8
                    v.load(kv_head, key, of_v); // A3:7-8
                    self.for_each_row(&work, |head, row| {
                        // A3:9
                        let mut slot = slots.acquire(); // A3:10
                        let work = again();
                        let [of_q, of_dout] = params.inputs.rows(&work, TilesOf::Keys);
                        of_q.load(&mut slot, 0, &params.inputs.q, [head, row]); // A3:11
                        let [batch, head, place] = self.place(&work, head, row);
                        slot.load(1, &params.stats, (0, place >> 1, head, batch)); // A3:20
                        of_dout.load(&mut slot, 2, &params.inputs.dout, [head, row]); // A3:11
                        slot.commit(); // A3:12
                    });
                });
                fetch_next();
            });
        });
    }

    /// The producer under a mask of intervals, a warp. Another one finds the blocks of rows that see a tile's keys.
    fn load_in_warp(&self) {
        let (b, params) = (self.builder, &self.params);
        let (mut k, mut v) = (self.k.loader(), self.v.loader());
        let mut slots = self.rows.producer();
        self.works.begin().produce(|work, _, fetch_next| {
            let Work { head: kv_head, row: key, batch, .. } = work;
            b.if_uniform(self.visits(&work), || {
                let of = Keys::Of(batch.into());
                k.load_in_warp(kv_head, key, &of); // A3:7-8
                v.load_in_warp(kv_head, key, &of); // A3:7-8
                self.for_each_row(&work, |head, row| {
                    // A3:9
                    slots.fill_by_warp(|mut slot| {
                        slot.load(0, &params.inputs.q, (0, head, row, batch)); // A3:11
                        slot.load(1, &params.stats, (0, row >> 1, head, batch)); // A3:20
                        slot.load(2, &params.inputs.dout, (0, head, row, batch)); // A3:11
                        slot.commit(); // A3:12
                    });
                });
            });
            fetch_next();
        });
    }

    /// The sequence, head and row of arrays with places for rows of Q: of a table they are all of one sequence.
    #[track_caller]
    fn place(&self, work: &Work<V<'k, B32>>, head: V<'k, B32>, row: V<'k, B32>) -> [V<'k, B32>; 3] {
        match work.listed.and_then(|listed| listed.place) {
            None => [work.batch, head, row],
            Some(place) => [self.builder.value(0), head, place + row],
        }
    }

    /// The number of a row of Q in memory: in a packed tensor, or in the sequence of a dense one.
    #[track_caller]
    fn row_in_memory(&self, work: &Work<V<'k, B32>>, row: V<'k, B32>) -> V<'k, B32> {
        work.listed.map_or(row, |listed| listed.k_row + row)
    }

    /// Runs `body` for every head of Q that shares a tile's keys, and every block of its rows that sees some.
    #[track_caller]
    fn for_each_block(&self, work: &Work<V<'k, B32>>, mut body: impl FnMut(V<'k, B32>, KvBlock<'k>)) {
        let b = self.builder;
        let tile = &self.spec.tile;
        let mut kv = work.kv;
        if tile.adds_dq.is_some() {
            // All blocks of a tile that reaches beyond the keys are masked.
            let whole = (work.row + tile.tile_n).le(work.lens.q);
            kv.unmasked_first = whole.select(kv.unmasked_first, kv.first);
            kv.unmasked_end = whole.select(kv.unmasked_end, kv.first);
        }
        let blocks = KvBlocks::of(b, kv, tile.tile_m, self.spec.mask);
        self.for_each_head(work, |head| blocks.for_each_upwards(|block| body(head, block)));
    }

    /// The same with the block's first row alone.
    #[track_caller]
    fn for_each_row(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>, V<'k, B32>)) {
        let (b, rows) = (self.builder, self.spec.tile.tile_m);
        let (first, end) = (work.kv.first * rows, work.kv.end * rows);
        self.for_each_head(work, |head| b.for_each((first, end), rows, |row| body(head, row)));
    }

    /// Runs `body` for every head of Q that shares a tile's keys.
    #[track_caller]
    fn for_each_head(&self, work: &Work<V<'k, B32>>, body: impl FnOnce(V<'k, B32>)) {
        let head = work.head * self.params.group;
        self.builder.for_each((head, head + self.params.group), 1, body);
    }

    /// Whether tiles that see none may come after others: those of keys before what the first row sees, or of a
    /// sequence without rows.
    fn has_idle_tiles(&self) -> bool {
        let (_, last) = self.spec.mask.reach();
        let has_intervals = self.spec.mask.intervals().is_some();
        has_intervals || last.is_some() || self.spec.sequences == SequenceForm::Listed
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

    /// Rows of the block that see the thread's two keys; `None` if all do. If dQ is added, no row sees a key beyond the
    /// end: its dS is multiplied by a row of K, zeros, and would have to be finite.
    #[track_caller]
    fn hidden(
        &self,
        work: &Work<V<'k, B32>>,
        head: V<'k, B32>,
        key: V<'k, B32>,
        block: &KvBlock<'k>,
    ) -> Option<Hidden<'k>> {
        let (inputs, mask) = (&self.params.inputs, self.spec.mask);
        if let Some(rows) = inputs.intervals {
            let (b, of_head) = (self.builder, rows.of_head(work.batch, head));
            let columns = || IntervalColumns::new(b, rows, of_head, work.lens.transposed(), [key, block.key]);
            return block.masked.then(|| Hidden::Columns(columns()));
        }
        let seen = block.masked.then(|| visible(self.builder, inputs, work, mask, [key, block.key]))?;
        if self.spec.tile.adds_dq.is_none() {
            return Some(Hidden::Rows(seen));
        }
        let [upper, lower] = seen;
        Some(Hidden::Rows([(upper, Half::Upper), (lower, Half::Lower)].map(|(seen, half)| {
            let inside = (key + half.rows()).lt(work.lens.q);
            Visible { end: inside.select(seen.end, 0), ..seen }
        })))
    }

    /// Makes Pᵀ of the products of a block, in their registers, if scores are not capped.
    #[track_caller]
    fn begin_p(&self, s: &mut Frag<'k>, shifts: &Columns<'k>, hidden: Option<&Hidden<'k>>) {
        let scores = self.scores();
        if scores.into_cap.is_none() {
            s.map_in_place(|product, at| {
                let [p, _] = scores.p(product, shifts.of(at));
                hide(hidden, at, p)
            });
        }
    }

    /// Pᵀ of what [`Dkv::begin_p`] made, and dSᵀ of that and dPᵀ, rounded, as operands.
    #[track_caller]
    fn end_p(
        &self,
        s: &Frag<'k>,
        dp: &mut Frag<'k>,
        [shifts, minus_delta]: [&Columns<'k>; 2],
        hidden: Option<&Hidden<'k>>,
    ) -> [AFrag<'k>; 2] {
        let (scores, ty) = (self.scores(), self.spec.product_type());
        let Some(into_cap) = scores.into_cap else {
            dp.map_in_place(|dp, at| dp + minus_delta.of(at)); // A3:25
            // In this order dSᵀ takes the registers of dPᵀ, and Pᵀ those of Sᵀ.
            let ds = self.ds(dp, &registers(s));
            return [s.to_a(ty), ds];
        };
        // Element by element, otherwise ptxas spills: capped scores, their P and dP do not fit into the registers.
        let dp = registers(dp);
        s.map_to_two_a(ty, |product, at| {
            let [p, slope] = scores.capped_p(product, into_cap, shifts.of(at));
            let p = hide(hidden, at, p);
            let slope_of_delta = minus_delta.of(at) * slope;
            [p, p * dp[at.index()].fma(slope, slope_of_delta)]
        })
    }

    /// Pᵀ of the products of a block, rounded, as an operand. What dPᵀ - D is multiplied by stays in `s`.
    #[track_caller]
    fn p(&self, s: &mut Frag<'k>, shifts: &Columns<'k>, hidden: Option<&Hidden<'k>>) -> AFrag<'k> {
        let scores = self.scores();
        s.split_to_a(self.spec.product_type(), |product, at| {
            let [p, weight] = scores.p(product, shifts.of(at));
            match scores.into_cap {
                None => [hide(hidden, at, p); 2],
                Some(_) => [p, weight].map(|x| hide(hidden, at, x)),
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
        let params = &self.params;
        let parts = params.parts.as_ref().map(|parts| parts.dk);
        let to = (&params.dk, self.spec.head_dim);
        self.write(dk, Some(params.inputs.softmax_scale), work, key, parts, to);
    }

    /// Writes a tile's dV.
    #[track_caller]
    fn write_dv(&self, dv: Frag<'k>, work: &Work<V<'k, B32>>, key: V<'k, B32>) {
        let params = &self.params;
        let parts = params.parts.as_ref().map(|parts| parts.dv);
        self.write(dv, None, work, key, parts, (&params.dv, self.spec.head_dim_v));
    }

    /// Writes a gradient of a tile, times `factor`, to a tensor of so many columns; that of a part of a tile as it is
    /// to where those of parts are.
    #[track_caller]
    fn write(
        &self,
        gradient: Frag<'k>,
        factor: Option<V<'k, F32>>,
        work: &Work<V<'k, B32>>,
        key: V<'k, B32>,
        parts: Option<V<'k, B64>>,
        (to, cols): (&Strided<InKernel<'k>>, u32),
    ) {
        let (b, tile_n) = (self.builder, self.spec.tile.tile_n);
        let (rows, format) = ((key, tile_n), (self.spec.elem, cols));
        let Some((out, parts)) = work.out.zip(parts) else {
            return write_tile(gradient, factor, to, work, rows, format);
        };
        b.if_uniform(out.is_split(), || {
            let block = out.split().mad(tile_n / join::KEYS, (key - work.row) >> join::KEYS.ilog2());
            Block::at(b, parts, block, gradient.cols()).store(&gradient);
        });
        b.if_uniform(out.is_tensor(), || write_tile(gradient, factor, to, work, rows, format));
    }
}

/// Which rows of Q see a key.
enum Hidden<'k> {
    /// Rows that the thread's two keys say, which are rows of Sᵀ.
    Rows([Visible<'k>; 2]),
    /// Rows whose intervals have it, which are columns of Sᵀ.
    Columns(IntervalColumns<'k>),
}

/// Zero in place of what a row of Q does not see.
#[track_caller]
fn hide<'k>(hidden: Option<&Hidden<'k>>, at: At, x: V<'k, F32>) -> V<'k, F32> {
    match hidden {
        None => x,
        Some(Hidden::Rows(visible)) => visible[at.half as usize].hide(x, at.col, 0.0),
        Some(Hidden::Columns(columns)) => columns.hide(x, at),
    }
}
