//! The matrix products of a warp that are in flight, and the accesses to registers that they forbid.

use std::collections::VecDeque;

use crate::decoded::Code;
use crate::rule::Rule;

/// The products of a warp.
#[derive(Default)]
pub(crate) struct Flight {
    /// One entry per slot.
    watch: Vec<Watch>,
    /// Number of fences so far.
    fences: u32,
    /// Groups committed and groups retired so far. Groups count from 1.
    pub(crate) committed: u32,
    pub(crate) retired: u32,
    /// Number of products in the open group.
    pub(crate) open: u32,
    /// Whether the warp has waited while the open group had products.
    passed: bool,
    /// Products that are not computed yet, in order.
    pub(crate) queue: VecDeque<Pending>,
    pub(crate) accumulators: Vec<Accumulator>,
    /// The cluster's component that counts retired groups.
    pub(crate) component: Option<u16>,
    /// Number of warpgroup instructions so far.
    pub(crate) sequence: usize,
}

#[derive(Clone, Copy, Default)]
struct Watch {
    /// The number of fences before the register's last access, plus 1; 0 if there was none.
    touched: u32,
    /// The last group with a product that uses the register.
    group: u32,
    /// The number of columns of that product if the register is one of its accumulators, 0 if it is part of A.
    columns: u32,
}

/// A product to be computed.
pub(crate) struct Pending {
    /// Its step.
    pub(crate) pc: usize,
    pub(crate) group: u32,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) accumulate: bool,
}

/// The sums of products in flight.
pub(crate) struct Accumulator {
    /// The step of its first product.
    pub(crate) pc: usize,
    /// 16 rows of n columns.
    pub(crate) values: Vec<f32>,
    /// The group of its last product.
    pub(crate) group: u32,
}

/// How a product uses a register.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Accumulator { columns: u32 },
    Factor,
}

impl Flight {
    pub(crate) fn new(code: &Code) -> Flight {
        let watched = code.watched.iter().any(|&watched| watched);
        let slots = if watched { code.registers } else { 0 };
        Flight { watch: vec![Watch::default(); slots], ..Flight::default() }
    }

    /// The group of the next product.
    pub(crate) fn group(&self) -> u32 {
        self.committed + 1
    }

    pub(crate) fn fence(&mut self) {
        self.fences += 1;
    }

    pub(crate) fn commit(&mut self) {
        self.committed += 1;
        (self.open, self.passed) = (0, false);
    }

    /// Waits until at most `pending` groups are unfinished.
    pub(crate) fn wait(&mut self, pending: u32) {
        self.retired = self.retired.max(self.committed.saturating_sub(pending));
        self.passed |= self.open > 0;
    }

    /// Whether a group has no commit yet, although the warp has waited since.
    pub(crate) fn uncommitted(&self, group: u32) -> bool {
        group > self.committed && self.passed
    }

    /// Records that an instruction other than a product accesses a register. Returns the rule that this breaks.
    pub(crate) fn touch(&mut self, slot: u32) -> Option<Rule> {
        let (group, fences) = (self.watch[slot as usize].group, self.fences);
        let broken =
            (group > self.retired).then(|| if self.uncommitted(group) { Rule::W3 } else { Rule::W2 });
        let watch = &mut self.watch[slot as usize];
        if broken.is_some() {
            watch.group = 0;
        }
        watch.touched = fences + 1;
        broken
    }

    /// Records that a product uses a register. Returns the rule that this breaks.
    pub(crate) fn product(&mut self, slot: u32, used: Use) -> Option<Rule> {
        let (group, fences, retired) = (self.group(), self.fences, self.retired);
        let watch = &mut self.watch[slot as usize];
        let in_flight = watch.group > retired;
        let columns = match used {
            Use::Accumulator { columns } => columns,
            Use::Factor => 0,
        };
        let broken = if in_flight && (watch.columns == 0) != (columns == 0) {
            Some(Rule::W2)
        } else if watch.touched > fences || fences == 0 || (in_flight && watch.columns != columns) {
            Some(Rule::W1)
        } else {
            None
        };
        *watch = Watch { touched: if broken.is_some() { 0 } else { watch.touched }, group, columns };
        broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight() -> Flight {
        Flight { watch: vec![Watch::default(); 4], ..Flight::default() }
    }

    const D: Use = Use::Accumulator { columns: 64 };

    #[test]
    fn products_need_a_fence_after_every_access() {
        let mut flight = flight();
        assert_eq!(flight.product(0, D), Some(Rule::W1), "no fence at all");
        flight.fence();
        assert_eq!(flight.product(0, D), None);
        assert_eq!(flight.product(0, D), None, "the same shape");
        assert_eq!(flight.product(0, Use::Accumulator { columns: 128 }), Some(Rule::W1));
        flight.commit();
        flight.wait(0);
        assert_eq!(flight.product(0, D), None, "nobody touched it");
        flight.commit();
        flight.wait(0);
        assert_eq!(flight.touch(0), None);
        assert_eq!(flight.product(0, D), Some(Rule::W1));
    }

    #[test]
    fn registers_in_flight_are_not_touched() {
        let mut flight = flight();
        flight.fence();
        flight.product(0, D);
        flight.product(1, Use::Factor);
        flight.commit();
        flight.product(2, D);
        flight.commit();
        flight.wait(1);
        assert_eq!([0, 1, 2, 3].map(|slot| flight.touch(slot)), [None, None, Some(Rule::W2), None]);
    }

    #[test]
    fn a_wait_passes_by_what_is_not_committed() {
        let mut flight = flight();
        flight.fence();
        flight.product(0, D);
        flight.open += 1;
        flight.wait(0);
        assert_eq!(flight.touch(0), Some(Rule::W3));
    }
}
