//! Pairs of 16-bit numbers in a register: the first is the lower half, as in memory.

use crate::lang::{B32, F32, V};

impl<'k> V<'k, B32> {
    /// Two binary32 as bf16, each rounded to nearest.
    #[track_caller]
    pub fn pack_bf16x2([low, high]: [V<'k, F32>; 2]) -> V<'k, B32> {
        high.bf16x2_above(low)
    }

    /// Two bf16 as binary32, exactly.
    #[track_caller]
    pub fn unpack_bf16x2(self) -> [V<'k, F32>; 2] {
        // A bf16 is the upper half of a binary32.
        [(self << 16).as_f32(), (self & 0xFFFF_0000_u32).as_f32()]
    }

    /// Two binary32 as f16, each rounded to nearest.
    #[track_caller]
    pub fn pack_f16x2([low, high]: [V<'k, F32>; 2]) -> V<'k, B32> {
        high.f16x2_above(low)
    }

    /// Two f16 as binary32, exactly.
    #[track_caller]
    pub fn unpack_f16x2(self) -> [V<'k, F32>; 2] {
        let (low, high) = self.halves();
        [low, high].map(V::f16_to_f32)
    }
}
