//! Pipelines that a warp fills by cp.async: copies of 16 bytes a thread, each thread from its own addresses.
//!
//! These copies write through the generic proxy, and products read through the async proxy, so that a fence must lie
//! between the two. A warp that executes the fence first has to wait for the copies, so neither the copying warp nor a
//! computing warp should execute it. The pipeline's [`FenceWarp`] does: it waits until the copies of a stage have
//! landed, executes the fence, and passes the stage on.

use super::{Cursor, Pipeline};
use crate::lang::{Builder, Tile, TileShape};
use crate::{FenceInst, Region};

/// Threads of a warp, each of which arrives when its copies are complete.
const LANES: u32 = 32;

/// A pipeline whose stages one warp fills by [`Builder::copy_async`] and another warp passes on.
#[derive(Clone, Debug)]
pub struct CpAsyncPipeline<'k, const N: usize> {
    pipeline: Pipeline<'k, N>,
    /// The mbarriers of stages whose copies are complete.
    landed: Region,
}

impl Builder {
    /// Declares a pipeline of `stages` stages with these tiles. One warp fills them by copies of 16 bytes a thread,
    /// another warp fences, and `consumers` warps empty them.
    #[track_caller]
    pub fn cp_async_pipeline<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> CpAsyncPipeline<'_, N> {
        let pipeline = self.pipeline(name, stages, consumers, tiles);
        CpAsyncPipeline { pipeline, landed: self.mbarriers(&format!("{name} landed"), stages, LANES) }
    }
}

impl<'k, const N: usize> CpAsyncPipeline<'k, N> {
    /// The pipeline that the consumers see.
    pub fn pipeline(&self) -> &Pipeline<'k, N> {
        &self.pipeline
    }

    /// The position of the copying warp: all stages are empty.
    #[track_caller]
    pub fn producer(&self) -> CpAsyncProducer<'k, N> {
        CpAsyncProducer { cursor: Cursor::new(&self.pipeline, 1), landed: self.landed }
    }

    /// The position of the fencing warp.
    #[track_caller]
    pub fn fence_warp(&self) -> FenceWarp<'k, N> {
        FenceWarp { cursor: Cursor::new(&self.pipeline, 0), landed: self.landed }
    }
}

/// Fills a pipeline by copies. Exactly one warp uses this value.
#[derive(Debug)]
pub struct CpAsyncProducer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<'k, const N: usize> CpAsyncProducer<'k, N> {
    /// Waits until the next stage is empty, and runs `copy` in all lanes, which begins to copy to the stage's tiles.
    #[track_caller]
    pub fn fill(&mut self, copy: impl FnOnce([Tile<'_, 'k>; N])) {
        let pipeline = &self.cursor.pipeline;
        let stage = {
            let _one = pipeline.builder.as_one();
            self.cursor.next(pipeline.empty)
        };
        copy(pipeline.tiles(stage));
        let _one = pipeline.builder.as_one();
        pipeline.builder.mbarrier_arrive_copied(pipeline.barrier(self.landed, stage));
    }
}

/// Passes the filled stages of a pipeline on. Exactly one warp uses this value.
#[derive(Debug)]
pub struct FenceWarp<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<const N: usize> FenceWarp<'_, N> {
    /// Waits until the copies to the next stage are complete, and passes it to the consumers: products may read it.
    #[track_caller]
    pub fn pass(&mut self) {
        let pipeline = &self.cursor.pipeline;
        let b = pipeline.builder;
        let _one = b.as_one();
        let stage = self.cursor.next(self.landed);
        b.once_per_warp(|| {
            b.fence(FenceInst::ProxyAsyncShared);
            b.mbarrier_arrive(pipeline.barrier(pipeline.full, stage));
        });
    }
}
