//! The element type of P, the left operand of PV, and the limits that its range sets.

use fa3_ir::lang::*;

use crate::kernels::parts::unpack::unpacked;

/// The type that P is rounded to.
#[derive(Clone, Copy)]
pub(super) struct PType(pub(super) WgmmaType);

impl PType {
    /// P of a block, rounded, as an operand in registers.
    #[track_caller]
    pub(super) fn round<'k>(self, p: &Frag<'k>) -> AFrag<'k> {
        p.map_to_a(self.0, |p, _| p)
    }

    /// The largest sum that a thread's part of a row of P may have. In f16 it is the largest finite number; in bf16 it
    /// is a number that leaves room for O below the largest binary32.
    pub(super) fn most(self) -> f32 {
        if self.0 == WgmmaType::F16 { 65504.0 } else { 2.0f32.powi(30) }
    }

    /// Whether a rounded P that is too large can be multiplied by a power of 2. In f16 it may be infinite.
    pub(super) fn has_range(self) -> bool {
        self.0 == WgmmaType::Bf16
    }

    /// Distance (log2) of a new reference above the row_max, which leaves room for larger scores later. P must still
    /// round to normal numbers of the type, unless it is negligible beside O.
    pub(super) fn headroom(self) -> f32 {
        if self.0 == WgmmaType::F16 { 4.0 } else { 16.0 }
    }

    /// log2 of P of the largest score. In e4m3 it is 8, because most e4m3 numbers lie above 1.
    pub(super) fn offset(self) -> f32 {
        if self.0 == WgmmaType::E4m3 { 8.0 } else { 0.0 }
    }

    /// The numbers of both rows, rounded to the 16-bit type that products take.
    #[track_caller]
    pub(super) fn rounded<'k>(self, Rows([upper, lower]): Rows<'k>) -> Rows<'k> {
        Rows(match self.0 == WgmmaType::F16 {
            true => unpacked(Elem::F16, lower.f16x2_above(upper)),
            false => unpacked(Elem::Bf16, lower.bf16x2_above(upper)),
        })
    }
}
