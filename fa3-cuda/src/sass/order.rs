//! The order of an iteration's instructions in a few lines, as Appendix B.2 of the paper prints it.

use std::fmt;

use super::{Class, Instruction, Round};

/// Number of instructions without a new name in a group, after which the next new name begins another group.
const SETTLED: usize = 12;

/// An iteration's instructions in order. Products, waits and barriers are listed one by one. The arithmetic in between
/// is summarised in groups, as kinds of instructions with their numbers. Integer instructions, moves and branches are
/// left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The products, waits, barriers and groups.
    pub steps: Vec<Step>,
}

/// Instructions that run together: their short names in order of appearance, with their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The names, each with its number of instructions.
    pub counts: Vec<(String, usize)>,
    landmark: bool,
    /// Number of instructions since the last new name.
    settled: usize,
}

impl Round<'_> {
    /// The order of the iteration's instructions.
    pub fn order(&self) -> Order {
        let mut steps: Vec<Step> = Vec::new();
        for instruction in self.instructions.iter().filter(|instruction| is_shown(instruction)) {
            match steps.last_mut().filter(|step| step.takes(instruction)) {
                Some(step) => step.add(instruction),
                None => steps.push(Step::begin(instruction)),
            }
        }
        Order { steps }
    }
}

fn is_shown(instruction: &Instruction) -> bool {
    instruction.class() != Class::Other
}

/// Whether an instruction is listed on its own, because its position matters and not only the number of its kind.
fn is_landmark(instruction: &Instruction) -> bool {
    matches!(instruction.class(), Class::Product | Class::Wait | Class::Barrier | Class::Spill)
}

impl Step {
    fn begin(instruction: &Instruction) -> Step {
        let counts = vec![(instruction.name().into_owned(), 1)];
        Step { counts, landmark: is_landmark(instruction), settled: 0 }
    }

    fn has(&self, instruction: &Instruction) -> bool {
        self.counts.iter().any(|(name, _)| *name == instruction.name())
    }

    fn takes(&self, instruction: &Instruction) -> bool {
        let mixes = !self.landmark && !is_landmark(instruction) && self.settled < SETTLED;
        mixes || self.has(instruction)
    }

    fn add(&mut self, instruction: &Instruction) {
        let name = instruction.name();
        match self.counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => {
                *count += 1;
                self.settled += 1;
            }
            None => {
                self.counts.push((name.into_owned(), 1));
                self.settled = 0;
            }
        }
    }
}

/// `HGMMA×8`, `FFMA×40+MUFU.EX2×12`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, count)) in self.counts.iter().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { "+" })?;
            if *count > 1 {
                write!(f, "×{count}")?;
            }
        }
        Ok(())
    }
}

/// The steps, separated by spaces.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            write!(f, "{}{step}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Listing, product_loops};

    /// The order of a loop that has a product and then these instructions.
    fn order(instructions: &[&str]) -> String {
        let lines = instructions.iter().map(|text| format!("/*0010*/ {text} ;\n")).collect::<String>();
        let product = "/*0000*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;";
        let text = format!(".L_x_0:\n{product}\n{lines}/*0010*/ @P0 BRA `(.L_x_0) ;\n/*0020*/ EXIT ;\n");
        product_loops(&Listing::parse(&text).unwrap())[0].order().to_string()
    }

    const MAX: &str = "FMNMX R2, R2, R24, !PT";
    const FMA: &str = "FFMA R26, R26, UR14, -R17";
    const EXP: &str = "MUFU.EX2 R24, R24";
    const WAIT: &str = "WARPGROUP.DEPBAR.LE gsb0, 0x0";

    #[test]
    fn mixtures_end_where_something_new_begins() {
        let mixed = [[MAX; 20].as_slice(), &[FMA, EXP].repeat(15), &[MAX]].concat();
        assert_eq!(order(&mixed), "HGMMA FMNMX×20 FFMA×15+MUFU.EX2×15 FMNMX");
        // A kind that appears soon enough belongs to the group; integer instructions belong to no group.
        let soon = [&[MAX; 3], ["UMOV UR4, UR5"; 3].as_slice(), &[FMA; 2], &[MAX]].concat();
        assert_eq!(order(&soon), "HGMMA FMNMX×4+FFMA×2");
    }

    #[test]
    fn waits_barriers_and_spills_stand_for_themselves() {
        let bar = "BAR.ARV R18, 0x100";
        let text = order(&[EXP, WAIT, EXP, bar, bar, "LDL R3, [R1]", MAX]);
        assert_eq!(text, "HGMMA MUFU.EX2 DEPBAR(0) MUFU.EX2 BAR.ARV×2 LDL FMNMX");
    }

    /// The loop of the kernel `gemm_simple`: a leader that loads, a wait with its retry out of line, a product.
    #[test]
    fn a_real_loop() {
        let listing = Listing::parse(include_str!("gemm_simple.sass")).unwrap();
        let rounds = product_loops(&listing);
        let [round] = &rounds[..] else { panic!("{} loops", rounds.len()) };
        let expected = "SHFL SYNCS.ARRIVE SYNCS.TRYWAIT HGMMA×4 DEPBAR(0) BAR.SYNC";
        assert_eq!(round.order().to_string(), expected);
        let [product] = &round.products()[..] else { panic!("one product") };
        assert_eq!((product.n, product.parts, product.fresh, product.interruptions), (128, 4, false, 0));
        let at = |index: usize| round.instructions[index].address;
        assert_eq!((at(product.first), at(product.last), product.wait.map(at)), (0x660, 0x760, Some(0x770)));
        // The loop has all instructions from 0x410 to 0x790, and nothing of the retry at 0x1490.
        assert_eq!((at(0), round.instructions.len()), (0x410, 1 + (0x790 - 0x410) / 16));
    }
}
