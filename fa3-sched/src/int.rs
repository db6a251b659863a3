//! The integers that scheduling is written in.

use std::ops::{Add, Mul};

/// An unsigned 32-bit integer, on the host or in a kernel under construction.
///
/// Everything that a kernel must compute as well as the host is one generic function over this trait:
/// `u32` runs it, a value of a kernel builder records the same arithmetic. Hence the rules for such
/// functions: no host control flow on values (use [`Int::select`], [`Int::at_most`], [`Int::at_least`]), no
/// difference below zero (use [`Int::sub_sat`]), no division but by a [`crate::FastDiv`], and nothing that
/// leaves 0 ≤ x < 2³² for lengths below 2³¹.
pub trait Int: Copy + Add<Output = Self> + Mul<Output = Self> {
    /// The truth of a comparison.
    type Bool: Copy;

    /// The constant `value`. A method, because a kernel's value knows which kernel it belongs to.
    fn lit(self, value: u32) -> Self;

    /// max(self − other, 0).
    fn sub_sat(self, other: Self) -> Self;

    /// The smaller of both.
    fn at_most(self, limit: Self) -> Self;

    /// The larger of both.
    fn at_least(self, limit: Self) -> Self;

    /// The upper 32 bits of the 64-bit product.
    fn mul_hi(self, other: Self) -> Self;

    /// self / 2^bits, rounded down, for `bits` below 32.
    fn shr(self, bits: Self) -> Self;

    /// self < other.
    fn lt(self, other: Self) -> Self::Bool;

    /// self ≤ other.
    fn le(self, other: Self) -> Self::Bool;

    /// self = other.
    fn eq(self, other: Self) -> Self::Bool;

    /// `yes` where `condition` holds, `no` elsewhere.
    fn select(condition: Self::Bool, yes: Self, no: Self) -> Self;
}

impl Int for u32 {
    type Bool = bool;

    fn lit(self, value: u32) -> u32 {
        value
    }

    fn sub_sat(self, other: u32) -> u32 {
        self.saturating_sub(other)
    }

    fn at_most(self, limit: u32) -> u32 {
        Ord::min(self, limit)
    }

    fn at_least(self, limit: u32) -> u32 {
        Ord::max(self, limit)
    }

    fn mul_hi(self, other: u32) -> u32 {
        ((u64::from(self) * u64::from(other)) >> 32) as u32
    }

    fn shr(self, bits: u32) -> u32 {
        self >> bits
    }

    fn lt(self, other: u32) -> bool {
        self < other
    }

    fn le(self, other: u32) -> bool {
        self <= other
    }

    fn eq(self, other: u32) -> bool {
        self == other
    }

    fn select(condition: bool, yes: u32, no: u32) -> u32 {
        if condition { yes } else { no }
    }
}

#[cfg(test)]
pub(crate) mod checked {
    //! A second instance: 64-bit arithmetic that stops where a kernel's 32 bits would have wrapped.

    use super::{Add, Int, Mul};

    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) struct Checked(pub(crate) u64);

    /// Opaque on purpose: generic code cannot branch on it.
    #[derive(Clone, Copy)]
    pub(crate) struct Truth(bool);

    fn fits(value: u64) -> Checked {
        assert!(value <= u64::from(u32::MAX), "{value} does not fit 32 bits");
        Checked(value)
    }

    impl From<u32> for Checked {
        fn from(value: u32) -> Checked {
            Checked(value.into())
        }
    }

    impl Add for Checked {
        type Output = Checked;
        fn add(self, other: Checked) -> Checked {
            fits(self.0 + other.0)
        }
    }

    impl Mul for Checked {
        type Output = Checked;
        fn mul(self, other: Checked) -> Checked {
            fits(self.0 * other.0)
        }
    }

    impl Int for Checked {
        type Bool = Truth;
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
        fn shr(self, bits: Checked) -> Checked {
            assert!(bits.0 < 32, "shift by {}", bits.0);
            Checked(self.0 >> bits.0)
        }
        fn lt(self, other: Checked) -> Truth {
            Truth(self.0 < other.0)
        }
        fn le(self, other: Checked) -> Truth {
            Truth(self.0 <= other.0)
        }
        fn eq(self, other: Checked) -> Truth {
            Truth(self.0 == other.0)
        }
        fn select(condition: Truth, yes: Checked, no: Checked) -> Checked {
            if condition.0 { yes } else { no }
        }
    }
}
