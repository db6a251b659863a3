//! Semaphores (flags) in global memory, by which CTAs announce their additions: the stores and the polling loops.

use fa3_ir::{
    Address, AtomicOp, Cache, GlobalAddr, Inst, LaneInst, LaneOp, MemInst, Operand, Ty, Value, ValueInfo,
};
use fa3_sim::Rule::{self, *};

use super::{constant, deleted, later, sites};
use crate::mutate::anatomy::touches;
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{is_bulk_wait, is_plain_arrival};
use crate::mutate::{Anatomy, Operator, Site};

/// Rules that notice that a CTA does not wait for the copies or additions of another CTA.
const UNORDERED: &[Rule] = &[T2, T4];

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("st.release: deleted", &[Deadlock], |kernel| deleted(releases(kernel))),
    // The operator moves the wait and not the store, because the flag's address is computed in between.
    Operator::new("st.release: before the wait for the copy", UNORDERED, |kernel| {
        let waits = releases(kernel).into_iter().filter_map(|line| kernel.before(line, is_bulk_wait));
        later(kernel, waits.collect(), |wait| kernel.after(wait, is_release))
    }),
    Operator::new("st.release: relaxed", UNORDERED, |kernel| {
        sites(releases(kernel), |line| exchanged(kernel, line))
    }),
    Operator::new("st.release: an ordinary store", &[Race], |kernel| {
        sites(releases(kernel), |line| stored(kernel, line))
    }),
    Operator::new("ld.acquire: relaxed", UNORDERED, |kernel| {
        polls(kernel).iter().map(Poll::relaxed).collect()
    }),
    Operator::new("ld.acquire: an ordinary load, once", &[Race], |kernel| {
        polls(kernel).iter().map(Poll::loaded).collect()
    }),
    Operator::new("poll: deleted", UNORDERED, |kernel| {
        deleted(polls(kernel).iter().map(|poll| poll.around).collect())
    }),
    Operator::new("poll: once", UNORDERED, |kernel| {
        polls(kernel).iter().map(|poll| Site::new(poll.end, vec![poll.once()])).collect()
    }),
    Operator::new("poll: until anybody has set it", UNORDERED, |kernel| {
        polls(kernel).iter().map(Poll::for_anybody).collect()
    }),
    Operator::new("poll: for another number", &[Deadlock], |kernel| {
        polls(kernel).iter().map(|poll| poll.for_next(kernel)).collect()
    }),
    Operator::new("poll: after what it protects", UNORDERED, |kernel| {
        let branches = polls(kernel).into_iter().filter_map(|poll| kernel.outer_branch(poll.around));
        let mut branches: Vec<usize> = branches.collect();
        branches.dedup();
        later(kernel, branches, |branch| kernel.after(branch, is_plain_arrival))
    }),
];

fn is_release(inst: &Inst) -> bool {
    matches!(inst, Inst::Mem(MemInst::StoreRelease { .. }))
}

fn releases(kernel: &Anatomy<'_>) -> Vec<usize> {
    kernel.find(is_release)
}

/// Operand and address of a release store.
fn release(kernel: &Anatomy<'_>, line: usize) -> Option<(Operand, GlobalAddr)> {
    let Some(Inst::Mem(MemInst::StoreRelease { src, addr })) = kernel.inst(line) else { return None };
    Some((*src, *addr))
}

/// Sets the flag by a relaxed atomic. It orders nothing.
fn exchanged(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let ((src, addr), dst) = (release(kernel, line)?, kernel.next_register());
    let set = MemInst::Atomic { op: AtomicOp::ExchangeB32, dst, addr: Address::Global(addr), src };
    let register = Edit::Register(ValueInfo { ty: Ty::B32, name: None, mutable: false });
    Some(Site::new(line, vec![register, Edit::Inst(line, Inst::Mem(set))]))
}

fn stored(kernel: &Anatomy<'_>, line: usize) -> Option<Site> {
    let (src, addr) = release(kernel, line)?;
    let set = MemInst::Store { src: vec![src], ty: Ty::B32, addr: Address::Global(addr) };
    Some(Site::replaced(line, Inst::Mem(set)))
}

/// A loop that polls a flag until it equals a number.
struct Poll {
    around: usize,
    load: usize,
    flag: Value,
    addr: GlobalAddr,
    /// The comparison that ends the loop.
    end: usize,
    ends: Vec<Value>,
    number: Operand,
}

fn polls(kernel: &Anatomy<'_>) -> Vec<Poll> {
    (0..kernel.len()).filter_map(|line| Poll::of(kernel, line)).collect()
}

impl Poll {
    fn of(kernel: &Anatomy<'_>, load: usize) -> Option<Poll> {
        let Some(&Inst::Mem(MemInst::LoadAcquire { dst: flag, addr })) = kernel.inst(load) else {
            return None;
        };
        let around = kernel.innermost_loop(load)?;
        let compares = |inst: &Inst| {
            matches!(inst, Inst::Lane(LaneInst { op: LaneOp::EqB32, .. })) && touches(inst, flag)
        };
        let end = *kernel.within(around, compares).first()?;
        let Some(Inst::Lane(LaneInst { dst, src, .. })) = kernel.inst(end) else { return None };
        Some(Poll { around, load, flag, addr, end, ends: dst.clone(), number: *src.get(1)? })
    }

    /// Polls the flag by a relaxed atomic that leaves the flag unchanged. It orders nothing.
    fn relaxed(&self) -> Site {
        let Poll { load, flag, addr, .. } = *self;
        let (addr, src) = (Address::Global(addr), constant(0));
        Site::replaced(load, Inst::Mem(MemInst::Atomic { op: AtomicOp::AddU32, dst: flag, addr, src }))
    }

    /// Polls the flag by ordinary loads. The loop might never end.
    fn loaded(&self) -> Site {
        let Poll { load, flag, addr, .. } = *self;
        let (addr, cache) = (Address::Global(addr), Cache::Coherent);
        let ordinary = Inst::Mem(MemInst::Load { dst: vec![flag], ty: Ty::B32, addr, cache });
        Site::new(load, vec![Edit::Inst(load, ordinary), self.once()])
    }

    fn once(&self) -> Edit {
        self.ending(LaneOp::EqB32, [self.number; 2])
    }

    fn for_anybody(&self) -> Site {
        Site::new(self.end, vec![self.ending(LaneOp::NeB32, [Operand::Value(self.flag), constant(0)])])
    }

    fn for_next(&self, kernel: &Anatomy<'_>) -> Site {
        let next = vec![self.number, constant(1)];
        let (number, mut edits) = Edit::compute(kernel, self.end, LaneOp::AddU32, next);
        edits.push(self.ending(LaneOp::EqB32, [Operand::Value(self.flag), number]));
        Site::new(self.end, edits)
    }

    /// Ends the loop by another comparison.
    fn ending(&self, op: LaneOp, src: [Operand; 2]) -> Edit {
        Edit::Inst(self.end, Inst::Lane(LaneInst { op, dst: self.ends.clone(), src: src.to_vec() }))
    }
}
