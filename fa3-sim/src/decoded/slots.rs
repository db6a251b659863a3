//! Assignment of slots: values whose lifetimes do not overlap share a slot. This keeps a warp's registers in the cache.

use fa3_ir::{Access, Kernel, Value};

/// The lifetime of each value, in steps.
pub(super) struct Lifetimes {
    lives: Vec<Life>,
}

#[derive(Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
    /// Whether the value has a slot of its own: a variable, or a register of products.
    alone: bool,
    watched: bool,
}

impl Lifetimes {
    pub(super) fn new(kernel: &Kernel) -> Lifetimes {
        let life = |mutable| Life { first: usize::MAX, last: 0, alone: mutable, watched: false };
        Lifetimes { lives: kernel.values.iter().map(|info| life(info.mutable)).collect() }
    }

    pub(super) fn touch(&mut self, step: usize, value: Value) {
        let life = &mut self.lives[value.0 as usize];
        life.first = life.first.min(step);
        life.last = life.last.max(step);
    }

    pub(super) fn see(&mut self, step: usize, access: Access) {
        if let Some(value) = access.value() {
            self.touch(step, value);
        }
    }

    /// Notes that a product uses a value. A product in flight uses it for longer than the steps show.
    pub(super) fn watch(&mut self, value: Value) {
        let life = &mut self.lives[value.0 as usize];
        (life.alone, life.watched) = (true, true);
    }

    pub(super) fn watched(&self, value: usize) -> bool {
        self.lives[value].watched
    }

    /// Notes that the steps from `start` to `end` repeat: values that are defined before `start` and used in these
    /// steps live until `end`.
    pub(super) fn repeat(&mut self, start: usize, end: usize) {
        for life in &mut self.lives {
            if life.first < start && life.last >= start {
                life.last = life.last.max(end);
            }
        }
    }

    /// The slot of each value, and the number of slots. Values that this code does not use share the last slot.
    pub(super) fn assign(&self) -> (Vec<u32>, usize) {
        let mut order: Vec<usize> =
            (0..self.lives.len()).filter(|&value| self.lives[value].first != usize::MAX).collect();
        order.sort_by_key(|&value| self.lives[value].first);
        let mut slots = vec![0; self.lives.len()];
        let mut count = 0;
        let mut free: Vec<u32> = Vec::new();
        let mut taken: std::collections::BTreeSet<(usize, u32)> = std::collections::BTreeSet::new();
        for value in order {
            let life = self.lives[value];
            while let Some(&(last, slot)) = taken.first() {
                if last >= life.first {
                    break;
                }
                taken.pop_first();
                free.push(slot);
            }
            let reused = if life.alone { None } else { free.pop() };
            let slot = reused.unwrap_or_else(|| {
                count += 1;
                count - 1
            });
            if !life.alone {
                taken.insert((life.last, slot));
            }
            slots[value] = slot;
        }
        for (value, life) in self.lives.iter().enumerate() {
            if life.first == usize::MAX {
                slots[value] = count;
            }
        }
        (slots, count as usize + 1)
    }
}
