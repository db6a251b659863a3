//! Problems for the append kernel.

use fa3_types::{Dtype, QueryPositions, RopeStyle};

use super::{Base, Cache, CacheLayout, Case, Lengths, New, Queries, Rotation};
use crate::fwd::Layout;
use crate::mutate::{Equivalent, Target};
use crate::{Levels, Trial, covering_cases};

/// Head dimensions: rows of full and of partial chunks, rows whose number of threads is and is not a power of two, and
/// a row that takes two warps.
const HEAD_DIMS: [[usize; 2]; 8] =
    [[128, 128], [64, 64], [96, 80], [16, 24], [72, 40], [256, 256], [192, 128], [576, 512]];
const LENGTHS: [Lengths; 5] = [Lengths::Any, Lengths::Zero, Lengths::Full, Lengths::Beyond, Lengths::Garbage];
const ROTATIONS: [Option<Rotation>; 9] = {
    const fn of(style: RopeStyle, whole: bool, f32: bool, base: Base) -> Option<Rotation> {
        Some(Rotation { style, whole, f32, base })
    }
    const HALVES: RopeStyle = RopeStyle::HalfSplit;
    const NEXT: RopeStyle = RopeStyle::Interleaved;
    [
        of(HALVES, true, true, Base::Used),
        of(NEXT, true, true, Base::Listed),
        of(HALVES, false, true, Base::Listed),
        of(NEXT, false, true, Base::Used),
        of(HALVES, true, false, Base::Listed),
        of(NEXT, true, false, Base::Used),
        of(HALVES, false, false, Base::Used),
        of(NEXT, false, false, Base::Listed),
        None,
    ]
};
const QUERIES: [Option<Queries>; 6] = {
    const fn of(rows: usize, packed: bool, positions: QueryPositions) -> Option<Queries> {
        Some(Queries { rows, packed, positions })
    }
    const EACH: QueryPositions = QueryPositions::Each;
    const FIRST: QueryPositions = QueryPositions::First;
    [None, of(1, false, EACH), of(4, true, EACH), of(3, false, FIRST), of(2, true, FIRST), of(0, false, EACH)]
};

/// The covering array, and the cases outside of it: no sequences, and queries without new rows.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let covered = (seed..).zip(covering_cases(of_features)).map(|(seed, case)| Case { seed, ..case });
    let none = [New::Packed(3), New::Dense(1)].map(|new| Case { count: 0, new: Some(new), ..SMALL });
    let rotations = ROTATIONS.into_iter().flatten().enumerate();
    let alone = rotations.map(|(index, rotation)| Case {
        new: None,
        rotation: Some(rotation),
        queries: QUERIES[1 + index % (QUERIES.len() - 1)],
        head_dims: HEAD_DIMS[index % HEAD_DIMS.len()],
        ..SMALL
    });
    covered.chain(none).chain(alone).map(Case::trial).collect()
}

/// A case with the next levels. Each pair of levels of two factors occurs in some case.
fn of_features(levels: &mut Levels) -> Case {
    // The type of new rows, and whether the cache is of e4m3.
    let (dtype, to_e4m3) = levels.pick(&[
        (Dtype::Bf16, false),
        (Dtype::F16, false),
        (Dtype::Bf16, true),
        (Dtype::F16, true),
        (Dtype::E4m3, true),
    ]);
    // One sequence; a few; and more sequences than a warp reads at once.
    let (count, head_dims) = (levels.pick(&[1, 3, 33, 40]), levels.pick(&HEAD_DIMS));
    let heads = levels.pick(&[[8, 2], [3, 3], [5, 1]]);
    let new = levels.pick(&[
        New::Dense(1),
        New::Packed(3),
        New::Dense(3),
        New::Packed(1),
        New::Dense(0),
        New::Garbage(3),
        New::Dense(5),
    ]);
    let layout = levels.pick(&Layout::ALL);
    let cache = levels.pick(&[
        Cache::Dense(20),
        Cache::Pages { rows: 16, pages: 2 },
        Cache::Pages { rows: 1, pages: 12 },
        Cache::Pages { rows: 24, pages: 1 },
        Cache::Pages { rows: 64, pages: 1 },
        Cache::Missing { rows: 16, pages: 2 },
        Cache::Missing { rows: 1, pages: 12 },
        Cache::Indexed { rows: 4, pages: 5 },
    ]);
    let cache_layout = levels.pick(&[
        CacheLayout::Of(Layout::Contiguous),
        CacheLayout::Of(Layout::HeadsFirst),
        CacheLayout::Of(Layout::Gaps),
        CacheLayout::Of(Layout::Interleaved),
        CacheLayout::Beside,
    ]);
    let (lengths, rotation, queries) =
        (levels.pick(&LENGTHS), levels.pick(&ROTATIONS), levels.pick(&QUERIES));
    let case = Case {
        dtype,
        to_e4m3,
        count,
        head_dims,
        heads,
        new: Some(new),
        layout,
        cache,
        cache_layout,
        lengths,
        rotation,
        queries,
        seed: 0,
    };
    case.allowed()
}

const SMALL: Case = Case {
    dtype: Dtype::Bf16,
    to_e4m3: false,
    count: 3,
    head_dims: [64, 64],
    heads: [4, 2],
    new: Some(New::Packed(4)),
    layout: Layout::Gaps,
    cache: Cache::Pages { rows: 16, pages: 2 },
    cache_layout: CacheLayout::Beside,
    lengths: Lengths::Any,
    rotation: ROTATIONS[0],
    queries: QUERIES[2],
    seed: 1,
};

/// Packed and dense new rows, for a paged and a dense cache.
pub(crate) fn small() -> Vec<Trial> {
    let dense = Case { new: Some(New::Dense(2)), cache: Cache::Dense(20), queries: QUERIES[3], ..SMALL };
    let many = Case { count: 40, rotation: ROTATIONS[1], ..SMALL };
    let to_e4m3 = Case { to_e4m3: true, ..SMALL };
    [SMALL, dense, many, to_e4m3].map(Case::trial).into()
}

/// In the simulator a step sees all writes of the previous step, by any proxy. On a GPU the fences order the new rows
/// before the copies of an attention kernel that was launched early (PDL).
const FENCES: &[Equivalent] = &[(
    "fence.proxy.async: deleted",
    3,
    "the next step reads what these fence, and begins when all of this one is done",
)];

/// One kernel that searches for sequences and pages, and one that does not, with all kinds of lengths. Operators on
/// bounds are not tried, because the trials compare every byte with plain loops.
pub(crate) fn targets() -> Vec<Target> {
    let dense = Case { new: Some(New::Dense(2)), cache: Cache::Dense(20), queries: None, ..SMALL };
    let missing = Case { cache: Cache::Missing { rows: 16, pages: 2 }, new: Some(New::Garbage(4)), ..SMALL };
    let searching = Case { count: 33, ..SMALL };
    let all = |case: Case| LENGTHS.map(|lengths| Case { lengths, ..case }.trial());
    let searched: Vec<Trial> = all(searching).into_iter().chain(all(Case { count: 33, ..missing })).collect();
    vec![
        Target::of_step("append", &searched, 0, FENCES),
        Target::of_step("append: dense", &all(dense), 0, FENCES),
    ]
}
