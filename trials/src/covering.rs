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
pub fn covering_cases<T>(close: usize, case: impl Fn(&mut Levels) -> T) -> Vec<T> {
    let mut factors = Levels::default();
    case(&mut factors);
    let rows = covering(&factors.counts, close).into_iter();
    rows.map(|row| case(&mut Levels { row, counts: Vec::new() })).collect()
}

/// A factor and one of its levels.
type Choice = (usize, usize);

/// Rows with a level for each factor. Every pair of levels of two factors occurs in some row. Every triple of levels
/// occurs, too, for the first `close` factors, which interact most.
///
/// # Panics
/// If a factor has no levels.
pub fn covering(levels: &[usize], close: usize) -> Vec<Vec<usize>> {
    let mut open = tuples(levels, close);
    let mut rows = Vec::new();
    while let Some(first) = open.first().cloned() {
        let mut row = first;
        for (factor, &count) in levels.iter().enumerate() {
            if row.iter().any(|&(chosen, _)| chosen == factor) {
                continue;
            }
            // If several levels cover equally many new tuples, these levels take turns.
            let turn = |level| (level + count - rows.len() % count) % count;
            let new = |level| met(&row, (factor, level), close).filter(|tuple| open.contains(tuple)).count();
            let best = (0..count).max_by_key(|&level| (new(level), turn(level)));
            row.push((factor, best.expect("a factor has levels")));
        }
        row.sort_unstable();
        for (index, &choice) in row.iter().enumerate() {
            met(&row[..index], choice, close).for_each(|tuple| _ = open.remove(&tuple));
        }
        rows.push(row.into_iter().map(|(_, level)| level).collect());
    }
    rows
}

/// Every tuple to cover. The factors of a tuple are in order.
fn tuples(levels: &[usize], close: usize) -> BTreeSet<Vec<Choice>> {
    let factors = (0..levels.len()).flat_map(|factor| (0..levels[factor]).map(move |level| (factor, level)));
    let choices: Vec<Choice> = factors.collect();
    let before = |choice: Choice| choices.iter().copied().take_while(move |&(factor, _)| factor < choice.0);
    let mut tuples = BTreeSet::new();
    for &c in &choices {
        for b in before(c) {
            tuples.insert(vec![b, c]);
            tuples.extend(before(b).filter(|_| c.0 < close).map(|a| vec![a, b, c]));
        }
    }
    tuples
}

/// The pairs and triples that `choice` forms with `others`. The factors of each tuple are in order.
fn met(others: &[Choice], choice: Choice, close: usize) -> impl Iterator<Item = Vec<Choice>> {
    let ordered = |mut tuple: Vec<Choice>| {
        tuple.sort_unstable();
        tuple
    };
    let is_close = move |&(factor, _): &Choice| factor < close;
    let pairs = others.iter().map(move |&other| ordered(vec![other, choice]));
    let near =
        others.iter().copied().enumerate().filter(move |(_, other)| is_close(&choice) && is_close(other));
    let triples = near.flat_map(move |(index, b)| {
        others[..index].iter().filter(move |a| is_close(a)).map(move |&a| ordered(vec![a, b, choice]))
    });
    pairs.chain(triples)
}
