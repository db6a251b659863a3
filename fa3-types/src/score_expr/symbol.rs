//! Symbols: numbers whose operations add nodes to an expression.

use std::cell::RefCell;
use std::ops::{Add, BitAnd, BitOr, Mul, Neg, Sub};

use super::builder::Builder;
use super::node::{Id, Leaf, Node};
use super::op::{IndexOp, Op, Test};
use super::real::guarded;
use super::value::{ScoreInputs, Value};
use super::{Dual, ScoreError, ScoreIndex, ScoreReal};
use crate::Real;

/// A node of an expression under construction, as a real number, an integer or a condition.
#[derive(Clone, Copy)]
pub(super) struct Symbol<'b> {
    builder: &'b RefCell<Builder>,
    pub(super) id: Id,
}

impl<'b> Symbol<'b> {
    fn new(
        builder: &'b RefCell<Builder>,
        add: impl FnOnce(&mut Builder) -> Result<Id, ScoreError>,
    ) -> Symbol<'b> {
        let id = add(&mut builder.borrow_mut()).expect("operands have their types, and there is room");
        Symbol { builder, id }
    }

    fn op(self, op: Op, other: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.op(op, [self.id, other.id]))
    }

    fn of_indices(self, op: IndexOp, other: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.of_indices(op, [self.id, other.id]))
    }

    fn test(self, test: Test, other: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.test(test, [self.id, other.id]))
    }

    fn both(self, node: fn([Id; 2]) -> Node, other: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.both(node, [self.id, other.id]))
    }

    fn choose(self, yes: Symbol<'b>, no: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.select(self.id, [yes.id, no.id]))
    }
}

/// The inputs of an expression, as symbols.
pub(super) struct Symbols<'b>(pub(super) &'b RefCell<Builder>);

impl<'b> Symbols<'b> {
    /// A leaf, as a constant.
    pub(super) fn leaf(&self, leaf: Leaf) -> Value<Dual<Symbol<'b>>> {
        let score = || Dual::constant(self.of_leaf(Leaf::Score));
        leaf.value(self, 0, score, || self.row(0), || self.of_leaf(Leaf::Key))
    }

    fn of_leaf(&self, leaf: Leaf) -> Symbol<'b> {
        Symbol::new(self.0, |builder| builder.leaf(leaf))
    }
}

impl<'b> ScoreInputs<Dual<Symbol<'b>>> for Symbols<'b> {
    fn real(&self, value: f32) -> Dual<Symbol<'b>> {
        Dual::constant(Symbol::new(self.0, |builder| builder.real(value)))
    }

    fn index(&self, value: i32) -> Symbol<'b> {
        Symbol::new(self.0, |builder| builder.index(value))
    }

    fn number(&self, number: usize) -> Dual<Symbol<'b>> {
        Dual::constant(Symbol::new(self.0, |builder| builder.read_number(number as u8)))
    }

    fn element(&self, table: usize, at: &[Symbol<'b>]) -> Dual<Symbol<'b>> {
        let at: Vec<Id> = at.iter().map(|index| index.id).collect();
        Dual::constant(Symbol::new(self.0, |builder| builder.read(table as u8, &at)))
    }

    fn sequence(&self) -> Symbol<'b> {
        self.of_leaf(Leaf::Batch)
    }

    fn head(&self, _: usize) -> Symbol<'b> {
        self.of_leaf(Leaf::Head)
    }

    fn row(&self, _: usize) -> Symbol<'b> {
        self.of_leaf(Leaf::Row)
    }

    fn position(&self, _: Symbol<'b>) -> Symbol<'b> {
        self.of_leaf(Leaf::Query)
    }
}

impl<'b> Add for Symbol<'b> {
    type Output = Symbol<'b>;

    fn add(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Add, other)
    }
}

impl<'b> Sub for Symbol<'b> {
    type Output = Symbol<'b>;

    fn sub(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Sub, other)
    }
}

impl<'b> Mul for Symbol<'b> {
    type Output = Symbol<'b>;

    fn mul(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Mul, other)
    }
}

impl<'b> Neg for Symbol<'b> {
    type Output = Symbol<'b>;

    fn neg(self) -> Symbol<'b> {
        self.op(Op::Neg, self)
    }
}

impl<'b> BitAnd for Symbol<'b> {
    type Output = Symbol<'b>;

    fn bitand(self, other: Symbol<'b>) -> Symbol<'b> {
        self.both(Node::And, other)
    }
}

impl<'b> BitOr for Symbol<'b> {
    type Output = Symbol<'b>;

    fn bitor(self, other: Symbol<'b>) -> Symbol<'b> {
        self.both(Node::Or, other)
    }
}

impl<'b> Real for Symbol<'b> {
    type Bool = Symbol<'b>;

    fn lit(self, value: f64) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.real(value as f32))
    }

    fn fma(self, factor: Symbol<'b>, addend: Symbol<'b>) -> Symbol<'b> {
        self * factor + addend
    }

    fn exp2(self) -> Symbol<'b> {
        self.op(Op::Exp2, self)
    }

    fn tanh(self) -> Symbol<'b> {
        self.op(Op::Tanh, self)
    }

    fn lt(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::Less, other)
    }

    fn select(condition: Symbol<'b>, yes: Symbol<'b>, no: Symbol<'b>) -> Symbol<'b> {
        condition.choose(yes, no)
    }
}

impl<'b> ScoreReal for Symbol<'b> {
    type Index = Symbol<'b>;

    fn of_index(index: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(index.builder, |builder| builder.of_index(index.id))
    }

    fn to_index(self) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.index_of(self.id))
    }

    fn not(condition: Symbol<'b>) -> Symbol<'b> {
        Symbol::new(condition.builder, |builder| builder.not(condition.id))
    }

    fn div(self, divisor: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Div, divisor)
    }

    fn log2(self) -> Symbol<'b> {
        self.op(Op::Log2, self)
    }

    fn sqrt(self) -> Symbol<'b> {
        self.op(Op::Sqrt, self)
    }

    fn abs(self) -> Symbol<'b> {
        self.op(Op::Abs, self)
    }

    fn floor(self) -> Symbol<'b> {
        self.op(Op::Floor, self)
    }

    fn min(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Min, other)
    }

    fn max(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Max, other)
    }

    fn le(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::AtMost, other)
    }

    fn eq(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::Equal, other)
    }

    /// A product needs no test of 0 if one of the two is known.
    fn scaled(self, factor: Symbol<'b>) -> Symbol<'b> {
        let (is, is_finite) = {
            let builder = self.builder.borrow();
            ([0.0, 1.0].map(|x| builder.is_real(self.id, x)), builder.is_finite(factor.id))
        };
        match is {
            [true, _] => self,
            [_, true] => factor,
            _ if is_finite => self * factor,
            _ => guarded(self, factor),
        }
    }
}

impl<'b> ScoreIndex for Symbol<'b> {
    type Bool = Symbol<'b>;

    fn lit(self, value: i32) -> Symbol<'b> {
        Symbol::new(self.builder, |builder| builder.index(value))
    }

    fn abs(self) -> Symbol<'b> {
        self.op(Op::Abs, self)
    }

    fn min(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Min, other)
    }

    fn max(self, other: Symbol<'b>) -> Symbol<'b> {
        self.op(Op::Max, other)
    }

    fn div_floor(self, divisor: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::Div, divisor)
    }

    fn and(self, other: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::And, other)
    }

    fn or(self, other: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::Or, other)
    }

    fn xor(self, other: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::Xor, other)
    }

    fn shl(self, bits: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::Left, bits)
    }

    fn shr(self, bits: Symbol<'b>) -> Symbol<'b> {
        self.of_indices(IndexOp::Right, bits)
    }

    fn lt(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::Less, other)
    }

    fn le(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::AtMost, other)
    }

    fn eq(self, other: Symbol<'b>) -> Symbol<'b> {
        self.test(Test::Equal, other)
    }

    fn select(condition: Symbol<'b>, yes: Symbol<'b>, no: Symbol<'b>) -> Symbol<'b> {
        condition.choose(yes, no)
    }
}
