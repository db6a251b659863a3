//! A second instance of [`Int`]: 64-bit arithmetic that stops where a kernel's 32 bits would have wrapped.

use std::ops::{Add, BitAnd, BitOr, Mul};

use crate::Int;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Checked(pub(crate) u64);

/// The result of a comparison. Its field is private, so that generic code cannot branch on it.
#[derive(Clone, Copy)]
pub(crate) struct CheckedBool(bool);

fn fits(value: u64) -> Checked {
    assert!(value <= u64::from(u32::MAX), "{value} does not fit 32 bits");
    Checked(value)
}

macro_rules! operators {
    ($($ty:ident: $operator:ident, $name:ident |$a:ident, $b:ident| $result:expr;)+) => {$(
        impl $operator for $ty {
            type Output = $ty;
            fn $name(self, other: $ty) -> $ty {
                let ($a, $b) = (self.0, other.0);
                $result
            }
        }
    )+};
}

operators! {
    CheckedBool: BitAnd, bitand |a, b| CheckedBool(a & b);
    CheckedBool: BitOr, bitor |a, b| CheckedBool(a | b);
    Checked: Add, add |a, b| fits(a + b);
    Checked: Mul, mul |a, b| fits(a * b);
}

impl From<u32> for Checked {
    fn from(value: u32) -> Checked {
        Checked(value.into())
    }
}

impl Int for Checked {
    type Bool = CheckedBool;
    fn lit(self, value: u32) -> Checked {
        value.into()
    }
    fn sub_sat(self, other: Checked) -> Checked {
        Checked(self.0.saturating_sub(other.0))
    }
    fn at_most(self, limit: Checked) -> Checked {
        Checked(self.0.min(limit.0))
    }
    fn at_least(self, limit: Checked) -> Checked {
        Checked(self.0.max(limit.0))
    }
    fn mul_hi(self, other: Checked) -> Checked {
        Checked((self.0 * other.0) >> 32)
    }
    fn div(self, divisor: Checked) -> Checked {
        Checked(self.0 / divisor.0)
    }
    fn shr(self, bits: Checked) -> Checked {
        assert!(bits.0 < 32, "shift by {}", bits.0);
        Checked(self.0 >> bits.0)
    }
    fn lt(self, other: Checked) -> CheckedBool {
        CheckedBool(self.0 < other.0)
    }
    fn le(self, other: Checked) -> CheckedBool {
        CheckedBool(self.0 <= other.0)
    }
    fn eq(self, other: Checked) -> CheckedBool {
        CheckedBool(self.0 == other.0)
    }
    fn select(condition: CheckedBool, yes: Checked, no: Checked) -> Checked {
        if condition.0 { yes } else { no }
    }
}
