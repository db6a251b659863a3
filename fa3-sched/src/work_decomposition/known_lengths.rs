//! The splits of all CTAs where the host knows the lengths of sequences, for pictures and tests.

use super::{IterationSpace, Split, WorkDecomposition, WorkUnits};
use crate::SeqLens;

/// The splits of all CTAs. Kernels find the same ones from lengths on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splits {
    /// The units of each sequence.
    pub units: Vec<WorkUnits<u32>>,
    /// The splits, by CTA, each CTA's in the order in which it computes them.
    pub splits: Vec<CtaSplit>,
}

/// A split and the CTA that computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtaSplit {
    /// The CTA.
    pub cta: u32,
    /// The sequence.
    pub sequence: usize,
    /// The head, with each co-scheduled head counted.
    pub head: u32,
    /// The split.
    pub split: Split<u32>,
}

impl WorkDecomposition<u32> {
    /// The splits of sequences that have these rows of O (`q`) and keys. `None` if their iterations, or one share more,
    /// are 2³¹ or more, which kernels do not count.
    pub fn splits(&self, sequences: &[SeqLens<u32>]) -> Option<Splits> {
        let units: Vec<_> = sequences.iter().map(|&len| self.units(len.q, len)).collect();
        let space = self.space(&units)?;
        let units: Vec<_> = units.into_iter().map(|units| units.on(&space)).collect();
        let ctas = self.shares.divisor() * self.co_scheduled.unwrap_or(1);
        let splits = (0..ctas).flat_map(|cta| self.splits_of(&space, &units, cta)).collect();
        Some(Splits { units, splits })
    }

    fn space(&self, units: &[WorkUnits<u32>]) -> Option<IterationSpace<u32>> {
        let small = |number: u64| u32::try_from(number).ok().filter(|&number| number < 1 << 31);
        let sum = |of: &dyn Fn(&WorkUnits<u32>) -> u64| small(units.iter().map(of).sum());
        let total = sum(&|units| u64::from(units.count) * u64::from(units.iterations))?;
        let count = sum(&|units| units.count.into())?;
        let longest = units.iter().map(|units| units.iterations).max().unwrap_or(0);
        small(u64::from(count) * u64::from(longest))?;
        let space = self.iteration_space(total, || [count, longest]);
        small(u64::from(self.shares.divisor()) * u64::from(space.share)).map(|_| space)
    }

    fn splits_of(&self, space: &IterationSpace<u32>, units: &[WorkUnits<u32>], cta: u32) -> Vec<CtaSplit> {
        let number = self.number(cta);
        let end = ((number + 1) * space.share).min(space.total);
        let (mut place, mut first, mut begins) = (number * space.share, 0, false);
        let mut splits = Vec::new();
        for (sequence, units) in units.iter().enumerate() {
            let next = first + units.all();
            while place < next.min(end) {
                if !begins {
                    begins = true;
                    place = first + self.begin(units, place - first);
                    continue;
                }
                let split = self.split(units, place - first, end - place);
                splits.push(CtaSplit { cta, sequence, head: self.head(split.head, cta), split });
                place += split.iterations;
            }
            first = next;
        }
        splits
    }
}
