//! Values, variables, immediates: what instructions read and write.

use std::fmt;
use std::marker::PhantomData;

use crate::{B16, B32, B64, Class, F32, Pred, Ty};

/// A register of a kernel: an index into [`crate::Kernel::values`], which knows its class, its name and
/// whether it is assigned once (a value) or any number of times (a variable).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// What a kernel knows about a [`Value`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    /// Its class.
    pub ty: Ty,
    /// A name for the reader; the printer appends the index.
    pub name: Option<String>,
    /// Whether it may be assigned more than once.
    pub mutable: bool,
}

/// A constant operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Imm {
    /// A truth value.
    Pred(bool),
    /// 16 bits.
    B16(u16),
    /// 32 bits.
    B32(u32),
    /// 64 bits.
    B64(u64),
    /// The bits of a binary32, so that constants can be compared and hashed.
    F32(u32),
}

impl Imm {
    /// The class of registers that can hold it.
    pub const fn ty(self) -> Ty {
        match self {
            Imm::Pred(_) => Ty::Pred,
            Imm::B16(_) => Ty::B16,
            Imm::B32(_) => Ty::B32,
            Imm::B64(_) => Ty::B64,
            Imm::F32(_) => Ty::F32,
        }
    }
}

/// What an instruction reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A value, or what a variable holds when the instruction runs.
    Value(Value),
    /// A constant.
    Imm(Imm),
}

impl Operand {
    /// The constant 32 bits, if it is that.
    pub const fn constant(self) -> Option<u32> {
        match self {
            Operand::Imm(Imm::B32(bits)) => Some(bits),
            Operand::Imm(_) | Operand::Value(_) => None,
        }
    }
}

/// A handle to a value of class `T`: assigned once, visible in the block that defines it and the blocks within.
///
/// Mixing classes does not compile:
/// ```compile_fail,E0271
/// use fa3_ir::{B32, Builder, F32, Launch, V};
/// fn mix(b: &mut Builder, x: V<F32>, n: V<B32>) -> V<F32> {
///     b.add(x, n)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct V<T>(Value, PhantomData<T>);

/// A handle to a mutable register of class `T`: the state that a loop carries. It is set by
/// [`crate::Builder::set`] only, and as the accumulator of a wgmma. As an operand it stands for what it holds
/// then; [`crate::Builder::get`] keeps that.
///
/// It takes values of its own class only:
/// ```compile_fail,E0271
/// use fa3_ir::{B32, Builder, F32, V, Var};
/// fn mix(b: &mut Builder, row_max: Var<F32>, n: V<B32>) {
///     b.set(row_max, n);
/// }
/// ```
/// and a value is no variable:
/// ```compile_fail,E0308
/// use fa3_ir::{Builder, F32, V};
/// fn assign_twice(b: &mut Builder, x: V<F32>) {
///     b.set(x, 0.0);
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Var<T>(Value, PhantomData<T>);

impl<T: Class> V<T> {
    pub(crate) fn new(value: Value) -> V<T> {
        V(value, PhantomData)
    }
}

impl<T: Class> Var<T> {
    pub(crate) fn new(value: Value) -> Var<T> {
        Var(value, PhantomData)
    }
}

/// What can be an operand of class [`Arg::Ty`]: a [`V`], a [`Var`], or a Rust number (`u32` and `i32` for
/// [`B32`], `u64` for [`B64`], `u16` for [`B16`], `f32` for [`F32`], `bool` for [`Pred`]).
pub trait Arg: Copy {
    /// The class.
    type Ty: Class;
    /// The operand.
    fn operand(self) -> Operand;
}

/// An [`Arg`] in a register, where PTX takes no constant: a [`V`] or a [`Var`].
///
/// ```compile_fail,E0277
/// use fa3_ir::{Builder, F32, V};
/// fn shuffle_a_constant(b: &mut Builder) -> V<F32> {
///     b.shfl_bfly(1.0, 1)
/// }
/// ```
pub trait Reg: Arg {
    /// The register.
    fn value(self) -> Value;
}

impl<T: Class> Arg for V<T> {
    type Ty = T;
    fn operand(self) -> Operand {
        Operand::Value(self.0)
    }
}

impl<T: Class> Reg for V<T> {
    fn value(self) -> Value {
        self.0
    }
}

impl<T: Class> Arg for Var<T> {
    type Ty = T;
    fn operand(self) -> Operand {
        Operand::Value(self.0)
    }
}

impl<T: Class> Reg for Var<T> {
    fn value(self) -> Value {
        self.0
    }
}

macro_rules! constants {
    ($($rust:ty: $class:ident = $imm:expr;)+) => {$(
        impl Arg for $rust {
            type Ty = $class;
            fn operand(self) -> Operand {
                Operand::Imm($imm(self))
            }
        }
    )+};
}

constants! {
    bool: Pred = Imm::Pred;
    u16: B16 = Imm::B16;
    u32: B32 = Imm::B32;
    i32: B32 = |x: i32| Imm::B32(x.cast_unsigned());
    u64: B64 = Imm::B64;
    f32: F32 = |x: f32| Imm::F32(x.to_bits());
}

/// A predicate, or its negation, as guards and branches take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// The predicate.
    pub pred: Value,
    /// Whether it must be false.
    pub negate: bool,
}

impl<R: Reg<Ty = Pred>> From<R> for Condition {
    fn from(pred: R) -> Condition {
        Condition { pred: pred.value(), negate: false }
    }
}

impl std::ops::Not for V<Pred> {
    type Output = Condition;
    /// The lanes where the predicate is false, for a guard or a branch. It emits nothing.
    fn not(self) -> Condition {
        Condition { pred: self.0, negate: true }
    }
}
