//! Addresses: a base and a constant offset. The type of the base gives the state space.

use crate::inst::Access;
use crate::lang::{B32, B64, Reg, V, Var};
use crate::{Operand, Region, Ty, Value};

/// The base of a [`SharedAddr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SharedBase {
    /// The start of a region: the address is a constant, and checked.
    Region(Region),
    /// A computed address.
    Value(Value),
}

/// An address in the CTA's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedAddr {
    /// The base of the address.
    pub base: SharedBase,
    /// Byte offset from the base.
    pub offset: i32,
}

/// An address in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GlobalAddr {
    /// The base of the address, 64 bits.
    pub base: Value,
    /// Byte offset from the base.
    pub offset: i32,
}

/// An address in either space. Registers of 64 bits address global memory, registers of 32 bits and regions
/// shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// In shared memory.
    Shared(SharedAddr),
    /// In global memory.
    Global(GlobalAddr),
}

impl Region {
    /// `offset` bytes into the region.
    pub fn at(self, offset: i32) -> SharedAddr {
        SharedAddr { base: SharedBase::Region(self), offset }
    }
}

impl V<'_, B32> {
    /// `offset` bytes beyond this shared-memory address.
    #[track_caller]
    pub fn at(self, offset: i32) -> SharedAddr {
        SharedAddr { base: SharedBase::Value(self.register()), offset }
    }
}

impl V<'_, B64> {
    /// `offset` bytes beyond this global address.
    #[track_caller]
    pub fn at(self, offset: i32) -> GlobalAddr {
        GlobalAddr { base: self.register(), offset }
    }
}

impl Var<'_, B32> {
    /// `offset` bytes beyond the shared-memory address that the variable holds.
    pub fn at(self, offset: i32) -> SharedAddr {
        SharedAddr { base: SharedBase::Value(self.register()), offset }
    }
}

impl Var<'_, B64> {
    /// `offset` bytes beyond the global address that the variable holds.
    pub fn at(self, offset: i32) -> GlobalAddr {
        GlobalAddr { base: self.register(), offset }
    }
}

macro_rules! addresses {
    ($($from:ty => $to:ident in $space:ident;)+) => {$(
        impl From<$from> for $to {
            #[track_caller]
            fn from(base: $from) -> $to {
                base.at(0)
            }
        }
        impl From<$from> for Address {
            #[track_caller]
            fn from(base: $from) -> Address {
                Address::$space(base.at(0))
            }
        }
    )+};
}

addresses! {
    Region => SharedAddr in Shared;
    V<'_, B32> => SharedAddr in Shared;
    Var<'_, B32> => SharedAddr in Shared;
    V<'_, B64> => GlobalAddr in Global;
    Var<'_, B64> => GlobalAddr in Global;
}

impl From<SharedAddr> for Address {
    fn from(addr: SharedAddr) -> Address {
        Address::Shared(addr)
    }
}

impl From<GlobalAddr> for Address {
    fn from(addr: GlobalAddr) -> Address {
        Address::Global(addr)
    }
}

impl SharedAddr {
    /// Reports the register that the address reads, and the access to `bytes` bytes aligned to `align`.
    pub(crate) fn visit(self, bytes: u32, align: u32, see: &mut dyn FnMut(Access)) {
        self.visit_base(see);
        see(Access::Shared { addr: self, bytes, align });
    }

    /// Reports the register that the address reads.
    pub(crate) fn visit_base(self, see: &mut dyn FnMut(Access)) {
        if let SharedBase::Value(base) = self.base {
            see(Access::Read(Operand::Value(base), Ty::B32));
        }
    }
}

impl GlobalAddr {
    /// Reports the register that the address reads.
    pub(crate) fn visit(self, see: &mut dyn FnMut(Access)) {
        see(Access::Read(Operand::Value(self.base), Ty::B64));
    }
}

impl Address {
    pub(crate) fn visit(self, bytes: u32, align: u32, see: &mut dyn FnMut(Access)) {
        match self {
            Address::Shared(addr) => addr.visit(bytes, align, see),
            Address::Global(addr) => addr.visit(see),
        }
    }

    /// The state space as PTX names it: `shared` or `global`.
    pub(crate) fn space(self) -> &'static str {
        match self {
            Address::Shared(_) => "shared",
            Address::Global(_) => "global",
        }
    }
}
