//! Varlen plans: lengths are data, and tiles are found through a table in device memory.

use std::fmt;

use fa3_types::{Feature, Known, Problem, TensorDesc, TensorName};

use super::Asked;
use crate::forward::{Loads, PlanError};
use crate::packed::{self, MemoryRows, Side, Tiles, section};
use crate::{ListedRows, Longest, Order, Scheduler};

/// The features that kernels of varlen plans compute.
const KNOWN: Known = Known::new(
    "the forward kernels of packed sequences",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Tree,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Qv,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Int8Keys,
        Feature::TokenScales,
        Feature::BlockScales,
        Feature::Packed,
        Feature::Used,
        Feature::Pages,
        Feature::Index,
        Feature::Leftpad,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// Plan of sequences whose lengths are data.
#[derive(Clone, Debug)]
pub struct VarlenPlan {
    tiles: Tiles,
    rows: [MemoryRows; 3],
    latent_rows: Option<MemoryRows>,
    given_table: bool,
}

impl VarlenPlan {
    /// Decides the table and the tiles.
    pub(super) fn new(asked: &Asked<'_>) -> Result<VarlenPlan, PlanError> {
        let &Asked { problem, tile, sms, options, .. } = asked;
        KNOWN.check(problem)?;
        match options.scheduler {
            None | Some(Scheduler::DynamicPersistent) => {}
            Some(scheduler) => return Err(PlanError::VarlenScheduler { scheduler }),
        }
        if tile.loads != Loads::Producer {
            return Err(PlanError::NoProducer { scheduler: Scheduler::DynamicPersistent });
        }
        if options.clusters == Some(true) {
            return Err(PlanError::VarlenClusters);
        }
        if tile.precision.is_fp8() && !tile.precision.transposes_v() {
            return Err(PlanError::VarlenTransposedV);
        }
        let of_heads = problem.has_scales() && !problem.has_block_scales();
        if of_heads && problem.batch() == 0 && problem.q().extent().0 > 0 {
            // Rows of O would be written with the scales of a sequence that does not exist.
            return Err(PlanError::VarlenNothing { rows: problem.q().shape.seqlen });
        }
        let (sides, sizes) = (Side::both(problem), [tile.tile_m, tile.tile_n]);
        let table = packed::Plan::new(problem.batch(), sides, sizes, problem.mask())?;
        let heads = problem.heads().q() as u32;
        let longest = Longest::from(problem.mask());
        let section = match options.order {
            // The number of rows is below 2³¹ in every problem.
            None => {
                let head_tiles = (problem.longest().q as u32).div_ceil(tile.tile_m);
                section(head_tiles, [heads, problem.heads().group_size() as u32], sms)
            }
            // Within a sequence, the tiles of a group of heads follow each other.
            Some(Order::Linear) => problem.heads().group_size() as u32,
            Some(Order::LongestFirst { section, longest: given })
                if given == longest && heads.is_multiple_of(section) =>
            {
                section
            }
            Some(order) => return Err(PlanError::VarlenOrder { order, heads }),
        };
        Ok(VarlenPlan {
            tiles: Tiles::new(table, [heads, section], longest, sms)?,
            rows: memory_rows(problem)?,
            latent_rows: latent_rows(problem)?,
            given_table: options.given_table,
        })
    }

    /// The tiles of the launch.
    pub fn tiles(&self) -> &Tiles {
        &self.tiles
    }

    /// Whether the caller gives the table.
    pub fn has_given_table(&self) -> bool {
        self.given_table
    }

    /// The rows of Q, K and V in memory.
    pub fn rows(&self) -> [MemoryRows; 3] {
        self.rows
    }

    /// The rows of `qv` in memory, if the problem has `qv`.
    pub fn latent_rows(&self) -> Option<MemoryRows> {
        self.latent_rows
    }

    /// Writes the number of tiles, and how they reach CTAs of `threads` threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let (scheduler, grid) = (Scheduler::DynamicPersistent, self.tiles.grid());
        writeln!(f, "scheduler  {scheduler}, {grid} CTAs of {threads} threads")?;
        let (count, most) = (self.tiles.table().count(), self.tiles.most());
        let who = if self.given_table { "the caller gives" } else { "a kernel writes before" };
        writeln!(f, "tiles      at most {most}, by a table of {count} sequences that {who}")
    }

    /// Writes how much device memory is needed.
    pub(super) fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = 4 * self.tiles.table().words();
        let whose = if self.given_table { " of the caller's" } else { "" };
        write!(f, "memory     4 bytes for the tile counter, and {bytes}{whose} for the table")
    }
}

fn rows(name: TensorName, tensor: &TensorDesc) -> Result<MemoryRows, PlanError> {
    MemoryRows::of(tensor).map_err(|source| PlanError::VarlenRows { tensor: name, source })
}

pub(super) fn latent_rows(problem: &Problem) -> Result<Option<MemoryRows>, PlanError> {
    problem.qv().map(|qv| rows(TensorName::Qv, qv)).transpose()
}

/// The rows of Q, K and V in memory; the rows of a page of K and V, if keys are listed.
pub(super) fn memory_rows(problem: &Problem) -> Result<[MemoryRows; 3], PlanError> {
    let (mut k, mut v) = (*problem.k(), *problem.v());
    if problem.seqs_k().list().is_some() {
        [k, v] = [k, v].map(|tensor| ListedRows::of_page(&tensor));
    }
    Ok([rows(TensorName::Q, problem.q())?, rows(TensorName::K, &k)?, rows(TensorName::V, &v)?])
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape, Strides, UnknownFeature, ValueLayout};

    use super::*;
    use crate::forward::{Plan, PlanKind, PlanOptions};
    use crate::packed::NotInRows;
    use crate::{DeviceLimits, TooManyTiles};

    const H100: DeviceLimits = DeviceLimits::h100_sxm();

    /// Packed sequences with `total` rows of Q.
    fn packed(count: usize, total: usize, longest: usize, heads: (usize, usize), mask: Mask) -> ProblemSpec {
        let q = Shape { batch: 1, seqlen: total, heads: heads.0, head_dim: 128 };
        let sequences = Sequences::packed(count).longest(longest);
        let spec = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: heads.1, ..q }).mask(mask);
        spec.seqs_q(sequences).seqs_k(sequences)
    }

    #[test]
    fn sequences_whose_lengths_are_data_have_varlen_plans() {
        let varlen = |spec: ProblemSpec| {
            let plan = Plan::new(&spec.validate().unwrap(), &H100).unwrap();
            let PlanKind::Varlen(varlen) = plan.kind() else { panic!("{plan}") };
            assert!(plan.dense().is_none());
            (plan.tile(), *varlen.tiles())
        };
        let (tile, plan) = varlen(packed(12, 16_384, 4096, (32, 8), Mask::Causal));
        assert_eq!((plan.grid(), plan.table().count()), (132, 12));
        assert_eq!(plan.table().capacity(), 16_384 / tile.tile_m + 12 + 1);
        // There are 32, 8 and 1 tiles per head, for half of 132 SMs: a section gets groups of four heads until it has
        // enough tiles.
        let section = |longest| varlen(packed(12, 16_384, longest, (32, 8), Mask::Causal)).1.order();
        let order = |section| Order::LongestFirst { section, longest: Longest::Last };
        assert_eq!([4096, 1024, 64].map(section), [order(4), order(16), order(32)]);
        // The number of heads is a multiple of a section's heads.
        let (_, odd) = varlen(packed(12, 16_384, 512, (28, 7), Mask::Causal));
        assert_eq!(odd.order(), order(28));
        // The tile is chosen for the longest sequence, if its length is known.
        let short = varlen(packed(300, 16_384, 60, (32, 8), Mask::Causal)).0;
        assert_eq!((short.tile_m, varlen(packed(300, 16_384, 4000, (32, 8), Mask::Causal)).0), (64, tile));

        const SHAPE: Shape = Shape { batch: 3, seqlen: 64, heads: 4, head_dim: 64 };
        let dense = ProblemSpec::dense(Dtype::F16, SHAPE, SHAPE);
        let used = dense.clone().seqs_k(Sequences::dense(3, SHAPE.seqlen).used()).validate().unwrap();
        let used = Plan::new(&used, &H100).unwrap();
        let PlanKind::Varlen(used) = used.kind() else { panic!("{used}") };
        assert_eq!(used.rows().map(|rows| rows.batch), [SHAPE.seqlen as u32; 3]);
        let (_, one) = varlen(packed(1, 0, 0, (2, 1), Mask::None));
        assert_eq!(one.grid(), 0);
    }

    #[test]
    fn a_table_may_be_given() {
        let packed = packed(12, 16_384, 4096, (32, 8), Mask::Causal).validate().unwrap();
        let [own, given] = [PlanOptions::default(), PlanOptions::default().given_table()]
            .map(|options| Plan::with(&packed, &H100, &options).unwrap());
        // The written table and the given table have the same layout.
        assert_eq!(own.table(), given.table());
        assert!(given.to_string().contains("by a table of 12 sequences that the caller gives"), "{given}");
        let given = PlanOptions::default().given_table();
        let one = Shape { batch: 1, seqlen: 64, heads: 4, head_dim: 64 };
        let dense = ProblemSpec::dense(Dtype::F16, one, one);
        let over_dense = dense.clone().seqs_q(Sequences::packed(1));
        for spec in [dense.clone(), dense.seqs_k(Sequences::dense(1, 64).used()), over_dense] {
            let plan = Plan::with(&spec.validate().unwrap(), &H100, &given);
            assert_eq!(plan.unwrap_err(), PlanError::GivenTable);
        }
    }

    #[test]
    fn what_no_table_serves_is_refused() {
        let with = |spec: ProblemSpec, options: PlanOptions| {
            Plan::with(&spec.validate().unwrap(), &H100, &options).unwrap_err()
        };
        let spec = || packed(3, 1000, 500, (32, 8), Mask::Causal);
        let options = PlanOptions::default;
        let scheduler = Scheduler::OneTile;
        assert_eq!(with(spec(), options().scheduler(scheduler)), PlanError::VarlenScheduler { scheduler });
        assert_eq!(with(spec(), options().clusters(true)), PlanError::VarlenClusters);
        for (section, longest) in [(3, Longest::Last), (4, Longest::First)] {
            let order = Order::LongestFirst { section, longest };
            assert_eq!(with(spec(), options().order(order)), PlanError::VarlenOrder { order, heads: 32 });
        }
        let shape = Shape { batch: 2, seqlen: 300, heads: 2, head_dim: 64 };
        let used = |spec: ProblemSpec| spec.seqs_k(Sequences::dense(2, 300).used());
        let e4m3 = || used(ProblemSpec::dense(Dtype::E4m3, shape, shape));
        for (spec, feature) in
            [(e4m3().v_channels(), Feature::VChannels), (e4m3().transposed_v(), Feature::TransposedV)]
        {
            let unknown = UnknownFeature { who: "the forward kernels of packed sequences", feature };
            assert_eq!(with(spec, options()), PlanError::Unknown(unknown));
        }
        assert_eq!(e4m3().validate().unwrap().v_layout(), ValueLayout::Rows);
        let nothing = Sequences::packed(0);
        let one = Shape { batch: 1, ..shape };
        let nothing = ProblemSpec::dense(Dtype::E4m3, one, one).seqs_q(nothing).seqs_k(nothing);
        assert_eq!(with(nothing.clone(), options()), PlanError::VarlenNothing { rows: 300 });
        assert!(Plan::new(&nothing.block_scales(128).validate().unwrap(), &H100).is_ok());
        assert!(Plan::new(&e4m3().block_scales(64).validate().unwrap(), &H100).is_ok());
        let mut apart = used(ProblemSpec::dense(Dtype::F16, shape, shape));
        apart.k.strides = Strides { batch: 300 * 128 + 8, ..apart.k.strides };
        let source = NotInRows::Stride { batch: 300 * 128 + 8, row: 128 };
        assert_eq!(with(apart, options()), PlanError::VarlenRows { tensor: TensorName::K, source });
        let tiles = with(packed(1 << 20, 1 << 20, 1, (32, 8), Mask::None), options());
        assert!(matches!(tiles, PlanError::Tiles(TooManyTiles { .. })), "{tiles}");
    }
}
