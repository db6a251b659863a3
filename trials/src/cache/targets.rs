//! Mutation targets that read a paged cache, and targets that reduce splits.

use fa3_sched::forward::SplitKeys;
use fa3_sim::Rule;
use fa3_types::{Dtype, Mask};

use super::trials::SMALL;
use super::{Case, Keys, Pages};
use crate::Trial;
use crate::mutate::{Equivalent, QK_FENCE, Target};

/// Files that turn page indices into box coordinates (`BOXES`) and into row addresses (`ROWS`).
const BOXES: &[&str] = &["parts/pages.rs", "fwd/producer.rs"];
const ROWS: &[&str] = &["parts/pages.rs", "parts/gather.rs"];

/// Files that choose a CTA's splits, the place of each split's results, and the results that the reduction reads.
const PARTS: &[&str] =
    &["sched/src/work_decomposition.rs", "parts/shares.rs", "fwd/epilogue.rs", "fwd/combine.rs"];

/// The file that finds the scales of tokens.
const SCALES: &[&str] = &["fwd/token_scales.rs"];

/// Equivalent mutants of attention kernels, with the reasons.
const ATTENTION: &[Equivalent] = &[("wgmma.fence", 1, QK_FENCE), ("comparison: the opposite", 2, SAME_LSE)];

/// Further equivalent mutants of the kernel that copies pages in boxes.
const COPIED: &[Equivalent] = &[
    (
        "bound: one more",
        1,
        "where a round over 32 sequences more begins behind the last one, it finds no units",
    ),
    ("number: select, min or max gives the first", 1, MASKED),
    ("number: select, min or max gives the second", 1, MASKED),
    (
        "number: shuffle leaves each lane its own",
        6,
        "all lanes of the warp have the same number, and the shuffle tells the compiler so",
    ),
];

/// Further equivalent mutants of the kernel that copies row by row.
const GATHERED: &[Equivalent] = &[
    (
        "full wait: after the first read",
        1,
        "V of a block is passed on before K of the next one, which was waited for",
    ),
    (
        "fence.proxy.async: deleted",
        1,
        "a work tile's V, but for the last block's, is read after K of the next block, which has a fence behind it",
    ),
    (
        "wgmma.wait_group: after what it protects",
        1,
        "the warps that load K again load V before, whose stage is given back after products behind K's",
    ),
    (
        "empty wait: parity not toggled",
        2,
        "a CTA's last blocks of K and V are waited for, and none after them",
    ),
];

/// Further equivalent mutants of the kernel with scales of tokens.
const SCALED: &[Equivalent] = &[(
    "accumulator not zeroed",
    3,
    "a scale is loaded before it is used, but for rows that do not exist, whose codes are 0 (a scale of NaN would show it, \
     which has its own test)",
)];

/// Equivalent mutants of the reduction kernel.
const MERGED: &[Equivalent] = &[("comparison: the opposite", 1, SAME_LSE)];

/// Files by which consumers merge pieces.
const PIECES: &[&str] = &["fwd/merged.rs", "parts/kv_blocks.rs"];

const SAME_LSE: &str = "the threads of a row have the same LSE, and store the same numbers";
const MASKED: &str = "scores of keys behind a sequence's end are masked, whatever K has there";

/// Rules that notice a missing wait for V. There is no data race, because a wait for K of the next block follows.
const UNSEEN: &[(&str, &[Rule])] = &[("full wait: deleted", &[Rule::M3, Rule::M4])];

/// Lengths of three and five blocks of 128 keys, and of one block. With four stages, the pipeline wraps once at the
/// first K of a work unit, and once at the last V of a work unit.
const ROUND: &[usize] = &[300, 600, 20];

/// Kernels over pages that are copied in boxes; over pages that are copied row by row, with fixed-size splits; over
/// e4m3 pages that warps dequantize, with scales of tokens; and one that merges pieces of two blocks. In each target a
/// CTA has more KV blocks than pipeline stages, one work unit has several splits or pieces, and another work unit has
/// one.
///
/// The arithmetic by which a CTA finds its share of the blocks is not mutated: the host runs the same code, and a
/// property test covers all of it.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    // A CTA's share ends beyond the last work unit, and the table ends before the last tile.
    let boxes = trials(&case(), &[(1, ROUND), (2, &[20, 0, 828])]);
    let e4m3 = trials(&Case { token_scales: Some(Dtype::E4m3), ..case() }, &[(1, ROUND), (2, &[20, 1, 700])]);
    let pieces = Some(SplitKeys::FixedSize { keys: 512 });
    let rows = Case { keys: Keys::Pages(Pages::of(12).padded()), split_keys: pieces, ..case() };
    let parts = trials(&rows, &[(1, ROUND), (2, &[700, 100, 300]), (1, &[300; 4])]);
    let nowhere = trials(&rows, &[(1, &[384])]).into_iter().map(|trial| with_pages(trial, 0, &[1 << 31; 34]));
    let rows = parts.into_iter().chain(nowhere).chain(trials(&rows, &[(1, &[1])]));
    let rows: Vec<Trial> = rows.collect();
    let merging = Case {
        split_keys: Some(SplitKeys::FixedSize { keys: 256 }),
        split_bytes: Some(0),
        heads: (16, 1),
        ..case()
    };
    let merging = trials(&merging, &[(1, ROUND), (2, &[20, 0, 828])]);
    let attends =
        |name, trials: &[Trial]| Target::of_step(name, trials, 0, ATTENTION).with("comparison", PARTS);
    let merges = |name, trials: &[Trial]| Target::of_step(name, trials, 1, MERGED).with("comparison", PARTS);
    vec![
        attends("cache, boxes", &boxes).also_equivalent(COPIED).with("bound", BOXES).with("number", BOXES),
        attends("cache, rows", &rows).also_equivalent(GATHERED).also_noticed(UNSEEN).with("number", ROWS),
        attends("cache, e4m3", &e4m3)
            .also_equivalent(SCALED)
            .with("comparison", SCALES)
            .with("number", SCALES),
        attends("cache, merged pieces", &merging)
            .also_equivalent(COPIED)
            .with("comparison", PIECES)
            .with("number", PIECES),
        // A work unit with four splits.
        merges("cache, merge", &trials(&case(), &[(5, &[20, 1, 900])])),
        merges("cache, merge of pieces", &rows[..2]),
    ]
}

/// The case that the targets vary. It has no mask, because other targets test masked blocks.
fn case() -> Case {
    Case { heads: (2, 1), sink: false, mask: Mask::None, ..SMALL }
}

/// Trials of the case with these lengths of the keys, each on a device with this number of SMs.
fn trials(case: &Case, problems: &[(u32, &[usize])]) -> Vec<Trial> {
    let trial = |&(sms, lengths): &(u32, &[usize])| {
        let case = Case { sms, lengths: lengths.to_vec(), ..case.clone() };
        with_missing_pages(case.trial())
    };
    problems.iter().map(trial).collect()
}

/// The trial with invalid indices for some pages of the last sequence, and with an unused page after its last page.
fn with_missing_pages(trial: Trial) -> Trial {
    let pages = trial.program.buffers[buffer(&trial, "k")].shape[0] as u32;
    let of_each = pages_of_each(&trial);
    let trial = with_pages(trial, 5, &[u32::MAX, 1 << 31, pages]);
    let in_use: Vec<u32> = numbers(&trial).collect();
    let nobodys = (0..pages).find(|page| !in_use.contains(page)).expect("there are pages between others");
    with_pages(trial, of_each - 2, &[nobodys; 2])
}

/// Index of a buffer of a program over pages.
fn buffer(trial: &Trial, name: &str) -> usize {
    trial.program.find(name).expect("keys are in pages").0
}

/// Entries of the page table.
fn numbers(trial: &Trial) -> impl Iterator<Item = u32> {
    trial.before[buffer(trial, "page_table")]
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| u32::from_le_bytes(bytes))
}

/// Number of entries in a row of the page table.
fn pages_of_each(trial: &Trial) -> usize {
    let [entries, sequences] =
        ["page_table", "seqused_k"].map(|name| trial.before[buffer(trial, name)].len());
    entries / sequences
}

/// The trial with these page indices of the last sequence, from its `first` page on.
fn with_pages(mut trial: Trial, first: usize, numbers: &[u32]) -> Trial {
    let table = buffer(&trial, "page_table");
    let of_each = pages_of_each(&trial);
    let last = trial.before[table].len() - 4 * of_each;
    let entries = trial.before[table][last..].chunks_mut(4).skip(first);
    entries.zip(numbers).for_each(|(entry, number)| entry.copy_from_slice(&number.to_le_bytes()));
    trial
}
