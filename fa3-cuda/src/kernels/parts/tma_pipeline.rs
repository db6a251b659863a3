//! TMA loads of tiles through a pipeline (CUTLASS: `PipelineTmaAsync`), and pipelines of the same tiles that warps copy
//! or convert.

use std::ops::Range;

use fa3_ir::lang::*;

use super::pages::PageSpan;
use super::ragged::RowSpan;
use super::seen::COPIERS;

/// A tensor whose tiles go through a pipeline.
pub(crate) struct TmaPipeline<'k> {
    source: Source<'k>,
    along: Along,
    stages: Pipeline<'k, 1>,
    /// The tensor's column with which tiles begin.
    col: u32,
    /// The rows of its tiles that it has.
    rows: Range<u32>,
    /// The part of each tile that this CTA multicasts to its cluster; `None` if the CTA loads whole tiles for itself.
    part: Option<U32<'k>>,
}

/// The source of a pipeline's tiles.
enum Source<'k> {
    /// TMA copies by a tensor map.
    Tiles(TileMap),
    /// Warps that copy rows.
    Rows(CpAsyncPipeline<'k, 1>),
    /// Warps that store rows.
    Stores,
}

/// The producer's end of the pipeline: the thread that issues loads.
pub(crate) struct TmaProducer<'k> {
    map: TileMap,
    /// Number of rows of a tile. The map may copy fewer rows at a time.
    tile_rows: u32,
    along: Along,
    col: u32,
    stages: Producer<'k, 1>,
    part: Option<U32<'k>>,
}

/// The multicast mask of both CTAs of a cluster.
const BOTH: u16 = 0b11;

/// The dimension of the tensor along which the rows of a tile run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    /// The rows of a tile have the columns of a head. Dimensions are head_dim, heads, rows, sequences.
    HeadDim,
    /// The rows of a tile have the rows of a sequence. Dimensions are rows, head_dim, heads, sequences.
    Seqlen,
}

/// The sequence whose rows are loaded.
#[derive(Clone, Copy)]
pub(crate) enum Sequence<'k> {
    /// The sequence with this index, in a tensor that has a dimension of sequences.
    Number(U32<'k>),
    /// A span of rows of memory, in a tensor map of [`ragged`](super::ragged).
    Rows(RowSpan<'k>),
    /// A span of rows of memory, in a tensor map whose tiles have rows of this number of heads (PackGQA). A tile's
    /// heads have one index.
    RowsOfHeads(RowSpan<'k>, u32),
}

/// Keys whose tiles a warp loads.
pub(crate) enum Keys<'k> {
    /// The rows of a sequence.
    Of(Sequence<'k>),
    /// Rows of pages.
    InPages(PageSpan<'k>),
}

impl<'k> From<U32<'k>> for Sequence<'k> {
    fn from(number: U32<'k>) -> Sequence<'k> {
        Sequence::Number(number)
    }
}

impl<'k> Sequence<'k> {
    /// Loads a tile into a stage: the tile of a head that begins with a row of the sequence.
    #[track_caller]
    pub(crate) fn load<const N: usize>(
        &self,
        stage: &mut EmptyStage<'k, N>,
        index: usize,
        map: &TileMap,
        at: [U32<'k>; 2],
    ) {
        self.load_from(stage, index, map, (0, at));
    }

    /// Loads a tile into a stage: the tile of a head that begins with a column and a row of the sequence.
    #[track_caller]
    fn load_from<const N: usize>(
        &self,
        stage: &mut EmptyStage<'k, N>,
        index: usize,
        map: &TileMap,
        (col, [head, row]): (u32, [U32<'k>; 2]),
    ) {
        match self {
            Sequence::Number(batch) => stage.load(index, map, (col, head, row, *batch)),
            Sequence::Rows(rows) => stage.load(index, map, rows.coords(head, row).at_column(col)),
            Sequence::RowsOfHeads(rows, heads) => {
                stage.load_first_rows(index, map, rows.coords_of_heads(head * *heads, row));
            }
        }
    }
}

impl<'k> TmaPipeline<'k> {
    fn new(source: Source<'k>, stages: Pipeline<'k, 1>) -> TmaPipeline<'k> {
        let [tile] = stages.tiles_of(0);
        let rows = 0..tile.shape().rows;
        TmaPipeline { source, along: Along::HeadDim, stages, col: 0, rows, part: None }
    }

    /// Declares a pipeline of `stages` tiles of the map's shape, which `consumers` warps release.
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        [stages, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        TmaPipeline::declare_rows(b, name, map, map.shape().rows, [stages, consumers])
    }

    /// Like `declare`, for tiles of `rows` rows, where one copy of `map` has fewer rows.
    #[track_caller]
    pub(crate) fn declare_rows(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        rows: u32,
        [stages, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        let stages = b.pipeline(name, stages, consumers, [(name, TileShape { rows, ..map.shape() })]);
        TmaPipeline::new(Source::Tiles(map), stages)
    }

    /// Like `declare`, for a transposed tensor. Each stage ends with `more` extra rows that loads never write.
    #[track_caller]
    pub(crate) fn declare_transposed(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        more: u32,
        [stages, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        let rows = map.shape().rows + more;
        let along = Along::Seqlen;
        TmaPipeline { along, ..TmaPipeline::declare_rows(b, name, map, rows, [stages, consumers]) }
    }

    /// Like `declare`, for tiles shared by a cluster: each CTA loads the rows that `map` copies, and multicasts them.
    #[track_caller]
    pub(crate) fn declare_shared(
        b: &'k Builder,
        name: &str,
        map: TileMap,
        [stages, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        let cluster = b.launch().cluster;
        if cluster == 1 {
            return TmaPipeline::declare(b, name, map, [stages, consumers]);
        }
        let shape = TileShape { rows: map.shape().rows * cluster, ..map.shape() };
        let stages = b.cluster_pipeline(name, stages, consumers, [(name, shape)]);
        let part = Some(b.cluster_cta_rank());
        TmaPipeline { part, ..TmaPipeline::new(Source::Tiles(map), stages) }
    }

    /// Like `declare`, for tiles that warps copy row by row.
    #[track_caller]
    pub(crate) fn declare_copied(
        b: &'k Builder,
        name: &str,
        shape: TileShape,
        [stages, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        let copied = b.cp_async_pipeline(name, stages, [COPIERS, consumers], [(name, shape)]);
        let stages = copied.pipeline().clone();
        TmaPipeline::new(Source::Rows(copied), stages)
    }

    /// Like `declare`, for tiles whose rows `producers` warps store.
    #[track_caller]
    pub(crate) fn declare_stored(
        b: &'k Builder,
        name: &str,
        shape: TileShape,
        stages: u32,
        [producers, consumers]: [u32; 2],
    ) -> TmaPipeline<'k> {
        let stages = b.stored_pipeline(name, stages, [producers, consumers], [(name, shape)]);
        TmaPipeline::new(Source::Stores, stages)
    }

    /// Makes tiles begin with column `col` of the tensor.
    pub(crate) fn at_column(self, col: u32) -> TmaPipeline<'k> {
        TmaPipeline { col, ..self }
    }

    /// Divides a pipeline of tiles that warps copy: it keeps the first `count` rows, and a pipeline of this name has
    /// the others. Stages of both have whole tiles.
    #[track_caller]
    pub(crate) fn split_rows(self, name: &str, count: u32) -> [TmaPipeline<'k>; 2] {
        let Source::Rows(copied) = &self.source else { unreachable!("a tensor map copies whole tiles") };
        let (copied, rows) = (copied.of_same_tiles(name), self.rows.clone());
        let stages = copied.pipeline().clone();
        let others = TmaPipeline {
            col: self.col,
            rows: count..rows.end,
            ..TmaPipeline::new(Source::Rows(copied), stages)
        };
        [TmaPipeline { rows: rows.start..count, ..self }, others]
    }

    /// The rows of its tiles that it has: all, unless the pipeline was divided.
    pub(crate) fn rows(&self) -> Range<u32> {
        self.rows.clone()
    }

    /// Number of columns of a tile.
    pub(crate) fn cols(&self) -> u32 {
        let [tile] = self.stages.tiles_of(0);
        tile.shape().cols
    }

    /// The pipeline itself.
    pub(crate) fn stages(&self) -> &Pipeline<'k, 1> {
        &self.stages
    }

    /// The first column of its tiles in the tensor.
    pub(crate) fn first_col(&self) -> u32 {
        self.col
    }

    /// The pipeline for warps that copy rows, and the first column of its tiles; `None` if no warp copies them.
    pub(crate) fn copied(&self) -> Option<(&CpAsyncPipeline<'k, 1>, u32)> {
        match &self.source {
            Source::Tiles(_) | Source::Stores => None,
            Source::Rows(pipeline) => Some((pipeline, self.col)),
        }
    }

    /// The producer's end, for loads by a tensor map.
    #[track_caller]
    pub(crate) fn producer(&self) -> TmaProducer<'k> {
        let Source::Tiles(map) = self.source else { unreachable!("rows that warps copy have no tensor map") };
        let [tile] = self.stages.tiles_of(0);
        let tile_rows = tile.shape().rows;
        let &TmaPipeline { along, col, part, .. } = self;
        TmaProducer { map, tile_rows, along, col, stages: self.stages.producer(), part }
    }

    /// The consumer's end.
    #[track_caller]
    pub(crate) fn consumer(&self) -> Consumer<'k, 1> {
        self.stages.consumer()
    }
}

impl<'k> TmaProducer<'k> {
    /// Loads the tile of `head` that begins with `row`.
    #[track_caller]
    pub(crate) fn load(&mut self, head: U32<'k>, row: U32<'k>, of: impl Into<Sequence<'k>>) {
        let mut stage = self.stages.acquire(); // A1:7
        match (of.into(), self.along, self.part) {
            (of @ (Sequence::Rows(_) | Sequence::RowsOfHeads(..)), ..) => {
                of.load_from(&mut stage, 0, &self.map, (self.col, [head, row]));
            }
            // A1:8, the copy itself
            (Sequence::Number(batch), Along::HeadDim, None) => {
                stage.load(0, &self.map, (self.col, head, row, batch))
            }
            (Sequence::Number(batch), Along::HeadDim, Some(part)) => {
                let row = part.mad(self.map.shape().rows, row);
                stage.load_part(0, &self.map, (self.col, head, row, batch), part, BOTH);
            }
            (Sequence::Number(batch), Along::Seqlen, _) => {
                stage.load_first_rows(0, &self.map, (row, self.col, head, batch));
            }
        }
        stage.commit(); // A1:9
    }

    /// Loads the tile of `head` that begins with `row`, in a whole warp, one thread of which issues the copies.
    /// Arguments must be equal in all lanes, and the compiler must know it, or it wraps each copy in a loop over the
    /// lanes' values.
    #[track_caller]
    pub(crate) fn load_in_warp(&mut self, head: U32<'k>, row: U32<'k>, of: &Keys<'k>) {
        TmaProducer::load_parts_in_warp(std::slice::from_mut(self), head, row, of);
    }

    /// Like `load_in_warp`, for several loaders, one after another, that have different columns of the same rows.
    #[track_caller]
    pub(crate) fn load_parts_in_warp(
        loaders: &mut [TmaProducer<'k>],
        head: U32<'k>,
        row: U32<'k>,
        of: &Keys<'k>,
    ) {
        let Some(first) = loaders.first() else { return };
        match of {
            Keys::Of(sequence) => {
                for TmaProducer { map, col, stages, .. } in loaders {
                    stages.fill_by_warp(|mut stage| {
                        sequence.load_from(&mut stage, 0, map, (*col, [head, row])); // A1:7-8
                        stage.commit(); // A1:9
                    });
                }
            }
            Keys::InPages(pages) => {
                let rows = first.map.shape().rows;
                // Pages are looked up before the wait for the stage, because the look-up may take as long as the wait.
                let blocks = pages.blocks(head, row, (first.tile_rows / rows, rows));
                for TmaProducer { map, col, stages, .. } in loaders {
                    stages.fill_by_warp(|mut stage| {
                        stage.load_blocks(0, map, blocks.iter().map(|block| block.at_column(*col))); // A1:7-8
                        stage.commit(); // A1:9
                    });
                }
            }
        }
    }
}
