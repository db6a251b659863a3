//! Numbers out of registers that have several of them.

use fa3_ir::lang::*;

/// Selectors of [`V::prmt`]: the even bytes of two words, and the odd ones. `ldmatrix.trans` moves pairs of bytes,
/// neighbours along the columns: these part codes of even columns from those of odd ones.
pub(crate) const EVEN_ODD: [u32; 2] = [0x6420, 0x7531];

/// The two numbers of a register, f16 or bf16.
#[track_caller]
pub(crate) fn unpacked(elem: Elem, word: V<'_, B32>) -> [V<'_, F32>; 2] {
    if elem == Elem::F16 {
        let (low, high) = word.halves();
        return [low, high].map(V::f16_to_f32);
    }
    // A bf16 is the upper half of a binary32.
    [(word << 16).as_f32(), (word & 0xFFFF_0000_u32).as_f32()]
}
