//! CTA barriers, named barriers and cluster barriers, by purpose.

use fa3_ir::{BarrierInst, BarrierRef, ClusterInst, Inst, Operand};
use fa3_sim::Rule::*;

use super::{constant, deleted, deleted_unless, earlier, later, sites, unless};
use crate::mutate::edit::Edit;
use crate::mutate::kinds::{
    is_bulk_wait, is_copy_out, is_init, is_init_fence, is_product_wait, is_proxy_fence, is_sync,
    writes_shared,
};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("barrier after mbarrier.init: deleted", &[M6], |kernel| {
        deleted_unless(kernel, syncs(kernel, Purpose::Init), |kernel, _| one_thread(kernel))
    }),
    Operator::new("barrier after mbarrier.init: before it", &[M6], |kernel| {
        let barriers = syncs(kernel, Purpose::Init);
        let moved = earlier(kernel, barriers, |line| kernel.before(line, is_init));
        unless(moved, |_| one_thread(kernel))
    }),
    Operator::new("barrier before a copy: deleted", &[Race, W4], |kernel| {
        deleted(syncs(kernel, Purpose::Copy))
    }),
    Operator::new("barrier before a copy: after it", &[Race, W4], |kernel| {
        later(kernel, syncs(kernel, Purpose::Copy), |line| kernel.after(line, is_copy_out))
    }),
    Operator::new("barrier before a copy: before the last write", &[Race, W4], |kernel| {
        earlier(kernel, syncs(kernel, Purpose::Copy), |line| kernel.before(line, writes_shared))
    }),
    Operator::new("barrier after a copy's wait: deleted", &[T2], |kernel| {
        deleted_unless(kernel, syncs(kernel, Purpose::Reuse), first_use)
    }),
    Operator::new("barrier after a copy's wait: after the first write", &[T2], |kernel| {
        let barriers = syncs(kernel, Purpose::Reuse);
        let moved = later(kernel, barriers, |line| kernel.after(line, writes_shared));
        unless(moved, |line| first_use(kernel, line))
    }),
    Operator::new("barrier after products: deleted", &[W6], |kernel| {
        deleted(syncs(kernel, Purpose::Products))
    }),
    Operator::new("barrier after products: before their wait", &[W6], |kernel| {
        let barriers = syncs(kernel, Purpose::Products);
        earlier(kernel, barriers, |line| kernel.before(line, is_product_wait))
    }),
    Operator::new("barrier after a store to shared memory: deleted", &[Race, Lanes], |kernel| {
        deleted(syncs_of_stores(kernel))
    }),
    Operator::new("named barrier: + 32 threads", &[B1, Deadlock], |kernel| {
        computed(kernel, |id, threads| (id, threads + 32))
    }),
    Operator::new("named barrier: - 32 threads", &[B1, B2, Deadlock], |kernel| {
        computed(kernel, |id, threads| (id, threads - 32))
    }),
    Operator::new("named barrier: the first warpgroup's", &[B1, B2, Race, T2, Deadlock], |kernel| {
        if kernel.kernel.barriers.len() < 2 {
            return Vec::new();
        }
        computed(kernel, |_, threads| (constant(1), threads))
    }),
    Operator::new("cluster barrier after mbarrier.init: half of it deleted", &[M6, B1, Deadlock], |kernel| {
        deleted(cluster_barriers(kernel, true))
    }),
    Operator::new("cluster barrier at the end: deleted in one role", &[], |kernel| {
        let reason = "the other role's warps, and with them their CTA, stay until this role's have exited";
        let site = |pair: &[usize]| {
            let edits = pair.iter().copied().map(Edit::Delete).collect();
            Site::new(pair[0], edits).equivalent(reason)
        };
        cluster_barriers(kernel, false).chunks_exact(2).map(site).collect()
    }),
    Operator::new("cluster barrier at the end: deleted in every role", &[T5], |kernel| {
        let lines = cluster_barriers(kernel, false);
        let edits = lines.iter().copied().map(Edit::Delete).collect();
        lines.first().map(|&line| Site::new(line, edits)).into_iter().collect()
    }),
];

/// Purpose of a barrier: the accesses that it orders before later accesses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Initialization of mbarriers.
    Init,
    /// Writes that a copy reads, and their proxy fence.
    Copy,
    /// A wait until a copy has read memory that is overwritten next.
    Reuse,
    /// Products whose operands are overwritten next.
    Products,
}

fn purpose(inst: &Inst) -> Option<Purpose> {
    if is_init_fence(inst) {
        Some(Purpose::Init)
    } else if is_proxy_fence(inst) {
        Some(Purpose::Copy)
    } else if is_bulk_wait(inst) {
        Some(Purpose::Reuse)
    } else if is_product_wait(inst) {
        Some(Purpose::Products)
    } else {
        None
    }
}

/// The barriers that follow an instruction of the purpose `wanted`.
fn syncs(kernel: &Anatomy<'_>, wanted: Purpose) -> Vec<usize> {
    let barriers = kernel.find(is_sync).into_iter();
    let of_purpose = barriers.filter(|&line| {
        let before = kernel.before(line, |inst| purpose(inst).is_some());
        before.is_some_and(|before| kernel.has(before, |inst| purpose(inst) == Some(wanted)))
    });
    of_purpose.collect()
}

/// Barriers whose nearest preceding store, barrier or operation with a [`Purpose`] is a store to shared memory.
fn syncs_of_stores(kernel: &Anatomy<'_>) -> Vec<usize> {
    let barriers = kernel.find(is_sync).into_iter();
    let of_stores = barriers.filter(|&line| {
        let before =
            kernel.before(line, |inst| writes_shared(inst) || purpose(inst).is_some() || is_sync(inst));
        before.is_some_and(|before| kernel.has(before, writes_shared))
    });
    of_stores.collect()
}

/// Reason why the barrier after mbarrier initialization is redundant: only one elected lane uses the mbarriers.
fn one_thread(kernel: &Anatomy<'_>) -> Option<&'static str> {
    let alone = |&line: &usize| kernel.in_lanes(line);
    let all = kernel.find(|inst| matches!(inst, Inst::Mbarrier(_))).iter().all(alone);
    (all && kernel.has_one_role()).then_some("the thread that initialises is the only one that waits")
}

/// Reason why a barrier before a write to a tile is redundant: outside of loops and before any copy, no write precedes.
pub(super) fn first_use(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let copies = kernel.find(is_copy_out);
    let first = kernel.innermost_loop(line).is_none() && copies.iter().all(|&copy| copy > line);
    first.then_some("nothing has been copied from the tile yet")
}

fn computed(kernel: &Anatomy<'_>, change: fn(Operand, u32) -> (Operand, u32)) -> Vec<Site> {
    sites(kernel.find(is_sync), |line| {
        let Some(Inst::Barrier(BarrierInst::Sync(BarrierRef::Computed { id, threads }))) = kernel.inst(line)
        else {
            return None;
        };
        let (id, threads) = change(*id, *threads);
        Some(Site::replaced(line, Inst::Barrier(BarrierInst::Sync(BarrierRef::Computed { id, threads }))))
    })
}

/// Arrivals at and waits for cluster barriers, in the prologue or in the roles.
fn cluster_barriers(kernel: &Anatomy<'_>, prologue: bool) -> Vec<usize> {
    let barriers =
        kernel.find(|inst| matches!(inst, Inst::Cluster(ClusterInst::Arrive { .. } | ClusterInst::Wait)));
    let in_prologue = |line: usize| kernel.before(line, is_init_fence).is_some();
    barriers.into_iter().filter(|&line| in_prologue(line) == prologue).collect()
}
