//! Kinds of instructions that matter to a main loop's speed.

use std::borrow::Cow;
use std::fmt;

use super::Instruction;

/// A kind of instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// A part of a tensor-core product: HGMMA, or QGMMA of 8-bit inputs.
    Product,
    /// A wait until at most N products are in flight: WARPGROUP.DEPBAR.
    Wait,
    /// A wait or an arrival at an mbarrier (SYNCS) or a named barrier (BAR).
    Barrier,
    /// An exponential: MUFU.EX2.
    Exp,
    /// Another special function: MUFU.
    Special,
    /// A conversion between types: F2FP and the like.
    Convert,
    /// Single-precision arithmetic: FFMA, FMUL, FADD, FMNMX.
    Float,
    /// A load or a store of shared memory: LDS, LDSM, STS, STSM.
    Shared,
    /// An exchange within a warp: SHFL.
    Shuffle,
    /// A move into a register of the whole warp: R2UR.
    ToUniform,
    /// A load or a store of local memory, to which registers spill: LDL, STL.
    Spill,
    /// Integers, moves, predicates, branches.
    Other,
}

impl Class {
    /// All kinds.
    pub const ALL: [Class; 12] = [
        Class::Product,
        Class::Wait,
        Class::Barrier,
        Class::Exp,
        Class::Special,
        Class::Convert,
        Class::Float,
        Class::Shared,
        Class::Shuffle,
        Class::ToUniform,
        Class::Spill,
        Class::Other,
    ];
}

impl Instruction {
    /// The kind of the instruction.
    pub fn class(&self) -> Class {
        match self.stem() {
            "HGMMA" | "QGMMA" => Class::Product,
            "WARPGROUP" if self.opcode.contains(".DEPBAR") => Class::Wait,
            "SYNCS" | "BAR" => Class::Barrier,
            "MUFU" if self.opcode.starts_with("MUFU.EX2") => Class::Exp,
            "MUFU" => Class::Special,
            "F2FP" | "F2F" | "F2I" | "I2F" | "I2FP" => Class::Convert,
            "FFMA" | "FMUL" | "FADD" | "FMNMX" => Class::Float,
            "LDS" | "LDSM" | "STS" | "STSM" => Class::Shared,
            "SHFL" => Class::Shuffle,
            "R2UR" => Class::ToUniform,
            "LDL" | "STL" => Class::Spill,
            _ => Class::Other,
        }
    }

    /// Number of products that may still be in flight after this wait. `None` for other instructions.
    pub fn leaves_in_flight(&self) -> Option<usize> {
        if self.class() != Class::Wait {
            return None;
        }
        let count = self.operands.rsplit(", 0x").next()?;
        usize::from_str_radix(count, 16).ok()
    }

    /// The short name: `HGMMA`, `DEPBAR(1)`, `SYNCS.TRYWAIT`, `BAR.ARV`.
    pub fn name(&self) -> Cow<'_, str> {
        if let Some(left) = self.leaves_in_flight() {
            return Cow::Owned(format!("DEPBAR({left})"));
        }
        match self.stem() {
            "SYNCS" if self.opcode.contains(".TRYWAIT") => Cow::Borrowed("SYNCS.TRYWAIT"),
            "SYNCS" | "BAR" | "MUFU" => {
                let ends = self.opcode.match_indices('.').map(|(at, _)| at).nth(1);
                Cow::Borrowed(&self.opcode[..ends.unwrap_or(self.opcode.len())])
            }
            stem => Cow::Borrowed(stem),
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Class::Product => "products",
            Class::Wait => "waits",
            Class::Barrier => "barriers",
            Class::Exp => "exponentials",
            Class::Special => "special",
            Class::Convert => "conversions",
            Class::Float => "float",
            Class::Shared => "shared",
            Class::Shuffle => "shuffles",
            Class::ToUniform => "to-uniform",
            Class::Spill => "spills",
            Class::Other => "other",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Listing;
    use super::*;

    #[test]
    fn classes_and_names() {
        let all = [
            ("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT", Class::Product, "HGMMA"),
            ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0", Class::Product, "QGMMA"),
            ("WARPGROUP.DEPBAR.LE gsb0, 0x1", Class::Wait, "DEPBAR(1)"),
            ("WARPGROUP.ARRIVE", Class::Other, "WARPGROUP"),
            ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10", Class::Barrier, "SYNCS.TRYWAIT"),
            ("@P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R9+URZ], RZ", Class::Barrier, "SYNCS.ARRIVE"),
            ("BAR.SYNC.DEFER_BLOCKING R2, 0x100", Class::Barrier, "BAR.SYNC"),
            ("BAR.ARV R18, 0x100", Class::Barrier, "BAR.ARV"),
            ("MUFU.EX2 R36, R36", Class::Exp, "MUFU.EX2"),
            ("MUFU.RCP R13, R10", Class::Special, "MUFU.RCP"),
            ("F2FP.BF16.F32.PACK_AB R176, R25, R24", Class::Convert, "F2FP"),
            ("FMNMX R16, R17, R16, !PT", Class::Float, "FMNMX"),
            ("FFMA R26, R26, UR14, -R17.reuse", Class::Float, "FFMA"),
            ("STSM.16.M88.4 [R9], R24", Class::Shared, "STSM"),
            ("R2UR UR8, R6.reuse", Class::ToUniform, "R2UR"),
            ("STL.64 [R1+0x8], R24", Class::Spill, "STL"),
            ("UIADD3 UR18, UR19, 0x2, URZ", Class::Other, "UIADD3"),
        ];
        let text: String = all.iter().map(|(text, ..)| format!("/*0000*/ {text} ;\n")).collect();
        let listing = Listing::parse(&text).unwrap();
        for (instruction, (text, class, name)) in listing.instructions.iter().zip(all) {
            assert_eq!((instruction.class(), &*instruction.name()), (class, name), "{text}");
        }
        assert_eq!(listing.instructions[2].leaves_in_flight(), Some(1));
        assert_eq!(listing.instructions[3].leaves_in_flight(), None);
    }
}
