//! The consumer: a warpgroup computes 64 rows of O, a block of keys after the other.

use fa3_ir::{B32, Builder, Consumer, Frag, Fresh, FullSlot, Tile, V, gemm_ss};
use fa3_sched::forward::{Loads, Overlap, Rescale};

use super::Fwd;
use super::blocks::{Block, Blocks};
use super::geometry::Work;
use super::probabilities::{Place, Probabilities};
use super::refill::Refill;
use super::scores::Scores;
use super::softmax::Softmax;
use super::turn::Turn;

/// What one consumer warpgroup has, tile after tile.
pub(super) struct Attend<'f> {
    fwd: &'f Fwd,
    scores: &'f Scores<'f>,
    me: V<B32>,
    q: Consumer<1>,
    k: Consumer<1>,
    v: Consumer<1>,
    p: Place,
    turn: Turn,
    refill: Refill<'f>,
}

/// Q of a tile.
struct Query<'s> {
    /// Its slot, which goes back when the last block has been multiplied: the next tile's Q can then be loaded.
    slot: &'s FullSlot<1>,
    /// This warpgroup's rows.
    tile: Tile<'s>,
    /// The thread's first row.
    row: V<B32>,
    work: &'s Work<V<B32>>,
}

/// What a tile adds up to.
pub(super) struct Sum {
    pub(super) o: Frag,
    pub(super) softmax: Softmax,
}

/// What consumers run.
pub(super) fn consumer(b: &mut Builder, fwd: &Fwd, scores: &Scores<'_>) {
    let me = b.warpgroup();
    let mut attend = Attend {
        fwd,
        scores,
        me,
        q: fwd.q.1.consumer(b),
        k: fwd.k.1.consumer(b),
        v: fwd.v.1.consumer(b),
        p: fwd.p.of(b, me),
        turn: fwd.turns.as_ref().map_or_else(Turn::none, |turns| turns.of(b, me)),
        refill: match fwd.spec.tile.loads {
            Loads::Producer => Refill::none(),
            Loads::Consumers => Refill::new(b, fwd),
        },
    };
    fwd.walk.consume(b, |b, work| {
        // Found out again for each tile: it would take a register to keep.
        let row = b.frag_row();
        let row = b.mad_u32(me, 64, row);
        let row = b.add(work.row, row);
        let sum = attend.tile(b, &work, row);
        fwd.output.write(b, &fwd.walk.geometry, sum, &work, row); // A1:24-25
    });
    attend.turn.end(b);
}

impl Attend<'_> {
    /// All blocks of a tile, of which the thread's first row is `row`.
    fn tile(&mut self, b: &mut Builder, work: &Work<V<B32>>, row: V<B32>) -> Sum {
        let o = Frag::zeros(b, self.fwd.spec.tile.head_dim_v); // A1:13
        let mut sum = Sum { o, softmax: Softmax::new(b, self.fwd.unit) };
        let visits = b.lt_u32(work.kv.first, work.kv.end);
        let blocks = Blocks::of(b, &self.fwd.spec, work.kv);
        b.if_uniform(visits, |b| {
            self.refill.begin(b, work);
            let slot = self.q.wait(b); // A1:14
            let [tile] = slot.tiles();
            let q = Query { slot: &slot, tile: tile.row_block(b, self.me, 64), row, work };
            match self.fwd.spec.tile.overlap {
                Overlap::None => self.algorithm1(b, &q, &blocks, &mut sum),
                Overlap::TwoStage => self.algorithm2(b, &q, &blocks, &mut sum),
                Overlap::ThreeStage => self.algorithm4(b, &q, &blocks, &mut sum),
            }
            slot.released(b);
        });
        sum
    }

    /// Algorithm 1: products and softmax one after the other. A turn lasts from PV of one block to QKᵀ of the next.
    fn algorithm1(&mut self, b: &mut Builder, q: &Query<'_>, blocks: &Blocks, sum: &mut Sum) {
        self.turn.take(b);
        blocks.for_each(b, 0, |b, block| {
            let k = self.k.wait(b); // A1:16
            let [tile] = k.tiles();
            let s = gemm_ss(b, q.tile, tile.t(), Fresh); // A1:17
            self.turn.pass(b);
            let mut s = s.wait(b);
            k.release(b);
            self.refill.k(b, q.work);
            q.slot.release_if(b, block.last);
            self.score(b, &mut s, q, &block);
            let p = match self.fwd.spec.tile.rescale {
                Rescale::EveryBlock => {
                    let shrink = sum.softmax.step(b, &mut s); // A1:18-19
                    sum.o.scale_rows(b, shrink); // A1:21
                    self.round(b, &s)
                }
                Rescale::Lazy => sum.softmax.step_lazily(b, &s, &self.p, &mut sum.o), // A1:18-21
            };
            self.turn.take(b);
            self.add_product(b, &p, &mut sum.o); // A1:20-22
            self.refill.v(b, q.work);
        });
        self.turn.pass(b);
    }

    /// Algorithm 2: the softmax of a block under PV of the block before.
    fn algorithm2(&mut self, b: &mut Builder, q: &Query<'_>, blocks: &Blocks, sum: &mut Sum) {
        let block = blocks.at(b, 0);
        let mut s = self.product(b, q, &block); // A2:3-5
        self.score(b, &mut s, q, &block);
        sum.softmax.step(b, &mut s); // A2:6, O is still 0
        let mut p = self.round(b, &s);
        blocks.for_each(b, 1, |b, block| {
            // A2:7, to T_c - 1
            let k = self.k.wait(b); // A2:8
            let [tile] = k.tiles();
            self.turn.take(b);
            let s = gemm_ss(b, q.tile, tile.t(), Fresh); // A2:9, in flight
            let v = self.v.wait(b); // A2:10
            let [tile] = v.tiles();
            let pv = p.times(b, tile, &mut sum.o); // A2:11, in flight
            self.turn.pass(b);
            let mut s = s.wait(b); // A2:12
            k.release(b); // A2:15
            self.refill.k(b, q.work);
            q.slot.release_if(b, block.last);
            self.score(b, &mut s, q, &block);
            let next = match self.fwd.spec.tile.rescale {
                Rescale::EveryBlock => {
                    let shrink = sum.softmax.step(b, &mut s); // A2:13
                    pv.wait(b); // A2:14
                    v.release(b); // A2:15
                    self.refill.v(b, q.work);
                    sum.o.scale_rows(b, shrink); // A2:14
                    self.round(b, &s)
                }
                Rescale::Lazy => {
                    pv.wait(b); // A2:14
                    v.release(b); // A2:15
                    self.refill.v(b, q.work);
                    sum.softmax.step_lazily(b, &s, &self.p, &mut sum.o) // A2:13-14
                }
            };
            p.set(b, &next); // A2:16
        });
        self.add_product(b, &p, &mut sum.o); // A2:18-19
    }

    /// Algorithm 4: the softmax of a block under QKᵀ of the next and PV of the block before.
    fn algorithm4(&mut self, b: &mut Builder, q: &Query<'_>, blocks: &Blocks, sum: &mut Sum) {
        let block = blocks.at(b, 0);
        let mut s = self.product(b, q, &block); // A4:2-3
        self.score(b, &mut s, q, &block);
        let shrink = b.rows_var("shrink", 0.0);
        let first = sum.softmax.step(b, &mut s); // A4:4
        shrink.set(b, first);
        let mut p = self.round(b, &s);
        let more = b.gt_u32(blocks.count, 1);
        b.if_uniform(more, |b| {
            let block = blocks.at(b, 1);
            let mut s = self.product(b, q, &block); // A4:5-6
            self.score(b, &mut s, q, &block);
            blocks.for_each(b, 2, |b, block| {
                // A4:7, to T_c - 1
                let k = self.k.wait(b);
                let [tile] = k.tiles();
                self.turn.take(b);
                let next = gemm_ss(b, q.tile, tile.t(), Fresh); // A4:8-9, in flight
                let v = self.v.wait(b);
                let [tile] = v.tiles();
                let factor = shrink.get(b);
                sum.o.scale_rows(b, factor); // A4:11
                let pv = p.times(b, tile, &mut sum.o); // A4:10, in flight
                self.turn.pass(b);
                let factor = sum.softmax.step(b, &mut s); // A4:13
                shrink.set(b, factor);
                let mut next = next.wait(b); // A4:14
                k.release(b);
                self.refill.k(b, q.work);
                q.slot.release_if(b, block.last);
                pv.wait(b); // A4:12
                v.release(b);
                self.refill.v(b, q.work);
                let rounded = self.round(b, &s);
                p.set(b, &rounded); // A4:16
                self.score(b, &mut next, q, &block);
                s.set(b, &next); // A4:15
            });
            let factor = shrink.get(b);
            sum.o.scale_rows(b, factor); // A4:19
            self.add_product(b, &p, &mut sum.o); // A4:18, A4:20
            self.refill.v(b, q.work);
            let factor = sum.softmax.step(b, &mut s); // A4:21
            shrink.set(b, factor);
            let rounded = self.round(b, &s);
            p.set(b, &rounded);
        });
        let factor = shrink.get(b);
        sum.o.scale_rows(b, factor); // A4:23
        self.add_product(b, &p, &mut sum.o); // A4:22, A4:24
    }

    /// O += P V with the next block of V.
    fn add_product(&mut self, b: &mut Builder, p: &Probabilities, o: &mut Frag) {
        let v = self.v.wait(b);
        let [tile] = v.tiles();
        p.times(b, tile, o).wait(b);
        v.release(b);
    }

    /// Q Kᵀ of the next block, complete.
    fn product(&mut self, b: &mut Builder, q: &Query<'_>, block: &Block) -> Frag {
        let k = self.k.wait(b);
        let [tile] = k.tiles();
        let s = gemm_ss(b, q.tile, tile.t(), Fresh).wait(b);
        k.release(b);
        self.refill.k(b, q.work);
        q.slot.release_if(b, block.last);
        s
    }

    /// P of a block, complete, where products find it.
    fn round(&self, b: &mut Builder, p: &Frag) -> Probabilities {
        let p = self.p.put(b, p, |_, p, _| p);
        self.p.publish(b);
        p
    }

    fn score(&self, b: &mut Builder, s: &mut Frag, q: &Query<'_>, block: &Block) {
        self.scores.of(b, self.fwd, s, q.row, block.key, block.masked);
    }
}
