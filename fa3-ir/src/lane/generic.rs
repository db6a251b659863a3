//! Arithmetic that reads the same for every class that has it: `b.add(x, y)`.

use crate::{Arg, B16, B32, B64, Builder, Class, F32, LaneOp, Operand, Pred, V};

/// Classes with addition and multiplication: [`B32`] and [`B64`] (modulo 2ⁿ, so that signs do not matter) and [`F32`].
pub trait Number: Class {
    /// The class's addition.
    const ADD: LaneOp;
    /// The class's subtraction.
    const SUB: LaneOp;
    /// The class's multiplication, of integers its lower half.
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
    /// The class's complement.
    const NOT: LaneOp;
}

impl Bits for Pred {
    const AND: LaneOp = LaneOp::AndPred;
    const OR: LaneOp = LaneOp::OrPred;
    const XOR: LaneOp = LaneOp::XorPred;
    const NOT: LaneOp = LaneOp::NotPred;
}

impl Bits for B32 {
    const AND: LaneOp = LaneOp::AndB32;
    const OR: LaneOp = LaneOp::OrB32;
    const XOR: LaneOp = LaneOp::XorB32;
    const NOT: LaneOp = LaneOp::NotB32;
}

impl Bits for B64 {
    const AND: LaneOp = LaneOp::AndB64;
    const OR: LaneOp = LaneOp::OrB64;
    const XOR: LaneOp = LaneOp::XorB64;
    const NOT: LaneOp = LaneOp::NotB64;
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

/// Lane operations by what they mean; the class of the first operand chooses the row of the table.
impl Builder {
    /// a + b.
    #[track_caller]
    pub fn add<T: Number>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::ADD, vec![a.operand(), b.operand()])
    }

    /// a − b.
    #[track_caller]
    pub fn sub<T: Number>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::SUB, vec![a.operand(), b.operand()])
    }

    /// a · b.
    #[track_caller]
    pub fn mul<T: Number>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::MUL, vec![a.operand(), b.operand()])
    }

    /// a ∧ b, bit by bit.
    #[track_caller]
    pub fn and<T: Bits>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::AND, vec![a.operand(), b.operand()])
    }

    /// a ∨ b, bit by bit.
    #[track_caller]
    pub fn or<T: Bits>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::OR, vec![a.operand(), b.operand()])
    }

    /// a ⊕ b, bit by bit.
    #[track_caller]
    pub fn xor<T: Bits>(&mut self, a: impl Arg<Ty = T>, b: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::XOR, vec![a.operand(), b.operand()])
    }

    /// ¬a, bit by bit.
    #[track_caller]
    pub fn not<T: Bits>(&mut self, a: impl Arg<Ty = T>) -> V<T> {
        self.lane_value(T::NOT, vec![a.operand()])
    }

    /// `yes` where `condition` holds, `no` elsewhere.
    #[track_caller]
    pub fn select<T: Select>(
        &mut self,
        condition: impl Arg<Ty = Pred>,
        yes: impl Arg<Ty = T>,
        no: impl Arg<Ty = T>,
    ) -> V<T> {
        self.lane_value(T::SELECT, vec![yes.operand(), no.operand(), condition.operand()])
    }

    #[track_caller]
    pub(crate) fn lane_value<T: Class>(&mut self, op: LaneOp, src: Vec<Operand>) -> V<T> {
        let dst = self.define(T::TY);
        self.lane(op, vec![dst], src);
        V::new(dst)
    }
}
