//! Unpacks numbers from registers that hold several of them.

use fa3_ir::lang::*;

/// Selectors of [`V::prmt`] for the even bytes and for the odd bytes of two words. `ldmatrix.trans` moves pairs of
/// bytes, which are neighbours along the columns; the selectors separate the codes of even columns from the codes
/// of odd columns.
pub(crate) const EVEN_ODD: [u32; 2] = [0x6420, 0x7531];

/// The two numbers of a register, f16 or bf16.
#[track_caller]
pub(crate) fn unpacked(elem: Elem, word: U32<'_>) -> [V<'_, F32>; 2] {
    if elem == Elem::F16 { word.unpack_f16x2() } else { word.unpack_bf16x2() }
}
