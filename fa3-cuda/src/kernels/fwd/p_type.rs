//! The element type of P, the left operand of PV, and what its range allows.

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

    /// A thread's part of a row may add up to so much: an f16 to its largest, a bf16 to what leaves O room below the
    /// largest binary32.
    pub(super) fn most(self) -> f32 {
        if self.0 == WgmmaType::F16 { 65504.0 } else { 2.0f32.powi(30) }
    }

    /// A thread's part of a row of P that was rounded already may add up to so much if P is to be multiplied by a power
    /// of 2 that makes it small: no element is infinite, and the factor is a normal bf16. f16 has no room for it.
    pub(super) fn most_rounded(self) -> Option<f32> {
        (self.0 == WgmmaType::Bf16).then_some(2.0f32.powi(100))
    }

    /// How far (log2) a new reference is set above the largest score, to leave room for larger scores later. Limited by
    /// what still rounds to normal numbers of the type, or has weight beside O.
    pub(super) fn headroom(self) -> f32 {
        if self.0 == WgmmaType::F16 { 4.0 } else { 16.0 }
    }

    /// log2 of P of the largest score, if that is not 1: e4m3 has most of its numbers there.
    pub(super) fn offset(self) -> f32 {
        if self.0 == WgmmaType::E4m3 { 8.0 } else { 0.0 }
    }

    /// Two numbers as products of 16 bits see them.
    #[track_caller]
    pub(super) fn rounded<'k>(self, Rows([upper, lower]): Rows<'k>) -> Rows<'k> {
        Rows(match self.0 == WgmmaType::F16 {
            true => unpacked(Elem::F16, lower.f16x2_above(upper)),
            false => unpacked(Elem::Bf16, lower.bf16x2_above(upper)),
        })
    }
}
