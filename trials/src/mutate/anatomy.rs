//! Anatomy of a kernel: its statements, numbered in text order, and the definition of each value.

use fa3_ir::{
    Access, Block, ClusterInst, Condition, Inst, Kernel, MbarrierInst, Node, Operand, Region, RegionKind,
    SharedAddr, SharedBase, Stmt, Value,
};

use super::kinds::is_wait;

/// A kernel taken apart. Its statements have the numbers 0, 1, ... in text order, prologue first.
pub(super) struct Anatomy<'k> {
    pub(super) kernel: &'k Kernel,
    lines: Vec<Line<'k>>,
    /// The first statement that assigns each value.
    definitions: Vec<Option<usize>>,
}

/// Position of a statement.
struct Line<'k> {
    stmt: &'k Stmt,
    /// The block that contains it.
    block: usize,
    /// Number of the first statement after it and its children.
    end: usize,
    /// Its enclosing statements, outermost first.
    around: Vec<usize>,
}

impl<'k> Anatomy<'k> {
    pub(super) fn new(kernel: &'k Kernel) -> Anatomy<'k> {
        let mut walk = Walk { lines: Vec::new(), around: Vec::new(), blocks: 0 };
        walk.block(&kernel.prologue);
        kernel.roles.iter().for_each(|role| walk.block(&role.block));
        let mut definitions = vec![None; kernel.values.len()];
        for (number, line) in walk.lines.iter().enumerate() {
            let Node::Inst { inst, .. } = &line.stmt.node else { continue };
            for value in writes(inst) {
                definitions[value.0 as usize].get_or_insert(number);
            }
        }
        Anatomy { kernel, lines: walk.lines, definitions }
    }

    /// Number of statements.
    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn stmt(&self, number: usize) -> &'k Stmt {
        self.lines[number].stmt
    }

    /// The instruction of a statement, if the statement is an instruction.
    pub(super) fn inst(&self, number: usize) -> Option<&'k Inst> {
        match &self.stmt(number).node {
            Node::Inst { inst, .. } => Some(inst),
            Node::If { .. } | Node::Loop { .. } | Node::Break { .. } => None,
        }
    }

    /// The predicate of an instruction, if not all lanes execute the instruction.
    pub(super) fn guard(&self, number: usize) -> Option<Condition> {
        match self.stmt(number).node {
            Node::Inst { guard, .. } => guard,
            Node::If { .. } | Node::Loop { .. } | Node::Break { .. } => None,
        }
    }

    /// The instructions that `wanted` accepts.
    pub(super) fn find(&self, wanted: impl Fn(&Inst) -> bool) -> Vec<usize> {
        self.find_in(0, self.len(), wanted)
    }

    fn find_in(&self, first: usize, end: usize, wanted: impl Fn(&Inst) -> bool) -> Vec<usize> {
        (first..end).filter(|&number| self.inst(number).is_some_and(&wanted)).collect()
    }

    /// Whether a statement is, or contains, an instruction that `wanted` accepts.
    pub(super) fn has(&self, number: usize, wanted: impl Fn(&Inst) -> bool) -> bool {
        !self.find_in(number, self.lines[number].end, wanted).is_empty()
    }

    /// The next statement of the same block that has an instruction that `wanted` accepts.
    pub(super) fn after(&self, number: usize, wanted: impl Fn(&Inst) -> bool) -> Option<usize> {
        let Line { block, end, .. } = self.lines[number];
        let mut later = (end..self.len()).filter(|&later| self.lines[later].block == block);
        later.find(|&later| self.has(later, &wanted))
    }

    /// The last preceding statement of the same block that has an instruction that `wanted` accepts.
    pub(super) fn before(&self, number: usize, wanted: impl Fn(&Inst) -> bool) -> Option<usize> {
        let block = self.lines[number].block;
        let mut earlier = (0..number).rev().filter(|&earlier| self.lines[earlier].block == block);
        earlier.find(|&earlier| self.has(earlier, &wanted))
    }

    /// The innermost loop that contains a statement.
    pub(super) fn innermost_loop(&self, number: usize) -> Option<usize> {
        let is_loop = |&&number: &&usize| matches!(self.stmt(number).node, Node::Loop { .. });
        self.lines[number].around.iter().rev().find(is_loop).copied()
    }

    /// Whether only some lanes execute a statement.
    pub(super) fn in_lanes(&self, number: usize) -> bool {
        let parts = |&number: &usize| matches!(self.stmt(number).node, Node::If { uniform: false, .. });
        self.lines[number].around.iter().any(parts)
    }

    /// The innermost warp-uniform branch that contains a statement.
    pub(super) fn outer_branch(&self, number: usize) -> Option<usize> {
        let is_branch = |&&number: &&usize| matches!(self.stmt(number).node, Node::If { uniform: true, .. });
        self.lines[number].around.iter().rev().find(is_branch).copied()
    }

    /// The instructions within a statement that `wanted` accepts.
    pub(super) fn within(&self, number: usize, wanted: impl Fn(&Inst) -> bool) -> Vec<usize> {
        self.find_in(number, self.lines[number].end, wanted)
    }

    /// The statement that defines a value. For a variable, this is the first statement that assigns it.
    pub(super) fn definition(&self, value: Value) -> Option<usize> {
        self.definitions[value.0 as usize]
    }

    fn is_variable(&self, value: Value) -> bool {
        self.kernel.values[value.0 as usize].mutable
    }

    /// Whether an operand is a register of this name.
    pub(super) fn is_called(&self, operand: Operand, name: &str) -> bool {
        let Operand::Value(value) = operand else { return false };
        self.kernel.values[value.0 as usize].name.as_deref() == Some(name)
    }

    /// The first unused register number.
    pub(super) fn next_register(&self) -> Value {
        Value(self.kernel.values.len() as u32)
    }

    /// Whether all warps have the same role.
    pub(super) fn has_one_role(&self) -> bool {
        self.kernel.roles.is_empty()
    }

    /// The statement that loads the address of the region that `addr` lies in.
    pub(super) fn region_address(&self, addr: SharedAddr) -> Option<usize> {
        match addr.base {
            SharedBase::Region(_) => None,
            SharedBase::Value(value) => self.region_address_of(value),
        }
    }

    fn region_address_of(&self, value: Value) -> Option<usize> {
        let number = self.definition(value)?;
        let inst = self.inst(number)?;
        if let Inst::RegionAddress { .. } = inst {
            Some(number)
        } else if let Inst::Cluster(ClusterInst::MapAddress { addr, .. }) = inst {
            self.region_address(*addr)
        } else if let Inst::Lane(lane) = inst {
            lane.src.iter().find_map(|&operand| match operand {
                Operand::Value(value) if !self.is_variable(value) => self.region_address_of(value),
                Operand::Value(_) | Operand::Imm(_) => None,
            })
        } else {
            None
        }
    }

    /// The region that an address lies in.
    pub(super) fn region(&self, addr: SharedAddr) -> Option<Region> {
        match addr.base {
            SharedBase::Region(region) => Some(region),
            SharedBase::Value(_) => {
                let Inst::RegionAddress { region, .. } = self.inst(self.region_address(addr)?)? else {
                    return None;
                };
                Some(*region)
            }
        }
    }

    /// The region of the mbarrier that an instruction uses, by its own address or by an address that was mapped to
    /// another CTA.
    pub(super) fn mbarrier(&self, inst: &Inst) -> Option<Region> {
        let Inst::Mbarrier(inst) = inst else { return None };
        self.region(match *inst {
            MbarrierInst::Init { addr, .. }
            | MbarrierInst::Invalidate { addr }
            | MbarrierInst::Arrive { addr }
            | MbarrierInst::ArriveExpect { addr, .. }
            | MbarrierInst::Expect { addr, .. }
            | MbarrierInst::ArriveCopied { addr }
            | MbarrierInst::Wait { addr, .. }
            | MbarrierInst::TryWait { addr, .. }
            | MbarrierInst::TestWait { addr, .. } => addr,
            MbarrierInst::ArriveRemote { addr } => SharedAddr { base: SharedBase::Value(addr), offset: 0 },
        })
    }

    /// The statement that loads the address of the mbarriers of a wait.
    pub(super) fn wait_address(&self, wait: usize) -> Option<usize> {
        let Some(Inst::Mbarrier(MbarrierInst::Wait { addr, .. })) = self.inst(wait) else { return None };
        self.region_address(*addr)
    }

    /// Whether mbarriers of a region signal full stages rather than empty stages. Their arrivals then expect bytes
    /// (possibly zero); or, if warps store the data, the name of the region ends with "full".
    pub(super) fn is_full(&self, region: Region) -> bool {
        if self.kernel.smem.regions[region.0 as usize].name.ends_with(" full") {
            return true;
        }
        let expects = |inst: &Inst| {
            matches!(inst, Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, .. })
                if self.region(*addr) == Some(region))
        };
        !self.find(expects).is_empty()
    }

    /// The mbarrier regions, with the number of mbarriers in each.
    pub(super) fn mbarriers(&self) -> impl Iterator<Item = (Region, u32)> {
        let regions = self.kernel.smem.regions.iter().zip(0..);
        let mbarriers = regions.filter(|(info, _)| matches!(info.kind, RegionKind::Mbarriers { .. }));
        mbarriers.map(|(info, index)| (Region(index), info.bytes / 8))
    }

    /// The region of this name.
    pub(super) fn region_called(&self, name: &str) -> Option<Region> {
        let index = self.kernel.smem.regions.iter().position(|info| info.name == name)?;
        Some(Region(index as u32))
    }

    /// Number of mbarriers of a region, which is the number of pipeline stages.
    pub(super) fn stages(&self, region: Region) -> Option<usize> {
        self.mbarriers().find(|&(other, _)| other == region).map(|(_, count)| count as usize)
    }

    /// Waits for the mbarriers of a region.
    pub(super) fn waits_for(&self, region: Region) -> Vec<usize> {
        self.find(|inst| is_wait(inst) && self.mbarrier(inst) == Some(region))
    }

    /// Waits for full mbarriers (`full`), or for all others.
    pub(super) fn waits(&self, full: bool) -> Vec<usize> {
        self.find(|inst| {
            is_wait(inst) && self.mbarrier(inst).is_some_and(|region| self.is_full(region) == full)
        })
    }
}

/// The registers that an instruction assigns.
fn writes(inst: &Inst) -> Vec<Value> {
    let mut values = Vec::new();
    inst.visit(&mut |access| {
        if let Access::Write(value, _) | Access::Update(value, _) = access {
            values.push(value);
        }
    });
    values
}

/// Whether an instruction reads or assigns a register.
pub(super) fn touches(inst: &Inst, register: Value) -> bool {
    let mut found = false;
    inst.visit(&mut |access| {
        found |= matches!(access, Access::Write(value, _) | Access::Update(value, _) if value == register)
            || matches!(access, Access::Read(operand, _) if operand == Operand::Value(register));
    });
    found
}

struct Walk<'k> {
    lines: Vec<Line<'k>>,
    around: Vec<usize>,
    blocks: usize,
}

impl<'k> Walk<'k> {
    fn block(&mut self, block: &'k Block) {
        let id = self.blocks;
        self.blocks += 1;
        for stmt in block {
            let number = self.lines.len();
            self.lines.push(Line { stmt, block: id, end: 0, around: self.around.clone() });
            self.around.push(number);
            match &stmt.node {
                Node::Inst { .. } | Node::Break { .. } => {}
                Node::If { then, otherwise, .. } => {
                    self.block(then);
                    self.block(otherwise);
                }
                Node::Loop { body } => self.block(body),
            }
            self.around.pop();
            self.lines[number].end = self.lines.len();
        }
    }
}
