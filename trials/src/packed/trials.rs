//! Batches for the kernel that writes the table of packed sequences.

use fa3_sched::packed::Arrays;
use fa3_types::Mask;

use super::{Case, Lengths};
use crate::family::Trial;
use crate::mutate::Target;
use crate::{chunks, covering};

/// None; one; warps and CTAs that are full, one short of it and one beyond; more than are sorted at once, and more than
/// twice as many.
const COUNTS: [usize; 13] = [0, 1, 2, 31, 32, 33, 65, 127, 129, 300, 1024, 1025, 2100];
const LENGTHS: [Lengths; 5] =
    [Lengths::Edges, Lengths::Equal, Lengths::OneLong, Lengths::Any, Lengths::Garbage];
const ARRAYS: [Arrays; 4] = [
    Arrays { cu_seqlens: true, seqused: false, leftpad: false },
    Arrays { cu_seqlens: true, seqused: true, leftpad: false },
    Arrays { cu_seqlens: false, seqused: true, leftpad: false },
    Arrays { cu_seqlens: false, seqused: false, leftpad: false },
];
/// Arrays of K and V, which may have one more.
const ARRAYS_OF_K: [Arrays; 5] = {
    let [a, b, c, d] = ARRAYS;
    [a, b, c, d, Arrays { leftpad: true, ..c }]
};
const MASKS: [Mask; 6] = [
    Mask::Causal,
    Mask::None,
    Mask::Window { left: Some(100), right: None },
    Mask::Window { left: None, right: Some(30) },
    Mask::Window { left: Some(200), right: Some(50) },
    chunks(300, None),
];
const TILES: [[u32; 2]; 3] = [[128, 128], [192, 80], [64, 176]];
const BEHIND: [bool; 2] = [true, false];
const FIRSTS: [bool; 2] = [false, true];

/// Any two levels of two factors meet.
const LEVELS: [usize; 8] = [
    COUNTS.len(),
    LENGTHS.len(),
    ARRAYS.len(),
    ARRAYS_OF_K.len(),
    MASKS.len(),
    TILES.len(),
    BEHIND.len(),
    FIRSTS.len(),
];

/// The covering array.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    covering(&LEVELS, 0)
        .iter()
        .enumerate()
        .map(|(index, row)| of_levels(row, seed + index as u64).trial())
        .collect()
}

fn of_levels(row: &[usize], seed: u64) -> Case {
    let &[count, lengths, q, k, mask, tile, behind, firsts] = row else {
        unreachable!("a row has a level for each factor");
    };
    Case {
        count: COUNTS[count],
        arrays: [ARRAYS[q], ARRAYS_OF_K[k]],
        lengths: LENGTHS[lengths],
        behind: BEHIND[behind],
        firsts: FIRSTS[firsts],
        tile: TILES[tile],
        mask: MASKS[mask],
        seed,
    }
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

/// A CTA whose warps rank keys at once, one that merges runs, one that does so twice, and two chunks.
pub(super) fn small() -> Vec<Trial> {
    let counts = [40, 120, 300, 1030];
    counts.map(|count| Case { count, ..SMALL }.trial()).into()
}

/// A kernel of two warps, and one that merges runs twice, with all kinds of lengths. Bounds that are off by one are not
/// among their mutants: every word of the table the trials compare with that of the host.
pub(super) fn targets() -> Vec<Target> {
    let target = |name, count| {
        let trials = LENGTHS.map(|lengths| Case { count, lengths, ..SMALL }.trial());
        Target::of_step(name, &trials, 0, &[])
    };
    vec![target("packed", 40), target("packed: merged", 300)]
}
