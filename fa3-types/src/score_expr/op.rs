//! The table of operations.

use std::num::Wrapping;

use super::{ScoreIndex, ScoreReal};

/// Defines [`Op`] from lines `Name(operands) = "text": value of reals; value of indices`. Operations without a second
/// value take real numbers only.
macro_rules! score_ops {
    (@some) => { None };
    (@some $index:expr) => { Some($index) };
    ($($op:ident($($x:ident),+) = $text:literal: $real:expr $(; $index:expr)?,)+) => {
        /// An operation whose operands have the type of its result. Indices wrap in 32 bits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(super) enum Op {
            $($op),+
        }

        impl Op {
            pub(super) const ALL: &[Op] = &[$(Op::$op),+];

            /// The operator or the name of the function.
            pub(super) fn text(self) -> &'static str {
                match self {
                    $(Op::$op => $text),+
                }
            }

            /// The number of operands, 1 or 2.
            pub(super) fn operands(self) -> usize {
                match self {
                    $(Op::$op => [$(stringify!($x)),+].len()),+
                }
            }

            /// The value, of operands that are numbers. One operand is given twice.
            pub(super) fn of_reals<R: ScoreReal>(self, operands: [R; 2]) -> R {
                match self {
                    $(Op::$op => {
                        let [$($x),+, ..] = operands;
                        $real
                    })+
                }
            }

            /// The value, of operands that are indices. `None` if there is no such operation.
            pub(super) fn of_indices<I: ScoreIndex>(self, operands: [I; 2]) -> Option<I> {
                match self {
                    $(Op::$op => {
                        #[allow(unused_variables, reason = "some operations take real numbers only")]
                        let [$($x),+, ..] = operands;
                        score_ops!(@some $($index)?)
                    })+
                }
            }
        }
    };
}

score_ops! {
    Add(a, b) = "+": a + b; a + b,
    Sub(a, b) = "-": a - b; a - b,
    Mul(a, b) = "*": a * b; a * b,
    Div(a, b) = "/": a.div(b),
    Neg(a) = "-": -a; -a,
    Abs(a) = "abs": a.abs(); a.abs(),
    Min(a, b) = "min": a.min(b); a.min(b),
    Max(a, b) = "max": a.max(b); a.max(b),
    Exp2(a) = "exp2": a.exp2(),
    Log2(a) = "log2": a.log2(),
    Sqrt(a) = "sqrt": a.sqrt(),
    Tanh(a) = "tanh": a.tanh(),
    Floor(a) = "floor": a.floor(),
}

impl Op {
    /// Whether the order of operands does not change the value.
    pub(super) fn is_commutative(self) -> bool {
        matches!(self, Op::Add | Op::Mul)
    }

    /// Whether the operation takes indices.
    pub(super) fn takes_indices(self) -> bool {
        self.of_indices([Wrapping(1); 2]).is_some()
    }
}

/// An operation of two indices that numbers do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum IndexOp {
    /// Rounded down; 0 by a divisor of 0.
    Div,
    And,
    Or,
    Xor,
    Left,
    Right,
}

impl IndexOp {
    pub(super) fn text(self) -> &'static str {
        match self {
            IndexOp::Div => "//",
            IndexOp::And => "&",
            IndexOp::Or => "|",
            IndexOp::Xor => "^",
            IndexOp::Left => "<<",
            IndexOp::Right => ">>",
        }
    }

    pub(super) fn of<I: ScoreIndex>(self, [a, b]: [I; 2]) -> I {
        match self {
            IndexOp::Div => a.div_floor(b),
            IndexOp::And => a.and(b),
            IndexOp::Or => a.or(b),
            IndexOp::Xor => a.xor(b),
            IndexOp::Left => a.shl(b),
            IndexOp::Right => a.shr(b),
        }
    }

    /// Whether the order of operands does not change the value.
    pub(super) fn is_commutative(self) -> bool {
        matches!(self, IndexOp::And | IndexOp::Or | IndexOp::Xor)
    }
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Test {
    Less,
    AtMost,
    Equal,
}

impl Test {
    pub(super) fn text(self) -> &'static str {
        match self {
            Test::Less => "<",
            Test::AtMost => "<=",
            Test::Equal => "==",
        }
    }

    pub(super) fn of_reals<R: ScoreReal>(self, [a, b]: [R; 2]) -> R::Bool {
        match self {
            Test::Less => a.lt(b),
            Test::AtMost => a.le(b),
            Test::Equal => a.eq(b),
        }
    }

    pub(super) fn of_indices<I: ScoreIndex>(self, [a, b]: [I; 2]) -> I::Bool {
        match self {
            Test::Less => a.lt(b),
            Test::AtMost => a.le(b),
            Test::Equal => a.eq(b),
        }
    }
}
