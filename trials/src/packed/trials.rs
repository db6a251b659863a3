//! Batches for the kernel that writes the table of packed sequences.

use fa3_sched::packed::Arrays;
use fa3_types::Mask;

use super::{Case, Lengths};
use crate::mutate::Target;
use crate::{Levels, Trial, chunks, covering_cases};

const LENGTHS: [Lengths; 5] =
    [Lengths::Edges, Lengths::Equal, Lengths::OneLong, Lengths::Any, Lengths::Garbage];
const ARRAYS: [Arrays; 4] = [
    Arrays { cu_seqlens: true, seqused: false, leftpad: false },
    Arrays { cu_seqlens: true, seqused: true, leftpad: false },
    Arrays { cu_seqlens: false, seqused: true, leftpad: false },
    Arrays { cu_seqlens: false, seqused: false, leftpad: false },
];
/// The length arrays of K and V. They have one kind more than Q: left padding.
const ARRAYS_OF_K: [Arrays; 5] = {
    let [a, b, c, d] = ARRAYS;
    [a, b, c, d, Arrays { leftpad: true, ..c }]
};

/// The covering array: each pair of levels of two factors occurs in some case.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let cases = covering_cases(of_features).into_iter();
    (seed..).zip(cases).map(|(seed, case)| Case { seed, ..case }.trial()).collect()
}

fn of_features(levels: &mut Levels) -> Case {
    // Numbers of sequences: none; one; the threads of a warp or a CTA, one less, and one more; more than one sort step
    // takes, and more than twice that number.
    let count = levels.pick(&[0, 1, 2, 31, 32, 33, 65, 127, 129, 300, 1024, 1025, 2100]);
    let (lengths, arrays) = (levels.pick(&LENGTHS), [levels.pick(&ARRAYS), levels.pick(&ARRAYS_OF_K)]);
    let mask = levels.pick(&[
        Mask::Causal,
        Mask::None,
        Mask::Window { left: Some(100), right: None },
        Mask::Window { left: None, right: Some(30) },
        Mask::Window { left: Some(200), right: Some(50) },
        chunks(300, None),
    ]);
    let tile = levels.pick(&[[128, 128], [192, 80], [64, 176]]);
    let (behind, firsts) = (levels.pick(&[true, false]), levels.pick(&[false, true]));
    Case { count, arrays, lengths, behind, firsts, tile, mask, seed: 0 }
}

const SMALL: Case = Case {
    count: 40,
    arrays: [ARRAYS[1]; 2],
    lengths: Lengths::Any,
    behind: true,
    firsts: true,
    tile: [128, 128],
    mask: Mask::Causal,
    seed: 1,
};

/// Batches whose sort ranks keys within warps, merges runs, merges runs twice, and takes two chunks.
pub(crate) fn small() -> Vec<Trial> {
    let counts = [40, 120, 300, 1030];
    counts.map(|count| Case { count, ..SMALL }.trial()).into()
}

/// A kernel of two warps, and a kernel that merges runs twice, with all kinds of lengths. Operators on bounds are not
/// tried, because the trials compare every word of the table with the host's.
pub(crate) fn targets() -> Vec<Target> {
    let target = |name, count| {
        let trials = LENGTHS.map(|lengths| Case { count, lengths, ..SMALL }.trial());
        Target::of_step(name, &trials, 0, &[])
    };
    vec![target("packed", 40), target("packed: merged", 300)]
}
