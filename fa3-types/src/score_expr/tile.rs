//! The function of the scores of a tile.

use std::collections::HashMap;

use super::joint::Joint;
use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreIndex, ScoreReal};

/// The rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreRows {
    /// Queries of one head. Columns are keys.
    OfHead,
    /// Queries of several heads. Columns are keys.
    OfHeads,
    /// Keys. Columns are queries of one head.
    Keys,
}

/// An expression in the rows of a tile, and its derivative by the score, if that is asked for. Each node is evaluated
/// as seldom as its leaves allow: once a tile, a row of a block, a column of a block, or a score. A node that changes
/// in equal steps from column to column is evaluated for the first column of a block, and other columns add a multiple
/// of the step. So a kernel converts a distance to a real number once a row, and not for each score. A product that is
/// used once, in a sum of each score, is rounded together with the sum. A quotient by what has one value in the tile is
/// a product with its reciprocal.
pub struct ScoreTile<R: ScoreReal, I> {
    joint: Joint,
    rows: ScoreRows,
    inputs: I,
    kinds: Vec<Kind>,
    /// The values of the nodes that have one value in the tile.
    values: HashMap<Id, Value<R>>,
    /// The reciprocals of the nodes that have one value in the tile, and by which others divide.
    reciprocals: HashMap<Id, R>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreTile<R, I> {
    /// The expression in a tile.
    pub fn new(expr: &ScoreExpr, inputs: I, rows: ScoreRows) -> ScoreTile<R, I> {
        ScoreTile::of(Joint::of_value(expr), inputs, rows)
    }

    /// The expression and its derivative in a tile.
    pub fn with_slope(expr: &ScoreExpr, inputs: I, rows: ScoreRows) -> ScoreTile<R, I> {
        ScoreTile::of(Joint::new(expr).0, inputs, rows)
    }

    fn of(joint: Joint, inputs: I, rows: ScoreRows) -> ScoreTile<R, I> {
        let kinds = Kind::of_nodes(&joint.nodes, [joint.value].into_iter().chain(joint.slope), rows);
        let mut values: HashMap<Id, Value<R>> = HashMap::new();
        for ((id, node), kind) in (0..).zip(joint.nodes.iter()).zip(&kinds) {
            if !kind.of_row && !kind.of_column {
                let (score, varies) = (|| unreachable!("it varies"), || unreachable!("it varies"));
                let leaf = |leaf: Leaf| leaf.value(&inputs, 0, score, varies, varies);
                let value = node.value(&inputs, leaf, |id| values[&id]);
                values.insert(id, value);
            }
        }
        let mut reciprocals = HashMap::new();
        for (id, node) in (0..).zip(joint.nodes.iter()) {
            if let Node::Op(Op::Div, [_, divisor]) = *node
                && !values.contains_key(&id)
                && let Some(value) = values.get(&divisor)
            {
                let value = value.real();
                reciprocals.entry(divisor).or_insert_with(|| value.lit(1.0).div(value));
            }
        }
        ScoreTile { joint, rows, inputs, kinds, values, reciprocals }
    }

    /// The block whose first column is `first`: a key, or a row of the sequence's queries if rows are keys.
    pub fn block(&self, first: R::Index) -> ScoreBlock<'_, R, I> {
        ScoreBlock { tile: self, first, values: HashMap::new() }
    }
}

/// A score, as a product of two numbers.
#[derive(Clone, Copy)]
pub struct ScoreProduct<R> {
    /// The product of query and key, or the capped score in units of the cap.
    pub product: R,
    /// The factor that turns it into the score.
    pub unit: R,
}

/// The place of a score in a block.
#[derive(Clone, Copy)]
struct Place<R> {
    score: ScoreProduct<R>,
    row: usize,
    column: u32,
}

/// An expression in the rows of a tile and the columns of a block.
pub struct ScoreBlock<'t, R: ScoreReal, I> {
    tile: &'t ScoreTile<R, I>,
    /// The first column.
    first: R::Index,
    /// Values by node, and by row and column if the node depends on them.
    values: HashMap<(Id, Option<usize>, Option<u32>), Value<R>>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreBlock<'_, R, I> {
    /// The value in a row and in a column, which is counted from the block's first.
    pub fn at(&mut self, score: ScoreProduct<R>, row: usize, column: u32) -> R {
        self.value(self.tile.joint.value, Place { score, row, column }).real()
    }

    /// The derivative by the score in a row and in a column. `None` if it is 1, or if the tile has no derivative.
    pub fn slope_at(&mut self, score: ScoreProduct<R>, row: usize, column: u32) -> Option<R> {
        Some(self.value(self.tile.joint.slope?, Place { score, row, column }).real())
    }

    fn value(&mut self, id: Id, at: Place<R>) -> Value<R> {
        if let Some(&value) = self.tile.values.get(&id) {
            return value;
        }
        let kind = self.tile.kinds[usize::from(id)];
        let place = (id, kind.of_row.then_some(at.row), kind.of_column.then_some(at.column));
        if let Some(&value) = self.values.get(&place) {
            return value;
        }
        let value = match kind.step {
            Some(step) if at.column > 0 => {
                let first = self.value(id, Place { column: 0, ..at });
                self.after(first, step, at)
            }
            _ => self.sum_of_product(id, at).map_or_else(|| self.evaluated(id, at), Value::Real),
        };
        self.values.insert(place, value);
        value
    }

    /// The value of a node, of its value in the block's first column.
    fn after(&mut self, first: Value<R>, step: Step, at: Place<R>) -> Value<R> {
        match (step, first) {
            (Step::Constant(0), _) => first,
            (Step::Constant(step), Value::Index(first)) => {
                Value::Index(first + first.lit(step.wrapping_mul(at.column as i32)))
            }
            (Step::Constant(step), first) => {
                let first = first.real();
                Value::Real(first + first.lit(f64::from(step) * f64::from(at.column)))
            }
            (Step::Multiple(factor, step), first) => {
                let factor = self.value(factor, at).real();
                let steps = factor.lit(f64::from(step) * f64::from(at.column));
                Value::Real(factor.fma(steps, first.real()))
            }
        }
    }

    /// The value of a real sum of each score, if it has a product that is used nowhere else.
    fn sum_of_product(&mut self, id: Id, at: Place<R>) -> Option<R> {
        let (node, kind) = (self.tile.joint.nodes[usize::from(id)], self.tile.kinds[usize::from(id)]);
        let (Node::Op(op @ (Op::Add | Op::Sub), [a, b]), false) = (node, kind.is_index) else { return None };
        if let Some([x, y]) = self.factors(a, at) {
            let b = self.value(b, at).real();
            return Some(x.fma(y, if op == Op::Sub { -b } else { b }));
        }
        let [x, y] = self.factors(b, at)?;
        let a = self.value(a, at).real();
        Some((if op == Op::Sub { -x } else { x }).fma(y, a))
    }

    /// The factors of a product of each score that is used once.
    fn factors(&mut self, id: Id, at: Place<R>) -> Option<[R; 2]> {
        let kind = self.tile.kinds[usize::from(id)];
        if !kind.is_used_once || !kind.of_row || !kind.of_column || kind.step.is_some() {
            return None;
        }
        let node = self.tile.joint.nodes[usize::from(id)];
        if node == Node::Leaf(Leaf::Score) {
            return Some([at.score.product, at.score.unit]);
        }
        let Node::Op(Op::Mul, factors) = node else { return None };
        Some(factors.map(|id| self.value(id, at).real()))
    }

    /// The value of a node, of the values of its operands.
    fn evaluated(&mut self, id: Id, at: Place<R>) -> Value<R> {
        let ScoreTile { joint, inputs, rows, reciprocals, .. } = self.tile;
        let node = joint.nodes[usize::from(id)];
        if let Node::Op(Op::Div, [dividend, divisor]) = node
            && let Some(&reciprocal) = reciprocals.get(&divisor)
        {
            return Value::Real(self.value(dividend, at).real() * reciprocal);
        }
        let operands: Vec<(Id, Value<R>)> = node.operands().map(|id| (id, self.value(id, at))).collect();
        let score = || at.score.product * at.score.unit;
        let (first, row) = (|| self.first, || inputs.row(at.row));
        let leaf = |leaf: Leaf| match rows {
            ScoreRows::OfHead | ScoreRows::OfHeads => leaf.value(inputs, at.row, score, row, first),
            ScoreRows::Keys => leaf.value(inputs, at.row, score, first, row),
        };
        let of = |id| operands.iter().find(|(operand, _)| *operand == id).map(|(_, value)| *value);
        node.value(inputs, leaf, |id| of(id).expect("these are the node's operands"))
    }
}
