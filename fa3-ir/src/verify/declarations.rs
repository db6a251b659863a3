//! Rules about what a kernel declares: V-13, V-15 to V-20, V-23, V-24.

use super::{Fault, VerifyError};
use crate::{
    Block, Inst, Kernel, MiscInst, Node, ParamInfo, ParamKind, Region, RegionInfo, RoleBody, SmemPlan, Source,
};

/// All violations of these rules.
pub(super) fn check(kernel: &Kernel) -> Vec<VerifyError> {
    let mut faults = Vec::new();
    launch(kernel, &mut faults);
    barriers(kernel, &mut faults);
    regions(&kernel.smem, &mut faults);
    roles(kernel, &mut faults);
    names(kernel, &mut faults);
    boxes(kernel, &mut faults);
    let mut errors: Vec<_> = faults.into_iter().map(|fault| VerifyError { fault, source: None }).collect();
    registers(kernel, &mut errors);
    errors
}

fn launch(kernel: &Kernel, faults: &mut Vec<Fault>) {
    let crate::Launch { threads, cluster, per_sm } = kernel.launch;
    if !threads.is_multiple_of(32) || !(32..=1024).contains(&threads) {
        faults.push(Fault::Threads { threads });
    }
    if !(1..=16).contains(&cluster) {
        faults.push(Fault::Cluster { cluster });
    }
    if !(1..=32).contains(&per_sm) || threads.saturating_mul(per_sm) > 2048 {
        faults.push(Fault::PerSm { per_sm, threads });
    }
}

fn barriers(kernel: &Kernel, faults: &mut Vec<Fault>) {
    let limit = kernel.launch.threads;
    for (index, barrier) in kernel.barriers.iter().enumerate() {
        let (name, id, threads) = (barrier.name.clone(), barrier.id, barrier.threads);
        let taken = kernel.barriers[..index].iter().any(|other| other.id == id);
        if taken || !(1..=15).contains(&id) {
            faults.push(Fault::BarrierId { name: name.clone(), id });
        }
        if !threads.is_multiple_of(32) || !(32..=limit).contains(&threads) {
            faults.push(Fault::BarrierThreads { name, threads, limit });
        }
    }
}

fn regions(plan: &SmemPlan, faults: &mut Vec<Fault>) {
    for (index, region) in plan.regions.iter().enumerate() {
        let RegionInfo { name, offset, align, .. } = region;
        if !align.is_power_of_two() || *align > SmemPlan::ALIGN || !offset.is_multiple_of(*align) {
            faults.push(Fault::RegionAlign { name: name.clone(), offset: *offset, align: *align });
        }
        for (earlier, other) in plan.regions[..index].iter().enumerate() {
            let apart = region.end() <= other.offset || other.end() <= region.offset;
            let declared = region.overlays.contains(&Region(earlier as u32))
                || other.overlays.contains(&Region(index as u32));
            if !apart && !declared {
                faults.push(Fault::RegionOverlap { first: other.name.clone(), second: name.clone() });
            }
        }
    }
    if plan.bytes() > SmemPlan::LIMIT {
        faults.push(Fault::SmemTotal { given: plan.bytes(), limit: SmemPlan::LIMIT });
    }
}

fn roles(kernel: &Kernel, faults: &mut Vec<Fault>) {
    let warps = kernel.launch.warps();
    if kernel.roles.is_empty() {
        return;
    }
    for RoleBody { name, warps: range, .. } in &kernel.roles {
        if range.is_empty() || range.end > warps {
            let (start, end) = (range.start, range.end);
            faults.push(Fault::RoleWarps { role: name.clone(), start, end, warps });
        }
    }
    for warp in 0..warps {
        let given = kernel.roles.iter().filter(|role| role.warps.contains(&warp)).count();
        if given != 1 {
            faults.push(Fault::RoleCover { warp, given });
        }
    }
}

fn names(kernel: &Kernel, faults: &mut Vec<Fault>) {
    let kernel_name = [kernel.name.as_str()];
    let params: Vec<&str> = kernel.params.iter().map(|param| param.name.as_str()).collect();
    let roles: Vec<&str> = kernel.roles.iter().map(|role| role.name.as_str()).collect();
    for (what, names) in [("kernel", &kernel_name[..]), ("parameter", &params), ("role", &roles)] {
        for (index, &name) in names.iter().enumerate() {
            if !is_identifier(name) || what == "kernel" && TAKEN.contains(&name) {
                faults.push(Fault::Identifier { what, name: name.to_owned() });
            }
            if names[..index].contains(&name) {
                faults.push(Fault::SameName { what, name: name.to_owned() });
            }
        }
    }
}

fn boxes(kernel: &Kernel, faults: &mut Vec<Fault>) {
    for ParamInfo { name, kind } in &kernel.params {
        if let ParamKind::TensorMap(shape) = kind
            && let Err(error) = shape.check()
        {
            faults.push(Fault::TensorMap { param: name.clone(), error });
        }
    }
}

/// Names that no kernel may have: shared memory has one of them, a constant of PTX the other.
const TAKEN: [&str; 2] = ["smem", "WARP_SZ"];

fn is_identifier(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Checks V-15 and V-16. In a kernel without roles, all warps run only the prologue.
fn registers(kernel: &Kernel, errors: &mut Vec<VerifyError>) {
    let (entry, warps) = (kernel.launch.entry_registers(), kernel.launch.warps());
    let nothing = Block::new();
    let everything = (0..warps, &nothing);
    let roles = kernel.roles.iter().map(|role| (role.warps.clone(), &role.block));
    let (mut taken, mut counted) = (0, 0);
    for (range, block) in roles.chain(kernel.roles.is_empty().then_some(everything)) {
        let mut changes = Vec::new();
        register_changes(&kernel.prologue, &mut changes);
        register_changes(block, &mut changes);
        let mut before = entry;
        for &(increase, given, source) in &changes {
            if if increase { given < before } else { given > before } {
                let fault = Fault::SetMaxRegisters { given, before };
                errors.push(VerifyError { fault, source: Some(source) });
            }
            before = given;
        }
        for source in [&kernel.prologue, block].into_iter().flat_map(nested_changes) {
            errors.push(VerifyError { fault: Fault::SetMaxRegistersNested, source: Some(source) });
        }
        let registers = changes.last().map_or(entry, |&(_, registers, _)| registers);
        let warps = range.end.saturating_sub(range.start);
        // Sums that are too large stop at the largest number: V-6 and V-13 report their terms.
        (taken, counted) = (
            warps.saturating_mul(32).saturating_mul(registers).saturating_add(taken),
            warps.saturating_add(counted),
        );
    }
    // Warps of overlapping roles are counted twice. V-13 reports such roles, so that V-16 need not.
    let pool = entry * kernel.launch.threads;
    if taken > pool && counted <= warps {
        errors.push(VerifyError { fault: Fault::RegisterPool { given: taken, pool }, source: None });
    }
}

/// Every setmaxnreg of the block itself: whether it increases the number of registers, the new number, and the source.
fn register_changes(block: &Block, found: &mut Vec<(bool, u32, Source)>) {
    for stmt in block {
        if let Node::Inst { inst: Inst::Misc(MiscInst::SetMaxRegisters { increase, registers }), .. } =
            &stmt.node
        {
            found.push((*increase, *registers, stmt.source));
        }
    }
}

/// The source lines of the register changes in blocks within this one.
fn nested_changes(block: &Block) -> Vec<Source> {
    let within = |inner: &Block| {
        let mut found = Vec::new();
        register_changes(inner, &mut found);
        let own = found.into_iter().map(|(_, _, source)| source);
        own.chain(nested_changes(inner)).collect::<Vec<Source>>()
    };
    let inner = block.iter().flat_map(|stmt| match &stmt.node {
        Node::If { then, otherwise, .. } => vec![then, otherwise],
        Node::Loop { body } => vec![body],
        Node::Inst { .. } | Node::Break { .. } => Vec::new(),
    });
    inner.flat_map(within).collect()
}
