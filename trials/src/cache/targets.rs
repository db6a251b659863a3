//! Mutation targets that read a cache in pages, and those that merge what CTAs leave of units whose keys they share.

use fa3_sched::forward::SplitKeys;
use fa3_sim::Rule;
use fa3_types::Mask;

use super::trials::SMALL;
use super::{Case, Keys, Pages};
use crate::Trial;
use crate::mutate::{Equivalent, QK_FENCE, Target};

/// Where numbers of pages become places of boxes, and of rows.
const BOXES: &[&str] = &["parts/pages.rs", "fwd/producer.rs"];
const ROWS: &[&str] = &["parts/pages.rs", "parts/gather.rs"];

/// Where it is chosen which parts of units a CTA has, where their results go, and where the merge finds them.
const PARTS: &[&str] = &["sched/src/shares.rs", "parts/shares.rs", "fwd/epilogue.rs", "fwd/merge.rs"];

/// Mutants of attention kernels that do what the kernel does, and why.
const ATTENTION: &[Equivalent] = &[("wgmma.fence", 1, QK_FENCE), ("comparison: the opposite", 2, SAME_LSE)];

/// Mutants of the kernel that copies boxes.
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

/// Mutants of the kernel that copies row by row.
const GATHERED: &[Equivalent] = &[(
    "full wait: after the first read",
    1,
    "V of a block is passed on before K of the next one, which was waited for",
)];

/// Mutants of the kernel that merges parts.
const MERGED: &[Equivalent] = &[("comparison: the opposite", 1, SAME_LSE)];

const SAME_LSE: &str = "the threads of a row have the same LSE, and store the same numbers";
const MASKED: &str = "scores of keys behind a sequence's end are masked, whatever K has there";

/// Nobody sees that V is there: that K of the next block is, says it.
const UNSEEN: &[(&str, &[Rule])] = &[("full wait: deleted", &[Rule::M3, Rule::M4])];

/// Three, five blocks of 128 keys, and one: with four slots, a round of the ring ends with the first K of a unit, and
/// with the last V of one.
const ROUND: &[usize] = &[300, 600, 20];

/// Pages that are copied in boxes; pages whose rows are copied one by one, in pieces; e4m3, which warps convert. In
/// each a CTA has more blocks of keys than there are stages, a unit has several parts, and another one is whole.
///
/// The sums by which a CTA finds its share are not among what is broken: they are code that the host shares, and a
/// property test has all of it.
///
/// # Panics
/// If one cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    // A share ends beyond the last unit, and the table ends before the last tile.
    let boxes = trials(&case(), &[(1, ROUND), (2, &[20, 0, 828])]);
    let e4m3 = trials(&Case { e4m3_keys: true, ..case() }, &[(1, ROUND), (2, &[20, 1, 700])]);
    let pieces = Some(SplitKeys::Pieces { keys: 512 });
    let rows = Case { keys: Keys::Pages(Pages::of(12).padded()), split_keys: pieces, ..case() };
    let parts = trials(&rows, &[(1, ROUND), (2, &[700, 100, 300]), (1, &[300; 4])]);
    let nowhere = trials(&rows, &[(1, &[384])]).into_iter().map(|trial| with_pages(trial, 0, &[1 << 31; 34]));
    let rows = parts.into_iter().chain(nowhere).chain(trials(&rows, &[(1, &[1])]));
    let rows: Vec<Trial> = rows.collect();
    let attends =
        |name, trials: &[Trial]| Target::of_step(name, trials, 0, ATTENTION).with("comparison", PARTS);
    let merges = |name, trials: &[Trial]| Target::of_step(name, trials, 1, MERGED).with("comparison", PARTS);
    vec![
        attends("cache, boxes", &boxes).also_equivalent(COPIED).with("bound", BOXES).with("number", BOXES),
        attends("cache, rows", &rows).also_equivalent(GATHERED).also_noticed(UNSEEN).with("number", ROWS),
        attends("cache, e4m3", &e4m3),
        // Four parts of a unit.
        merges("cache, merge", &trials(&case(), &[(5, &[20, 1, 900])])),
        merges("cache, merge of pieces", &rows[..2]),
    ]
}

/// Without a mask, whose blocks are other kernels' to test.
fn case() -> Case {
    Case { heads: (2, 1), sink: false, mask: Mask::None, ..SMALL }
}

/// The case with these keys on so many SMs.
fn trials(case: &Case, problems: &[(u32, &[usize])]) -> Vec<Trial> {
    let trial = |&(sms, lengths): &(u32, &[usize])| {
        let case = Case { sms, lengths: lengths.to_vec(), ..case.clone() };
        with_missing_pages(case.trial())
    };
    problems.iter().map(trial).collect()
}

/// The trial with numbers that are no page's in place of some pages of the last sequence, and with a page that is
/// nobody's behind its last one.
fn with_missing_pages(trial: Trial) -> Trial {
    let pages = trial.program.buffers[buffer(&trial, "k")].shape[0] as u32;
    let of_each = pages_of_each(&trial);
    let trial = with_pages(trial, 5, &[u32::MAX, 1 << 31, pages]);
    let in_use: Vec<u32> = numbers(&trial).collect();
    let nobodys = (0..pages).find(|page| !in_use.contains(page)).expect("there are pages between others");
    with_pages(trial, of_each - 2, &[nobodys; 2])
}

/// The number of a buffer of a program over pages.
fn buffer(trial: &Trial, name: &str) -> usize {
    trial.program.find(name).expect("keys are in pages").0
}

/// The page table.
fn numbers(trial: &Trial) -> impl Iterator<Item = u32> {
    trial.before[buffer(trial, "page_table")]
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| u32::from_le_bytes(bytes))
}

/// Entries of a row of the page table.
fn pages_of_each(trial: &Trial) -> usize {
    let [entries, sequences] =
        ["page_table", "seqused_k"].map(|name| trial.before[buffer(trial, name)].len());
    entries / sequences
}

/// The trial with these numbers of pages of the last sequence, from the `first` one on.
fn with_pages(mut trial: Trial, first: usize, numbers: &[u32]) -> Trial {
    let table = buffer(&trial, "page_table");
    let of_each = pages_of_each(&trial);
    let last = trial.before[table].len() - 4 * of_each;
    let entries = trial.before[table][last..].chunks_mut(4).skip(first);
    entries.zip(numbers).for_each(|(entry, number)| entry.copy_from_slice(&number.to_le_bytes()));
    trial
}
