//! A consumer of the dK/dV kernel that owns 64 keys, and computes their dK and dV. Where blocks of 64 keys are listed,
//! it passes over the blocks of rows that see only the keys of the other consumer.

use fa3_ir::lang::*;

use super::columns::{Stat, StatColumns};
use super::dq::DqPart;
use super::state::{Adding, Dkv};
use crate::kernels::bwd::gradients::registers;
use crate::kernels::parts::ping_pong::Turn;

pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: Option<&Adding<'k>>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let me = b.warpgroup();
    let (mut k, mut v) = (dkv.k.consumer(), dkv.v.consumer());
    let mut rows = dkv.rows.consumer();
    let mut additions = adding.map(|adding| Additions::of(dkv, adding, me));
    // A consumer that passes over a block takes no turn.
    let taking_turns = adding.filter(|_| !dkv.lists_are_own());
    let turn = taking_turns.map_or_else(Turn::none, |adding| adding.ping_pong.of(b, me));
    dkv.scheduler.consume(|work, again| {
        let key = work.row + me.mad(64, b.frag_row());
        let mut dk = Frag::zeros(b, spec.tile.head_dim); // A3:16
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v); // A3:16
        b.if_uniform(dkv.visits(&work), || {
            let (k_stage, v_stage) = (k.wait(), v.wait()); // A3:17
            let [k, v] = [&k_stage, &v_stage].map(|stage| stage.tile().row_block(me, 64));
            let of_head = |head| dkv.tile_head(&work, key, head);
            dkv.for_each_block(&work, of_head, |of, block| {
                // A3:18, for each block of rows
                let stage = rows.wait(); // A3:19
                let [q, stats, dout] = stage.tiles();
                let mut multiply = || {
                    // The accumulator is set before any product is issued: while a product is in flight, no other
                    // accumulator can be written.
                    let minus_delta = StatColumns::load(b, stats, Stat::MinusDelta).frag(b);
                    let s = gemm(k, q.t(), Fresh); // A3:21
                    let shifts = StatColumns::load(b, stats, Stat::Shift);
                    let dp = gemm(v, dout.t(), minus_delta); // A3:22-23
                    // If the kernel adds to dQ, the fence of the stored dS covers these loads, too.
                    if additions.is_none() {
                        stage.fence_loads();
                    }
                    let mut s = s.wait(); // A3:24
                    turn.take();
                    let p = dkv.p(&mut s, &shifts, &dkv.elements(&work, of, &block)); // A3:24
                    let more_dv = gemm(&p, dout, &mut dv); // A3:26
                    turn.pass();
                    let dp = dp.wait(); // A3:25
                    let ds = dkv.ds(&dp, &registers(&s)); // A3:25
                    if let Some(additions) = &mut additions {
                        additions.give(&ds);
                    }
                    let more_dk = gemm(&ds, q, &mut dk); // A3:27
                    more_dk.wait();
                    more_dv.wait();
                };
                match block.columns.map(|columns| ((columns >> me) & 1).ne(0)) {
                    None => multiply(),
                    Some(own) => {
                        b.if_uniform(own, multiply);
                        if let Some(additions) = &mut additions {
                            b.if_uniform(!own, || additions.give_nothing());
                        }
                    }
                }
                stage.release();
                if let Some(additions) = &mut additions {
                    additions.add(k_stage.tile());
                    additions.go_on(block.columns);
                }
            });
            if let Some(additions) = &mut additions {
                additions.add(k_stage.tile());
                additions.is_mine.set(false);
            }
            k_stage.release();
            v_stage.release();
        });
        let work = again();
        dkv.write_dv(dv, &work, key);
        dkv.write_dk(dk, &work, key);
    });
    turn.end(b);
}

/// The additions to dQ. The consumers take turns: one of them computes dQ of a block, over all keys of the tile.
struct Additions<'a, 'k> {
    dq_part: DqPart<'a, 'k>,
    /// Whether this consumer computes dQ of the previous block.
    is_mine: Var<'k, Pred>,
    /// A bit for each consumer whose list has the previous block, if each has its own list.
    seen: Option<Var<'k, B32>>,
}

impl<'a, 'k> Additions<'a, 'k> {
    #[track_caller]
    fn of(dkv: &'a Dkv<'k>, adding: &'a Adding<'k>, me: U32<'k>) -> Additions<'a, 'k> {
        let dq_part = DqPart::of(dkv, adding, me, (Rounds::begin(dkv.builder), 2));
        let b = dkv.builder;
        let seen = dkv.lists_are_own().then(|| b.var("seen", 0));
        Additions { dq_part, is_mine: b.var("is_mine", false), seen }
    }

    /// Stores dSᵀ of this consumer's keys for a block, so that each consumer can read it.
    #[track_caller]
    fn give(&mut self, ds: &AFrag<'k>) {
        let stage = self.dq_part.ds_in.acquire();
        self.dq_part.store(ds, &stage);
        stage.commit_stored();
    }

    /// Says that this consumer has no dSᵀ for a block, of which it sees no key.
    #[track_caller]
    fn give_nothing(&mut self) {
        self.dq_part.ds_in.acquire().commit_unfenced();
    }

    /// Moves to the next block. `columns` says which consumers' lists have this block, if each has its own list.
    #[track_caller]
    fn go_on(&mut self, columns: Option<U32<'k>>) {
        if let Some((seen, columns)) = self.seen.zip(columns) {
            seen.set(columns);
        }
        let DqPart { blocks, me, .. } = &self.dq_part;
        self.is_mine.set((blocks.number() & 1).eq(*me));
        blocks.next();
    }

    /// Computes dQ of the previous block, if that is this consumer's turn.
    #[track_caller]
    fn add(&mut self, k: Tile<'_, 'k>) {
        self.dq_part.dkv.builder.if_uniform(self.is_mine, || {
            let ds = self.dq_part.ds_out.wait(); // A3:32
            let dq = self.dq(ds.tile(), k); // A3:28
            ds.release();
            self.dq_part.stage().give(&dq);
        });
    }

    /// Computes dQ of the previous block from all keys, or from the keys of those lists that have the block.
    #[track_caller]
    fn dq(&self, ds: Tile<'_, 'k>, k: Tile<'_, 'k>) -> Frag<'k> {
        let Some(seen) = self.seen else { return gemm(ds.t(), k, Fresh).wait() };
        let Dkv { builder: b, spec, .. } = self.dq_part.dkv;
        let mut dq = Frag::zeros(b, spec.tile.head_dim);
        for consumer in 0..spec.tile.consumers() {
            b.if_uniform(((seen.get() >> consumer) & 1).ne(0), || {
                let [ds, k] = [ds, k].map(|tile| tile.row_block(b.value(consumer), 64));
                gemm(ds.t(), k, &mut dq).wait();
            });
        }
        dq
    }
}
