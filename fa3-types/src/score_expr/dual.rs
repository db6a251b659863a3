//! Dual numbers.

use std::f64::consts::{LN_2, LOG2_E};
use std::ops::{Add, Mul, Neg, Sub};

use super::ScoreReal;
use crate::Real;

/// A number and its derivative. A function of [`ScoreReal`]s gives its derivative if it is evaluated in these numbers.
///
/// ```
/// use fa3_types::Dual;
///
/// let x = Dual { value: 3.0_f64, slope: 1.0 };
/// assert_eq!((x * x).slope, 6.0);
/// ```
///
/// At a kink the slope is one of the two sides' or, of an absolute value at 0, 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dual<R> {
    /// The number.
    pub value: R,
    /// Its derivative.
    pub slope: R,
}

impl<R: ScoreReal> Dual<R> {
    pub(super) fn constant(value: R) -> Dual<R> {
        Dual { value, slope: value.lit(0.0) }
    }

    /// `value`, whose derivative is `factor` times the slope of `self`: 0 for a constant, even at an infinite factor.
    fn chain(self, value: R, factor: R) -> Dual<R> {
        Dual { value, slope: self.slope.scaled(factor) }
    }
}

impl<R: ScoreReal> Add for Dual<R> {
    type Output = Dual<R>;

    fn add(self, other: Dual<R>) -> Dual<R> {
        Dual { value: self.value + other.value, slope: self.slope + other.slope }
    }
}

impl<R: ScoreReal> Sub for Dual<R> {
    type Output = Dual<R>;

    fn sub(self, other: Dual<R>) -> Dual<R> {
        Dual { value: self.value - other.value, slope: self.slope - other.slope }
    }
}

impl<R: ScoreReal> Mul for Dual<R> {
    type Output = Dual<R>;

    fn mul(self, other: Dual<R>) -> Dual<R> {
        let slope = self.slope.scaled(other.value) + other.slope.scaled(self.value);
        Dual { value: self.value * other.value, slope }
    }
}

impl<R: ScoreReal> Neg for Dual<R> {
    type Output = Dual<R>;

    fn neg(self) -> Dual<R> {
        Dual { value: -self.value, slope: -self.slope }
    }
}

impl<R: ScoreReal> Real for Dual<R> {
    type Bool = R::Bool;

    fn lit(self, value: f64) -> Dual<R> {
        Dual::constant(self.value.lit(value))
    }

    fn fma(self, factor: Dual<R>, addend: Dual<R>) -> Dual<R> {
        let Dual { slope, .. } = self * factor + addend;
        Dual { value: self.value.fma(factor.value, addend.value), slope }
    }

    fn exp2(self) -> Dual<R> {
        let value = self.value.exp2();
        self.chain(value, value * value.lit(LN_2))
    }

    fn tanh(self) -> Dual<R> {
        let value = self.value.tanh();
        self.chain(value, value.lit(1.0) - value * value)
    }

    fn lt(self, other: Dual<R>) -> R::Bool {
        self.value.lt(other.value)
    }

    fn select(condition: R::Bool, yes: Dual<R>, no: Dual<R>) -> Dual<R> {
        let [value, slope] =
            [(yes.value, no.value), (yes.slope, no.slope)].map(|(yes, no)| R::select(condition, yes, no));
        Dual { value, slope }
    }
}

impl<R: ScoreReal> ScoreReal for Dual<R> {
    type Index = R::Index;

    fn of_index(index: R::Index) -> Dual<R> {
        Dual::constant(R::of_index(index))
    }

    fn to_index(self) -> R::Index {
        self.value.to_index()
    }

    fn not(condition: R::Bool) -> R::Bool {
        R::not(condition)
    }

    fn div(self, divisor: Dual<R>) -> Dual<R> {
        let value = self.value.div(divisor.value);
        let inverse = value.lit(1.0).div(divisor.value);
        Dual { value, slope: self.slope.scaled(inverse) - divisor.slope.scaled(value * inverse) }
    }

    fn log2(self) -> Dual<R> {
        self.chain(self.value.log2(), self.value.lit(LOG2_E).div(self.value))
    }

    fn sqrt(self) -> Dual<R> {
        let value = self.value.sqrt();
        self.chain(value, value.lit(0.5).div(value))
    }

    fn abs(self) -> Dual<R> {
        let zero = self.value.lit(0.0);
        let sign = R::select(
            zero.lt(self.value),
            zero.lit(1.0),
            R::select(self.value.lt(zero), zero.lit(-1.0), zero),
        );
        self.chain(self.value.abs(), sign)
    }

    fn floor(self) -> Dual<R> {
        Dual::constant(self.value.floor())
    }

    fn min(self, other: Dual<R>) -> Dual<R> {
        Dual { value: self.value.min(other.value), ..Dual::select(other.value.lt(self.value), other, self) }
    }

    fn max(self, other: Dual<R>) -> Dual<R> {
        Dual { value: self.value.max(other.value), ..Dual::select(self.value.lt(other.value), other, self) }
    }

    fn le(self, other: Dual<R>) -> R::Bool {
        self.value.le(other.value)
    }

    fn eq(self, other: Dual<R>) -> R::Bool {
        self.value.eq(other.value)
    }
}
