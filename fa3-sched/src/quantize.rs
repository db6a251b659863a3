//! Plans of quantization: how a tensor's rows are cut into tiles, and which elements each thread has.

mod channels;
mod maxima;
mod packed;

use std::fmt;

pub use channels::{ChannelPlan, GROUPS, PART_ROWS};
use fa3_types::{QuantizeProblem, RopeStyle, ScaleBlocks, Scaling, Shape, ValueLayout};
pub use maxima::MaximaPlan;
pub use packed::{Packed, PlanError};

use crate::{Decoder, DeviceLimits, Order, TileCounts, TooManyTiles};

/// Elements of one load of a thread: 16 bytes.
pub const CHUNK: u32 = 8;

/// Numbers of tiles per run, the largest first. Longer runs were slower: memory is read fastest if CTAs read
/// neighbouring heads.
const RUNS: [u32; 3] = [4, 2, 1];

/// Threads per SM, with 32 elements each. With twice the threads, each thread had too few registers to overlap
/// anything.
const THREADS: u32 = 512;

/// Threads per SM for wide rows, with 64 elements each. Fewer elements pass between threads in the transform, and a
/// thread has registers for the same number of angles.
const WIDE_THREADS: u32 = 256;

/// Registers of an SM.
const REGISTERS: u32 = 65536;

/// Bytes in flight that keep device memory busy.
const IN_FLIGHT: u32 = 96 << 10;

/// Bytes of shared memory that a CTA needs besides tiles: signs, maxima, mbarriers, and bytes lost to alignment and to
/// the driver.
const OTHER_SMEM: u32 = 4 << 10;

/// Rows of one head, and the threads of a CTA. The rows share a scale, together with the rows of the cluster's other
/// CTA if there is one.
///
/// `lanes` neighbouring threads share a row. Lane l has the row's chunks l, l + lanes, l + 2 · lanes, …
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows per CTA.
    pub rows: u32,
    /// Elements per row.
    pub head_dim: u32,
    /// Threads per row: 1, 2, 4 or 8.
    pub lanes: u32,
    /// Pipeline stages: tiles that are loaded ahead.
    pub stages: u32,
    /// CTAs per cluster, 1 or 2. If there are two, each has half of the rows that share a scale.
    pub cluster: u32,
    /// CTAs per SM: some compute while others wait for each other.
    pub ctas_per_sm: u32,
}

impl Tile {
    fn of(problem: &QuantizeProblem, limits: &DeviceLimits) -> Tile {
        let head_dim = problem.x().shape.head_dim as u32;
        let rows = match problem.scaling() {
            Scaling::Block { rows } => rows as u32,
            Scaling::Heads { .. } | Scaling::Tensor | Scaling::Given(_) | Scaling::Channel => 128,
        };
        let (threads, lanes) = if head_dim > 128 && has_work(problem) {
            (WIDE_THREADS, lanes(problem, head_dim.div_ceil(64)))
        } else {
            (THREADS, lanes(problem, head_dim.div_ceil(32).min(THREADS / rows)))
        };
        // If a CTA is alone on an SM, the SM is idle while the CTA waits for its maximum. Codes are transposed 64 rows
        // at a time.
        let has_an_sm = rows * lanes > threads / 2;
        let has_halves = problem.layout() == ValueLayout::Rows || rows == 128;
        let halves = if has_work(problem) && has_an_sm && has_halves { 2 } else { 1 };
        let (parts, cluster) = match problem.scaling() {
            Scaling::Block { .. } => (halves, halves),
            Scaling::Heads { .. } | Scaling::Tensor => (halves, 1),
            Scaling::Given(_) | Scaling::Channel => (1, 1),
        };
        let rows = (rows / parts).min(threads / lanes);
        let ctas_per_sm = (threads / (rows * lanes)).clamp(1, 4);
        let tile = Tile { rows, head_dim, lanes, stages: 0, cluster, ctas_per_sm };
        let stage = 2 * rows * head_dim.next_multiple_of(64);
        let stages = (IN_FLIGHT / (stage * tile.ctas_per_sm)).clamp(2, 8);
        let stages = match problem.layout() {
            ValueLayout::Rows => stages,
            // The tiles of codes of all CTAs of an SM need room beside the stages.
            ValueLayout::Transposed => {
                let others = OTHER_SMEM + rows * tile.codes_cols();
                let left = (limits.smem_bytes / tile.ctas_per_sm).saturating_sub(others);
                stages.min(left / stage).max(1)
            }
        };
        Tile { stages, ..tile }
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> u32 {
        self.rows * self.lanes
    }

    /// Rows that share a scale, if blocks have scales.
    pub fn block_rows(&self) -> u32 {
        self.rows * self.cluster
    }

    /// Number of registers of a thread in which cosines and sines may stay from one head to the next. Together with the
    /// elements they take half of the thread's registers.
    pub fn registers_for_angles(&self) -> u32 {
        (REGISTERS / (self.threads() * self.ctas_per_sm) / 2).saturating_sub(CHUNK * self.chunks())
    }

    /// Columns of the tile in which codes are transposed: whole panels, whose rows are in different banks.
    pub fn codes_cols(&self) -> u32 {
        self.head_dim.next_multiple_of(if self.head_dim <= 64 { 64 } else { 128 })
    }

    /// Chunks per thread.
    pub fn chunks(&self) -> u32 {
        self.head_dim / (CHUNK * self.lanes)
    }
}

/// Whether a thread does more with each element than scale it.
fn has_work(problem: &QuantizeProblem) -> bool {
    problem.rotary().is_some() || problem.signs().is_some() || problem.scaling() == Scaling::Channel
}

/// Largest number of lanes, at most `most` rounded up to a power of two, whose chunks together divide every boundary
/// within a row: head_dim, the offset of the trailing transform, and the bounds of rotated elements. Then a lane has
/// both elements of each rotated pair, and an element stays in its lane in the trailing transform.
fn lanes(problem: &QuantizeProblem, most: u32) -> u32 {
    let head_dim = problem.x().shape.head_dim as u32;
    let trailing = head_dim - (1 << head_dim.ilog2());
    let rotary = problem.rotary().map_or(0, |rotary| match rotary.style {
        RopeStyle::Interleaved => rotary.rotary_dim as u32,
        RopeStyle::HalfSplit => rotary.rotary_dim as u32 / 2,
    });
    let divides = |lanes: &u32| [head_dim, trailing, rotary].iter().all(|n| n.is_multiple_of(CHUNK * lanes));
    [8, 4, 2].into_iter().filter(|&lanes| lanes <= most.next_power_of_two()).find(divides).unwrap_or(1)
}

/// How scales are found.
#[derive(Clone, Copy, Debug)]
pub enum Scales {
    /// Each block of rows has a scale, which the CTA of its tile finds.
    Blocks,
    /// One given scale for all rows.
    Given(f32),
    /// Scales of heads, or one scale of the tensor: a pass beforehand finds the largest magnitude of each tile.
    Maxima(MaximaPlan),
    /// Scales and means of channels: a pass beforehand sums the columns of V.
    Channels(ChannelPlan),
}

impl Scales {
    /// Decides how scales of a problem are found, in tiles of `rows` rows.
    fn of(problem: &QuantizeProblem, rows: u32) -> Result<Scales, TooManyTiles> {
        let Shape { batch, heads, .. } = problem.x().shape;
        Ok(match problem.scaling() {
            Scaling::Block { .. } => Scales::Blocks,
            Scaling::Given(scale) => Scales::Given(scale),
            Scaling::Heads { heads } => Scales::Maxima(MaximaPlan::new(problem, heads, rows)?),
            Scaling::Tensor => Scales::Maxima(MaximaPlan::new(problem, batch * heads, rows)?),
            Scaling::Channel => Scales::Channels(ChannelPlan::new(problem.x().shape)?),
        })
    }
}

/// How a tensor is quantized on a device.
///
/// Heads vary fastest. Tiles are cut into runs of a few tiles, which CTAs or clusters take in turn: CTA c computes runs
/// c, c + CTAs, c + 2 · CTAs, … The tiles of a run are mostly heads of the same rows, so that threads load cosines and
/// sines once.
///
/// ```
/// use fa3_sched::{DeviceLimits, quantize::Plan};
/// use fa3_types::{Dtype, QuantizeSpec, Shape};
///
/// let shape = Shape { batch: 1, seqlen: 16384, heads: 16, head_dim: 128 };
/// let problem = QuantizeSpec::contiguous(Dtype::Bf16, shape).validate()?;
/// let plan = Plan::new(&problem, &DeviceLimits::h100_sxm())?;
/// assert_eq!((plan.num_tiles(), plan.run(), plan.grid()), (128 * 16, 4, 132));
/// assert_eq!((plan.tile().threads(), plan.tile().chunks()), (512, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: QuantizeProblem,
    tile: Tile,
    blocks: u32,
    tiles: u32,
    run: u32,
    clusters: u32,
    decoder: Option<Decoder<u32>>,
    scales: Scales,
    packed: Option<Packed>,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(problem: &QuantizeProblem, limits: &DeviceLimits) -> Result<Plan, PlanError> {
        let (tile, shape) = (Tile::of(problem, limits), problem.x().shape);
        let packed = Packed::of(problem)?;
        let blocks = match problem.packed() {
            None => (shape.seqlen as u32).div_ceil(tile.block_rows()),
            // A number of sequences beyond 32 bits means too many tiles.
            Some(sequences) => {
                let blocks = ScaleBlocks::packed(shape.seqlen, sequences, tile.block_rows() as usize);
                u32::try_from(blocks.count()).unwrap_or(u32::MAX)
            }
        };
        let counts = TileCounts { m_blocks: blocks, heads: shape.heads as u32, batch: shape.batch as u32 };
        let tiles = counts.num_tiles()?;
        let clusters = (limits.sms.get().saturating_mul(tile.ctas_per_sm) / tile.cluster).max(1);
        let decoder = (tiles > 0).then(|| Decoder::new(counts, Order::HEADS_FASTEST));
        // The longest run with which no cluster has more tiles than with shorter runs.
        let most_tiles = |run: &u32| tiles.div_ceil(clusters.saturating_mul(*run)) * run;
        let run = RUNS.into_iter().min_by_key(most_tiles).unwrap_or(1);
        let scales = Scales::of(problem, tile.block_rows())?;
        Ok(Plan { problem: *problem, tile, blocks, tiles, run, clusters, decoder, scales, packed })
    }

    /// The problem.
    pub fn problem(&self) -> &QuantizeProblem {
        &self.problem
    }

    /// How the rows are cut into tiles.
    pub fn tile(&self) -> Tile {
        self.tile
    }

    /// Number of tiles.
    pub fn num_tiles(&self) -> u32 {
        self.tiles
    }

    /// Tiles per run, a power of two.
    pub fn run(&self) -> u32 {
        self.run
    }

    /// Number of CTAs; 0 if there is nothing to launch.
    pub fn grid(&self) -> u32 {
        self.tiles.div_ceil(self.run).min(self.clusters) * self.tile.cluster
    }

    /// The numbering of tiles; `None` if there are no tiles.
    pub fn decoder(&self) -> Option<Decoder<u32>> {
        self.decoder
    }

    /// How scales are found.
    pub fn scales(&self) -> Scales {
        self.scales
    }

    /// Number of blocks of rows per head; for packed sequences the largest possible number.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The sequences of a packed tensor.
    pub fn packed(&self) -> Option<Packed> {
        self.packed
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tile { rows, head_dim, lanes, stages, cluster, .. } = self.tile;
        writeln!(f, "problem    {}", self.problem)?;
        writeln!(f, "tile       {rows} rows of {head_dim}, {lanes} threads a row, {stages} stages")?;
        write!(f, "tiles      {} in runs of {}, ", self.tiles, self.run)?;
        write!(f, "{} CTAs of {} threads", self.grid(), self.tile.threads())?;
        if cluster > 1 {
            write!(f, " in clusters of {cluster}")?;
        }
        match self.scales {
            Scales::Blocks | Scales::Given(_) => Ok(()),
            Scales::Maxima(MaximaPlan { scales, maxima, .. }) => {
                write!(f, "\nscales     {scales} of {maxima} tiles each, in a pass before")
            }
            Scales::Channels(channels) => write!(f, "\n{channels}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Positions, QuantizeSpec, Rotary};

    use super::*;
    use crate::packed::{MemoryRows, NotInRows};

    fn spec(batch: usize, seqlen: usize, heads: usize, head_dim: usize) -> QuantizeSpec {
        QuantizeSpec::contiguous(Dtype::F16, Shape { batch, seqlen, heads, head_dim })
    }

    fn planned(spec: QuantizeSpec) -> Result<Plan, PlanError> {
        Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm())
    }

    fn plan(spec: QuantizeSpec) -> Plan {
        planned(spec).unwrap()
    }

    fn tile(head_dim: usize, rows: usize, rotary: Option<(RopeStyle, usize)>) -> Tile {
        let mut spec = spec(2, 500, 3, head_dim).scaling(Scaling::Block { rows });
        let (table_rows, positions) = (500, Positions::From(0));
        spec.rotary = rotary.map(|(style, rotary_dim)| Rotary { style, rotary_dim, table_rows, positions });
        plan(spec).tile()
    }

    /// Every boundary within a row is a boundary of all lanes' chunks, and a CTA has whole warps and not too many
    /// threads.
    #[test]
    fn lanes_begin_at_every_boundary() {
        for head_dim in (16..=256).step_by(16) {
            let rotary_dims = (16..=head_dim).step_by(16);
            let styles = [RopeStyle::Interleaved, RopeStyle::HalfSplit];
            let rotations = rotary_dims.flat_map(|dim| styles.map(|style| Some((style, dim)))).chain([None]);
            for (rotary, rows) in rotations.flat_map(|rotary| [64, 128].map(|rows| (rotary, rows))) {
                let tile = tile(head_dim, rows, rotary);
                let aligned = |n: usize| (n as u32).is_multiple_of(CHUNK * tile.lanes);
                let trailing = head_dim - (1 << head_dim.ilog2());
                let boundary = rotary.map_or(0, |(style, dim)| match style {
                    RopeStyle::Interleaved => dim,
                    RopeStyle::HalfSplit => dim / 2,
                });
                assert!([head_dim, trailing, boundary].into_iter().all(aligned), "{tile:?} {rotary:?}");
                assert!(tile.threads().is_multiple_of(32) && tile.threads() <= 512);
                let bytes = tile.stages * 2 * tile.rows * tile.head_dim.next_multiple_of(64);
                assert!(bytes <= 192 << 10, "{tile:?}");
            }
        }
        assert_eq!(tile(128, 128, Some((RopeStyle::HalfSplit, 128))).lanes, 4);
        assert_eq!(tile(64, 128, Some((RopeStyle::HalfSplit, 16))).lanes, 1);
    }

    /// A block of rows has a cluster of two CTAs if one CTA would fill an SM, and threads of wide rows have more
    /// registers.
    #[test]
    fn two_ctas_share_what_would_fill_an_sm() {
        let tile = |head_dim, rows, rotary| {
            let Tile { rows, lanes, cluster, ctas_per_sm, .. } = tile(head_dim, rows, rotary);
            [rows, lanes, cluster, ctas_per_sm]
        };
        let rotary = |dim| Some((RopeStyle::HalfSplit, dim));
        assert_eq!(tile(64, 128, rotary(64)), [128, 2, 1, 2]);
        assert_eq!(tile(128, 64, rotary(128)), [64, 4, 1, 2]);
        assert_eq!(tile(128, 128, rotary(128)), [64, 4, 2, 2]);
        assert_eq!(tile(256, 64, rotary(256)), [32, 4, 2, 2]);
        assert_eq!(tile(256, 128, rotary(256)), [64, 4, 2, 1]);
        // Without work, the pipeline is short.
        assert_eq!(tile(128, 128, None), [128, 4, 1, 1]);
        assert_eq!(tile(256, 64, None), [64, 8, 1, 1]);
    }

    /// Transposed codes need one more tile, for which all CTAs of an SM have room. The number of prefetched tiles
    /// stays, unless they take nearly all of shared memory.
    #[test]
    fn tiles_of_transposed_codes_fit() {
        for (head_dim, rows) in (16..=256).step_by(16).flat_map(|dim| [64, 128].map(|rows| (dim, rows))) {
            let tile = plan(spec(2, 500, 3, head_dim).transposed().scaling(Scaling::Block { rows })).tile();
            let bytes = tile.stages * 2 * tile.rows * tile.head_dim.next_multiple_of(64)
                + tile.rows * tile.codes_cols()
                + OTHER_SMEM;
            assert!(bytes * tile.ctas_per_sm <= 227 << 10, "{tile:?}");
            if ![144, 176, 208, 240].contains(&head_dim) {
                assert_eq!(tile, self::tile(head_dim, rows, None));
            }
        }
    }

    #[test]
    fn heads_are_the_fastest() {
        let plan = plan(spec(2, 300, 3, 64));
        let decoder = plan.decoder().unwrap();
        let tiles = (0..plan.num_tiles()).map(|index| decoder.decode(index));
        let tiles: Vec<(u32, u32, u32)> = tiles.map(|tile| (tile.m_block, tile.batch, tile.head)).collect();
        let mut sorted = tiles.clone();
        sorted.sort_unstable();
        assert_eq!((tiles.len(), &tiles), (18, &sorted));
    }

    #[test]
    fn packed_sequences_have_tiles_for_any_lengths() {
        let plan = |sequences, seqlen| planned(spec(1, seqlen, 3, 64).packed(sequences));
        let packed = plan(5, 300).unwrap();
        let rows = MemoryRows { count: 300, batch: 0, stride: 192 };
        assert_eq!(packed.packed(), Some(Packed { sequences: 5, rows }));
        assert_eq!((packed.blocks(), packed.num_tiles()), (300 / 128 + 5 + 1, 3 * 8));
        assert_eq!(plan(5, 0).unwrap().grid(), 0);
        assert!(matches!(plan(1 << 40, 300), Err(PlanError::Tiles(_))));
        let rows = (1 << 30) + 1;
        let count = NotInRows::Count { given: rows as u128, limit: 1 << 30 };
        assert_eq!(plan(1, rows).unwrap_err(), PlanError::Rows(count));
    }

    #[test]
    fn tiles_share_scales() {
        let plan = |seqlen, scaling| plan(spec(2, seqlen, 6, 64).scaling(scaling));
        let maxima = |seqlen, scaling| {
            let Scales::Maxima(MaximaPlan { scales, heads, maxima }) = plan(seqlen, scaling).scales() else {
                panic!("{scaling:?} has maxima");
            };
            [scales, heads, maxima]
        };
        assert_eq!(maxima(300, Scaling::Heads { heads: 1 }), [12, 1, 3]);
        assert_eq!(maxima(300, Scaling::Heads { heads: 3 }), [4, 3, 9]);
        assert_eq!(maxima(300, Scaling::Tensor), [1, 12, 36]);
        assert_eq!(maxima(0, Scaling::Tensor), [1, 0, 0]);
        assert_eq!(maxima(0, Scaling::Heads { heads: 2 }), [6, 2, 0]);
        assert!(matches!(plan(300, Scaling::Block { rows: 128 }).scales(), Scales::Blocks));
        // There are no rows, but there is a scale for each head.
        let many = spec(1 << 20, 0, 1 << 20, 64);
        assert!(planned(many).is_ok() && planned(many.scaling(Scaling::Tensor)).is_ok());
        let too_many = [Scaling::Heads { heads: 1 }, Scaling::Channel];
        assert!(too_many.into_iter().all(|scaling| planned(many.scaling(scaling)).is_err()));
        let text = plan(300, Scaling::Heads { heads: 3 }).to_string();
        assert!(text.ends_with("\nscales     4 of 9 tiles each, in a pass before"), "{text}");
    }

    #[test]
    fn channels_are_summed_in_parts() {
        let plan = |seqlen| plan(spec(2, seqlen, 3, 64).scaling(Scaling::Channel));
        let channels = |seqlen| {
            let Scales::Channels(of) = plan(seqlen).scales() else { panic!("channels have scales") };
            of
        };
        assert_eq!([0, 1, 256, 257].map(|seqlen| channels(seqlen).parts_grid()), [0, 6, 6, 12]);
        assert_eq!(channels(0).heads_grid(), 6);
        assert!(channels(0).decoder().is_none());
        // A CTA has whole warps, and at most the allowed number of threads.
        for (head_dim, columns) in (16..=256).step_by(16).flat_map(|dim| [(dim, 8), (dim, 4)]) {
            let threads = ChannelPlan::threads(head_dim, columns);
            assert!(threads.is_multiple_of(32) && (head_dim..=1024).contains(&threads), "{head_dim}");
        }
        let text = plan(300).to_string();
        let last = "channels   2 parts of 256 rows of 6 heads, 12 CTAs of 128 threads";
        assert!(text.ends_with(last), "{text}");
    }

    #[test]
    fn every_tile_has_a_cta() {
        for seqlen in [0, 1, 300, 5000, 70_000] {
            let plan = plan(spec(1, seqlen, 7, 64));
            let (tiles, run, grid) = (plan.num_tiles(), plan.run(), plan.grid());
            assert!(run.is_power_of_two());
            assert_eq!(tiles as usize, 7 * seqlen.div_ceil(128));
            assert!(grid <= 264 && (grid == 0 || (grid - 1) * run < tiles));
        }
    }
}
