//! Covering arrays: few cases in which every pair of levels of two factors occurs.

use std::collections::BTreeSet;

/// Picks the level of each factor of a case.
#[derive(Debug, Default)]
pub struct Levels {
    /// Level of each factor. A factor without an entry has level 0.
    row: Vec<usize>,
    /// Number of levels of each factor picked so far.
    counts: Vec<usize>,
}

impl Levels {
    /// Picks the level of the next factor. Every case must pick the same factors in the same order.
    ///
    /// # Panics
    /// If `levels` is empty.
    pub fn pick<T: Copy>(&mut self, levels: &[T]) -> T {
        let level = self.row.get(self.counts.len()).copied().unwrap_or(0);
        self.counts.push(levels.len());
        levels[level]
    }
}

/// The cases of a [`covering`] array of the factors that `case` picks.
///
/// # Panics
/// If a factor has no levels.
pub fn covering_cases<T>(case: impl Fn(&mut Levels) -> T) -> Vec<T> {
    let mut factors = Levels::default();
    case(&mut factors);
    let rows = covering(&factors.counts).into_iter();
    rows.map(|row| case(&mut Levels { row, counts: Vec::new() })).collect()
}

/// A factor and one of its levels.
type Choice = (usize, usize);

/// Rows with a level for each factor. Every pair of levels of two factors occurs in some row.
///
/// # Panics
/// If a factor has no levels.
pub fn covering(levels: &[usize]) -> Vec<Vec<usize>> {
    let mut open = pairs(levels);
    let mut rows = Vec::new();
    while let Some(&pair) = open.first() {
        let mut row = Vec::from(pair);
        for (factor, &count) in levels.iter().enumerate() {
            if row.iter().any(|&(chosen, _)| chosen == factor) {
                continue;
            }
            // If several levels cover equally many new pairs, these levels take turns.
            let turn = |level| (level + count - rows.len() % count) % count;
            let new = |level| met(&row, (factor, level)).filter(|pair| open.contains(pair)).count();
            let best = (0..count).max_by_key(|&level| (new(level), turn(level)));
            row.push((factor, best.expect("a factor has levels")));
        }
        row.sort_unstable();
        for (index, &choice) in row.iter().enumerate() {
            met(&row[..index], choice).for_each(|pair| _ = open.remove(&pair));
        }
        rows.push(row.into_iter().map(|(_, level)| level).collect());
    }
    rows
}

/// Every pair to cover. The factors of a pair are in order.
fn pairs(levels: &[usize]) -> BTreeSet<[Choice; 2]> {
    let choices =
        |factors| (0..factors).flat_map(|factor| (0..levels[factor]).map(move |level| (factor, level)));
    let with_earlier = |second: Choice| choices(second.0).map(move |first| [first, second]);
    choices(levels.len()).flat_map(with_earlier).collect()
}

/// The pairs that `choice` forms with `others`. The factors of each pair are in order.
fn met(others: &[Choice], choice: Choice) -> impl Iterator<Item = [Choice; 2]> {
    others.iter().map(move |&other| [other.min(choice), other.max(choice)])
}
