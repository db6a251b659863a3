//! [`Int`], [`Real`] and the numbers of functions of scores for a kernel under construction: functions over them record
//! instructions.

use std::f32::consts::LOG2_E;

use fa3_types::{Int, Real, ScoreIndex, ScoreReal};

use crate::lang::{Arg, B32, F32, Pred, V};

impl<'k> Int for V<'k, B32> {
    type Bool = V<'k, Pred>;

    fn lit(self, value: u32) -> Self {
        self.constant(value)
    }

    #[track_caller]
    fn sub_sat(self, other: Self) -> Self {
        self.max(other) - other
    }

    #[track_caller]
    fn at_most(self, limit: Self) -> Self {
        self.min(limit)
    }

    #[track_caller]
    fn at_least(self, limit: Self) -> Self {
        self.max(limit)
    }

    #[track_caller]
    fn mul_hi(self, other: Self) -> Self {
        self.mul_hi(other)
    }

    #[track_caller]
    fn div(self, divisor: Self) -> Self {
        // Refines the reciprocal and the quotient, as `div.rn.f32` does if no operand is subnormal or infinite. For
        // other operands `div.rn.f32` calls a function, and the call takes registers. The refined quotient reaches the
        // next integer only if both numbers have more than 24 bits.
        let (x, y) = (self.to_f32(), divisor.to_f32());
        let reciprocal = y.rcp();
        let reciprocal = reciprocal.fma((-y).fma(reciprocal, 1.0), reciprocal);
        let quotient = x * reciprocal;
        (-y).fma(quotient, x).fma(reciprocal, quotient).to_u32()
    }

    #[track_caller]
    fn shr(self, bits: Self) -> Self {
        self >> bits
    }

    #[track_caller]
    fn lt(self, other: Self) -> V<'k, Pred> {
        self.lt(other)
    }

    #[track_caller]
    fn le(self, other: Self) -> V<'k, Pred> {
        self.le(other)
    }

    #[track_caller]
    fn eq(self, other: Self) -> V<'k, Pred> {
        self.eq(other)
    }

    #[track_caller]
    fn select(condition: V<'k, Pred>, yes: Self, no: Self) -> Self {
        condition.select(yes, no)
    }
}

impl<'k> Real for V<'k, F32> {
    type Bool = V<'k, Pred>;

    fn lit(self, value: f64) -> Self {
        self.constant(value as f32)
    }

    #[track_caller]
    fn fma(self, factor: Self, addend: Self) -> Self {
        self.fma(factor, addend)
    }

    #[track_caller]
    fn exp2(self) -> Self {
        self.ex2()
    }

    /// Computes tanh x = 1 - 2 / (exp 2x + 1), because the special-function unit's own tanh has only 11 bits. Near 0
    /// the difference from 1 would leave few bits, so the result is the first terms of the series, x - x³ / 3 + 2x⁵ /
    /// 15.
    #[track_caller]
    fn tanh(self) -> Self {
        let x = self;
        let far = ((x * (2.0 * LOG2_E)).ex2() + 1.0).rcp().fma(-2.0, 1.0);
        let square = x * x;
        let near = square.fma(2.0 / 15.0, -1.0 / 3.0).fma(square * x, x);
        x.abs().lt(0.1).select(near, far)
    }

    #[track_caller]
    fn lt(self, other: Self) -> V<'k, Pred> {
        self.lt(other)
    }

    #[track_caller]
    fn select(condition: V<'k, Pred>, yes: Self, no: Self) -> Self {
        condition.select(yes, no)
    }
}

impl<'k> ScoreIndex for V<'k, B32> {
    type Bool = V<'k, Pred>;

    fn lit(self, value: i32) -> Self {
        self.constant(value)
    }

    #[track_caller]
    fn abs(self) -> Self {
        self.abs_s32()
    }

    #[track_caller]
    fn min(self, other: Self) -> Self {
        self.min_s32(other)
    }

    #[track_caller]
    fn max(self, other: Self) -> Self {
        self.max_s32(other)
    }

    /// Divides by a constant with one product. The number is inverted if it is negative, so that it has 31 bits. The
    /// factor is 2^bits / divisor rounded up, which changes no quotient of 31 bits, and is below 2³² unless the divisor
    /// is a power of two, by which functions of scores do not divide.
    ///
    /// Another divisor's reciprocal is off by some 2⁻²². So is a first quotient, and the quotient of what it leaves is
    /// off by at most 1.
    #[track_caller]
    fn div_floor(self, divisor: Self) -> Self {
        let Some(divisor) = divisor.operand().constant().filter(|&divisor| divisor as i32 > 2) else {
            let (x, y) = (self.in_register(), divisor.in_register());
            let reciprocal = y.to_f32_signed().rcp();
            let first = (x.to_f32_signed() * reciprocal).to_s32();
            let rest = x - first * y;
            let quotient = first + (rest.to_f32_signed() * reciprocal).to_s32();
            let rest = x - quotient * y;
            // The remainder has the divisor's sign, and is smaller.
            let is_above = rest.ne(0) & (rest ^ y).lt_s32(0);
            let is_below = (rest ^ y).ge_s32(0) & rest.abs_s32().ge_s32(y.abs_s32());
            let quotient = is_below.select(quotient + 1, is_above.select(quotient - 1, quotient));
            return y.eq(0).select(0, quotient);
        };
        let bits = 31 + divisor.next_power_of_two().trailing_zeros();
        let factor = (1_u64 << bits).div_ceil(divisor.into()) as u32;
        let sign = self.shr_s32(31);
        ((self ^ sign).mul_hi(factor) >> (bits - 32)) ^ sign
    }

    #[track_caller]
    fn and(self, other: Self) -> Self {
        self & other
    }

    #[track_caller]
    fn or(self, other: Self) -> Self {
        self | other
    }

    #[track_caller]
    fn xor(self, other: Self) -> Self {
        self ^ other
    }

    #[track_caller]
    fn shl(self, bits: Self) -> Self {
        self << bits
    }

    #[track_caller]
    fn shr(self, bits: Self) -> Self {
        self.shr_s32(bits)
    }

    #[track_caller]
    fn lt(self, other: Self) -> V<'k, Pred> {
        self.lt_s32(other)
    }

    #[track_caller]
    fn le(self, other: Self) -> V<'k, Pred> {
        self.le_s32(other)
    }

    #[track_caller]
    fn eq(self, other: Self) -> V<'k, Pred> {
        self.eq(other)
    }

    #[track_caller]
    fn select(condition: V<'k, Pred>, yes: Self, no: Self) -> Self {
        condition.select(yes, no)
    }
}

/// Subnormal operands of quotients, logarithms and roots count as 0.
impl<'k> ScoreReal for V<'k, F32> {
    type Index = V<'k, B32>;

    #[track_caller]
    fn of_index(index: V<'k, B32>) -> Self {
        index.to_f32_signed()
    }

    #[track_caller]
    fn to_index(self) -> V<'k, B32> {
        self.to_s32()
    }

    #[track_caller]
    fn not(condition: V<'k, Pred>) -> V<'k, Pred> {
        condition.negated()
    }

    /// Refines the quotient once, to about 1 ulp. A quotient by 0 or by an infinity would become NaN and stays as it
    /// is.
    #[track_caller]
    fn div(self, divisor: Self) -> Self {
        let reciprocal = divisor.rcp();
        let quotient = self * reciprocal;
        let refined = (-divisor).fma(quotient, self).fma(reciprocal, quotient);
        refined.ordered(refined).select(refined, quotient)
    }

    #[track_caller]
    fn log2(self) -> Self {
        self.lg2()
    }

    #[track_caller]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[track_caller]
    fn abs(self) -> Self {
        self.abs()
    }

    /// Converts to an integer and back, except for numbers of 2²³ and above, which are integers.
    #[track_caller]
    fn floor(self) -> Self {
        let floor = self.to_s32_down().to_f32_signed();
        self.abs().lt((1 << 23) as f32).select(floor, self)
    }

    #[track_caller]
    fn min(self, other: Self) -> Self {
        self.min_nan(other)
    }

    #[track_caller]
    fn max(self, other: Self) -> Self {
        self.max_nan(other)
    }

    #[track_caller]
    fn le(self, other: Self) -> V<'k, Pred> {
        self.le(other)
    }

    #[track_caller]
    fn eq(self, other: Self) -> V<'k, Pred> {
        self.eq(other)
    }
}
