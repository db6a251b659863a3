//! Candidates: other tiles than the tile table's, other tile orders, and the other choice of clusters.

use fa3_sched::forward::{CtaTile, Pipeline, Plan, PlanError, PlanOptions};
use fa3_sched::{DeviceLimits, Order};
use fa3_types::Problem;

/// Rows of a tile, and the number of consumer warpgroups with 64 rows each.
const ROWS: [(u32, u32); 3] = [(64, 1), (128, 2), (192, 3)];
const PIPELINES: [Pipeline; 4] =
    [Pipeline::Serial, Pipeline::Paired, Pipeline::TwoStage, Pipeline::ThreeStage];
/// Changes in the width of a KV block, in steps of [`STEP`] keys.
const STEPS: [i64; 4] = [-2, -1, 1, 2];
/// Keys per step: the K dimension of the PV instruction.
const STEP: u32 = 16;
/// Numbers of heads per section, as fractions of the planned number.
const SECTIONS: [(u32, u32); 5] = [(1, 4), (1, 2), (2, 1), (4, 1), (8, 1)];

/// A candidate: one way to compute a problem.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) options: PlanOptions,
    pub(super) tile: CtaTile,
    pub(super) order: Order,
    /// CTAs per cluster.
    pub(super) cluster: u32,
}

/// All candidates: first the planned one; then other tiles in the same order; the planned tile with the other choice of
/// clusters; and the planned tile with other sections.
pub(super) fn candidates(problem: &Problem, limits: &DeviceLimits) -> Result<Vec<Candidate>, PlanError> {
    let candidate = |options: PlanOptions| {
        let plan = Plan::with(problem, limits, &options)?;
        Ok::<_, PlanError>(Candidate {
            options,
            tile: plan.tile(),
            order: plan.order(),
            cluster: plan.cluster(),
        })
    };
    let planned = candidate(PlanOptions::default())?;
    let Candidate { tile, order, cluster, .. } = planned;
    let mut candidates = vec![planned];
    for shape in neighbours(tile, limits) {
        candidates.push(candidate(PlanOptions::default().tile(shape))?);
    }
    let otherwise = candidate(PlanOptions::default().clusters(cluster == 1))?;
    candidates.extend((otherwise.cluster != cluster).then_some(otherwise));
    for (times, part) in SECTIONS {
        let Order::LongestFirst { section, longest } = order else { break };
        let section = (section.saturating_mul(times) / part).max(1);
        let order = Order::LongestFirst { section, longest };
        if candidates.iter().all(|known| known.order != order) {
            candidates.push(candidate(PlanOptions::default().order(order))?);
        }
    }
    Ok(candidates)
}

/// Tiles that fit an SM and differ from `tile` in one parameter. Other widths are tried with and without ping-pong.
/// Where another parameter leaves too little room for the width, the largest width that fits is used.
fn neighbours(tile: CtaTile, limits: &DeviceLimits) -> Vec<CtaTile> {
    let widths = STEPS.into_iter().filter_map(|steps| {
        let tile_n = i64::from(tile.tile_n) + steps * i64::from(STEP);
        Some(CtaTile { tile_n: u32::try_from(tile_n).ok()?, ..tile })
    });
    let turns = |tile: CtaTile| [tile, CtaTile { ping_pong: !tile.ping_pong, ..tile }];
    let rows = ROWS.map(|(tile_m, consumers)| CtaTile {
        tile_m,
        consumers,
        ping_pong: tile.ping_pong && consumers > 1,
        ..tile
    });
    let stages = (1..=tile.stages + 1).map(|stages| CtaTile { stages, ..tile });
    let pipelines = PIPELINES.map(|pipeline| CtaTile { pipeline, ..tile });
    let others = turns(tile).into_iter().chain(rows).chain(stages).chain(pipelines);
    let others = others.filter_map(|other| widest(other, limits));

    let mut neighbours = Vec::new();
    for shape in widths.flat_map(turns).filter(|shape| shape.check(limits).is_ok()).chain(others) {
        if shape != tile && !neighbours.contains(&shape) {
            neighbours.push(shape);
        }
    }
    neighbours
}

/// `tile`, or the widest narrower tile that fits.
fn widest(tile: CtaTile, limits: &DeviceLimits) -> Option<CtaTile> {
    let widths = (1..=tile.tile_n / STEP).rev().map(|steps| CtaTile { tile_n: steps * STEP, ..tile });
    widths.into_iter().find(|tile| tile.check(limits).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_sched::forward::TileRow;

    use fa3_types::{Dtype, Mask, ProblemSpec, Shape};

    const H100: DeviceLimits = DeviceLimits::h100_sxm();

    fn problem(head_dim: usize, mask: Mask, seqlen: usize) -> Problem {
        let shape = Shape { batch: 16384 / seqlen, seqlen, heads: 2048 / head_dim, head_dim };
        ProblemSpec::dense(Dtype::Bf16, shape, shape).mask(mask).validate().unwrap()
    }

    #[test]
    fn all_neighbours_fit_and_differ() {
        assert!(TileRow::table().len() > 10);
        for TileRow { tile, .. } in TileRow::table() {
            let neighbours = neighbours(*tile, &H100);
            // No other tile that converts rows fits.
            let least = if tile.converts_rows() { 0 } else { 3 };
            assert!((least..25).contains(&neighbours.len()), "{tile}: {}", neighbours.len());
            for (index, other) in neighbours.iter().enumerate() {
                other.check(&H100).unwrap_or_else(|error| panic!("{other}: {error}"));
                assert!(other != tile && !neighbours[..index].contains(other), "{other} twice");
                assert_eq!(other.tile_m * other.column_groups(), 64 * other.consumers);
                assert_eq!((other.head_dim, other.head_dim_v), (tile.head_dim, tile.head_dim_v));
            }
        }
    }

    /// The neighbours of a tile of 128 x 176 with two stages and ping-pong are the tiles that an engineer would try
    /// next.
    #[test]
    fn neighbours_of_a_tile() {
        let tile = candidates(&problem(128, Mask::None, 8192), &H100).unwrap()[0].tile;
        let tile = CtaTile { tile_m: 128, consumers: 2, tile_n: 176, stages: 2, ping_pong: true, ..tile };
        let neighbours = neighbours(tile, &H100);
        let has = |shape: CtaTile| neighbours.contains(&shape);
        for tile_n in [144, 160, 192] {
            for ping_pong in [true, false] {
                assert!(has(CtaTile { tile_n, ping_pong, ..tile }), "{tile_n}");
            }
        }
        // 208 keys need too many registers.
        assert!(neighbours.iter().all(|shape| shape.tile_n <= 192));
        assert!(
            has(CtaTile { ping_pong: false, ..tile }) && has(CtaTile { pipeline: Pipeline::Serial, ..tile })
        );
        assert!(has(CtaTile { stages: 1, ..tile }));
        // 227 KiB hold 32 KiB of Q and three stages of 128 keys, 64 KiB each, but not three stages of 144 keys, 72 KiB
        // each.
        assert!(has(CtaTile { stages: 3, tile_n: 128, ..tile }));
        assert!(has(CtaTile { tile_m: 64, consumers: 1, ping_pong: false, ..tile }));
        let three = |shape: &&CtaTile| (shape.consumers, shape.pipeline) == (3, Pipeline::Paired);
        assert!(neighbours.iter().find(three).is_some_and(|shape| shape.tile_n < 176));
        assert!(neighbours.iter().any(|shape| shape.pipeline == Pipeline::ThreeStage));
    }

    /// Where clusters are possible, the table's tile is timed with and without them.
    #[test]
    fn clusters_are_compared_with_none() {
        let clusters = |mask, seqlen| {
            let candidates = candidates(&problem(128, mask, seqlen), &H100).unwrap();
            let of_the_table = candidates.iter().filter(|one| one.tile == candidates[0].tile);
            of_the_table.map(|one| one.cluster).collect::<Vec<u32>>()
        };
        assert_eq!(clusters(Mask::None, 4096), [2, 1]);
        assert_eq!(clusters(Mask::None, 512), [1, 2]);
        assert!(clusters(Mask::Causal, 4096).iter().all(|&cluster| cluster == 1));
    }

    #[test]
    fn the_tables_own_comes_first_and_sections_last() {
        for (head_dim, mask, seqlen) in
            [(64, Mask::None, 512), (128, Mask::Causal, 1024), (256, Mask::Causal, 16384)]
        {
            let problem = problem(head_dim, mask, seqlen);
            let candidates = candidates(&problem, &H100).unwrap();
            let planned = Plan::new(&problem, &H100).unwrap();
            assert_eq!(candidates[0].options, PlanOptions::default());
            assert_eq!((candidates[0].tile, candidates[0].order), (planned.tile(), planned.order()));
            let sections: Vec<Order> = candidates.iter().filter_map(|one| one.options.order).collect();
            assert_eq!(sections.is_empty(), mask == Mask::None);
            assert!(!sections.contains(&planned.order()));
        }
    }
}
