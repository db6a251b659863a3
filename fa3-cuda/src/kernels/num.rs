//! [`fa3_sched::Int`] over values of a kernel under construction: scheduling is written once, for host and kernel.

use std::cell::RefCell;
use std::ops::{Add, Mul};

use fa3_ir::{Arg, B32, Builder, Operand, Pred, V};
use fa3_sched::Int;

/// An unsigned 32-bit integer of the kernel that `b` builds. Arithmetic on it records instructions.
#[derive(Clone, Copy)]
pub(crate) struct Num<'b, 'k> {
    b: &'b RefCell<&'k mut Builder>,
    value: Scalar,
}

/// A value or a constant.
#[derive(Clone, Copy)]
enum Scalar {
    Value(V<B32>),
    Constant(u32),
}

impl Arg for Scalar {
    type Ty = B32;
    fn operand(self) -> Operand {
        match self {
            Scalar::Value(value) => value.operand(),
            Scalar::Constant(value) => value.operand(),
        }
    }
}

impl<'b, 'k> Num<'b, 'k> {
    /// A value of the kernel that `b` builds.
    pub(crate) fn new(b: &'b RefCell<&'k mut Builder>, value: V<B32>) -> Num<'b, 'k> {
        Num { b, value: Scalar::Value(value) }
    }

    /// The value.
    #[track_caller]
    pub(crate) fn value(self) -> V<B32> {
        match self.value {
            Scalar::Value(value) => value,
            Scalar::Constant(value) => self.b.borrow_mut().mov_b32(value),
        }
    }

    #[track_caller]
    fn with(self, other: Self, f: fn(&mut Builder, Scalar, Scalar) -> V<B32>) -> Self {
        let value = f(&mut self.b.borrow_mut(), self.value, other.value);
        Num { value: Scalar::Value(value), ..self }
    }

    #[track_caller]
    fn compare(self, other: Self, f: fn(&mut Builder, Scalar, Scalar) -> V<Pred>) -> V<Pred> {
        f(&mut self.b.borrow_mut(), self.value, other.value)
    }
}

/// What `f` makes of values of the kernel.
#[track_caller]
pub(crate) fn compute<const N: usize>(
    b: &mut Builder,
    values: [V<B32>; N],
    f: impl for<'b, 'k> FnOnce([Num<'b, 'k>; N]) -> Num<'b, 'k>,
) -> V<B32> {
    let cell = RefCell::new(b);
    f(values.map(|value| Num::new(&cell, value))).value()
}

impl Add for Num<'_, '_> {
    type Output = Self;
    #[track_caller]
    fn add(self, other: Self) -> Self {
        self.with(other, |b, x, y| b.add(x, y))
    }
}

impl Mul for Num<'_, '_> {
    type Output = Self;
    #[track_caller]
    fn mul(self, other: Self) -> Self {
        self.with(other, |b, x, y| b.mul(x, y))
    }
}

impl Int for Num<'_, '_> {
    type Bool = V<Pred>;

    fn lit(self, value: u32) -> Self {
        Num { value: Scalar::Constant(value), ..self }
    }

    #[track_caller]
    fn sub_sat(self, other: Self) -> Self {
        self.with(other, |b, x, y| {
            let larger = b.max_u32(x, y);
            b.sub(larger, y)
        })
    }

    #[track_caller]
    fn at_most(self, limit: Self) -> Self {
        self.with(limit, |b, x, y| b.min_u32(x, y))
    }

    #[track_caller]
    fn at_least(self, limit: Self) -> Self {
        self.with(limit, |b, x, y| b.max_u32(x, y))
    }

    #[track_caller]
    fn mul_hi(self, other: Self) -> Self {
        self.with(other, |b, x, y| b.mul_hi_u32(x, y))
    }

    #[track_caller]
    fn shr(self, bits: Self) -> Self {
        self.with(bits, |b, x, y| b.shr_u32(x, y))
    }

    #[track_caller]
    fn lt(self, other: Self) -> V<Pred> {
        self.compare(other, |b, x, y| b.lt_u32(x, y))
    }

    #[track_caller]
    fn le(self, other: Self) -> V<Pred> {
        self.compare(other, |b, x, y| b.le_u32(x, y))
    }

    #[track_caller]
    fn eq(self, other: Self) -> V<Pred> {
        self.compare(other, |b, x, y| b.eq_b32(x, y))
    }

    #[track_caller]
    fn select(condition: V<Pred>, yes: Self, no: Self) -> Self {
        let value = yes.b.borrow_mut().select(condition, yes.value, no.value);
        Num { value: Scalar::Value(value), ..yes }
    }
}
