//! Prints kernels for readers: the declarations, then every statement with the source line that built it.

use std::fmt::{self, Write};

use crate::names::Names;
use crate::ptx::location;
use crate::{Block, Elem, Kernel, Node, ParamKind, RegionKind, Source, Stmt};

/// The column where source locations begin.
const MARGIN: usize = 100;

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (threads, cluster, smem) = (self.launch.threads, self.launch.cluster, self.smem.bytes());
        writeln!(
            f,
            "kernel {}: {threads} threads, cluster of {cluster}, {smem} bytes of shared memory",
            self.name
        )?;
        for param in &self.params {
            writeln!(f, "  param   {}: {}", param.name, param.kind)?;
        }
        for region in &self.smem.regions {
            let kind = match region.kind {
                RegionKind::Bytes => String::new(),
                RegionKind::Mbarriers { arrivals } => format!(", mbarriers of {arrivals} arrivals"),
            };
            let over: Vec<&str> = region
                .overlays
                .iter()
                .filter_map(|&over| self.smem.get(over))
                .map(|over| &*over.name)
                .collect();
            let over =
                if over.is_empty() { String::new() } else { format!(", overlays {}", over.join(", ")) };
            let (start, end) = (region.offset, region.end());
            writeln!(
                f,
                "  smem    {start:>6}..{end:<6} {}, align {}{kind}{over}",
                region.name, region.align
            )?;
        }
        for barrier in &self.barriers {
            writeln!(f, "  barrier {}: number {}, {} threads", barrier.name, barrier.id, barrier.threads)?;
        }
        let mut printer = Printer { names: Names::ir(self), f };
        printer.line(0, "prologue", None)?;
        printer.block(1, &self.prologue)?;
        for role in &self.roles {
            let (start, end) = (role.warps.start, role.warps.end);
            printer.line(0, &format!("role {}: warps {start}..{end}", role.name), Some(role.source))?;
            printer.block(1, &role.block)?;
        }
        Ok(())
    }
}

struct Printer<'k, 'f, 'g> {
    names: Names<'k>,
    f: &'f mut fmt::Formatter<'g>,
}

impl Printer<'_, '_, '_> {
    fn block(&mut self, depth: usize, block: &Block) -> fmt::Result {
        block.iter().try_for_each(|stmt| self.stmt(depth, stmt))
    }

    fn stmt(&mut self, depth: usize, stmt: &Stmt) -> fmt::Result {
        let source = Some(stmt.source);
        match &stmt.node {
            Node::Inst { guard: None, inst } => self.line(depth, &inst.text(&self.names), source),
            Node::Inst { guard: Some(guard), inst } => {
                let line = format!("@{} {}", self.names.condition(*guard), inst.text(&self.names));
                self.line(depth, &line, source)
            }
            Node::If { condition, uniform, then, otherwise } => {
                let kind = if *uniform { "if" } else { "if lanes" };
                self.line(depth, &format!("{kind} {}", self.names.condition(*condition)), source)?;
                self.block(depth + 1, then)?;
                if !otherwise.is_empty() {
                    self.line(depth, "else", None)?;
                    self.block(depth + 1, otherwise)?;
                }
                Ok(())
            }
            Node::Loop { body } => {
                self.line(depth, "loop", source)?;
                self.block(depth + 1, body)
            }
            Node::Break { condition } => {
                self.line(depth, &format!("break if {}", self.names.condition(*condition)), source)
            }
        }
    }

    fn line(&mut self, depth: usize, line: &str, source: Option<Source>) -> fmt::Result {
        let mut text = String::new();
        write!(text, "{:indent$}{line}", "", indent = 2 * depth)?;
        match source {
            None => writeln!(self.f, "{text}"),
            Some(source) => writeln!(self.f, "{text:<MARGIN$}  {}", location(source)),
        }
    }
}

impl fmt::Display for ParamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParamKind::U32 => write!(f, "u32"),
            ParamKind::U64 => write!(f, "u64"),
            ParamKind::F32 => write!(f, "f32"),
            ParamKind::Pointer(elem) => write!(f, "pointer to {elem}"),
            ParamKind::TensorMap(shape) => write!(f, "tensor map, {shape}"),
        }
    }
}

impl fmt::Display for Elem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Elem::U8 => "u8",
            Elem::U32 => "u32",
            Elem::U64 => "u64",
            Elem::F32 => "f32",
            Elem::F16 => "f16",
            Elem::Bf16 => "bf16",
            Elem::E4m3 => "e4m3",
        })
    }
}
