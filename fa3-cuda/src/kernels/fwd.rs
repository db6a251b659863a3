//! The forward pass: a producer warpgroup loads; one to three consumer warpgroups compute 64 rows each, or load too.
//! Where O has more columns than the registers of one hold, two have the same rows, and a half of the columns each.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! [`FwdSpec`] builds the kernel, and [`program`] lowers a plan to its launches.
//! The roles are in `producer.rs` and `consumer.rs`, which cite the lines of the paper's Algorithms 1, 2 and 4 (arXiv
//! 2407.08608) that they are.

// What a launch is.
mod merge;
mod params;
mod program;
mod spec;

// The roles.
mod chains;
mod channels;
mod consumer;
mod converted;
mod descales;
mod epilogue;
mod latent;
mod ones;
mod p_type;
mod producer;
mod row_softmax;
mod transpose;
mod wide;
mod zeros;

// The consumer's main loops.
mod algorithm1;
mod algorithm2;
mod algorithm4;
mod self_loading;
mod two_levels;

pub use super::parts::lookup::SequenceForm;
pub use super::parts::shares::ShareForm;
pub use merge::MergeSpec;
pub use program::{buffers, program};
pub use spec::FwdSpec;

use fa3_ir::lang::*;
use fa3_sched::forward::ROW_SUM_COLS;
use fa3_sched::{FastDiv, Lens};
use fa3_types::softcap;

use super::KernelSpec;
use super::params::{Declare, Form, InKernel};
use super::parts::gather::Gather;
use super::parts::geometry::Work;
use super::parts::intervals::TilesUnderIntervals;
use super::parts::loader::{Feed, Sequence};
use super::parts::pages::PageSpan;
use super::parts::ping_pong::PingPong;
use super::parts::rows_view::RowSpan;
use super::parts::scores::{Scores, Visible};
use super::parts::store_rows::Columns;
use super::parts::walk::Walk;
use super::parts::works::Works;
use converted::Converted;
use p_type::PType;
use params::Params;
use transpose::Transposed;
use wide::HandOver;

/// State that the roles of a kernel share.
struct Fwd<'k> {
    builder: &'k Builder,
    spec: FwdSpec,
    params: Params<InKernel<'k>>,
    works: Works<'k>,
    q: Feed<'k>,
    /// The part of the queries that is multiplied by V, if there is one.
    qv: Option<Feed<'k>>,
    k: Feed<'k>,
    /// The last columns of K, if two warpgroups share O's and K is no small part of the keys: `k` are the others.
    k_second: Option<Feed<'k>>,
    v: Feed<'k>,
    /// The second half of V's columns, if two warpgroups share O's: `v` is the first one. With `qv` it has two parts
    /// if it has several panels, of which the first one is free while the other is multiplied.
    v_second: Vec<Feed<'k>>,
    /// V of e4m3, if it is to be transposed.
    transposed: Option<Transposed<'k>>,
    /// K and V, and perhaps Q, in the type of products, if they are to be converted.
    converted: Option<Converted<'k>>,
    p: PType,
    ping_pong: Option<PingPong<'k>>,
    /// The way of P from a warpgroup to another, if that has the same rows.
    hand_over: Option<HandOver<'k>>,
}

/// Both halves of a tile's columns from column `col` on, of whole panels; one if that is a panel.
fn halves((col, shape): (u32, TileShape)) -> impl Iterator<Item = (u32, TileShape)> {
    let first = shape.panels().div_ceil(2) * shape.panel_cols();
    let parts = [(col, first), (col + first, shape.cols - first)].into_iter();
    parts.filter(|(_, cols)| *cols > 0).map(move |(col, cols)| (col, TileShape { cols, ..shape }))
}

/// A row of a tile that may have rows of several heads.
#[derive(Clone, Copy)]
struct TileRow<'k> {
    /// Its position in the sequence.
    position: V<'k, B32>,
    /// Its query head.
    head: V<'k, B32>,
    /// Whether it is one of those that are copied.
    is_inside: V<'k, Pred>,
}

impl KernelSpec for FwdSpec {
    /// Builds the kernel. The spec must come from [`FwdSpec::of`], or differ from such a one only in a tile that passes
    /// [`CtaTile::check`](fa3_sched::forward::CtaTile::check) and has a producer.
    fn kernel(&self) -> Kernel {
        kernel(self)
    }
}

fn kernel(spec: &FwdSpec) -> Kernel {
    let tile = &spec.tile;
    let launch = Launch::threads(tile.threads()).cluster(spec.cluster).per_sm(spec.per_sm);
    Kernel::build("fwd", launch, |b| {
        if spec.guards_all() {
            b.guard_all();
        }
        let fwd = Fwd::declare(b, spec);
        fwd.prefetch();
        fwd.store_constants();
        b.init_mbarriers();
        // CTAs of the next kernel may take their places as ours leave them, and begin when all of ours are done.
        b.launch_dependents();
        b.grid_dependency_wait();

        let (registers, all) = (tile.registers_of(spec.per_sm, spec.gathers()), tile.threads() / 32);
        if let Some(registers) = registers.producer {
            b.role(Role::new("producer", 0..4).registers(registers), || {
                producer::run(&fwd);
                fwd.leave_together();
            });
        }
        let consumers = all - 4 * tile.consumers..all;
        if let (Some(converted), Some(registers)) = (&fwd.converted, registers.converter) {
            b.role(Role::new("converter", 4..consumers.start).registers(registers), || {
                converted.run(&fwd);
                fwd.leave_together();
            });
        }
        let of_first = consumers.start..registers.second.map_or(consumers.end, |_| consumers.start + 4);
        let second = of_first.end..consumers.end;
        b.role(Role::new("consumer", of_first).registers(registers.consumer), || {
            consumer::run(&fwd);
            fwd.leave_together();
        });
        if let (Some(hand_over), Some(registers)) = (&fwd.hand_over, registers.second) {
            b.role(Role::new("second", second).registers(registers), || {
                wide::run_second(&fwd, hand_over);
                fwd.leave_together();
            });
        }
    })
}

impl<'k> Fwd<'k> {
    fn declare(b: &'k Builder, spec: &FwdSpec) -> Fwd<'k> {
        let tile = &spec.tile;
        let params = Params::<Form>::form(spec).pass(&mut Declare(b));
        let warps = 4 * tile.consumers;
        // Those that compute scores.
        let first = warps / tile.column_groups();
        let (loaders, transposers) = (spec.loaders(), spec.transposers());
        let transposed = (transposers > 0).then(|| Transposed::declare(b, tile, transposers));
        let converted = spec.converts().then(|| Converted::declare(b, spec));
        let of_k = if spec.converts() { converted::WARPS } else { first };
        let of_q = if spec.converts_q() { converted::WARPS } else { first };
        let of_v = if transposers > 0 { transposers } else { of_k };
        let of_works = warps + loaders + transposers + 4 * tile.converters();
        let hand_over = (tile.column_groups() > 1).then(|| HandOver::declare(b, spec));
        // The first of these columns, and how many there are.
        let keys = |name, map: Option<TileMap>, (col, shape): (u32, TileShape), consumers| {
            let feed = match (map.map(|map| map.of_columns(shape.cols)), spec.page_block) {
                (Some(map), None) => Feed::declare_shared(b, name, map, tile.stages, consumers),
                (Some(map), Some(_)) => Feed::declare_rows(b, name, map, tile.tile_n, tile.stages, consumers),
                (None, _) => Feed::declare_copied(b, name, shape, tile.stages, consumers),
            };
            feed.at_column(col)
        };
        let [of_k_cols, of_v_cols] =
            [tile.head_dim, tile.head_dim_v].map(|cols| TileShape::new(spec.key_elem(), tile.tile_n, cols));
        let first_of_k = match &hand_over {
            Some(_) if !tile.qv => of_k_cols.panels().div_ceil(2) * of_k_cols.panel_cols(),
            _ => tile.head_dim,
        };
        let [k_parts, v_parts] =
            [(of_k_cols, first_of_k), (of_v_cols, tile.columns())].map(|(all, first)| {
                let part = |col, cols| (col, TileShape { cols, ..all });
                (part(0, first), (first < all.cols).then(|| part(first, all.cols - first)))
            });
        let ty = match (spec.is_fp8(), spec.output) {
            (true, _) => WgmmaType::E4m3,
            (false, Elem::F16) => WgmmaType::F16,
            (false, _) => WgmmaType::Bf16,
        };
        Fwd {
            builder: b,
            spec: *spec,
            q: Feed::declare_rows(b, "q", params.q, tile.tile_m, 1, of_q),
            qv: params.qv.map(|map| Feed::declare_rows(b, "qv", map, tile.tile_m, 1, first)),
            k: keys("k", params.k, k_parts.0, of_k),
            k_second: k_parts.1.map(|part| keys("k_second", params.k, part, of_k)),
            v: match (params.v, spec.v_is_transposed()) {
                (Some(map), true) => Feed::declare_transposed(b, "v", map, ROW_SUM_COLS, tile.stages, of_v),
                (map, _) => keys("v", map, v_parts.0, of_v),
            },
            v_second: v_parts.1.map_or_else(Vec::new, |part| {
                // With `qv`, scores take them, too. Rows that are gathered cost instructions for each part.
                let readers = if tile.qv { warps } else { warps - first };
                let parts = if tile.qv && !spec.gathers() { halves(part).collect() } else { vec![part] };
                let named = parts.into_iter().zip(["v_second", "v_third"]);
                named.map(|(part, name)| keys(name, params.v, part, readers)).collect()
            }),
            transposed,
            converted,
            p: PType(ty),
            hand_over,
            ping_pong: tile.ping_pong.then(|| PingPong::declare(b, tile.consumers)),
            works: match params.walk {
                Walk::Tiles(lookup) => {
                    let sizes = [tile.tile_m, tile.tile_n];
                    let of = params.intervals.map(TilesUnderIntervals::Rows);
                    match lookup.under_intervals(of, params.ticket, sizes) {
                        Some(tiles) => Works::declare_found(b, tiles, of_works),
                        None => Works::declare(b, spec.scheduler, &lookup, params.ticket, of_works),
                    }
                }
                Walk::Shares(shares) => Works::declare_shares(b, shares, of_works),
            },
            params,
        }
    }

    /// Brings near what the first loads of a short call wait for, one after the other: tensor maps, lengths and pages.
    /// It reads nothing, so that it need not wait for the kernel before.
    #[track_caller]
    fn prefetch(&self) {
        let (b, Params { q, qv, k, v, walk, pages, .. }) = (self.builder, &self.params);
        let Walk::Shares(shares) = walk else { return };
        b.once_in_warp(0, || {
            let maps = [Some(*q), *qv, *k, *v].into_iter().flatten();
            maps.for_each(|map| b.prefetch_tensor_map(map.tensor_map()));
        });
        shares.prefetch(b);
        if let Some(pages) = pages {
            pages.prefetch(b);
        }
    }

    /// The other CTA of a cluster may still load into this one's shared memory, or arrive at its mbarriers.
    #[track_caller]
    fn leave_together(&self) {
        if self.spec.cluster > 1 {
            self.builder.cluster_sync();
        }
    }

    /// Stores what no load writes, before threads have roles: ones in slots of V that is transposed in memory, and
    /// zeros in rows of Q that have no position.
    #[track_caller]
    fn store_constants(&self) {
        let (b, tile) = (self.builder, &self.spec.tile);
        let rows = self.spec.q_rows();
        if rows < tile.tile_m {
            for feed in [Some(&self.q), self.qv.as_ref()].into_iter().flatten() {
                let [to] = feed.ring().tiles_of(0);
                zeros::store(b, to.rows(rows, tile.tile_m - rows), b.tid(), tile.threads());
            }
            b.fence(FenceInst::ProxyAsyncShared);
        }
        if self.spec.v_is_transposed() {
            for slot in 0..tile.stages {
                let [to] = self.v.ring().tiles_of(slot);
                ones::store(b, to, b.tid(), tile.threads());
            }
            b.fence(FenceInst::ProxyAsyncShared);
        }
    }

    /// The sequence of a work, as loads of Q, K and V find it.
    #[track_caller]
    fn sequences(&self, work: &Work<V<'k, B32>>) -> [Sequence<'k>; 3] {
        let (Some(listed), Some(apart)) = (work.listed, &self.params.apart) else {
            return [work.batch.into(); 3];
        };
        let rows = |apart: V<'k, B32>, row: V<'k, B32>, count: V<'k, B32>| {
            RowSpan::new(work.batch.mad(apart, row), count)
        };
        let Lens { q, k } = work.lens;
        let of_q = self.of_queries(rows(apart.q, listed.q_row, q));
        let keys = |apart| Sequence::Rows(rows(apart, listed.k_row, k));
        [of_q, keys(apart.k), keys(apart.v)]
    }

    /// These rows of Q or of `qv`.
    fn of_queries(&self, rows: RowSpan<'k>) -> Sequence<'k> {
        match self.spec.shares {
            None => Sequence::Rows(rows),
            Some(_) => Sequence::RowsOfHeads(rows, self.spec.pack),
        }
    }

    /// The sequence of a work, as loads of `qv` find it.
    #[track_caller]
    fn latent_sequence(&self, work: &Work<V<'k, B32>>) -> Sequence<'k> {
        let apart = self.params.apart.as_ref().and_then(|apart| apart.qv);
        let Some((listed, apart)) = work.listed.zip(apart) else { return work.batch.into() };
        self.of_queries(RowSpan::new(work.batch.mad(apart, listed.q_row), work.lens.q))
    }

    /// The pages of K (1) or of V (2) of a work, if they are in pages.
    #[track_caller]
    fn pages(&self, work: &Work<V<'k, B32>>, of: usize) -> Option<PageSpan<'k>> {
        let (pages, listed, apart) = (self.params.pages?, work.listed?, self.params.apart.as_ref()?);
        let apart = if of == 1 { apart.k } else { apart.v };
        Some(PageSpan::new(self.builder, pages, work.batch, apart, [listed.k_row, work.lens.k]))
    }

    /// The blocks of K (1) or of V (2) of a work that visits some, of which the last one is loaded first, if rows are
    /// loaded one by one. In a whole warp, which loads them.
    #[track_caller]
    fn gather(&self, work: &Work<V<'k, B32>>, of: usize) -> Option<Gather<'k>> {
        let (rows, span, tile) = (self.params.gathered.as_ref()?, self.pages(work, of)?, &self.spec.tile);
        let (rows, cols, used) = match of {
            1 => (&rows.k, tile.head_dim, self.spec.gathered_cols?),
            _ => (&rows.v, tile.head_dim_v, self.spec.head_dim_v),
        };
        let shape = TileShape::new(self.spec.key_elem(), tile.tile_n, cols);
        let last = work.kv.end * tile.tile_n - tile.tile_n;
        Some(Gather::begin(self.builder, (shape, used), rows, span, [work.kv_head, last]))
    }

    /// The first row of a thread: of its sequence, or of its tile, where that may have rows of several heads.
    #[track_caller]
    fn first_row(&self, work: &Work<V<'k, B32>>, me: V<'k, B32>) -> V<'k, B32> {
        let within = self.row_in_tile(me);
        if self.spec.shares.is_some() { within } else { work.row + within }
    }

    /// The first row in its tile of a thread of warpgroup `me`.
    #[track_caller]
    fn row_in_tile(&self, me: V<'k, B32>) -> V<'k, B32> {
        let row = self.builder.frag_row();
        if self.spec.tile.column_groups() > 1 { row } else { me.mad(64, row) }
    }

    /// Which of the tile's blocks of 64 rows warpgroup `me` has.
    fn row_block(&self, me: V<'k, B32>) -> V<'k, B32> {
        if self.spec.tile.column_groups() > 1 { self.builder.value(0) } else { me }
    }

    /// Part number `part` of O's columns, as far as they are in memory.
    fn columns(&self, part: u32) -> Columns {
        let most = self.spec.tile.columns();
        let first = part * most;
        Columns { first, count: self.spec.head_dim_v.saturating_sub(first).min(most) }
    }

    /// The rows of a thread, of which the first is `row` of a tile that may have rows of several heads.
    #[track_caller]
    fn rows_of_heads(&self, work: &Work<V<'k, B32>>, row: V<'k, B32>) -> [TileRow<'k>; 2] {
        Half::BOTH.map(|half| {
            let row = row + half.rows();
            let (position, head) = self.pack().div_rem(row);
            TileRow {
                position: work.row + position,
                head: work.head.mad(self.spec.pack, head),
                is_inside: row.lt(self.spec.q_rows()),
            }
        })
    }

    /// Division by the query heads of a tile.
    #[track_caller]
    fn pack(&self) -> FastDiv<V<'k, B32>> {
        FastDiv::new(self.spec.pack).map(|number| self.builder.value(number))
    }

    /// The functions of scores: the soft cap, in whose units they are then, and the mask.
    fn scores(&self, work: &Work<V<'k, B32>>) -> Scores<'k> {
        let (walk, (left, _)) = (self.params.walk, self.spec.mask.reach());
        let (lens, first) = (work.lens, work.row);
        let modify = self.spec.softcap.then(|| Box::new(softcap) as _);
        if let Some(rows) = self.params.intervals {
            let (b, of_head) = (self.builder, rows.of_head(work.batch, work.head));
            let visible = Box::new(move |row| rows.visible(b, of_head, row, lens));
            return Scores { modify, visible, in_bits: true };
        }
        let pack = self.spec.shares.map(|_| self.pack());
        Scores {
            modify,
            visible: Box::new(move |row| {
                let row = pack.map_or(row, |pack| first + pack.quotient(row));
                let keys = walk.keys(row, lens);
                Visible { start: left.map(|_| keys.start), end: keys.end, other: None }
            }),
            in_bits: false,
        }
    }
}
