//! A consumer that owns 64 keys for dK and dV, and 64 of the 128 rows of every block for dQ. It computes dQ of block i
//! in the iteration of block i + 1. By then both consumers have stored their half of dSᵀ(i), so they need no barrier
//! between them.
//!
//! The diagram shows block i in the two consumers, W0 and W1, over time. An arrow marks a store to shared memory:
//!
//! ```text
//!             turn of W0                  turn of W1                  turn of W0
//! W0 products | S(i)  dP(i)               |    dV(i) dQ(i-1) dK(i)    | S(i+1)  dP(i+1)
//!    the rest |        P(i)               | dS(i)↓        dQ(i-1)↓    |          P(i+1)
//! W1 products |  dV(i-1) dQ(i-2) dK(i-1)  | S(i)  dP(i)               |    dV(i) dQ(i-1) dK(i)
//!    the rest | dS(i-1)↓      dQ(i-2)↓    |        P(i)               | dS(i)↓        dQ(i-1)↓
//! ```
//!
//! A consumer's ping-pong turn lasts from S to the end of dP, so its exponentials overlap dV, dQ and dK of the other.

use fa3_ir::lang::*;
use fa3_sched::backward::ADDED_ROWS;

use super::columns::{Stat, StatColumns};
use super::dq::DqPart;
use super::state::{Adding, Dkv};
use crate::kernels::bwd::elements::Elements;
use crate::kernels::bwd::gradients::registers;

pub(super) fn run<'k>(dkv: &Dkv<'k>, adding: &Adding<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let me = b.warpgroup();
    let blocks = Rounds::begin(b);
    // Counts the blocks of rows, but not the blocks of zeros (those before the first block, or after an idle tile).
    let read = dkv.has_idle_tiles().then(|| Rounds::begin(b));
    let (mut k, mut v) = (dkv.k.consumer(), dkv.v.consumer());
    let mut rows = dkv.rows.consumer_by(read.unwrap_or(blocks.late(1)));
    let dq_part = DqPart::of(dkv, adding, me, (blocks, 1));
    let turn = adding.ping_pong.of(b, me);
    let mut late = Late { dq_part, k: k.held_beside(), is_due: b.var("is_due", false) };
    dkv.scheduler.consume(|work, again| {
        let key = work.row + me.mad(64, b.frag_row());
        let mut dk = Frag::zeros(b, spec.tile.head_dim); // A3:16
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v); // A3:16
        let visits = dkv.visits(&work);
        b.if_uniform(visits, || {
            let (k_stage, v_stage) = (k.wait(), v.wait()); // A3:17
            let [k, v] = [&k_stage, &v_stage].map(|stage| stage.tile().row_block(me, 64));
            late.begin(&k_stage);
            let of_head = |head| dkv.tile_head(&work, key, head);
            dkv.for_each_block(&work, of_head, |of, block| {
                // A3:18, for each block of rows
                let stage = rows.wait(); // A3:19
                let [q, stats, dout] = stage.tiles();
                turn.take();
                let s = gemm(k, q.t(), Fresh); // A3:21
                let dp = gemm(v, dout.t(), Fresh); // A3:22-23
                let elements = dkv.elements(&work, of, &block);
                let mut s = s.wait();
                let shifts = StatColumns::on_demand(b, stats, Stat::Shift);
                dkv.begin_p(&mut s, &shifts, &elements); // A3:24
                let mut dp = dp.wait();
                turn.pass();
                let minus_delta = StatColumns::on_demand(b, stats, Stat::MinusDelta);
                let [p, ds] = dkv.end_p(&s, &mut dp, [&shifts, &minus_delta], &elements); // A3:24-25
                let ds_in = late.dq_part.ds_in.acquire();
                late.dq_part.store(&ds, &ds_in);
                let more_dv = gemm(&p, dout, &mut dv); // A3:26
                let more_dk = late.multiply(&k_stage, || gemm(&ds, q, &mut dk)); // A3:27-28
                // The fence after dQ covers the stored dSᵀ and the loads of statistics, too.
                ds_in.commit_unfenced();
                more_dk.wait();
                more_dv.wait();
                stage.release();
                blocks.next();
                if let Some(read) = read {
                    read.next();
                }
            });
            late.k.keep(k_stage);
            v_stage.release();
        });
        if dkv.has_idle_tiles() {
            // No block follows soon, so dQ of the last block is computed now: the next tile's index arrives only after
            // the writer has read this tile's, and until then the writer waits for dQ.
            b.if_uniform(!visits, || b.if_uniform(late.is_due, || late.end_for_now()));
        }
        let work = again();
        dkv.write_dv(dv, &work, key);
        dkv.write_dk(dk, &work, key);
    });
    b.if_uniform(late.is_due, || late.end());
    turn.end(b);
}

impl<'k> Dkv<'k> {
    /// Turns the products `s` of a block into Pᵀ, in place, if weights are P.
    #[track_caller]
    fn begin_p(&self, s: &mut Frag<'k>, shifts: &StatColumns<'k>, elements: &Elements<'_, 'k>) {
        if !elements.have_slope() {
            s.map_in_place(|product, at| elements.of(product, shifts.of(at), at).p);
        }
    }

    /// Pᵀ, from the result of [`Dkv::begin_p`], and dSᵀ, from Pᵀ and dPᵀ. Both are rounded, as operands in registers.
    #[track_caller]
    fn end_p(
        &self,
        s: &Frag<'k>,
        dp: &mut Frag<'k>,
        [shifts, minus_delta]: [&StatColumns<'k>; 2],
        elements: &Elements<'_, 'k>,
    ) -> [AFrag<'k>; 2] {
        let ty = self.spec.product_type();
        if elements.have_slope() {
            // This works element by element, or ptxas spills: scores, P and dP do not all fit into registers.
            let dp = registers(dp);
            return s.map_to_two_a(ty, |product, at| {
                let element = elements.of(product, shifts.of(at), at);
                [element.p, element.ds(dp[at.index()], minus_delta.of(at))]
            });
        }
        dp.map_in_place(|dp, at| dp + minus_delta.of(at)); // A3:25
        // In this order, dSᵀ takes the registers of dPᵀ, and then Pᵀ takes the registers of Sᵀ.
        let ds = self.ds(dp, &registers(s));
        [s.to_a(ty), ds]
    }
}

/// dQ of the previous block, which is computed an iteration late. That block may belong to the previous tile.
struct Late<'a, 'k> {
    dq_part: DqPart<'a, 'k>,
    /// K of the previous block's tile.
    k: HeldStage<'k, 1>,
    /// Whether dQ of the previous block is still to be computed.
    is_due: Var<'k, Pred>,
}

impl<'k> Late<'_, 'k> {
    /// Begins a tile. If no dQ is due, stores dSᵀ of a block of zeros, whose dQ the writer does not add.
    #[track_caller]
    fn begin(&mut self, k: &FullStage<'k, 1>) {
        let Dkv { builder: b, spec, .. } = self.dq_part.dkv;
        b.if_uniform(!self.is_due, || {
            self.k.begin(k);
            let stage = self.dq_part.ds_in.acquire();
            let zeros = Frag::zeros(b, spec.tile.tile_m).to_a(spec.product_type());
            self.dq_part.store(&zeros, &stage);
            stage.commit_stored();
            self.dq_part.blocks.next();
            self.is_due.set(true);
        });
    }

    /// Computes dQ of the previous block, while the product that `beside` issues runs, too. Then keeps `k`, which is K
    /// of the current block.
    #[track_caller]
    fn multiply<T>(&mut self, k: &FullStage<'k, 1>, beside: impl FnOnce() -> T) -> T {
        let ds = self.dq_part.ds_out.wait(); // A3:32
        let my_ds = ds.tile().nth_col_block(self.dq_part.me, ADDED_ROWS);
        let dq = gemm(my_ds.t(), self.k.tile(), Fresh); // A3:28
        let begun = beside();
        let stage = self.dq_part.stage();
        let dq = dq.wait();
        ds.release();
        self.k.advance(k);
        stage.give(&dq);
        begun
    }

    /// Computes dQ of the last block of the CTA's last tile.
    #[track_caller]
    fn end(&mut self) {
        let ds = self.dq_part.ds_out.wait(); // A3:32
        let my_ds = ds.tile().nth_col_block(self.dq_part.me, ADDED_ROWS);
        let dq = gemm(my_ds.t(), self.k.tile(), Fresh).wait(); // A3:28
        ds.release();
        self.dq_part.stage().give(&dq);
    }

    /// Computes dQ of the last block before an idle tile.
    #[track_caller]
    fn end_for_now(&mut self) {
        self.end();
        self.k.release();
        self.is_due.set(false);
    }
}
