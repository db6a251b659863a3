//! The notation of operands, in PTX and in the printed IR. The rest of an instruction's line is the same in both.

use std::borrow::{Borrow, Cow};

use crate::{
    Condition, GlobalAddr, Imm, Kernel, Operand, Param, Region, SharedAddr, SharedBase, TensorMap, Value,
    ValueInfo,
};

/// The two notations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Ptx,
    Ir,
}

/// Writes the operands of one kernel's instructions.
pub(crate) struct Names<'k> {
    kernel: &'k Kernel,
    style: Style,
    /// The text of each value, if it has a number. Kernels read a value many times.
    texts: Vec<Option<String>>,
}

impl<'k> Names<'k> {
    /// PTX: `%f9`, `0f3F800000`, `[smem+1024]`. Values for which `gone` is true were removed, and have no numbers.
    pub(crate) fn ptx(kernel: &'k Kernel, gone: &[bool]) -> Names<'k> {
        let mut next = 0..;
        let text = |(info, &gone): (&ValueInfo, &bool)| {
            let number: u32 = if gone { None } else { next.next() }?;
            Some(format!("%{}{number}", info.ty.prefix()))
        };
        let texts = kernel.values.iter().zip(gone).map(text).collect();
        Names { kernel, style: Style::Ptx, texts }
    }

    /// The printed IR: `row_max.9`, `1.0`, `[q+0]`.
    pub(crate) fn ir(kernel: &'k Kernel) -> Names<'k> {
        let text = |(number, info): (usize, &ValueInfo)| match &info.name {
            Some(name) => Some(format!("{name}.{number}")),
            None => Some(format!("{}{number}", info.ty.prefix())),
        };
        let texts = kernel.values.iter().enumerate().map(text).collect();
        Names { kernel, style: Style::Ir, texts }
    }

    /// The values that have numbers.
    pub(crate) fn values(&self) -> impl Iterator<Item = &'k ValueInfo> {
        self.kernel.values.iter().zip(&self.texts).filter_map(|(info, text)| text.as_ref().and(Some(info)))
    }

    pub(crate) fn value(&self, value: Value) -> Cow<'_, str> {
        match self.texts.get(value.0 as usize) {
            Some(Some(text)) => Cow::Borrowed(text),
            _ => Cow::Owned(value.to_string()),
        }
    }

    pub(crate) fn operand(&self, operand: Operand) -> Cow<'_, str> {
        match operand {
            Operand::Value(value) => self.value(value),
            Operand::Imm(imm) => Cow::Owned(self.imm(imm)),
        }
    }

    /// A condition as text: `p` or `!p`.
    pub(crate) fn condition(&self, condition: Condition) -> String {
        format!("{}{}", if condition.negate { "!" } else { "" }, self.value(condition.pred))
    }

    fn imm(&self, imm: Imm) -> String {
        let decimal_or_hex =
            |bits: u64| if bits < 1 << 20 { format!("{bits}") } else { format!("{bits:#x}") };
        match imm {
            Imm::Pred(truth) => u32::from(truth).to_string(),
            Imm::B16(bits) => decimal_or_hex(bits.into()),
            Imm::B32(bits) => decimal_or_hex(bits.into()),
            Imm::B64(bits) => decimal_or_hex(bits),
            Imm::F32(bits) if self.style == Style::Ptx => format!("0f{bits:08X}"),
            Imm::F32(bits) => format!("{:?}", f32::from_bits(bits)),
        }
    }

    /// A list of values as text: `{a, b}`. The printed IR shortens long lists to `{a .. z}`.
    pub(crate) fn list(&self, values: &[Value]) -> String {
        match values {
            [first, .., last] if self.style == Style::Ir && values.len() > 4 => {
                format!("{{{} .. {}}}", self.value(*first), self.value(*last))
            }
            _ => format!("{{{}}}", comma(values.iter().map(|&value| self.value(value)))),
        }
    }

    /// A list of operands as text: `{a, b}`.
    pub(crate) fn operands(&self, operands: &[Operand]) -> String {
        format!("{{{}}}", comma(operands.iter().map(|&operand| self.operand(operand))))
    }

    /// `a` or `{a, b}`: how loads and stores write their vectors.
    pub(crate) fn vector(&self, operands: &[Operand]) -> String {
        match operands {
            [one] => self.operand(*one).into_owned(),
            _ => self.operands(operands),
        }
    }

    /// A shared-memory address as text: `[base+offset]`.
    pub(crate) fn shared(&self, addr: SharedAddr) -> String {
        format!("[{}]", self.counted_from("%smem", addr))
    }

    /// `base+offset`, for instructions that do not take a register and an offset.
    pub(crate) fn shared_plain(&self, addr: SharedAddr) -> String {
        self.counted_from("smem", addr)
    }

    /// `base+offset`. In PTX the base of a region is `memory`, which holds all regions.
    fn counted_from(&self, memory: &str, addr: SharedAddr) -> String {
        let (base, offset) = match addr.base {
            SharedBase::Value(value) => (self.value(value).into_owned(), addr.offset.into()),
            SharedBase::Region(region) => {
                let info = self.kernel.smem.get(region);
                match self.style {
                    Style::Ptx => {
                        let start = info.map_or(0, |info| i64::from(info.offset));
                        (memory.to_owned(), start + i64::from(addr.offset))
                    }
                    Style::Ir => {
                        (info.map_or_else(|| "?".to_owned(), |info| info.name.clone()), addr.offset.into())
                    }
                }
            }
        };
        plus(&base, offset)
    }

    /// The instruction that gives a region's address.
    pub(crate) fn region_address(&self, dst: Value, region: Region) -> String {
        let (dst, region) = (self.value(dst), self.kernel.smem.get(region));
        match self.style {
            Style::Ptx => format!("add.u32 {dst}, %smem, {}", region.map_or(0, |info| info.offset)),
            Style::Ir => format!("mov.u32 {dst}, {}", region.map_or("?", |info| &info.name)),
        }
    }

    /// A global address as text: `[base+offset]`.
    pub(crate) fn global(&self, addr: GlobalAddr) -> String {
        format!("[{}]", plus(&self.value(addr.base), addr.offset.into()))
    }

    /// A loop that repeats a wait, which may time out, until it succeeds. Predicate and label are local to its braces.
    pub(crate) fn wait_loop(&self, wait: &str, addr: SharedAddr, parity: Operand) -> String {
        let (addr, parity) = (self.shared(addr), self.operand(parity));
        match self.style {
            Style::Ptx => {
                format!("{{ .reg .pred done; again: {wait} done, {addr}, {parity}; @!done bra again; }}")
            }
            Style::Ir => format!("loop {wait} {addr}, {parity}"),
        }
    }

    /// The name of a parameter.
    pub(crate) fn param(&self, param: Param) -> String {
        match self.style {
            Style::Ptx => format!("param_{}", self.param_name(param)),
            Style::Ir => self.param_name(param).to_owned(),
        }
    }

    fn param_name(&self, param: Param) -> &'k str {
        self.kernel.params.get(param.0 as usize).map_or("?", |info| &info.name)
    }

    /// The address of a tensor map. In PTX it is a register that the kernel's entry sets.
    pub(crate) fn tensor_map(&self, TensorMap(param): TensorMap) -> String {
        match self.style {
            Style::Ptx => format!("%map_{}", self.param_name(param)),
            Style::Ir => self.param_name(param).to_owned(),
        }
    }

    /// A named barrier: in PTX its number, in the printed IR its name.
    pub(crate) fn barrier(&self, barrier: crate::Barrier) -> String {
        let Some(info) = self.kernel.barriers.get(barrier.0 as usize) else { return "?".to_owned() };
        match self.style {
            Style::Ptx => format!("{}, {}", info.id, info.threads),
            Style::Ir => format!("{}, {}", info.name, info.threads),
        }
    }
}

/// Joins items to a text such as `a, b, c`.
pub(crate) fn comma(items: impl Iterator<Item = impl Borrow<str>>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

fn plus(base: &str, offset: i64) -> String {
    if offset == 0 { base.to_owned() } else { format!("{base}+{offset}") }
}
