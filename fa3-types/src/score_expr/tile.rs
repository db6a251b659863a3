//! The function of the scores of a tile.

use std::collections::HashMap;

use super::joint::Joint;
use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::parts::Parts;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreGradients, ScoreIndex, ScoreReal};

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

impl ScoreRows {
    /// Distance of a thread's two rows.
    const APART: u32 = 8;
}

/// An expression in the rows of a tile, and its derivative by the score, if that is asked for. Each node is evaluated
/// as seldom as its leaves allow: once a tile, a row of a block, a column of a block, or a score. A node that changes
/// in equal steps from column to column is evaluated for the first column of a block, and other columns add a multiple
/// of the step. So a kernel converts a distance to a real number once a row, and not for each score. A product that is
/// used once, in a sum of each score, is rounded together with the sum. A quotient by what has one value in the tile is
/// a product with its reciprocal.
pub struct ScoreTile<R: ScoreReal, I> {
    pub(super) joint: Joint,
    rows: ScoreRows,
    inputs: I,
    pub(super) kinds: Vec<Kind>,
    pub(super) parts: Parts,
    /// Whether what depends on the difference of row and column is computed once for both rows. Columns must ascend, or
    /// the values take registers.
    shares_diagonals: bool,
    /// The values of the nodes that have one value in the tile.
    pub(super) values: HashMap<Id, Value<R>>,
    /// The reciprocals of the nodes that have one value in the tile, and by which others divide.
    reciprocals: HashMap<Id, R>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreTile<R, I> {
    /// The expression in a tile.
    pub fn new(expr: &ScoreExpr, inputs: I, rows: ScoreRows) -> ScoreTile<R, I> {
        ScoreTile { shares_diagonals: true, ..ScoreTile::of(Joint::of_value(expr), inputs, rows) }
    }

    /// The expression and its derivative in a tile, and its derivatives by elements of tables with gradients.
    pub fn with_slopes(
        expr: &ScoreExpr,
        gradients: ScoreGradients,
        inputs: I,
        rows: ScoreRows,
    ) -> ScoreTile<R, I> {
        ScoreTile::of(Joint::new(expr, gradients).0, inputs, rows)
    }

    fn of(joint: Joint, inputs: I, rows: ScoreRows) -> ScoreTile<R, I> {
        let slopes = joint.of_reads.iter().filter_map(|read| read.slope);
        let results = [joint.value].into_iter().chain(joint.slope).chain(slopes);
        let kinds = Kind::of_nodes(&joint.nodes, results, rows);
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
        let parts = Parts::of(&joint.nodes, &kinds, joint.value);
        ScoreTile { joint, rows, inputs, kinds, parts, shares_diagonals: false, values, reciprocals }
    }

    /// The block whose first column is `first`: a key, or a row of the sequence's queries if rows are keys.
    pub fn block(&self, first: R::Index) -> ScoreBlock<'_, R, I> {
        ScoreBlock { tile: self, first, values: HashMap::new(), units: HashMap::new() }
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
pub(super) struct Place<R> {
    pub(super) score: ScoreProduct<R>,
    pub(super) row: usize,
    pub(super) column: u32,
}

/// An expression in the rows of a tile and the columns of a block.
pub struct ScoreBlock<'t, R: ScoreReal, I> {
    pub(super) tile: &'t ScoreTile<R, I>,
    /// The first column.
    first: R::Index,
    /// Values by node, and by row and column if the node depends on them.
    values: HashMap<(Id, Option<usize>, Option<u32>), Value<R>>,
    /// The units of products, of the nodes that multiply or divide scores by what has one value in the tile.
    units: HashMap<Id, R>,
}

impl<R> Place<R> {
    /// The first place in which the row and the column differ by as much.
    fn first_of_diagonal(self) -> Place<R> {
        match self.column.checked_sub(ScoreRows::APART) {
            Some(column) if self.row == 1 => Place { row: 0, column, ..self },
            _ => self,
        }
    }
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

    /// The derivatives by the elements of [`ScoreExpr::table_reads`] in a row and in a column, `None` for 1, each with
    /// whether it is finite, as [`ScoreSlope::Finite`](super::ScoreSlope::Finite) says.
    pub fn slopes_by_reads(
        &mut self,
        score: ScoreProduct<R>,
        row: usize,
        column: u32,
    ) -> Vec<(Option<R>, bool)> {
        let of_reads = self.tile.joint.of_reads.iter();
        let place = Place { score, row, column };
        of_reads
            .map(|read| (read.slope.map(|slope| self.value(slope, place).real()), read.is_finite))
            .collect()
    }

    pub(super) fn value(&mut self, id: Id, at: Place<R>) -> Value<R> {
        if let Some(&value) = self.tile.values.get(&id) {
            return value;
        }
        let kind = self.tile.kinds[usize::from(id)];
        let at = if self.tile.shares_diagonals && kind.of_diagonal { at.first_of_diagonal() } else { at };
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

    /// Whether a comparison of an index with a constant holds. The index in the block's first column is compared with
    /// another constant, if the index changes in equal steps.
    fn comparison(&mut self, node: Node, at: Place<R>) -> Option<R::Bool> {
        let Node::Test(test, [a, b]) = node else { return None };
        let of = |id: Id| (self.tile.kinds[usize::from(id)], self.tile.joint.nodes[usize::from(id)]);
        let (index, constant, is_left) = match (of(a), of(b)) {
            ((kind, _), (_, Node::Index(constant))) => ((a, kind), constant, true),
            ((_, Node::Index(constant)), (kind, _)) => ((b, kind), constant, false),
            _ => return None,
        };
        let (id, Kind { step: Some(Step::Constant(step)), is_index: true, most, .. }) = index else {
            return None;
        };
        let steps = f64::from(step) * f64::from(at.column);
        let constant = f64::from(constant) - steps;
        if most >= f64::from(i32::MAX) || constant.abs() >= f64::from(i32::MAX) {
            return None;
        }
        let first = self.value(id, Place { column: 0, ..at }).index();
        let constant = first.lit(constant as i32);
        Some(test.of_indices(if is_left { [first, constant] } else { [constant, first] }))
    }

    /// The factor of the score, if the node is the score times what has one value in the tile, or divided by it.
    fn factor_of_score(&self, node: Node) -> Option<R> {
        let ScoreTile { joint, values, reciprocals, .. } = self.tile;
        let Node::Op(op @ (Op::Mul | Op::Div), [a, b]) = node else { return None };
        let is_score = |id: Id| joint.nodes[usize::from(id)] == Node::Leaf(Leaf::Score);
        let factor = match [a, b].map(is_score) {
            [true, false] if op == Op::Div => return reciprocals.get(&b).copied(),
            [true, false] => b,
            [false, true] if op == Op::Mul => a,
            _ => return None,
        };
        values.get(&factor).map(|value| value.real())
    }

    /// The value of a node, of the values of its operands.
    fn evaluated(&mut self, id: Id, at: Place<R>) -> Value<R> {
        let ScoreTile { joint, inputs, rows, reciprocals, .. } = self.tile;
        let node = joint.nodes[usize::from(id)];
        if let Some(factor) = self.factor_of_score(node) {
            let unit = *self.units.entry(id).or_insert_with(|| at.score.unit * factor);
            return Value::Real(at.score.product * unit);
        }
        if let Node::Op(Op::Div, [dividend, divisor]) = node
            && let Some(&reciprocal) = reciprocals.get(&divisor)
        {
            return Value::Real(self.value(dividend, at).real() * reciprocal);
        }
        if let Some(holds) = self.comparison(node, at) {
            return Value::Bool(holds);
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
