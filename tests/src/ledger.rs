//! The score of a run. For each engine: the number of cases that it computed or skipped, the reasons, and the largest
//! ratio of an error to the error law's bound.

use std::collections::BTreeMap;
use std::fmt;

use fa3_ref::law::{Satisfied, Violation};

use crate::{Answer, Case, NoAnswer};

/// Counts each engine's results, and keeps its faults.
#[derive(Default)]
pub struct Ledger {
    engines: BTreeMap<String, Score>,
    faults: Vec<String>,
}

#[derive(Clone, Copy, Default)]
struct Score {
    computed: usize,
    skipped: usize,
    /// Largest ratio of an error to its bound.
    closest: f64,
}

impl Ledger {
    /// Enters the answer of `engine` on `case`, which `judge` judges. If the case was skipped, prints the reason.
    pub fn enter<T, P: AsRef<[Satisfied]>>(
        &mut self,
        engine: &str,
        case: &Case,
        answer: Answer<T>,
        judge: impl FnOnce(T) -> Result<P, Box<Violation>>,
    ) {
        let score = self.engines.entry(engine.to_owned()).or_default();
        match answer.map(judge) {
            Ok(Ok(parts)) => {
                score.computed += 1;
                score.closest = parts.as_ref().iter().map(|part| part.ratio).fold(score.closest, f64::max);
            }
            Ok(Err(violation)) => self.faults.push(format!("{engine} {}: {violation}", case.name)),
            Err(NoAnswer::Skipped(skip)) => {
                score.skipped += 1;
                println!("skipped: {engine} {}: {skip}", case.name);
            }
            Err(NoAnswer::Failed(error)) => {
                self.faults.push(format!("{engine} {} ({}): {error}", case.name, case.problem));
            }
        }
    }

    /// Engines that computed nothing.
    pub fn idle(&self) -> Vec<&str> {
        let idle = self.engines.iter().filter(|(_, score)| score.computed == 0);
        idle.map(|(name, _)| name.as_str()).collect()
    }

    /// Checks that there are no faults.
    ///
    /// # Panics
    /// If an engine broke the law or failed. The message lists every fault.
    pub fn close(&self) {
        assert!(self.faults.is_empty(), "{} faults\n\n{}\n", self.faults.len(), self.faults.join("\n\n"));
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:20} {:>8} {:>8} {:>14}", "engine", "computed", "skipped", "error / bound")?;
        for (name, Score { computed, skipped, closest }) in &self.engines {
            writeln!(f, "{name:20} {computed:>8} {skipped:>8} {closest:>14.2}")?;
        }
        Ok(())
    }
}
