//! The table of killed mutants.

use std::collections::BTreeMap;
use std::fmt;

use super::{Fate, Mutant, Operator, Target};

/// Fates of mutants by operator and kernel. Its `Display` is a Markdown table with cells `killed/total`, and `+e` for e
/// equivalent mutants.
pub struct Score {
    kernels: Vec<String>,
    rows: Vec<Row>,
    /// Mutants without their expected fate, one per line.
    pub failures: Vec<String>,
    /// Reasons of equivalent mutants, with the number of mutants for each.
    pub equivalent: BTreeMap<(&'static str, &'static str), usize>,
}

struct Row {
    operator: &'static str,
    cells: BTreeMap<usize, Cell>,
    /// Number of mutants that each rule killed.
    by: BTreeMap<String, usize>,
}

#[derive(Clone, Copy, Default)]
struct Cell {
    killed: usize,
    total: usize,
    equivalent: usize,
    /// Number of equivalent mutants that the target lists.
    said: usize,
}

impl Score {
    /// An empty table with a column for each of these kernels.
    pub fn new<'p>(kernels: impl IntoIterator<Item = &'p Target>) -> Score {
        let kernels = kernels.into_iter().map(|target| target.name.clone()).collect();
        Score { kernels, rows: Vec::new(), failures: Vec::new(), equivalent: BTreeMap::new() }
    }

    /// Whether an operator has mutants.
    pub fn has(&self, operator: &Operator) -> bool {
        self.rows.iter().any(|row| row.operator == operator.name)
    }

    /// Notes a mutant's fate.
    pub fn note(&mut self, target: &Target, operator: &Operator, mutant: &Mutant, fate: &Fate) {
        let kernel = &target.name;
        let column = self.kernels.iter().take_while(|name| *name != kernel).count();
        let row = self.rows.iter().position(|row| row.operator == operator.name).unwrap_or_else(|| {
            self.rows.push(Row { operator: operator.name, cells: BTreeMap::new(), by: BTreeMap::new() });
            self.rows.len() - 1
        });
        let row = &mut self.rows[row];
        let cell = row.cells.entry(column).or_default();
        if *fate == Fate::Survived
            && let Some(reason) = target.equivalent(operator, cell.said)
        {
            cell.said += 1;
            cell.equivalent += 1;
            *self.equivalent.entry((operator.name, reason)).or_default() += 1;
            return;
        }
        match fate {
            Fate::Killed(by) => {
                cell.killed += 1;
                cell.total += 1;
                *row.by.entry(by.clone()).or_default() += 1;
            }
            Fate::Equivalent(reason) => {
                cell.equivalent += 1;
                *self.equivalent.entry((operator.name, reason)).or_default() += 1;
            }
            Fate::Unbroken | Fate::Wrong(_) | Fate::Survived | Fate::NotEquivalent(_) => {
                cell.total += 1;
                self.failures.push(format!("{kernel}, {} at {}: {fate}", operator.name, mutant.site));
            }
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { killed, total, equivalent, said: _ } = *self;
        let text = match (total, equivalent) {
            (0, 0) => String::new(),
            (0, _) => format!("+{equivalent}"),
            (_, 0) => format!("{killed}/{total}"),
            (_, _) => format!("{killed}/{total} +{equivalent}"),
        };
        f.pad(&text)
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |name: &String| name.len().max(6);
        write!(f, "| {:50} |", "operator")?;
        self.kernels.iter().try_for_each(|name| write!(f, " {name:0$} |", width(name)))?;
        writeln!(f, " killed by |")?;
        write!(f, "|{:-<52}|", "")?;
        self.kernels.iter().try_for_each(|name| write!(f, "{:-<1$}|", "", width(name) + 2))?;
        writeln!(f, "---|")?;
        for Row { operator, cells, by } in &self.rows {
            write!(f, "| {operator:50} |")?;
            for (column, name) in self.kernels.iter().enumerate() {
                write!(f, " {:1$} |", cells.get(&column).copied().unwrap_or_default(), width(name))?;
            }
            let by: Vec<String> = by.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
            writeln!(f, " {} |", by.join(", "))?;
        }
        let cells = || self.rows.iter().flat_map(|row| row.cells.values());
        let (killed, total): (usize, usize) =
            (cells().map(|cell| cell.killed).sum(), cells().map(|cell| cell.total).sum());
        writeln!(f, "\n{killed} of {total} killed; {} equivalent:", self.equivalent.values().sum::<usize>())?;
        for ((operator, reason), count) in &self.equivalent {
            writeln!(f, "- {count} of {operator}: {reason}")?;
        }
        Ok(())
    }
}
