//! Register classes, as data ([`Ty`]) and as Rust types ([`Class`]).

use std::fmt;
use std::hash::Hash;

/// The class of a register. It says nothing about signedness, which is part of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ty {
    /// One bit a lane.
    Pred,
    /// 16 bits: f16, bf16, a pair of e4m3, a multicast mask.
    B16,
    /// 32 bits: integers, addresses in shared memory, pairs of f16 or bf16, quadruples of e4m3.
    B32,
    /// 64 bits: integers, global addresses, matrix descriptors, cache policies.
    B64,
    /// IEEE binary32.
    F32,
}

impl Ty {
    /// Every class.
    pub const ALL: [Ty; 5] = [Ty::Pred, Ty::B16, Ty::B32, Ty::B64, Ty::F32];

    /// Bytes in memory. A predicate has none: it cannot be loaded or stored.
    pub const fn bytes(self) -> u32 {
        match self {
            Ty::Pred => 0,
            Ty::B16 => 2,
            Ty::B32 | Ty::F32 => 4,
            Ty::B64 => 8,
        }
    }

    /// Prefix of the names of the class's registers.
    pub(crate) const fn prefix(self) -> &'static str {
        match self {
            Ty::Pred => "p",
            Ty::B16 => "h",
            Ty::B32 => "r",
            Ty::B64 => "d",
            Ty::F32 => "f",
        }
    }
}

impl fmt::Display for Ty {
    /// Writes the class as PTX does: `pred`, `b16`, `b32`, `b64`, `f32`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Ty::Pred => "pred",
            Ty::B16 => "b16",
            Ty::B32 => "b32",
            Ty::B64 => "b64",
            Ty::F32 => "f32",
        })
    }
}

/// A register class as a Rust type, so that mixing classes does not compile.
pub trait Class: sealed::Sealed + Copy + fmt::Debug + Eq + Hash {
    /// The class as data.
    const TY: Ty;
}

/// A [`Class`] that memory can hold: all but [`Pred`].
pub trait Stored: Class {}

/// A [`Class`] of 32 bits, which shuffles move between lanes: [`B32`] and [`F32`].
pub trait Word: Stored {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! classes {
    ($($class:ident)+) => {$(
        #[doc = concat!("[`Ty::", stringify!($class), "`] as a Rust type.")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $class;
        impl sealed::Sealed for $class {}
        impl Class for $class {
            const TY: Ty = Ty::$class;
        }
    )+};
}

classes!(Pred B16 B32 B64 F32);

impl Stored for B16 {}
impl Stored for B32 {}
impl Stored for B64 {}
impl Stored for F32 {}
impl Word for B32 {}
impl Word for F32 {}
