//! Problems whose rows see listed blocks of keys: a covering array of lists and kernel features.

use fa3_sched::forward::{CtaTile, Pipeline, PlanOptions};
use fa3_types::{BlockSide, Dtype, Intervals, IntervalsOfRow, KnownProblem, Mask, ProblemSpec, SequenceRows};

use super::intervals::OWN;
use super::shapes::TINY;
use super::trials::{BOUNDS, MASKS, SINKS, SOFTCAPS, trial};
use super::{Layout, dense, with_tile};
use crate::values::Rng;
use crate::{Case, Levels, Trial, covering_cases};

/// The lists of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// All blocks, and some that the sequence does not have.
    All,
    /// No block.
    Nothing,
    /// The first block, which all rows choose.
    First,
    /// The last block, most of whose keys may not exist, of two of three blocks of rows.
    Last,
    /// The blocks of a row's own place and one before.
    Diagonal,
    /// Every other block of some rows, and none of others.
    Some,
    /// Random bits of this seed, a third of them set.
    Random(u64),
}

impl Listed {
    /// All kinds without a seed.
    pub const ALL: [Listed; 6] =
        [Listed::All, Listed::Nothing, Listed::First, Listed::Last, Listed::Diagonal, Listed::Some];

    /// Whether block `rows` of rows, counted over all heads and sequences, sees block `keys` of `all`.
    fn sees(self, rows: usize, keys: usize, all: usize) -> bool {
        match self {
            Listed::All => true,
            Listed::Nothing => false,
            Listed::First => keys == 0,
            Listed::Last => rows % 3 != 1 && keys + 1 == all,
            Listed::Diagonal => keys <= rows && rows < keys + 2,
            Listed::Some => rows % 3 != 1 && keys % 2 == rows % 2 || keys > all,
            Listed::Random(seed) => Rng::new(seed ^ ((rows as u64) << 32) ^ keys as u64).below(3) == 0,
        }
    }

    /// The problem of dense sequences with these lists, of blocks of 128. `own` says whether sequences and heads have
    /// their own.
    ///
    /// # Panics
    /// If the problem is invalid.
    pub fn of(self, spec: ProblemSpec, own: (bool, bool)) -> KnownProblem {
        self.of_side(BlockSide::Of128, spec, own)
    }

    /// Like [`Listed::of`], of blocks of this side.
    ///
    /// # Panics
    /// If the problem is invalid.
    pub fn of_side(self, side: BlockSide, spec: ProblemSpec, own: (bool, bool)) -> KnownProblem {
        self.of_words(side.words(spec.k.shape.seqlen.div_ceil(side.rows())), spec, own)
    }

    /// Like [`Listed::of`], with this number of words for each block of rows.
    fn of_words(self, words: usize, spec: ProblemSpec, own: (bool, bool)) -> KnownProblem {
        let [rows_q, rows_k] = [spec.q, spec.k].map(|x| SequenceRows::dense(x.shape.batch, x.shape.seqlen));
        let side = BlockSide::of_words(words).expect("the caller's words say a side");
        let blocks = spec.k.shape.seqlen.div_ceil(side.rows());
        let of_row = IntervalsOfRow::Blocks { words, side };
        let form = Intervals { of_row, per_sequence: own.0, per_head: own.1 };
        let [batch, heads, rows, _] = form.shape(spec.q.shape);
        let word = |block: usize, word: usize| {
            let bit = |bit: usize| i32::from(self.sees(block, 32 * word + bit, blocks)) << bit;
            (0..32).map(bit).fold(0, |bits, bit| bits | bit)
        };
        let numbers = (0..batch * heads * rows).flat_map(|block| (0..words).map(move |at| word(block, at)));
        let numbers: Vec<i32> = numbers.collect();
        let problem = spec.mask(Mask::of_intervals(form)).validate().expect("the caller's problem is valid");
        KnownProblem::with_intervals(problem, rows_q, rows_k, numbers).expect("every block has its words")
    }
}

/// Tiles whose blocks of keys are the listed ones. The last ones have a list for each warpgroup.
const TILES: [CtaTile; 6] = [
    CtaTile { tile_n: 128, ..TINY },
    CtaTile { tile_m: 128, tile_n: 128, consumers: 2, ping_pong: true, stages: 3, ..TINY },
    CtaTile { tile_n: 128, stages: 1, pipeline: Pipeline::Serial, ..TINY },
    CtaTile { tile_m: 128, tile_n: 128, consumers: 2, pipeline: Pipeline::TwoStage, ..TINY },
    CtaTile { tile_m: 128, consumers: 2, stages: 1, ..OWN_LISTS },
    OWN_LISTS,
];

/// A tile with three lists.
const OWN_LISTS: CtaTile =
    CtaTile { tile_m: 192, tile_n: 64, consumers: 3, stages: 3, pipeline: Pipeline::Serial, ..TINY };

/// The side of blocks that a tile takes.
fn side(tile: CtaTile) -> BlockSide {
    if tile.tile_n == 64 { BlockSide::Of64 } else { BlockSide::Of128 }
}

/// The covering array, and tiles of the planner's table.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering_cases(|levels| of_features(levels, seed)).into_iter();
    // More blocks of keys than a word has bits.
    let chosen = [(64, Mask::None), (96, Mask::None), (128, Mask::Causal)].map(|(head_dim, mask)| {
        let spec = dense(Dtype::Bf16, 1, (140, 33 * 128 + 5), (1, 1), head_dim).mask(mask);
        let case = Case::normal("a tile of the table", Listed::Some.of(spec, (false, false)), seed);
        // The CTA has two tiles.
        trial(case, 1, &PlanOptions::default())
    });
    // Blocks behind the last word are not seen.
    let long = dense(Dtype::Bf16, 1, (9, 97 * 128), (1, 1), 64);
    let long = Case::normal("few words", Listed::First.of_words(3, long, (false, false)), seed);
    let of_64 = dense(Dtype::Bf16, 1, (200, 33 * 64 + 5), (1, 1), 128);
    let of_64 = Listed::Some.of_side(BlockSide::Of64, of_64, (false, false));
    let of_64 = Case::normal("blocks of 64, a tile of the table", of_64, seed);
    features.chain(chosen).chain([long, of_64].map(|case| trial(case, 2, &PlanOptions::default()))).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (listed, tile, mask) = (levels.pick(&Listed::ALL), levels.pick(&TILES), levels.pick(&BOUNDS));
    let lengths = levels.pick(&[(129, 300), (64, 128), (300, 257), (130, 0), (1, 400)]);
    let (batch, heads_q, heads_kv) = levels.pick(&[(1, 1, 1), (2, 4, 2), (1, 3, 1)]);
    let (own, softcap, sink) = (levels.pick(&OWN), levels.pick(&SOFTCAPS), levels.pick(&SINKS));
    let (dtype, layout) = (levels.pick(&[Dtype::F16, Dtype::Bf16]), levels.pick(&Layout::ALL));
    let mut spec = layout.of(dense(dtype, batch, lengths, (heads_q, heads_kv), 64).mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    let case = Case::normal(&format!("{listed:?}, {mask}"), listed.of_side(side(tile), spec, own), seed);
    trial(case, 2, &with_tile(tile))
}

/// A random problem with the tile sizes that the planner chooses. Seeds that are equal modulo `kernels` share their
/// kernels, so that many problems need few of them.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random(seed: u64, kernels: u64) -> Trial {
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0xb10c), Rng::new(seed ^ 0xb10c << 32));
    let dims = [(64, 64), (128, 128), (96, 96), (192, 128), (40, 72)];
    let (head_dim, head_dim_v) = dims[of_kernel.below(5)];
    let (mask, softcap) = (MASKS[of_kernel.below(MASKS.len() as u64)], SOFTCAPS[of_kernel.below(2)]);
    let (dtype, sink) = ([Dtype::F16, Dtype::Bf16][of_kernel.below(2)], SINKS[of_kernel.below(2)]);
    let (batch, heads_kv, group) = (1 + rng.below(2), 1 + rng.below(2), 1 + rng.below(3));
    let most = if rng.below(5) == 0 { 6000 } else { 900 };
    let lengths = (1 + rng.below(900), rng.below(most));
    let spec = dense(dtype, batch, lengths, (heads_kv * group, heads_kv), head_dim);
    let mut spec = Layout::ALL[rng.below(4)].of(spec.head_dim_v(head_dim_v).mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    // Wider heads have no tile for blocks of 64.
    let side = if head_dim <= 128 && of_kernel.below(2) == 0 { BlockSide::Of64 } else { BlockSide::Of128 };
    let problem = Listed::Random(seed).of_side(side, spec, OWN[rng.below(3)]);
    trial(Case::normal(&format!("random {seed}"), problem, seed), 132, &PlanOptions::default())
}

/// Three kinds of tiles, with several tiles per CTA.
pub(crate) fn small() -> Vec<Trial> {
    let tiles = [(TILES[1], Listed::Diagonal), (TILES[2], Listed::Some), (OWN_LISTS, Listed::Diagonal)];
    let trials = tiles.map(|(tile, listed)| {
        let spec = dense(Dtype::Bf16, 1, (300, 500), (2, 1), 64);
        let case = Case::normal("small", listed.of_side(side(tile), spec, (false, true)), 4);
        trial(case, 1, &with_tile(tile))
    });
    trials.into()
}
