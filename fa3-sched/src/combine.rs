//! Plans of the split-KV reduction, which merges partial results: the warps that merge a row, and the rows of a CTA.

use std::fmt;

use fa3_types::{CombineProblem, Dtype, Shape};

use crate::{Decoder, Order, TileCounts, TooManyTiles};

/// Number of neighbouring columns per lane: 16 bytes of f32.
pub const CHUNK: u32 = 4;

/// Largest number of splits whose rows a warp loads at once.
const MOST_AT_ONCE: u32 = 8;

/// Registers of a lane for the rows in flight.
const ROW_REGISTERS: u32 = 32;

/// Largest number of warps per row.
const MOST_WARPS: u32 = 8;

/// Smallest number of warps per CTA.
const FEWEST_WARPS: u32 = 4;

/// The warps that merge a row. Warp w has splits w, w + warps, w + 2 · warps, …, and loads the rows of several splits
/// at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Team {
    /// Warps, a power of two up to 8.
    pub warps: u32,
    /// Splits whose rows a warp loads at once: 2, 4 or 8.
    pub at_once: u32,
    /// Whether a single warp merges one split after the other, so that a split without keys changes no bit of the
    /// result.
    pub in_order: bool,
}

impl Team {
    /// The team for rows of `head_dim` elements in `splits` splits: the smallest number of warps that load all splits
    /// at once. A single warp needs no synchronisation.
    pub fn new(splits: u32, head_dim: u32, dtype: Dtype) -> Team {
        let row = head_dim.div_ceil(32 * CHUNK) * CHUNK * dtype.bytes() as u32 / 4;
        let most = (ROW_REGISTERS / row.max(1)).clamp(2, MOST_AT_ONCE);
        let at_once = splits.clamp(2, most).next_power_of_two();
        let warps = splits.div_ceil(at_once).clamp(1, MOST_WARPS).next_power_of_two();
        Team { warps, at_once, in_order: false }
    }

    /// The team for rows of `head_dim` elements whose splits are merged one after the other.
    pub fn in_order(head_dim: u32, dtype: Dtype) -> Team {
        Team { in_order: true, ..Team::new(Team::new(u32::MAX, head_dim, dtype).at_once, head_dim, dtype) }
    }

    /// Warps per CTA.
    pub fn cta_warps(&self) -> u32 {
        self.warps.max(FEWEST_WARPS)
    }

    /// Rows per CTA, one for each team.
    pub fn rows(&self) -> u32 {
        self.cta_warps() / self.warps
    }
}

/// Plan of the merge of partial results.
///
/// ```
/// use fa3_sched::combine::Plan;
/// use fa3_types::{CombineSpec, Dtype, Shape};
///
/// let shape = Shape { batch: 4, seqlen: 4096, heads: 32, head_dim: 128 };
/// let plan = |splits| {
///     let problem = CombineSpec::contiguous(Dtype::F32, Dtype::Bf16, splits, shape).validate()?;
///     Ok::<_, Box<dyn std::error::Error>>(Plan::new(&problem)?)
/// };
/// let (few, many) = (plan(2)?, plan(132)?);
/// assert_eq!((few.team().warps, few.grid()), (1, 4 * 4096 * 32 / 4));
/// assert_eq!((many.team().warps, many.grid()), (8, 4 * 4096 * 32));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: CombineProblem,
    team: Team,
    rows: u32,
    decoder: Option<Decoder<u32>>,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`TooManyTiles`] if there are too many rows of all heads.
    pub fn new(problem: &CombineProblem) -> Result<Plan, TooManyTiles> {
        let Shape { batch, seqlen, heads, head_dim } = problem.shape();
        let counts = TileCounts { m_blocks: seqlen as u32, heads: heads as u32, batch: batch as u32 };
        let rows = counts.num_tiles()?;
        let decoder = (rows > 0).then(|| Decoder::new(counts, Order::HEADS_FASTEST));
        let dtype = problem.out_partial().first.dtype;
        let team = Team::new(problem.splits() as u32, head_dim as u32, dtype);
        Ok(Plan { problem: *problem, team, rows, decoder })
    }

    /// The problem.
    pub fn problem(&self) -> &CombineProblem {
        &self.problem
    }

    /// The warps that merge a row.
    pub fn team(&self) -> Team {
        self.team
    }

    /// Rows of all heads of all sequences.
    pub fn num_rows(&self) -> u32 {
        self.rows
    }

    /// Number of CTAs; 0 if there is nothing to launch.
    pub fn grid(&self) -> u32 {
        self.rows.div_ceil(self.team.rows())
    }

    /// The numbering of rows; `None` if there are none.
    pub fn decoder(&self) -> Option<Decoder<u32>> {
        self.decoder
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Team { warps, at_once, .. } = self.team;
        writeln!(f, "problem    {}", self.problem)?;
        writeln!(f, "team       {warps} x 32 threads, {at_once} parts at once in each warp")?;
        write!(f, "rows       {} in {} CTAs of {} warps", self.rows, self.grid(), self.team.cta_warps())
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::CombineSpec;

    use super::*;

    fn team(splits: u32, head_dim: u32, dtype: Dtype) -> [u32; 2] {
        let Team { warps, at_once, .. } = Team::new(splits, head_dim, dtype);
        [warps, at_once]
    }

    #[test]
    fn few_parts_have_one_warp_and_many_have_eight() {
        let of_128 = [1, 2, 3, 8, 9, 31, 33, 132, 1000].map(|splits| team(splits, 128, Dtype::F32));
        assert_eq!(of_128, [[1, 2], [1, 2], [1, 4], [1, 8], [2, 8], [4, 8], [8, 8], [8, 8], [8, 8]]);
        // Wide rows take more registers, and rows of 16 bits take fewer.
        assert_eq!([256, 512].map(|dim| team(8, dim, Dtype::F32)), [[2, 4], [4, 2]]);
        assert_eq!([256, 512].map(|dim| team(8, dim, Dtype::Bf16)), [[1, 8], [2, 4]]);
    }

    #[test]
    fn a_team_loads_all_parts_at_once_if_it_may() {
        for (splits, head_dim) in (1..=300).flat_map(|splits| [8, 64, 96, 512].map(|dim| (splits, dim))) {
            for dtype in [Dtype::F32, Dtype::F16] {
                let Team { warps, at_once, .. } = Team::new(splits, head_dim, dtype);
                assert!(warps * at_once >= splits || warps == MOST_WARPS, "{splits} of {head_dim}");
                // Every warp has a split.
                assert!(warps == 1 || warps / 2 * at_once < splits, "{splits} of {head_dim}");
                assert!(at_once.is_power_of_two() && warps.is_power_of_two());
            }
        }
    }

    #[test]
    fn every_row_has_a_team() {
        for (seqlen, splits) in [0, 1, 3, 100].into_iter().flat_map(|rows| [1, 20, 200].map(|s| (rows, s))) {
            let shape = Shape { batch: 2, seqlen, heads: 5, head_dim: 64 };
            let spec = CombineSpec::contiguous(Dtype::F32, Dtype::F32, splits, shape);
            let plan = Plan::new(&spec.validate().unwrap()).unwrap();
            assert_eq!(plan.num_rows() as usize, 10 * seqlen);
            let places = plan.grid() * plan.team().rows();
            assert!((plan.num_rows()..plan.num_rows() + 4).contains(&places), "{plan}");
            assert_eq!(plan.decoder().is_none(), seqlen == 0);
        }
        let shape = Shape { batch: 1 << 16, seqlen: 1 << 16, heads: 1, head_dim: 8 };
        let many = CombineSpec::contiguous(Dtype::F32, Dtype::F32, 1, shape).validate().unwrap();
        assert_eq!(Plan::new(&many).unwrap_err().tiles, 1 << 32);
    }
}
