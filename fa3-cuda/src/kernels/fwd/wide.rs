//! Two consumers that compute the same 64 rows and share O's columns, where one warpgroup cannot hold all of them.
//!
//! The first one is the kernel's [consumer](super::consumer). It computes scores and softmax, and the first half of O's
//! columns. It hands P and the rescale factor of each row to the second one, through shared memory. The second one
//! multiplies P by its half of V's columns.
//!
//! ```text
//!                 first                                    second
//! block j - 1     P V, first columns ┐ in flight
//! block j         Q Kᵀ               ┘ together            .
//!                 hands P over to                       -> .
//!                 softmax                                  block j - 1: P V, second columns
//! block j         P V, first columns ┐                     ┘
//! ```
//!
//! If K and V are e4m3 and there is no `qv`, the second consumer also converts V. It multiplies its half of a block's V
//! while its half of the next block is loaded.
//!
//! P is handed over when the next block's scores are nearly complete. So the second consumer's products run under the
//! softmax of the first consumer, and delay nothing that the softmax waits for. P is handed over earlier only if the
//! next block has not been loaded yet.

use fa3_ir::lang::*;

use super::attend::{Attend, Sum};
use super::converted_rows::Converter;
use super::epilogue;
use super::first::First;
use super::hand_over::{HandOver, load_factors};
use super::query::Query;
use super::state::Fwd;
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::tma_pipeline::TmaPipeline;

impl<'k> Attend<'_, 'k> {
    /// Algorithm 2 with lazy rescaling, in the first consumer. PV of the previous block is issued before QKᵀ, so that
    /// its stage of V is released early. With `qv`, that stage is held from the block's scores to its PV.
    pub(super) fn algorithm2_of_first(
        &mut self,
        first: &mut First<'k>,
        q: &Query<'_, 'k>,
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        const HALF: &str = "a half of V's columns is held, or was waited for";
        let Attend { fwd, k, v, p: ty, .. } = self;
        let block = blocks.at(0);
        let (s, keys, _) = first.scores(fwd, q, (k, v), None, None); // A2:3-4
        let block = q.look(block);
        let mut s = s.wait(); // A2:5
        let mut held = keys.release().map(|of_v| {
            let mut held = v.held_beside();
            held.hold(of_v);
            held
        });
        q.release_if_last(&block);
        let exponents = q.apply(&mut s, &block);
        let mut p = sum.softmax.first(&mut s, exponents.as_ref(), *ty); // A2:6, O is still 0
        blocks.for_each(1, |block| {
            // A2:7, for each block up to T_c - 1
            let waited = held.is_none().then(|| v.wait()); // A2:10
            let of_v = waited.as_ref().map(FullStage::tile).or(held.as_ref().map(HeldStage::tile));
            let stored = p.copied();
            let pv = gemm(&p, of_v.expect(HALF), &mut sum.o); // A2:11, in flight
            // With `qv`, K has two stages, and the next one was filled long ago.
            let of_k = held.is_some().then(|| first.products_of_k(fwd, q, k, None)); // A2:8-9, in flight
            let stage = first.store(&stored, &sum.softmax);
            let o = pv.wait(); // A2:14
            give_back(waited, held.as_mut()); // A2:15
            let (s, keys, is_there) = first.scores(fwd, q, (k, v), of_k, Some(&stage)); // A2:8-9, in flight
            let block = q.look(block);
            // The second consumer begins when the products of the last panel are complete, too.
            s.wait_older();
            if let Some(is_there) = is_there {
                stage.commit_if(is_there);
            }
            stage.committed();
            let mut s = s.wait(); // A2:12
            if let Some((held, of_v)) = held.as_mut().zip(keys.release()) {
                held.hold(of_v);
            }
            q.release_if_last(&block);
            let exponents = q.apply(&mut s, &block);
            p.set(&sum.softmax.step_lazily(&s, exponents.as_ref(), *ty, o)); // A2:13-14, A2:16
        });
        let waited = held.is_none().then(|| v.wait()); // A2:18
        let of_v = waited.as_ref().map(FullStage::tile).or(held.as_ref().map(HeldStage::tile));
        let stage = first.store(&p, &sum.softmax);
        stage.fence();
        stage.commit_unfenced();
        gemm(&p, of_v.expect(HALF), &mut sum.o).wait(); // A2:18-19
        give_back(waited, held.as_mut());
    }
}

/// Releases the stage `waited` that the consumer waited for, and the stage `held`, if they exist.
#[track_caller]
fn give_back<'k>(waited: Option<FullStage<'k, 1>>, held: Option<&mut HeldStage<'k, 1>>) {
    if let Some(waited) = waited {
        waited.release();
    }
    if let Some(held) = held {
        held.release();
    }
}

/// Runs the second consumer.
pub(super) fn run_second<'k>(fwd: &Fwd<'k>, hand_over: &HandOver<'k>) {
    let b = fwd.builder;
    let (mut blocks, mut ends) = (hand_over.blocks.consumer(), hand_over.ends.consumer());
    let mut parts: Vec<_> = fwd.v_second.iter().map(|part| (part.consumer(), part.rows())).collect();
    let in_rows = fwd.spec.first_rows_of_second_half().is_some();
    let mut converter = Converter::of_second(fwd);
    fwd.scheduler.consume(|work, again| {
        let cols = fwd.spec.tile.columns();
        // The sums of parts of columns; parts of rows have one sum.
        let parts_of_o =
            if in_rows { vec![cols] } else { fwd.v_second.iter().map(TmaPipeline::cols).collect() };
        let mut sums: Vec<_> = parts_of_o.into_iter().map(|cols| Frag::zeros(b, cols)).collect();
        let mut multiply = || {
            let parts: Vec<_> = parts.iter_mut().map(|(part, rows)| (part.wait(), rows.clone())).collect();
            let stage = blocks.wait();
            let [p, factors] = stage.tiles();
            let factors = load_factors(b, factors);
            let shrinks = factors.map(|factor| factor.ne(1.0));
            b.if_uniform(shrinks.any().vote_any(), || {
                sums.iter_mut().for_each(|o| o.scale_rows(factors));
            });
            let mut products: Vec<_> = sums.drain(..).map(Chain::onto).collect();
            for (index, (part, rows)) in parts.iter().enumerate() {
                let (p, v) = (p.k_block(rows.start, rows.len() as u32), part.tile());
                products[if in_rows { 0 } else { index }].gemm(p, v.rows(rows.start, rows.len() as u32));
            }
            let mut parts = parts.into_iter().map(|(part, _)| part);
            let last = parts.next_back();
            if let Some(first) = parts.next() {
                // Released while the last part is multiplied.
                if in_rows {
                    products[0].wait_older()
                } else {
                    products[0].wait_all()
                }
                first.release();
            }
            sums.extend(products.into_iter().map(Chain::wait));
            stage.release_unfenced();
            if let Some(last) = last {
                last.release();
            }
        };
        let all = (work.kv.first, work.kv.end);
        match &mut converter {
            None => b.for_each(all, 1, |_| multiply()),
            Some(converter) => b.if_uniform(work.kv.first.lt(work.kv.end), || {
                let Some(keys) = converter.begin(fwd, &work) else { return };
                let tile_n = fwd.spec.tile.tile_n;
                let all = (work.kv.end - work.kv.first) * tile_n;
                converter.convert(&keys, [b.value(0), all], || {});
                b.for_each((tile_n, all), tile_n, |done| {
                    converter.convert(&keys, [done, all], &mut multiply)
                });
                multiply();
            }),
        }
        let end = ends.wait();
        let inverse = load_factors(b, end.tile());
        end.release_unfenced();
        let (work, columns) = (again(), fwd.columns(1));
        let row = fwd.first_row(&work, b.value(0));
        let Some(o) = sums.into_iter().reduce(Frag::beside) else { return };
        // The first warpgroup writes the other results.
        let (v_scale, lse, max_logits, of_keys) = (None, None, None, None);
        let results = epilogue::Results { o, v_scale, inverse, lse, max_logits, of_keys, columns };
        epilogue::write(fwd, results, &work, row);
    });
}
