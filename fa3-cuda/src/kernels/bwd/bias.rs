//! The gradient of a table that is read by query and key, such as a bias of scores. A CTA has a tile of elements, and
//! walks over the sequences and heads that read them:
//!
//! ```text
//! S = Q Kᵀ    dP = dO Vᵀ    P = exp(f(S) - LSE)    sums += P ∘ (dP - D) ∘ ∂f/∂table
//! ```
//!
//! The sums stay in registers, in the place of the elements, and are stored once. Their order is fixed.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Program};
use fa3_sched::FastDiv;
use fa3_sched::backward::{BiasTile, Plan};
use fa3_types::{Lengths, LineAxis, Mask, ReadBy, ScoreRows, TableRead};

use super::elements::{Elements, ds};
use super::gradients::registers;
use super::hidden::visible;
use super::params::Inputs;
use super::row_stats::RowStats;
use super::scratch::Scratch;
use super::spec::{BwdSpec, PartSpec};
use crate::kernels::Spec;
use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::geometry::{Geometry, WorkTile};
use crate::kernels::parts::lookup::Lookup;
use crate::kernels::parts::score::{ReadLines, ThreadRows, TileFunction};
use crate::kernels::parts::table::PaddedRows;
use crate::kernels::parts::visible::Position;

/// The spec of the kernel that computes the gradient of a table that is read by query and key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BiasSpec {
    /// The tile, the tensors, the mask and the function, of which this table alone has a gradient.
    pub part: PartSpec<BiasTile>,
    /// The table.
    pub table: usize,
}

impl BiasSpec {
    /// The table's read, and the axes along which queries and keys run.
    fn read(&self) -> (TableRead, [LineAxis; 2]) {
        let reads = self.part.score.as_ref().map(|expr| expr.table_reads(self.part.gradients));
        let read = reads.and_then(|mut reads| reads.pop()).expect("the function reads the table");
        let ReadBy::QueryAndKey { query, key } = read.by else { unreachable!("by query and key") };
        (read, [query, key])
    }
}

params! {
    struct BiasParams {
        inputs: all Inputs,
        stats: all RowStats,
        dtable: pointer,
        /// The index of the first query, and of the first key.
        first_query: u32,
        first_key: u32,
        /// The distance in elements from a query's element to the next query's, and from a key's to the next key's.
        query_stride: u32,
        key_stride: u32,
        /// Number of tiles of elements, and along the axes after the first one. Along axes that are neither the
        /// queries' nor the keys', a tile has one element.
        table_tiles: u32,
        tiles1: maybe div,
        tiles2: maybe div,
        tiles3: maybe div,
    }
}

impl BiasParams<Form> {
    fn form(spec: &BiasSpec) -> BiasParams<Form> {
        let BiasTile { head_dim, head_dim_v, tile_n, .. } = spec.part.tile;
        let (read, _) = spec.read();
        let tiles = |axis| (axis < read.steps.len()).then(Form::div);
        let (tile, dims) = ([BiasTile::ROWS, tile_n], [head_dim, head_dim_v]);
        BiasParams {
            inputs: Inputs::form(&spec.part, tile, dims, PaddedRows::OfBlocks),
            stats: RowStats::FORM,
            dtable: Elem::F32,
            first_query: (),
            first_key: (),
            query_stride: (),
            key_stride: (),
            table_tiles: (),
            tiles1: tiles(1),
            tiles2: tiles(2),
            tiles3: tiles(3),
        }
    }
}

struct Bias<'k> {
    builder: &'k Builder,
    spec: BiasSpec,
    read: TableRead,
    axes: [LineAxis; 2],
    params: BiasParams<InKernel<'k>>,
    qk: Pipeline<'k, 2>,
    dov: Pipeline<'k, 2>,
}

/// A tile of elements.
struct TableTile<'k> {
    /// The place of the first element along each axis.
    places: Vec<U32<'k>>,
    /// The query and the key of the first element, which may be negative numbers.
    row: U32<'k>,
    key: U32<'k>,
}

pub(super) fn kernel(spec: &BiasSpec) -> Kernel {
    let tile = &spec.part.tile;
    Kernel::build("bwd_bias", Launch::threads(tile.threads()), |b| {
        let params = BiasParams::<Form>::form(spec).pass(&mut Declare(b));
        let (read, axes) = spec.read();
        let (warps, Inputs { q, k, v, dout, .. }) = (4 * tile.consumers(), &params.inputs);
        let qk = [("q", q.shape()), ("k", k.shape())];
        let dov = [("dout", dout.shape()), ("v", v.shape())];
        let qk = b.pipeline("qk", tile.qk_stages, warps, qk);
        let dov = b.pipeline("dov", tile.dov_stages, warps, dov);
        let bias = Bias { builder: b, spec: spec.clone(), read, axes, params, qk, dov };
        b.init_mbarriers();
        b.launch_dependents();
        b.grid_dependency_wait();
        let [producer, consumer] = tile.registers();
        b.role(Role::new("producer", 0..4).registers(producer), || {
            let warp = (b.tid() >> 5).shfl_idx(0);
            b.if_uniform(warp.eq(0), || bias.load());
        });
        b.role(Role::new("consumer", 4..4 + warps).registers(consumer), || bias.consume());
    })
}

impl<'k> Bias<'k> {
    /// Runs the producer, in a warp.
    fn load(&self) {
        let (mut qk, mut dov) = (self.qk.producer(), self.dov.producer());
        let inputs = &self.params.inputs;
        self.for_each_tile(|tile| {
            self.walk(&tile, |work, _| {
                let WorkTile { head, kv_head, .. } = work;
                let [of_q, of_dout] = inputs.rows(&work, TilesOf::Rows);
                let [of_k, of_v] = inputs.keys(&work, TilesOf::Rows);
                qk.fill_by_warp(|mut stage| {
                    of_q.load(&mut stage, 0, &inputs.q, [head, tile.row]);
                    of_k.load(&mut stage, 1, &inputs.k, [kv_head, tile.key]);
                    stage.commit();
                });
                dov.fill_by_warp(|mut stage| {
                    of_dout.load(&mut stage, 0, &inputs.dout, [head, tile.row]);
                    of_v.load(&mut stage, 1, &inputs.v, [kv_head, tile.key]);
                    stage.commit();
                });
            });
        });
    }

    /// Runs a consumer: 64 queries of each tile.
    fn consume(&self) {
        let (b, inputs, me) = (self.builder, &self.params.inputs, self.builder.warpgroup());
        let (mut qk, mut dov) = (self.qk.consumer(), self.dov.consumer());
        self.for_each_tile(|tile| {
            let in_tile = me.mad(64, b.frag_row());
            let row = tile.row + in_tile;
            let mut sums = Frag::zeros(b, self.spec.part.tile.tile_n);
            self.walk(&tile, |work, is_masked| {
                let [shift, minus_delta] = self.params.stats.of_rows(b, &work, row);
                let function = self.function(&work, row);
                let qk = qk.wait();
                let [q, k] = qk.tiles();
                let s = gemm(q.row_block(me, 64), k.t(), Fresh);
                let dov = dov.wait();
                let [dout, v] = dov.tiles();
                let dp = gemm(dout.row_block(me, 64), v.t(), Fresh);
                let mut s = s.wait();
                qk.release();
                let elements = Elements::new(inputs, Some(function.block(tile.key)), None);
                s.map_in_place(|product, at| {
                    let element = elements.of(product, shift[at], at);
                    let slope = elements.slopes_by_reads(element, at).pop().flatten();
                    slope.map_or(element.p, |slope| slope.of(element.p))
                });
                let dp = dp.wait();
                dov.release();
                let (weights, dp) = (registers(&s), registers(&dp));
                let factors = |at: At| [weights[at.index()], dp[at.index()] + minus_delta[at]];
                let add = |sum: V<'k, F32>, at| {
                    let [weight, difference] = factors(at);
                    weight.fma(difference, sum)
                };
                let Some(is_masked) = is_masked else { return sums.map_in_place(add) };
                b.if_uniform(!is_masked, || sums.map_in_place(add));
                b.if_uniform(is_masked, || {
                    let visible = visible(b, inputs, &work, self.spec.part.mask, [row, tile.key]);
                    sums.map_in_place(|sum, at| {
                        let [weight, difference] = factors(at);
                        sum + visible[at.half as usize].hide(ds(difference, weight), at.col, 0.0)
                    });
                });
            });
            self.store(&tile, in_tile, &sums);
        });
    }

    /// Runs `body` for the CTA's tiles of elements.
    #[track_caller]
    fn for_each_tile(&self, body: impl FnOnce(TableTile<'k>)) {
        let (b, params) = (self.builder, &self.params);
        let [query, key] = self.axes.map(|axis| axis.axis);
        b.for_each((b.cta_x(), params.table_tiles), b.grid_x(), |number| {
            let (mut rest, mut places) = (number, vec![]);
            for tiles in [params.tiles3, params.tiles2, params.tiles1].into_iter().flatten() {
                let (quotient, place) = tiles.div_rem(rest);
                places.push(place);
                rest = quotient;
            }
            places.push(rest);
            places.reverse();
            places[query] = places[query] * BiasTile::ROWS;
            places[key] = places[key] * self.spec.part.tile.tile_n;
            let (row, key) = (places[query] - params.first_query, places[key] - params.first_key);
            body(TableTile { places, row, key });
        });
    }

    /// Runs `body` for each sequence and head that reads elements of a tile, in order, with whether the mask hides some
    /// scores; `None` if there is no mask. All lanes of a warp must call this.
    #[track_caller]
    fn walk(&self, tile: &TableTile<'k>, mut body: impl FnMut(WorkTile<'k>, Option<V<'k, Pred>>)) {
        let (b, inputs, spec) = (self.builder, &self.params.inputs, &self.spec.part);
        let Lookup::Dense(heads) = &inputs.lookup else { unreachable!("sequences have one length") };
        let lens = heads.lens;
        let (first, last) = (tile.row.max_s32(0), (tile.row + (BiasTile::ROWS - 1)).min_s32(lens.q - 1));
        let (begin, end) = (tile.key.max_s32(0), (tile.key + spec.tile.tile_n).min_s32(lens.k));
        // Both ends of a row's keys grow with its position.
        let [top, bottom] = [first, last].map(|row| inputs.lookup.keys(row, lens));
        let is_seen = first.le_s32(last) & begin.lt_s32(end) & top.start.lt(end) & bottom.end.gt(begin);
        let is_masked = match spec.mask.intervals() {
            Some(_) => Some(is_seen),
            None => (spec.mask != Mask::None).then(|| bottom.start.gt(begin) | top.end.lt(end)),
        };
        let (expr, params) = spec.score.as_ref().zip(inputs.score.as_ref()).expect("there is a function");
        b.if_uniform(is_seen, || {
            b.for_each((0, heads.tiles), 32, |first| {
                // The highest bit is of the first head.
                let number = first + 31 - b.lane_id();
                let WorkTile { batch: sequence, head, .. } = heads.work(number.min(heads.tiles - 1));
                let function = (expr, params);
                let lines = ReadLines { builder: b, function, read: &self.read, sequence, head, lens };
                let is_one = number.lt(heads.tiles);
                let reads = lines.of_head(&tile.places).map_or(is_one, |reads| reads & is_one);
                let bits = b.var("heads", reads.ballot());
                b.repeat(|| {
                    let now = bits.get();
                    b.break_if(now.eq(0));
                    let before = now.clz();
                    bits.set(now & (before.constant(i32::MAX as u32) >> before));
                    body(WorkTile { row: tile.row, ..heads.work(first + before) }, is_masked);
                });
            });
        });
    }

    /// The function of the scores of a head, for a thread whose rows are `row` and `row` + 8.
    #[track_caller]
    fn function(&self, work: &WorkTile<'k>, row: U32<'k>) -> TileFunction<'k> {
        let spec = &self.spec.part;
        let of = spec.score.as_ref().zip(self.params.inputs.score.as_ref()).expect("there is a function");
        let (sequence, lens, head) = (work.batch, work.lens, work.head);
        let (head, position) = (move |_| head, move |half: Half| Position(row + half.rows()));
        let rows = ThreadRows { sequence, lens, head: Box::new(head), position: Box::new(position) };
        TileFunction::with_slopes(self.builder, of, spec.gradients, rows, ScoreRows::OfHead)
    }

    /// Stores the sums of a tile, or 0 where there is no query or no key. The thread has the rows `in_tile` and
    /// `in_tile` + 8 of the tile.
    #[track_caller]
    fn store(&self, tile: &TableTile<'k>, in_tile: U32<'k>, sums: &Frag<'k>) {
        let (b, params) = (self.builder, &self.params);
        let Lookup::Dense(heads) = &params.inputs.lookup else { unreachable!("sequences have one length") };
        let score = params.inputs.score.as_ref().expect("there is a function");
        let extents = score.extents(self.spec.table);
        let [query, key] = self.axes.map(|axis| axis.axis);
        let mut places = tile.places.clone();
        places[query] = places[query] + in_tile;
        places[key] = places[key] + b.frag_col();
        let place = places.iter().zip(extents).map(|(&place, &extent)| (place, extent));
        let place = place.reduce(|(place, _), (next, extent)| (place.mad(extent, next), extent));
        let (place, _) = place.expect("tables have axes");
        let rows = Half::BOTH.map(|half| {
            let (row, index) = (tile.row + in_tile + half.rows(), places[query] + half.rows());
            let to = params.query_stride.mad(half.rows(), place).mad_wide(4, params.dtable);
            (b.var("to", to), index.lt(extents[query]), row.lt(heads.lens.q))
        });
        let (first, columns) = (tile.key + b.frag_col(), extents[key] - places[key]);
        let [of_key, of_chunk] = [1, 8].map(|keys: u32| params.key_stride.mul_wide(4 * keys));
        for (at, sum) in sums.elements() {
            let (to, is_element, is_query) = &rows[at.half as usize];
            // Addresses of all elements at a time would take too many registers.
            if at.col > 0 && at.col.is_multiple_of(8) {
                to.update(|to| to + of_chunk);
            }
            let to = if at.col.is_multiple_of(2) { to.get() } else { to.get() + of_key };
            let counts = *is_query & (first + at.col).lt(heads.lens.k);
            let value = counts.select(sum.get(), 0.0);
            b.guarded(*is_element & columns.gt_s32(at.col), || b.store(to, value));
        }
    }
}

/// Adds the step that computes the gradient of a table in a buffer.
pub(super) fn step(
    program: &mut Program<Spec>,
    plan: &Plan,
    scratch: &Scratch,
    spec: BiasSpec,
    dtable: BufferId,
) {
    let (forward, part) = (plan.problem().forward(), plan.bias().expect("a table is read by query and key"));
    let (tiles, form) = plan.dense().zip(forward.score()).expect("sequences have one length");
    let (extents, lens) = (&form.extents()[spec.table], tiles.lens());
    let (_, axes) = spec.read();
    let [query, key] = axes.map(|axis| axis.axis);
    let lens = Lengths { q: lens.q as usize, k: lens.k as usize };
    let [first_query, first_key] = axes.map(|axis| axis.first(lens) as u32);
    let stride = |axis: usize| extents[axis + 1..].iter().product::<usize>() as u32;
    let mut counts: Vec<u32> = extents.iter().map(|&extent| extent as u32).collect();
    counts[query] = counts[query].div_ceil(BiasTile::ROWS);
    counts[key] = counts[key].div_ceil(part.tile.tile_n);
    let count = |axis: usize| counts.get(axis).map(|&count| FastDiv::new(count));
    let table_tiles = counts.iter().product();
    let lookup = Lookup::Dense(Geometry::of(tiles.heads(), part.tiling, tiles.lens()));
    let params = BiasParams::<Host> {
        inputs: Inputs::of(plan, program, scratch, lookup, None),
        stats: RowStats::of(plan, scratch),
        dtable,
        first_query,
        first_key,
        query_stride: stride(query),
        key_stride: stride(key),
        table_tiles,
        tiles1: count(1),
        tiles2: count(2),
        tiles3: count(3),
    };
    let grid = tiles.sms().get().min(table_tiles);
    program.step(BwdSpec::Bias(spec).into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
}
