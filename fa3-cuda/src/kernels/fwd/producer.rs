//! The producer: it loads Q, K and V of every work tile as soon as pipeline stages are free, and transposes e4m3 V.

use fa3_ir::lang::*;

use super::converted_rows;
use super::spec::Loading;
use super::state::Fwd;
use crate::kernels::parts::gather::CopiedPart;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::FINDER;
use crate::kernels::parts::tma_pipeline::{Keys, TmaPipeline, TmaProducer};

/// Runs the producer's warps.
pub(super) fn run(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let warp = || (b.tid() >> 5).shfl_idx(0);
    let is = |number: u32| warp().eq(number);
    let transpose = || {
        if let Some(transposed) = &fwd.transposed {
            transposed.run(b, &fwd.scheduler, &fwd.v, &fwd.spec.tile);
        }
    };
    let [of_k, of_v] = parts(fwd);
    match fwd.spec.loading() {
        Loading::Thread if fwd.transposed.is_none() => load(fwd),
        Loading::Thread => {
            let loads = warp().eq(0);
            b.if_else_uniform(loads, || load(fwd), transpose);
        }
        Loading::Ranges => {
            b.if_uniform(is(0), || load_ranges(fwd, true));
            b.if_uniform(is(FINDER), || fwd.scheduler.find());
        }
        Loading::Blocks => load_ranges(fwd, false),
        Loading::WarpEach if fwd.spec.finds_ranges() => {
            b.if_uniform(is(0), || load_queries_in_warp(fwd));
            b.if_uniform(is(1), || load_ranges_in_warp(fwd, &of_k, 1));
            b.if_uniform(is(2), || load_ranges_in_warp(fwd, &of_v, 2));
            b.if_uniform(is(FINDER), || fwd.scheduler.find());
        }
        Loading::WarpEach => {
            b.if_uniform(is(0), || load_queries(fwd));
            b.if_uniform(is(1), || load_in_warp(fwd, &of_k, 1));
            b.if_uniform(is(2), || load_in_warp(fwd, &of_v, 2));
        }
        Loading::WarpForBoth => {
            b.if_uniform(is(0), || load_queries(fwd));
            b.if_uniform(is(1), || load_both_in_warp(fwd));
            b.if_uniform(warp().gt(1), transpose);
        }
        Loading::Gathered => {
            let number = warp();
            let feeds = number.eq(0);
            b.if_else_uniform(feeds, || feed(fwd, &of_k, &of_v), || gather(fwd, &of_k, &of_v, number - 1));
        }
        Loading::Converted => converted_rows::run(fwd, [&of_k, &of_v]),
    }
}

/// The pipelines of K and the pipelines of V. Each pipeline has a part of the columns.
fn parts<'f, 'k>(fwd: &'f Fwd<'k>) -> [Vec<&'f TmaPipeline<'k>>; 2] {
    let of_k = [Some(&fwd.k), fwd.k_second.as_ref()].into_iter().flatten().collect();
    [of_k, std::iter::once(&fwd.v).chain(&fwd.v_second).collect()]
}

/// Loads in one thread. Blocks go from the last to the first, K one block ahead of V, as consumers read them. The next
/// tile's loads follow at once, while consumers still compute this tile. V is loaded before K where waiting for a stage
/// of K would delay V.
fn load(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    b.once_per_role(|| {
        let (mut q, mut k, mut v) = (fwd.q.producer(), fwd.k.producer(), fwd.v.producer());
        let mut k_second = fwd.k_second.as_ref().map(TmaPipeline::producer);
        let mut second: Vec<_> = fwd.v_second.iter().map(TmaPipeline::producer).collect();
        let mut qv = fwd.qv.as_ref().map(|qv| qv.producer());
        let keys = fwd.spec.tile.tile_n;
        scheduler.produce(|work, _, fetch_next| {
            let WorkTile { head, kv_head, row, kv, .. } = work;
            let [of_q, of_k, of_v] = fwd.sequences(&work);
            let visits = kv.first.lt(kv.end);
            let first = kv.first * keys;
            b.if_uniform(visits, || {
                let last = kv.end * keys - keys;
                k.load(kv_head, last, of_k);
                if let Some(k_second) = &mut k_second {
                    k_second.load(kv_head, last, of_k);
                }
                q.load(head, row, of_q); // A1:4-5
                if let Some(qv) = &mut qv {
                    qv.load(head, row, fwd.latent_sequence(&work));
                }
                b.for_each((0, last - first), keys, |loaded| {
                    // A1:6
                    let key = last - loaded;
                    match (&mut second[..], fwd.spec.tile.loads_v_first()) {
                        ([], false) => {
                            k.load(kv_head, key - keys, of_k);
                            v.load(kv_head, key, of_v);
                        }
                        ([], true) => {
                            v.load(kv_head, key, of_v);
                            k.load(kv_head, key - keys, of_k);
                        }
                        (second, false) => {
                            v.load(kv_head, key, of_v);
                            k.load(kv_head, key - keys, of_k);
                            if let Some(k_second) = &mut k_second {
                                k_second.load(kv_head, key - keys, of_k);
                            }
                            second.iter_mut().for_each(|second| second.load(kv_head, key, of_v));
                        }
                        (second, true) => {
                            v.load(kv_head, key, of_v);
                            second.iter_mut().for_each(|second| second.load(kv_head, key, of_v));
                            k.load(kv_head, key - keys, of_k);
                        }
                    }
                });
            });
            // Fetched while the last load waits for its stage.
            fetch_next();
            b.if_uniform(visits, || {
                v.load(kv_head, first, of_v);
                second.iter_mut().for_each(|second| second.load(kv_head, first, of_v));
            });
        });
    });
}

/// Loads the blocks under a mask of intervals in the order of `load`: in a warp, if another warp finds these blocks, or
/// in one thread, if bits show them.
fn load_ranges<'k>(fwd: &Fwd<'k>, in_warp: bool) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    let load = |tensor: &mut TmaProducer<'k>, head, row, of| match in_warp {
        true => tensor.load_in_warp(head, row, &Keys::Of(of)),
        false => tensor.load(head, row, of),
    };
    let run = || {
        let mut q = fwd.q.producer();
        let [mut k, mut v] =
            parts(fwd).map(|of| of.into_iter().map(TmaPipeline::producer).collect::<Vec<_>>());
        // If V has two parts, the first one is loaded before K in any case.
        let before_k = v.len() - usize::from(!fwd.spec.tile.loads_v_first());
        scheduler.produce(|work, _, fetch_next| {
            let work = fwd.cut(work, in_warp);
            let WorkTile { head, kv_head, row, kv, .. } = work;
            let [of_q, of_k, of_v] = fwd.sequences(&work);
            let load_all = |parts: &mut [TmaProducer<'k>], key, of| {
                parts.iter_mut().for_each(|part| load(part, kv_head, key, of));
            };
            let visits = kv.first.lt(kv.end);
            let blocks = fwd.blocks_by(&work, in_warp, None);
            let key = b.var("key", blocks.first_key());
            b.if_uniform(visits, || {
                load_all(&mut k, key.get(), of_k);
                load(&mut q, head, row, of_q); // A1:4-5
                blocks.for_each_unmasked(1, |block| {
                    // A1:6
                    let before = key.get();
                    load_all(&mut v[..before_k], before, of_v);
                    load_all(&mut k, block.key, of_k);
                    load_all(&mut v[before_k..], before, of_v);
                    key.set(block.key);
                });
            });
            // Meanwhile another warp, if any, finds the blocks that the next tile visits.
            fetch_next();
            b.if_uniform(visits, || load_all(&mut v, key.get(), of_v));
        });
    };
    if in_warp { run() } else { b.once_per_role(run) }
}

/// Loads Q in one thread, and sends work tiles to the warps that load K and V.
fn load_queries(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    b.once_per_role(|| {
        let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
        scheduler.produce(|work, _, fetch_next| {
            let [of_q, ..] = fwd.sequences(&work);
            let visits = work.kv.first.lt(work.kv.end);
            b.if_uniform(visits, || {
                q.load(work.head, work.row, of_q); // A1:4-5
                if let Some(qv) = &mut qv {
                    qv.load(work.head, work.row, fwd.latent_sequence(&work));
                }
            });
            fetch_next();
        });
    });
}

/// Loads the blocks of tensor `of` (K is 1, V is 2) in a warp, from the last to the first.
fn load_in_warp<'k>(fwd: &Fwd<'k>, pipelines: &[&TmaPipeline<'k>], of: usize) {
    let mut loaders: Vec<_> = pipelines.iter().map(|pipeline| pipeline.producer()).collect();
    let b = fwd.builder;
    let keys = fwd.spec.tile.tile_n;
    fwd.scheduler.consume(|work, _| {
        let WorkTile { kv_head, kv, .. } = work;
        let of = keys_of(fwd, &work, of);
        let last = kv.end * keys - keys;
        b.for_each((0, (kv.end - kv.first) * keys), keys, |loaded| {
            TmaProducer::load_parts_in_warp(&mut loaders, kv_head, last - loaded, &of); // A1:6
        });
    });
}

/// Loads Q in a warp, and requests work tiles from the warp that finds them.
fn load_queries_in_warp(fwd: &Fwd<'_>) {
    let (b, scheduler, mut q) = (fwd.builder, fwd.scheduler.begin(), fwd.q.producer());
    scheduler.produce(|work, _, fetch_next| {
        let [of_q, ..] = fwd.sequences(&work).map(Keys::Of);
        let visits = work.kv.first.lt(work.kv.end);
        b.if_uniform(visits, || q.load_in_warp(work.head, work.row, &of_q)); // A1:4-5
        fetch_next();
    });
}

/// Loads the blocks of tensor `of` (K is 1, V is 2) in a warp, in the ranges that another warp finds.
fn load_ranges_in_warp<'k>(fwd: &Fwd<'k>, pipelines: &[&TmaPipeline<'k>], of: usize) {
    let mut loaders: Vec<_> = pipelines.iter().map(|pipeline| pipeline.producer()).collect();
    fwd.scheduler.consume(|work, _| {
        let of = keys_of(fwd, &work, of);
        fwd.blocks(&work).for_each_unmasked(0, |block| {
            TmaProducer::load_parts_in_warp(&mut loaders, work.kv_head, block.key, &of); // A1:6
        });
    });
}

/// Copies the blocks of K and V row by row, in copying warp number `warp`: from the last to the first in pages, from
/// the first to the last in lists.
fn gather<'k>(fwd: &Fwd<'k>, k: &[&TmaPipeline<'k>], v: &[&TmaPipeline<'k>], warp: U32<'k>) {
    let b = fwd.builder;
    // A warp has few registers, and all pipelines are at the same stage.
    let rounds = Rounds::begin(b);
    let pipelines = [k, v].into_iter().enumerate();
    let parts = pipelines.flat_map(|(of, pipelines)| pipelines.iter().map(move |pipeline| (of, *pipeline)));
    let mut parts: Vec<_> =
        parts.filter_map(|(of, pipeline)| CopiedPart::new(pipeline, of, rounds)).collect();
    let mut seen = fwd.seen.as_ref().map(|seen| seen.producer_by(rounds));
    fwd.scheduler.consume(|work, _| {
        let kv = work.kv;
        b.if_uniform(kv.first.lt(kv.end), || {
            let Some(gather) = fwd.gather(&work, warp) else { return };
            gather.load(&mut parts, seen.as_mut(), rounds); // A1:6-8
        });
    });
}

/// Loads the blocks of K and of V in one warp, in the order of `load`.
fn load_both_in_warp(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let (mut k, mut v) = (fwd.k.producer(), fwd.v.producer());
    let keys = fwd.spec.tile.tile_n;
    fwd.scheduler.consume(|work, _| {
        let WorkTile { kv_head, kv, .. } = work;
        let [of_k, of_v] = [1, 2].map(|of| keys_of(fwd, &work, of));
        let (first, last) = (kv.first * keys, kv.end * keys - keys);
        b.if_uniform(kv.first.lt(kv.end), || {
            k.load_in_warp(kv_head, last, &of_k); // A1:6
            b.for_each((0, last - first), keys, |loaded| {
                let key = last - loaded;
                k.load_in_warp(kv_head, key - keys, &of_k);
                v.load_in_warp(kv_head, key, &of_v);
            });
            v.load_in_warp(kv_head, first, &of_v);
        });
    });
}

/// Feeds consumers in one thread: sends work tiles, loads Q, and fences the blocks of K and V that other warps have
/// copied and commits them, in the consumers' order. The last block of a work tile comes after the next work tile has
/// been sent, so that the other warps begin early to copy blocks of the next one. Q of the next work tile comes behind
/// the last block, whose scores give Q's stage back.
fn feed<'k>(fwd: &Fwd<'k>, k: &[&TmaPipeline<'k>], v: &[&TmaPipeline<'k>]) {
    let b = fwd.builder;
    let scheduler = fwd.scheduler.begin();
    b.once_per_role(|| {
        let (mut q, mut qv) = (fwd.q.producer(), fwd.qv.as_ref().map(|qv| qv.producer()));
        let pipelines = k.iter().chain(v).filter_map(|pipeline| pipeline.copied());
        let mut pipelines: Vec<_> = pipelines.map(|(pipeline, _)| pipeline.fence()).collect();
        let mut pass = |blocks: (U32<'k>, U32<'k>)| {
            b.for_each(blocks, 1, |_| pipelines.iter_mut().for_each(|pipeline| pipeline.pass())); // A1:9
        };
        let last = b.var("blocks left", 0);
        scheduler.produce(|work, _, fetch_next| {
            let (WorkTile { head, row, kv, .. }, [of_q, ..]) = (work, fwd.sequences(&work));
            pass((b.value(0), last.get()));
            let visits = kv.first.lt(kv.end);
            last.set(visits.select::<B32>(1, 0));
            b.if_uniform(visits, || {
                q.load(head, row, of_q); // A1:4-5
                if let Some(qv) = &mut qv {
                    qv.load(head, row, fwd.latent_sequence(&work));
                }
            });
            fetch_next();
            pass((kv.first + 1, kv.end));
        });
        pass((b.value(0), last.get()));
    });
}

/// The keys of a work tile as loads of tensor `of` (K is 1, V is 2) address them.
fn keys_of<'k>(fwd: &Fwd<'k>, work: &WorkTile<'k>, of: usize) -> Keys<'k> {
    fwd.pages(work, of).map_or_else(|| Keys::Of(fwd.sequences(work)[of]), Keys::InPages)
}
