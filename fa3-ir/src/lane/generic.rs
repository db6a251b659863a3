//! Operators and methods that all classes of a kind have: `x + y`, `p.select(x, y)`.

use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Shl, Shr, Sub};

use crate::LaneOp;
use crate::lang::{Arg, B16, B32, B64, Class, F32, Pred, V, Var};

/// Classes with addition and multiplication: [`B32`] and [`B64`] (modulo 2ⁿ, so that signs do not matter) and [`F32`].
pub trait Number: Class {
    /// The class's addition.
    const ADD: LaneOp;
    /// The class's subtraction.
    const SUB: LaneOp;
    /// The class's multiplication; for integers the lower half of the product.
    const MUL: LaneOp;
}

impl Number for B32 {
    const ADD: LaneOp = LaneOp::AddU32;
    const SUB: LaneOp = LaneOp::SubU32;
    const MUL: LaneOp = LaneOp::MulU32;
}

impl Number for B64 {
    const ADD: LaneOp = LaneOp::AddU64;
    const SUB: LaneOp = LaneOp::SubU64;
    const MUL: LaneOp = LaneOp::MulU64;
}

impl Number for F32 {
    const ADD: LaneOp = LaneOp::AddF32;
    const SUB: LaneOp = LaneOp::SubF32;
    const MUL: LaneOp = LaneOp::MulF32;
}

/// Classes with bitwise logic: [`Pred`], [`B32`], [`B64`].
pub trait Bits: Class {
    /// The class's conjunction.
    const AND: LaneOp;
    /// The class's disjunction.
    const OR: LaneOp;
    /// The class's exclusive disjunction.
    const XOR: LaneOp;
}

impl Bits for Pred {
    const AND: LaneOp = LaneOp::AndPred;
    const OR: LaneOp = LaneOp::OrPred;
    const XOR: LaneOp = LaneOp::XorPred;
}

impl Bits for B32 {
    const AND: LaneOp = LaneOp::AndB32;
    const OR: LaneOp = LaneOp::OrB32;
    const XOR: LaneOp = LaneOp::XorB32;
}

impl Bits for B64 {
    const AND: LaneOp = LaneOp::AndB64;
    const OR: LaneOp = LaneOp::OrB64;
    const XOR: LaneOp = LaneOp::XorB64;
}

/// Classes that a predicate can choose between: all but [`Pred`] itself.
pub trait Select: Class {
    /// The class's choice.
    const SELECT: LaneOp;
}

impl Select for B16 {
    const SELECT: LaneOp = LaneOp::SelectB16;
}

impl Select for B32 {
    const SELECT: LaneOp = LaneOp::SelectB32;
}

impl Select for B64 {
    const SELECT: LaneOp = LaneOp::SelectB64;
}

impl Select for F32 {
    const SELECT: LaneOp = LaneOp::SelectF32;
}

macro_rules! operators {
    ($($trait:ident::$method:ident of $classes:ident: $op:ident;)+) => {$(
        impl<'k, T: $classes, R: Arg<Ty = T>> $trait<R> for V<'k, T> {
            type Output = V<'k, T>;
            #[track_caller]
            fn $method(self, right: R) -> V<'k, T> {
                let b = self.builder();
                V::new(b, b.lane(T::$op, &[self.operand(), right.operand()]))
            }
        }

        impl<'k, T: $classes, R: Arg<Ty = T>> $trait<R> for Var<'k, T> {
            type Output = V<'k, T>;
            #[track_caller]
            fn $method(self, right: R) -> V<'k, T> {
                self.now().$method(right)
            }
        }
    )+};
}

operators! {
    Add::add of Number: ADD;
    Sub::sub of Number: SUB;
    Mul::mul of Number: MUL;
    BitAnd::bitand of Bits: AND;
    BitOr::bitor of Bits: OR;
    BitXor::bitxor of Bits: XOR;
}

/// A correctly rounded quotient, in about ten instructions; an approximate one is `x * y.rcp()`.
impl<'k, R: Arg<Ty = F32>> Div<R> for V<'k, F32> {
    type Output = V<'k, F32>;
    #[track_caller]
    fn div(self, right: R) -> V<'k, F32> {
        let b = self.builder();
        V::new(b, b.lane(LaneOp::DivF32, &[self.operand(), right.operand()]))
    }
}

macro_rules! unary {
    ($($trait:ident::$method:ident of $class:ident: $op:ident;)+) => {$(
        impl<'k> $trait for V<'k, $class> {
            type Output = V<'k, $class>;
            #[track_caller]
            fn $method(self) -> V<'k, $class> {
                let b = self.builder();
                V::new(b, b.lane(LaneOp::$op, &[self.operand()]))
            }
        }

        impl<'k> $trait for Var<'k, $class> {
            type Output = V<'k, $class>;
            #[track_caller]
            fn $method(self) -> V<'k, $class> {
                self.now().$method()
            }
        }
    )+};
}

unary! {
    Not::not of B32: NotB32;
    Not::not of B64: NotB64;
    Neg::neg of B32: NegS32;
    Neg::neg of F32: NegF32;
}

/// Shifts of unsigned numbers, by a number of bits of class [`B32`]. A shift by the width of the class or more gives 0.
macro_rules! shifts {
    ($($trait:ident::$method:ident of $class:ident: $op:ident;)+) => {$(
        impl<'k, R: Arg<Ty = B32>> $trait<R> for V<'k, $class> {
            type Output = V<'k, $class>;
            #[track_caller]
            fn $method(self, bits: R) -> V<'k, $class> {
                let b = self.builder();
                V::new(b, b.lane(LaneOp::$op, &[self.operand(), bits.operand()]))
            }
        }

        impl<'k, R: Arg<Ty = B32>> $trait<R> for Var<'k, $class> {
            type Output = V<'k, $class>;
            #[track_caller]
            fn $method(self, bits: R) -> V<'k, $class> {
                self.now().$method(bits)
            }
        }
    )+};
}

shifts! {
    Shl::shl of B32: ShlB32;
    Shl::shl of B64: ShlB64;
    Shr::shr of B32: ShrU32;
    Shr::shr of B64: ShrU64;
}

impl<'k> V<'k, Pred> {
    /// `yes` where this predicate holds, `no` elsewhere.
    #[track_caller]
    pub fn select<T: Select>(self, yes: impl Arg<Ty = T>, no: impl Arg<Ty = T>) -> V<'k, T> {
        let b = self.builder();
        V::new(b, b.lane(T::SELECT, &[yes.operand(), no.operand(), self.operand()]))
    }
}
