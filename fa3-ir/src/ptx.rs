//! PTX: the text that the driver compiles.
//!
//! It targets sm_90a and PTX ISA 8.0, which every driver with CUDA 12 or newer takes (8.1 and CUDA 12.1 for kernels
//! with `st.async`). It is plain ASCII, which the driver's compiler demands. It depends on the kernel alone and has no
//! source locations, so that it can be the key of a cache; [`emit_annotated`] adds them for readers. It has no
//! [observations](crate::ObserveInst), and no values that are computed for them alone.

use std::fmt::Write;

use crate::names::Names;
use crate::unobserved::{Kept, Unobserved};
use crate::{
    Condition, Kernel, Node, ParamInfo, ParamKind, RoleBody, SmemPlan, Source, Ty, VerifyErrors, verify,
};

/// A kernel as PTX, with the properties of its launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptx {
    /// The module.
    pub text: String,
    /// The name of its one entry.
    pub entry: String,
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub smem_bytes: u32,
    /// CTAs of a cluster; 1 means no clusters.
    pub cluster: u32,
    /// The parameters, in order.
    pub params: Vec<ParamInfo>,
    /// [`Kernel::waits_for_grid`].
    pub waits_for_grid: bool,
}

/// Prints `kernel` as PTX.
///
/// # Errors
/// All violations that [`verify()`] finds.
pub fn emit(kernel: &Kernel) -> Result<Ptx, VerifyErrors> {
    emit_with(kernel, false)
}

/// Emits PTX like [`emit`], with the source location of each statement as a comment.
///
/// # Errors
/// All violations that [`verify()`] finds.
pub fn emit_annotated(kernel: &Kernel) -> Result<Ptx, VerifyErrors> {
    emit_with(kernel, true)
}

fn emit_with(kernel: &Kernel, annotate: bool) -> Result<Ptx, VerifyErrors> {
    verify(kernel)?;
    let code = Unobserved::new(kernel);
    let names = Names::ptx(kernel, &code.gone);
    let mut emitter = Emitter { names, text: String::new(), labels: 0, loops: Vec::new(), annotate };
    emitter.kernel(kernel, code);
    let version = if emitter.text.contains("st.async") { "8.1" } else { "8.0" };
    Ok(Ptx {
        text: format!(".version {version}\n.target sm_90a\n.address_size 64\n\n{}", emitter.text),
        entry: kernel.name.clone(),
        threads: kernel.launch.threads,
        smem_bytes: kernel.smem.bytes(),
        cluster: kernel.launch.cluster,
        params: kernel.params.clone(),
        waits_for_grid: kernel.waits_for_grid(),
    })
}

struct Emitter<'k> {
    names: Names<'k>,
    text: String,
    /// Number of labels given so far.
    labels: u32,
    /// The labels of the loops around the current statement, innermost last.
    loops: Vec<u32>,
    annotate: bool,
}

impl Emitter<'_> {
    fn kernel(&mut self, kernel: &Kernel, code: Unobserved<'_>) {
        self.header(kernel);
        self.registers(kernel);
        self.shared_memory(kernel);
        self.tensor_maps(kernel);
        self.block(&code.prologue);
        self.roles(code.roles);
        self.line("ret;");
        self.text += "}\n";
    }

    fn header(&mut self, kernel: &Kernel) {
        if !kernel.smem.regions.is_empty() {
            let _ = writeln!(self.text, ".extern .shared .align {} .b8 smem[];\n", SmemPlan::ALIGN);
        }
        let params: Vec<String> = kernel.params.iter().map(declaration).collect();
        let _ = writeln!(self.text, ".visible .entry {}(\n{}\n)", kernel.name, params.join(",\n"));
        let crate::Launch { threads, per_sm, .. } = kernel.launch;
        let _ = writeln!(self.text, ".maxntid {threads}, 1, 1\n.minnctapersm {per_sm}");
        if kernel.launch.cluster > 1 {
            let _ = writeln!(self.text, ".reqnctapercluster {}, 1, 1", kernel.launch.cluster);
        }
        self.text += "{\n";
    }

    /// Declares the registers. They keep the numbers that they have in the printed kernel, whatever their class, except
    /// after values that only observations read.
    fn registers(&mut self, kernel: &Kernel) {
        for ty in Ty::ALL {
            if self.names.values().any(|info| info.ty == ty) {
                self.line(&format!(".reg .{ty} %{}<{}>;", ty.prefix(), self.names.values().count()));
            }
        }
        if kernel.roles.len() > 1 {
            self.line(".reg .b32 %warp;");
            self.line(".reg .pred %other;");
        }
    }

    /// Loads the address of shared memory into a register. If statements used the symbol instead, ptxas would compute
    /// its address from a special register at each use, even in loops.
    fn shared_memory(&mut self, kernel: &Kernel) {
        if !kernel.smem.regions.is_empty() {
            self.line(".reg .b32 %smem;");
            self.line("mov.u32 %smem, smem;");
        }
    }

    /// Loads the generic address of each tensor map into a register with the map's name.
    fn tensor_maps(&mut self, kernel: &Kernel) {
        for ParamInfo { name, kind } in &kernel.params {
            if let ParamKind::TensorMap(_) = kind {
                self.line(&format!(".reg .b64 %map_{name};"));
                self.line(&format!("mov.b64 %map_{name}, param_{name};"));
                self.line(&format!("cvta.param.u64 %map_{name}, %map_{name};"));
            }
        }
    }

    /// Prints the roles in the order of their warps. Warps of later roles branch over a role's code. The last role
    /// needs no branch, because the verifier ensures that roles cover all warps.
    fn roles(&mut self, mut roles: Vec<(&RoleBody, Vec<Kept<'_>>)>) {
        roles.sort_by_key(|(role, _)| role.warps.start);
        let Some(((last, code), others)) = roles.split_last() else { return };
        if !others.is_empty() {
            self.line("mov.u32 %warp, %tid.x;");
            self.line("shr.u32 %warp, %warp, 5;");
        }
        for (role, code) in others {
            self.line(&format!(
                "// role {}: warps {} to {}",
                role.name,
                role.warps.start,
                role.warps.end - 1
            ));
            self.line(&format!("setp.ge.u32 %other, %warp, {};", role.warps.end));
            self.line(&format!("@%other bra.uni after_role_{};", role.name));
            self.block(code);
            self.line("ret;");
            self.label(&format!("after_role_{}", role.name));
        }
        self.line(&format!("// role {}: warps {} to {}", last.name, last.warps.start, last.warps.end - 1));
        self.block(code);
    }

    fn block(&mut self, block: &[Kept<'_>]) {
        block.iter().for_each(|kept| self.stmt(kept));
    }

    fn stmt(&mut self, Kept { stmt, blocks: [first, second] }: &Kept<'_>) {
        if self.annotate {
            self.line(&format!("// {}", location(stmt.source)));
        }
        match &stmt.node {
            Node::Inst { guard, inst } => {
                let text = inst.text(&self.names);
                self.text += "    ";
                if let Some(guard) = guard {
                    self.text.extend(["@", &self.names.condition(*guard), " "]);
                }
                self.text.extend([text.as_str(), if text.starts_with('{') { "\n" } else { ";\n" }]);
            }
            Node::If { condition, uniform, .. } => self.branch(*condition, *uniform, first, second),
            Node::Loop { .. } => {
                let id = self.new_label();
                self.label(&format!("loop_{id}"));
                self.loops.push(id);
                self.block(first);
                self.loops.pop();
                self.line(&format!("bra.uni loop_{id};"));
                self.label(&format!("after_loop_{id}"));
            }
            Node::Break { condition } => {
                let id = self.loops.last().copied().unwrap_or(0);
                let condition = self.names.condition(*condition);
                self.line(&format!("@{condition} bra.uni after_loop_{id};"));
            }
        }
    }

    fn branch(&mut self, condition: Condition, uniform: bool, then: &[Kept<'_>], otherwise: &[Kept<'_>]) {
        let id = self.new_label();
        let bra = if uniform { "bra.uni" } else { "bra" };
        let skip = self.names.condition(Condition { negate: !condition.negate, ..condition });
        self.line(&format!("@{skip} {bra} else_{id};"));
        self.block(then);
        if otherwise.is_empty() {
            self.label(&format!("else_{id}"));
            return;
        }
        self.line(&format!("{bra} end_{id};"));
        self.label(&format!("else_{id}"));
        self.block(otherwise);
        self.label(&format!("end_{id}"));
    }

    fn new_label(&mut self) -> u32 {
        self.labels += 1;
        self.labels
    }

    fn label(&mut self, name: &str) {
        let _ = writeln!(self.text, "{name}:");
    }

    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "    {line}");
    }
}

fn declaration(ParamInfo { name, kind }: &ParamInfo) -> String {
    match kind {
        ParamKind::U32 => format!("    .param .u32 param_{name}"),
        ParamKind::U64 | ParamKind::Pointer(_) => format!("    .param .u64 param_{name}"),
        ParamKind::F32 => format!("    .param .f32 param_{name}"),
        ParamKind::TensorMap(_) => format!("    .param .align 64 .b8 param_{name}[128]"),
    }
}

/// A location that editors open, `src/file.rs:12`, in ASCII.
pub(crate) fn location(source: Source) -> String {
    format!("{}:{}", source.file().escape_default(), source.line())
}
