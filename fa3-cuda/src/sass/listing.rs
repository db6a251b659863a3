//! Machine code as `nvdisasm -c` prints it.

use std::collections::HashMap;

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Bytes from the function's start.
    pub address: u32,
    /// The operation, such as `HGMMA.64x176x16.F32.BF16`.
    pub opcode: String,
    /// The operands, as printed.
    pub operands: String,
    /// Whether the instruction has a predicate.
    pub guarded: bool,
}

/// A kernel's instructions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// All instructions, in the order of addresses.
    pub instructions: Vec<Instruction>,
    /// The index of the instruction at each label; the number of instructions for a label at the end.
    labels: HashMap<String, usize>,
}

/// The errors of a text that is not a listing of machine code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum ListingError {
    #[error("there is no instruction in it of the form that `nvdisasm -c` prints")]
    Empty,
    #[error("the instruction at {address:#x} jumps to {label}, which is missing")]
    Label { address: u32, label: String },
}

impl Listing {
    /// Parses the output of `nvdisasm -c` for one kernel.
    ///
    /// # Errors
    /// [`ListingError`] if there are no instructions, or branches to missing labels.
    pub fn parse(text: &str) -> Result<Listing, ListingError> {
        let (mut instructions, mut labels) = (Vec::new(), HashMap::new());
        for line in text.lines() {
            if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L")) {
                labels.insert(label.to_owned(), instructions.len());
            } else {
                instructions.extend(Instruction::parse(line));
            }
        }
        if instructions.is_empty() {
            return Err(ListingError::Empty);
        }
        let lost =
            |instruction: &&Instruction| instruction.label().is_some_and(|label| !labels.contains_key(label));
        if let Some(instruction) = instructions.iter().find(lost) {
            let label = instruction.label().unwrap_or_default().to_owned();
            return Err(ListingError::Label { address: instruction.address, label });
        }
        Ok(Listing { instructions, labels })
    }

    /// The index of the instruction that a branch jumps to. `None` for other instructions.
    pub(super) fn target(&self, instruction: &Instruction) -> Option<usize> {
        self.labels.get(instruction.label()?).copied()
    }
}

impl Instruction {
    /// Parses `    /*0050*/    @P0 BRA `(.L_x_0) ;`. `None` for other kinds of lines.
    fn parse(line: &str) -> Option<Instruction> {
        let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
        let address = u32::from_str_radix(address, 16).ok()?;
        let (text, _) = rest.split_once(';')?;
        let mut text = text.trim();
        let guarded = text.starts_with('@');
        if guarded {
            text = text.split_once(' ')?.1.trim_start();
        }
        let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
        Some(Instruction {
            address,
            opcode: opcode.to_owned(),
            operands: operands.trim().to_owned(),
            guarded,
        })
    }

    /// The opcode up to its first dot.
    pub fn stem(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// The label that a branch jumps to.
    fn label(&self) -> Option<&str> {
        if !["BRA", "JMP"].contains(&self.stem()) {
            return None;
        }
        self.operands.split_once("`(")?.1.split(')').next()
    }

    /// Whether the next instruction may run after this one.
    pub(super) fn falls_through(&self) -> bool {
        let leaves = match self.stem() {
            "EXIT" | "RET" | "BRX" | "JMX" => true,
            // With a predicate among its operands, as in `BRA.U UP0, ...`, the branch is not always taken.
            "BRA" | "JMP" => self.operands.starts_with("`("),
            _ => false,
        };
        self.guarded || !leaves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of the output of nvdisasm 13.5.37, `-c`.
    const TEXT: &str = "\
	.target	sm_90a
//--------------------- .text.fwd                 --------------------------
        .global         fwd
fwd:
.text.fwd:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_29:
        /*0010*/                   SHFL.IDX PT, R2, R0, RZ, 0x1f ;
        /*0020*/              @!P0 BRA `(.L_x_29) ;
        /*0030*/              @UP0 UIADD3 UR6, -UR6, 0x100000, URZ ;
        /*0040*/                   BRA.DIV UR4, `(.L_x_30) ;
        /*0050*/                   EXIT ;
.L_x_28:
        /*0060*/                   BRA `(.L_x_28);
.L_x_30:
        /*0070*/                   NOP;
";

    #[test]
    fn a_listing() {
        let listing = Listing::parse(TEXT).unwrap();
        let opcodes: Vec<&str> = listing.instructions.iter().map(|i| i.opcode.as_str()).collect();
        assert_eq!(opcodes, ["LDC", "SHFL.IDX", "BRA", "UIADD3", "BRA.DIV", "EXIT", "BRA", "NOP"]);
        let of = |property: fn(&Instruction) -> bool| -> Vec<usize> {
            (0..8).filter(|&index| property(&listing.instructions[index])).collect()
        };
        assert_eq!(of(|i| i.guarded), [2, 3]);
        assert_eq!(of(|i| !i.falls_through()), [5, 6]);
        let targets: Vec<Option<usize>> = listing.instructions.iter().map(|i| listing.target(i)).collect();
        assert_eq!(targets, [None, None, Some(1), None, Some(7), None, Some(6), None]);
        assert_eq!(listing.instructions[7].address, 0x70);
        assert_eq!(listing.instructions[1].operands, "PT, R2, R0, RZ, 0x1f");
    }

    #[test]
    fn what_is_no_listing() {
        assert_eq!(Listing::parse("nvdisasm fatal   : no such file"), Err(ListingError::Empty));
        let lost = "        /*0010*/              @!P0 BRA `(.L_x_1) ;";
        let expected = ListingError::Label { address: 16, label: ".L_x_1".to_owned() };
        assert_eq!(Listing::parse(lost), Err(expected));
    }
}
