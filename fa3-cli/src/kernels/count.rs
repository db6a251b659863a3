//! Counts of a kernel's instructions.

use fa3_ir::{Block, ClusterInst, Inst, Kernel, MbarrierInst, MiscInst, Node, RoleBody, TmaInst, WgmmaInst};

/// The number of statements in a kernel's text, and of some kinds of instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// All statements, including control flow.
    pub(super) statements: u32,
    /// Matrix products.
    pub(super) products: u32,
    /// Tensor and bulk copies, in either direction.
    pub(super) copies: u32,
    /// Arrivals and waits at barriers and at mbarriers.
    pub(super) barriers: u32,
}

impl Count {
    /// Counts the statements of all roles.
    pub(super) fn of(kernel: &Kernel) -> Count {
        let mut count = Count::default();
        count.block(&kernel.prologue);
        kernel.roles.iter().for_each(|role| count.block(&role.block));
        count
    }

    fn block(&mut self, block: &Block) {
        for stmt in block {
            if matches!(stmt.node, Node::Inst { inst: Inst::Observe(_), .. }) {
                continue;
            }
            self.statements += 1;
            match &stmt.node {
                Node::Inst { inst, .. } => self.inst(inst),
                Node::If { then, otherwise, .. } => {
                    self.block(then);
                    self.block(otherwise);
                }
                Node::Loop { body } => self.block(body),
                Node::Break { .. } => {}
            }
        }
    }

    fn inst(&mut self, inst: &Inst) {
        let counter = match inst {
            Inst::Wgmma(WgmmaInst::Mma(_)) => &mut self.products,
            Inst::Tma(inst) if is_copy(inst) => &mut self.copies,
            Inst::Mbarrier(inst) if is_init(inst) => return,
            Inst::Mbarrier(_)
            | Inst::Barrier(_)
            | Inst::Cluster(ClusterInst::Arrive { .. } | ClusterInst::Wait) => &mut self.barriers,
            Inst::Wgmma(_)
            | Inst::Tma(_)
            | Inst::Cluster(ClusterInst::MapAddress { .. } | ClusterInst::StoreAsync { .. })
            | Inst::Lane(_)
            | Inst::Set { .. }
            | Inst::Special { .. }
            | Inst::RegionAddress { .. }
            | Inst::Mem(_)
            | Inst::Warp(_)
            | Inst::Fence(_)
            | Inst::Misc(_)
            | Inst::Observe(_) => return,
        };
        *counter += 1;
    }
}

fn is_copy(inst: &TmaInst) -> bool {
    !matches!(inst, TmaInst::Commit | TmaInst::Wait { .. } | TmaInst::Prefetch { .. })
}

fn is_init(inst: &MbarrierInst) -> bool {
    matches!(inst, MbarrierInst::Init { .. } | MbarrierInst::Invalidate { .. })
}

/// The register counts that roles set by setmaxnreg, as `producer 40, consumer 232`. `None` if no role does.
pub(super) fn registers(kernel: &Kernel) -> Option<String> {
    let roles: Vec<String> = kernel.roles.iter().filter_map(registers_of).collect();
    (!roles.is_empty()).then(|| roles.join(", "))
}

fn registers_of(role: &RoleBody) -> Option<String> {
    role.block.iter().find_map(|stmt| {
        let Node::Inst { inst: Inst::Misc(MiscInst::SetMaxRegisters { registers, .. }), .. } = stmt.node
        else {
            return None;
        };
        Some(format!("{} {registers}", role.name))
    })
}

#[cfg(test)]
mod tests {
    use fa3_cuda::kernels::shipped::shipped;
    use fa3_ir::ptx;
    use rayon::prelude::*;

    use super::*;

    /// The counts equal the numbers of lines in the kernel's printed IR and PTX.
    #[test]
    fn what_is_counted_is_what_is_printed() {
        let (others, forward): (Vec<_>, Vec<_>) = shipped().partition(|shipped| shipped.forward().is_none());
        let chosen: Vec<_> = others.iter().step_by(7).chain(forward.iter().step_by(60)).collect();
        chosen.into_par_iter().for_each(|shipped| {
            let kernel = shipped.kernel();
            let (ir, ptx) = (kernel.to_string(), ptx::emit(&kernel).unwrap().text);
            let lines = |text: &str, what: &[&str], not: &[&str]| {
                let has = |line: &str, any: &[&str]| any.iter().any(|what| line.contains(what));
                text.lines().filter(|line| has(line, what) && !has(line, not)).count() as u32
            };
            let barriers =
                [" bar", "barrier.cluster", "mbarrier.arrive", "mbarrier.try_wait", "mbarrier.test_wait"];
            let expected = Count {
                statements: lines(&ir, &[".rs:"], &["role "]),
                products: lines(&ptx, &["wgmma.mma_async"], &[]),
                copies: lines(
                    &ptx,
                    &["cp.async.bulk", "cp.reduce.async.bulk"],
                    &["commit_group", "wait_group"],
                ),
                barriers: lines(&ptx, &barriers, &["bar.warp"]),
            };
            assert_eq!(Count::of(&kernel), expected, "{}", shipped.name);
            let changes = registers(&kernel).map_or(0, |roles| roles.split(", ").count());
            assert_eq!(changes as u32, lines(&ptx, &["setmaxnreg"], &[]), "{}", shipped.name);
        });
    }
}
