//! Values, variables, immediates: what instructions read and write.

use std::fmt;
use std::marker::PhantomData;

use crate::Ty;
use crate::lang::{B16, B32, B64, Builder, Class, F32, Pred};

/// A register of a kernel: an index into [`crate::Kernel::values`], which knows its class, its name and
/// whether it is assigned once (a value) or any number of times (a variable).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// Everything that a kernel knows about a [`Value`].
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

/// An operand that an instruction reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A value, or what a variable holds when the instruction runs.
    Value(Value),
    /// A constant.
    Imm(Imm),
}

impl Operand {
    /// The 32-bit constant, if it is one.
    pub const fn constant(self) -> Option<u32> {
        match self {
            Operand::Imm(Imm::B32(bits)) => Some(bits),
            Operand::Imm(_) | Operand::Value(_) => None,
        }
    }
}

/// A value of class `T` of the kernel that its builder builds: a register that is assigned once, or a constant.
///
/// Arithmetic on it records instructions: `x * 2.0 + y`, `x.fma(2.0, y)`, `row.lt(rows)`. A register is visible in the
/// block that defines it and the blocks within.
///
/// Mixing classes does not compile:
/// ```compile_fail,E0271
/// use fa3_ir::lang::{B32, F32, V};
/// fn mix<'k>(x: V<'k, F32>, n: V<'k, B32>) -> V<'k, F32> {
///     x + n
/// }
/// ```
#[derive(Clone, Copy)]
pub struct V<'k, T> {
    builder: &'k Builder,
    operand: Operand,
    class: PhantomData<T>,
}

/// A value of 32 bits.
pub type U32<'k> = V<'k, B32>;

/// A value of 64 bits.
pub type U64<'k> = V<'k, B64>;

/// A mutable register of class `T`: the state that a loop carries. Only [`Var::set`] assigns it, and products whose
/// accumulator it is. As an operand it stands for its content at that time; [`Var::get`] keeps that content.
///
/// It takes values of its own class only:
/// ```compile_fail,E0271
/// use fa3_ir::lang::{B32, F32, V, Var};
/// fn mix<'k>(row_max: Var<'k, F32>, n: V<'k, B32>) {
///     row_max.set(n);
/// }
/// ```
/// and a value is no variable:
/// ```compile_fail,E0599
/// use fa3_ir::lang::{F32, V};
/// fn assign_twice(x: V<F32>) {
///     x.set(0.0);
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Var<'k, T> {
    builder: &'k Builder,
    register: Value,
    class: PhantomData<T>,
}

impl<'k, T: Class> V<'k, T> {
    pub(crate) fn new(builder: &'k Builder, register: Value) -> V<'k, T> {
        V { builder, operand: Operand::Value(register), class: PhantomData }
    }

    /// An operand of the kernel that `builder` builds.
    pub(crate) fn of(builder: &'k Builder, operand: impl Arg<Ty = T>) -> V<'k, T> {
        V { builder, operand: operand.operand(), class: PhantomData }
    }

    pub(crate) fn builder(self) -> &'k Builder {
        self.builder
    }

    /// The constant `value` in the same kernel.
    pub fn constant(self, value: impl Arg<Ty = T>) -> V<'k, T> {
        V { operand: value.operand(), ..self }
    }

    /// This value in a register, if it is a constant.
    #[track_caller]
    pub fn in_register(self) -> V<'k, T> {
        match self.operand {
            Operand::Value(_) => self,
            Operand::Imm(_) => self.builder.copy(self),
        }
    }

    /// Names this value for the reader of the printed kernel.
    #[must_use]
    pub fn named(self, name: &str) -> V<'k, T> {
        if let Operand::Value(register) = self.operand {
            self.builder.name(register, name);
        }
        self
    }
}

impl<'k, T: Class> Var<'k, T> {
    pub(crate) fn new(builder: &'k Builder, register: Value) -> Var<'k, T> {
        Var { builder, register, class: PhantomData }
    }

    /// Its register.
    pub(crate) fn register(self) -> Value {
        self.register
    }

    /// The variable's present content, as a value that does not change any more.
    #[track_caller]
    pub fn get(self) -> V<'k, T> {
        self.builder.copy(self)
    }

    /// The variable itself as an operand that is used at once: an instruction reads its content at that time.
    pub fn now(self) -> V<'k, T> {
        V::new(self.builder, self.register)
    }

    /// Assigns to the variable.
    #[track_caller]
    pub fn set(self, value: impl Arg<Ty = T>) {
        self.builder.set(self.register, value);
    }

    /// Assigns the result of `f`, which is given the present content.
    #[track_caller]
    pub fn update<A: Arg<Ty = T>>(self, f: impl FnOnce(V<'k, T>) -> A) {
        self.set(f(self.now()));
    }
}

impl<T> fmt::Debug for V<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.operand)
    }
}

impl<T> fmt::Debug for Var<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.register)
    }
}

/// An operand of class [`Arg::Ty`]: a [`V`], a [`Var`], or a Rust number (`u32` and `i32` for [`B32`], `u64` for
/// [`B64`], `u16` for [`B16`], `f32` for [`F32`], `bool` for [`Pred`]).
pub trait Arg: Copy {
    /// The class.
    type Ty: Class;
    /// The operand.
    fn operand(self) -> Operand;
}

/// An [`Arg`] in a register, where PTX takes no constant: a [`V`] or a [`Var`].
///
/// ```compile_fail,E0277
/// use fa3_ir::lang::Builder;
/// fn store_constants(b: &Builder) {
///     b.stmatrix(b.tid(), [1_u32], false);
/// }
/// ```
pub trait Reg: Arg {
    /// The register; a constant is moved to one first.
    fn register(self) -> Value;
}

impl<T: Class> Arg for V<'_, T> {
    type Ty = T;
    fn operand(self) -> Operand {
        self.operand
    }
}

impl<T: Class> Reg for V<'_, T> {
    #[track_caller]
    fn register(self) -> Value {
        match self.operand {
            Operand::Value(register) => register,
            Operand::Imm(_) => self.builder.copied(self),
        }
    }
}

impl<T: Class> Arg for Var<'_, T> {
    type Ty = T;
    fn operand(self) -> Operand {
        Operand::Value(self.register)
    }
}

impl<T: Class> Reg for Var<'_, T> {
    fn register(self) -> Value {
        self.register
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
    /// Whether the predicate must be false.
    pub negate: bool,
}

impl<R: Reg<Ty = Pred>> From<R> for Condition {
    #[track_caller]
    fn from(pred: R) -> Condition {
        Condition { pred: pred.register(), negate: false }
    }
}

impl std::ops::Not for V<'_, Pred> {
    type Output = Condition;
    /// The lanes where the predicate is false, for a guard or a branch. No instruction is emitted.
    #[track_caller]
    fn not(self) -> Condition {
        Condition { pred: self.register(), negate: true }
    }
}

impl std::ops::Not for Var<'_, Pred> {
    type Output = Condition;
    /// The lanes where the variable's content is false.
    fn not(self) -> Condition {
        Condition { pred: self.register(), negate: true }
    }
}
