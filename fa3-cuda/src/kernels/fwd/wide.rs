//! Two consumers that share out O's columns, where one cannot hold all of them, and have the same 64 rows.
//!
//! The first one is the kernel's [consumer](super::consumer): it computes scores and softmax, and the first half of O's
//! columns. It hands P over to the second one in shared memory, and by what its sums of each row have shrunk. The
//! second one multiplies P with its half of V's columns.
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
//! P is handed over when the next block's scores are nearly complete. So the second one's products run under the first
//! one's softmax, and delay nothing that the softmax waits for. Only where the next block has not been loaded yet, P is
//! handed over before.

use fa3_ir::lang::*;

use super::consumer::{Attend, Query, Sum};
use super::row_softmax::RowSoftmax;
use super::self_loading::Kv;
use super::{Fwd, FwdSpec, epilogue};
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::loader::Feed;

/// Where P and factors of its rows pass from one consumer to the other.
pub(super) struct HandOver<'k> {
    /// P of a block, and by what O is to be multiplied before its product is added.
    blocks: Ring<'k, 2>,
    /// By what O is to be multiplied at the end of a tile.
    ends: Ring<'k, 1>,
}

/// The first consumer's ends of rings that other consumers do not have.
pub(super) struct First<'k> {
    builder: &'k Builder,
    blocks: Producer<'k, 2>,
    ends: Producer<'k, 1>,
    /// The last columns of K, if it has several parts.
    k_second: Option<Consumer<'k, 1>>,
    /// The second half of V's columns, which scores take with `qv`, in one part or two.
    v_second: Vec<Consumer<'k, 1>>,
}

/// Scores that have been begun, the slot that they read, and whether more was there when that was asked.
type Begun<'k> = (Chain<'k>, FullSlot<'k, 1>, Option<V<'k, Pred>>);

/// Slots of the keys of a block that scores are computed from.
struct Keys<'k> {
    k: FullSlot<'k, 1>,
    /// Both halves of V's columns, with `qv`.
    latent: Option<(FullSlot<'k, 1>, Vec<FullSlot<'k, 1>>)>,
}

/// A factor of each of 64 rows, one after the other.
fn factors() -> TileShape {
    TileShape::new(Elem::F32, 16, 4)
}

/// Where in such a tile the factors of the thread's two rows are.
#[track_caller]
fn factors_of_thread<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> [SharedAddr; 2] {
    let first = b.frag_row().mad(4, tile.element(0, 0));
    Half::BOTH.map(|half| first.at(4 * half.rows() as i32))
}

/// Stores them, in one thread of each quad.
#[track_caller]
fn store_factors<'k>(b: &'k Builder, rows: Rows<'k>, tile: Tile<'_, 'k>) {
    let to = factors_of_thread(b, tile);
    b.guarded((b.tid() & 3).eq(0), || {
        for half in Half::BOTH {
            b.store(to[half as usize], rows[half]);
        }
    });
}

/// Loads them.
#[track_caller]
fn load_factors<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> Rows<'k> {
    Rows(factors_of_thread(b, tile).map(|from| b.load(from)))
}

impl<'k> HandOver<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> HandOver<'k> {
        let p = TileShape::new(spec.elem, spec.tile.tile_m, spec.tile.tile_n);
        HandOver {
            blocks: b.stored_ring("p", 1, [4, 4], [("p", p), ("factors", factors())]),
            ends: b.stored_ring("ends", 1, [4, 4], [("inverse", factors())]),
        }
    }
}

impl<'k> First<'k> {
    #[track_caller]
    pub(super) fn new(fwd: &Fwd<'k>, hand_over: &HandOver<'k>) -> First<'k> {
        First {
            builder: fwd.builder,
            blocks: hand_over.blocks.producer(),
            ends: hand_over.ends.producer(),
            k_second: fwd.k_second.as_ref().map(Feed::consumer),
            v_second: fwd.v_second.iter().filter(|_| fwd.spec.tile.qv).map(Feed::consumer).collect(),
        }
    }

    /// Stores P of a block and its factors. The second consumer gets them when the slot is fenced and committed.
    #[track_caller]
    fn store(&mut self, p: &AFrag<'k>, softmax: &RowSoftmax<'k>) -> EmptySlot<'k, 2> {
        let b = self.builder;
        let slot = self.blocks.acquire();
        let [of_p, factors] = slot.tiles();
        p.store(of_p);
        if let Some(shrunk) = softmax.shrunk() {
            store_factors(b, shrunk.get(), factors);
        }
        slot
    }

    /// Hands over by what O is to be multiplied at the end of a tile.
    #[track_caller]
    pub(super) fn hand_over_end(&mut self, inverse: Rows<'k>) {
        let slot = self.ends.acquire();
        let [to] = slot.tiles();
        store_factors(self.builder, inverse, to);
        slot.commit_unfenced();
    }

    /// Begins the scores of the next block, whose products with K may have begun. What is given back last is read last.
    /// Where that is not there yet, the tensor cores would have nothing to do: then P of the block before is handed
    /// over. Says whether it was there.
    #[track_caller]
    fn scores(
        &mut self,
        fwd: &Fwd<'k>,
        q: &Query<'_, 'k>,
        (k, v): (&mut Kv<'k>, &mut Kv<'k>),
        of_k: Option<Begun<'k>>,
        before: Option<&EmptySlot<'k, 2>>,
    ) -> (Chain<'k>, Keys<'k>, Option<V<'k, Pred>>) {
        let (mut scores, k, is_there) = of_k.unwrap_or_else(|| self.products_of_k(fwd, q, k, before));
        let Some((_, qv)) = q.latent else { return (scores, Keys { k, latent: None }, is_there) };
        let cols = fwd.spec.tile.columns();
        let v = v.wait();
        scores.gemm(qv.col_block(0, cols), v.tile().t());
        let all_there = self.v_second.iter().map(|part| part.is_full()).reduce(|all, part| all & part);
        let is_there = before.zip(all_there).map(|(slot, all_there)| hand_over_unless(slot, all_there));
        let (mut parts, mut first) = (Vec::new(), cols);
        for part in &mut self.v_second {
            let part = part.wait();
            let (tile, of_part) = (part.tile(), part.tile().shape().cols);
            let qv = qv.col_block(first, of_part);
            first += of_part;
            if first < 2 * cols {
                scores.gemm(qv, tile.t());
            } else {
                add_last(&mut scores, qv, tile, None);
            }
            parts.push(part);
        }
        (scores, Keys { k, latent: Some((v, parts)) }, is_there)
    }

    /// Begins the products of Q and the next block of K. Its first columns are given back as soon as they are complete,
    /// while those of the last ones go on. Hands over as scores do, but not with `qv`, where they go on.
    #[track_caller]
    fn products_of_k(
        &mut self,
        fwd: &Fwd<'k>,
        q: &Query<'_, 'k>,
        k: &mut Kv<'k>,
        before: Option<&EmptySlot<'k, 2>>,
    ) -> Begun<'k> {
        let mut scores = Chain::new(fwd.builder, fwd.spec.tile.tile_n);
        if q.latent.is_some() {
            let k = k.wait();
            scores.gemm(q.tile, k.tile().t());
            return (scores, k, None);
        }
        let Some(k_second) = &mut self.k_second else {
            let is_there = before.map(|slot| hand_over_unless(slot, k.is_there()));
            let k = k.wait();
            add_last(&mut scores, q.tile, k.tile(), None);
            return (scores, k, is_there);
        };
        let k = k.wait();
        let [cols, of_second] = [fwd.k.cols(), fwd.spec.tile.head_dim - fwd.k.cols()];
        scores.gemm(q.tile.col_block(0, cols), k.tile().t());
        let is_there = before.map(|slot| hand_over_unless(slot, k_second.is_full()));
        let k_second = k_second.wait();
        add_last(&mut scores, q.tile.col_block(cols, of_second), k_second.tile(), Some(k));
        (scores, k_second, is_there)
    }
}

/// Hands P over if what the next products read is not there: gives `is_there`. The fence of what was stored waits long
/// beside products, but not longer than those that are in flight behind it.
#[track_caller]
fn hand_over_unless<'k>(slot: &EmptySlot<'k, 2>, is_there: V<'k, Pred>) -> V<'k, Pred> {
    slot.fence();
    slot.commit_if(is_there.negated());
    is_there
}

/// Begins to add the last products of scores, so that those of the last panel of columns can be waited for apart. Gives
/// the slot back that products before have read.
#[track_caller]
fn add_last<'k>(
    scores: &mut Chain<'k>,
    q: Tile<'_, 'k>,
    k: Tile<'_, 'k>,
    mut before: Option<FullSlot<'k, 1>>,
) {
    let (cols, panel) = (q.shape().cols, q.shape().panel_cols());
    for (first, count) in [(0, cols - panel), (cols - panel, panel)] {
        if count == 0 {
            continue;
        }
        scores.gemm(q.col_block(first, count), k.col_block(first, count).t());
        if let Some(slot) = before.take() {
            scores.wait_older();
            slot.release();
        }
    }
}

impl<'k> Keys<'k> {
    /// Gives back what scores alone take. The first half of V's columns, with `qv`.
    #[track_caller]
    fn release(self) -> Option<FullSlot<'k, 1>> {
        self.k.release();
        self.latent.map(|(v, v_second)| {
            v_second.into_iter().for_each(|part| part.release());
            v
        })
    }
}

impl<'k> Attend<'_, 'k> {
    /// Algorithm 2 with lazy rescaling, in the first consumer. PV of the block before goes before QKᵀ, so that its
    /// columns of V are free early. With `qv`, these are held from a block's scores to its PV.
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
        let mut s = s.wait(); // A2:5
        let mut held = keys.release().map(|of_v| {
            let mut held = v.held_beside();
            held.hold(of_v);
            held
        });
        q.release_if_last(&block);
        q.apply(&mut s, &block);
        let mut p = sum.softmax.first(&mut s, *ty); // A2:6, O is still 0
        blocks.for_each(1, |block| {
            // A2:7, to T_c - 1
            let waited = held.is_none().then(|| v.wait()); // A2:10
            let of_v = waited.as_ref().map(FullSlot::tile).or(held.as_ref().map(HeldSlot::tile));
            let stored = p.copied();
            let pv = gemm(&p, of_v.expect(HALF), &mut sum.o); // A2:11, in flight
            // With `qv` there are two slots of K, and the next one has been there for long.
            let of_k = held.is_some().then(|| first.products_of_k(fwd, q, k, None)); // A2:8-9, in flight
            let slot = first.store(&stored, &sum.softmax);
            let o = pv.wait(); // A2:14
            give_back(waited, held.as_mut()); // A2:15
            let (s, keys, is_there) = first.scores(fwd, q, (k, v), of_k, Some(&slot)); // A2:8-9, in flight
            // The second consumer begins when the last panel's products are complete, too.
            s.wait_older();
            if let Some(is_there) = is_there {
                slot.commit_if(is_there);
            }
            slot.committed();
            let mut s = s.wait(); // A2:12
            if let Some((held, of_v)) = held.as_mut().zip(keys.release()) {
                held.hold(of_v);
            }
            q.release_if_last(&block);
            q.apply(&mut s, &block);
            p.set(&sum.softmax.step_lazily(&s, *ty, o)); // A2:13-14, A2:16
        });
        let waited = held.is_none().then(|| v.wait()); // A2:18
        let of_v = waited.as_ref().map(FullSlot::tile).or(held.as_ref().map(HeldSlot::tile));
        let slot = first.store(&p, &sum.softmax);
        slot.fence();
        slot.commit_unfenced();
        gemm(&p, of_v.expect(HALF), &mut sum.o).wait(); // A2:18-19
        give_back(waited, held.as_mut());
    }
}

/// Gives back the slot that was waited for, and the one that is held.
#[track_caller]
fn give_back<'k>(waited: Option<FullSlot<'k, 1>>, held: Option<&mut HeldSlot<'k, 1>>) {
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
    let Some((of_last, of_others)) = fwd.v_second.split_last() else { return };
    let (mut last, mut other) = (of_last.consumer(), of_others.first().map(Feed::consumer));
    fwd.works.consume(|work, again| {
        let cols = fwd.spec.tile.columns();
        let (mut o, mut o_last) = Frag::zeros(b, cols).split_at(cols - of_last.cols());
        b.for_each((work.kv.first, work.kv.end), 1, |_| {
            let (other, last) = (other.as_mut().map(|other| other.wait()), last.wait());
            let slot = blocks.wait();
            let [p, factors] = slot.tiles();
            let factors = load_factors(b, factors);
            let shrinks = factors.map(|factor| factor.ne(1.0));
            b.if_uniform(shrinks.any().vote_any(), || {
                o.scale_rows(factors);
                o_last.scale_rows(factors);
            });
            let product = other.as_ref().map(|other| gemm(p, other.tile(), &mut o));
            let product_of_last = gemm(p, last.tile(), &mut o_last);
            if let Some(product) = product {
                product.wait();
            }
            if let Some(other) = other {
                other.release(); // while the last columns are multiplied
            }
            product_of_last.wait();
            slot.release_unfenced();
            last.release();
        });
        let end = ends.wait();
        let inverse = load_factors(b, end.tile());
        end.release_unfenced();
        let (work, columns) = (again(), fwd.columns(1));
        let row = fwd.first_row(&work, b.value(0));
        let o = o.beside(o_last);
        let results = epilogue::Results { o, v_scale: None, inverse, lse: None, of_keys: None, columns };
        epilogue::write(fwd, results, &work, row);
    });
}
