//! A probe: the registers of a warp at one point of a run.

use std::fmt;

use fa3_ir::Ty;

use crate::finding::Site;

/// The contents of registers when a warp reached a probe.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Probe {
    /// Its name in the kernel.
    pub name: String,
    /// The CTA, the warp, the line of the kernel, and the number of iterations begun of the loops around it.
    pub site: Site,
    /// The lanes that reached the probe: bit i for lane i.
    pub lanes: u32,
    /// The class of the registers.
    pub ty: Ty,
    /// The bits of each register, lane by lane. Bits of lanes that did not reach the probe mean nothing.
    pub registers: Vec<[u64; 32]>,
    /// Whether they are the registers of a fragment.
    pub is_fragment: bool,
}

impl Probe {
    /// The numbers of each register, lane by lane, if they are binary32.
    pub fn f32(&self) -> Option<Vec<[f32; 32]>> {
        let numbers = |register: &[u64; 32]| register.map(|bits| f32::from_bits(bits as u32));
        (self.ty == Ty::F32).then(|| self.registers.iter().map(numbers).collect())
    }

    /// The warp's 16 rows of a fragment.
    pub fn rows(&self) -> Option<Vec<Vec<f32>>> {
        let registers = self.f32().filter(|_| self.is_fragment)?;
        let element = |row: usize, col: usize| {
            registers[4 * (col / 8) + 2 * (row / 8) + col % 2][4 * (row % 8) + col % 8 / 2]
        };
        let cols = 2 * registers.len();
        Some((0..16).map(|row| (0..cols).map(|col| element(row, col)).collect()).collect())
    }

    /// A register's number as text: floating point, unsigned, or bits.
    fn number(&self, bits: u64) -> String {
        match self.ty {
            Ty::Pred => (bits != 0).to_string(),
            Ty::F32 => f32::from_bits(bits as u32).to_string(),
            Ty::B32 => bits.to_string(),
            Ty::B16 | Ty::B64 => format!("{bits:#x}"),
        }
    }

    /// The numbers of the lanes that reached the probe; only one number if they agree.
    fn line(&self, register: &[u64; 32]) -> String {
        let got_there = |lane: &usize| self.lanes >> lane & 1 == 1;
        let mut bits = (0..32).filter(got_there).map(|lane| register[lane]);
        match bits.next() {
            Some(first) if bits.all(|bits| bits == first) => self.number(first),
            _ => {
                let lane = |lane| if got_there(&lane) { self.number(register[lane]) } else { "-".to_owned() };
                (0..32).map(lane).collect::<Vec<_>>().join(" ")
            }
        }
    }
}

/// Prints the place, and a line for each register, or for each row of a fragment. Lanes that did not reach the probe
/// are `-`.
impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.site)?;
        match self.rows() {
            Some(rows) => rows.iter().zip(0..).try_for_each(|(row, number)| {
                let row: Vec<String> = row.iter().map(f32::to_string).collect();
                write!(f, "\n  row {number}: {}", row.join(" "))
            }),
            None => self.registers.iter().try_for_each(|register| write!(f, "\n  {}", self.line(register))),
        }
    }
}
