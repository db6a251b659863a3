//! An expression and its derivative.

use std::cell::RefCell;
use std::sync::Arc;

use super::builder::Builder;
use super::kind::Kind;
use super::node::{Id, Leaf, Node};
use super::op::{IndexOp, Op};
use super::symbol::{Symbol, Symbols};
use super::tile::ScoreRows;
use super::value::Value;
use super::{Dual, ScoreExpr, ScoreGradients};
use crate::Real;

/// The properties of the derivative of an expression by the score that do not depend on its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreSlope {
    /// It is 1: the score is one term of a sum.
    One,
    /// It is finite, if scores and numbers are at most 2⁴⁰, and numbers that are divisors at least 2⁻⁴⁰.
    Finite,
    /// It may be infinite or NaN, as the derivatives of a logarithm and of a root are.
    Any,
}

/// The nodes of an expression, or of an expression and its derivative by the score, which share nodes.
pub(super) struct Joint {
    pub(super) nodes: Arc<[Node]>,
    pub(super) value: Id,
    /// The derivative; `None` if it is 1, or if it is not asked for.
    pub(super) slope: Option<Id>,
    /// The derivatives by the elements of tables with gradients, if these are asked for.
    pub(super) of_reads: Vec<ReadSlope>,
}

/// The derivative of an expression by an element of a table.
#[derive(Clone, Copy)]
pub(super) struct ReadSlope {
    /// The derivative; `None` if it is 1.
    pub(super) slope: Option<Id>,
    /// Whether it is finite, as [`ScoreSlope::Finite`] says.
    pub(super) is_finite: bool,
}

/// The values of an expression's nodes in dual numbers of symbols: derivatives by the node `by`.
fn duals<'b>(
    expr: &ScoreExpr,
    builder: &'b RefCell<Builder>,
    by: Option<Id>,
) -> Vec<Value<Dual<Symbol<'b>>>> {
    let symbols = Symbols(builder);
    let mut values: Vec<Value<Dual<Symbol<'b>>>> = Vec::with_capacity(expr.nodes().len());
    for (id, node) in (0..).zip(expr.nodes()) {
        let value = node.value(&symbols, |leaf| symbols.leaf(leaf), |id| values[usize::from(id)]);
        values.push(match (value, by) {
            (Value::Real(Dual { value, .. }), Some(by)) if by == id => {
                Value::Real(Dual { value, slope: Real::lit(value, 1.0) })
            }
            _ => value,
        });
    }
    values
}

impl Joint {
    /// An expression without its derivative.
    pub(super) fn of_value(expr: &ScoreExpr) -> Joint {
        Joint { nodes: expr.0.clone(), value: expr.nodes().len() as Id - 1, slope: None, of_reads: vec![] }
    }

    /// An expression and its derivatives by the score and by elements of tables with gradients: the expression's values
    /// in dual numbers of symbols.
    pub(super) fn new(expr: &ScoreExpr, gradients: ScoreGradients) -> (Joint, ScoreSlope) {
        let builder = RefCell::new(Builder::new(Id::MAX.into()));
        let score = (0..).zip(expr.nodes()).find(|(_, node)| **node == Node::Leaf(Leaf::Score));
        let values = duals(expr, &builder, score.map(|(id, _)| id));
        let Dual { value, .. } = values[values.len() - 1].real();
        let Dual { slope, .. } = values[usize::from(expr.visible())].real();
        let of_read = |read| duals(expr, &builder, Some(read))[usize::from(expr.visible())].real().slope.id;
        let of_reads: Vec<Id> = expr.reads(gradients).map(of_read).collect();
        let builder = builder.borrow();
        let kind = match slope.id {
            slope if builder.is_real(slope, 1.0) => ScoreSlope::One,
            slope if builder.is_finite(slope) => ScoreSlope::Finite,
            _ => ScoreSlope::Any,
        };
        let unless_one = |slope: Id| (!builder.is_real(slope, 1.0)).then_some(slope);
        let slopes = [slope.id].into_iter().chain(of_reads.iter().copied()).filter_map(unless_one);
        let roots: Vec<Id> = [value.id].into_iter().chain(slopes).collect();
        let (nodes, at) = builder.joint(&roots);
        let of_reads = of_reads.into_iter();
        let of_reads = of_reads.map(|slope| ReadSlope {
            slope: unless_one(slope).map(&at),
            is_finite: builder.is_finite(slope),
        });
        let (value, slope) = (at(value.id), unless_one(slope.id).map(&at));
        (Joint { value, slope, of_reads: of_reads.collect(), nodes }, kind)
    }
}

impl ScoreExpr {
    /// The properties of the derivative by the score. Where the value is -inf, P is 0, and any number may stand for the
    /// derivative.
    pub fn slope(&self) -> ScoreSlope {
        Joint::new(self, ScoreGradients::default()).1
    }

    /// Whether the value and the derivative of many scores take many registers, where rows are keys: if there are
    /// elements of tables, quotients, exponentials, logarithms or roots for each score or for each query.
    pub fn takes_registers(&self) -> bool {
        let (joint, _) = Joint::new(self, ScoreGradients::default());
        let kinds = Kind::of_nodes(&joint.nodes, [], ScoreRows::Keys);
        let varies = |id: Id| kinds[usize::from(id)].of_column;
        (0..).zip(joint.nodes.iter()).any(|(id, node)| {
            let takes = matches!(node, Node::Read { .. } | Node::Op(Op::Exp2 | Op::Log2 | Op::Sqrt, _));
            let divides = matches!(
                *node,
                Node::Op(Op::Div, [_, divisor]) | Node::OfIndices(IndexOp::Div, [_, divisor]) if varies(divisor)
            );
            takes && varies(id) || divides
        })
    }

    /// The node that is the value wherever the value is not the constant -inf.
    fn visible(&self) -> Id {
        let hides = |id: Id| self.nodes()[usize::from(id)] == Node::Real(f32::NEG_INFINITY.to_bits());
        let mut id = self.nodes().len() as Id - 1;
        while let Node::Select([_, yes, no]) = self.nodes()[usize::from(id)] {
            match [hides(yes), hides(no)] {
                [true, _] => id = no,
                [_, true] => id = yes,
                [false, false] => break,
            }
        }
        id
    }
}
