//! The function of the scores of a tile.

use std::collections::HashMap;

use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreIndex, ScoreReal};

/// An expression in the rows of a tile. Each node is evaluated as seldom as its leaves allow: once a tile, a row of a
/// block, a column of a block, or a score. A node that changes in equal steps from key to key is evaluated for the
/// first key of a block, and other keys add a multiple of the step. So a kernel converts a distance to a real number
/// once a row, and not for each score. A product that is used once, in a sum of each score, is rounded together with
/// the sum.
pub struct ScoreTile<R: ScoreReal, I> {
    expr: ScoreExpr,
    inputs: I,
    kinds: Vec<Kind>,
    /// The values of the nodes that have one value in the tile.
    values: HashMap<Id, Value<R>>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreTile<R, I> {
    /// The expression in a tile. `heads_differ` says whether its rows have different heads.
    pub fn new(expr: &ScoreExpr, inputs: I, heads_differ: bool) -> ScoreTile<R, I> {
        let kinds = Kind::of_nodes(expr.nodes(), heads_differ);
        let mut values: HashMap<Id, Value<R>> = HashMap::new();
        for ((id, node), kind) in (0..).zip(expr.nodes()).zip(&kinds) {
            if !kind.of_row && !kind.of_key {
                let (score, key) = (|| unreachable!("it varies"), || unreachable!("it varies"));
                let leaf = |leaf: Leaf| leaf.value(&inputs, 0, score, key);
                let value = node.value(&inputs, leaf, |id| values[&id]);
                values.insert(id, value);
            }
        }
        ScoreTile { expr: expr.clone(), inputs, kinds, values }
    }

    /// The block of keys that begins with `key`.
    pub fn block(&self, key: R::Index) -> ScoreBlock<'_, R, I> {
        ScoreBlock { tile: self, key, values: HashMap::new() }
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

/// An expression in the rows of a tile and a block of keys.
pub struct ScoreBlock<'t, R: ScoreReal, I> {
    tile: &'t ScoreTile<R, I>,
    /// The first key.
    key: R::Index,
    /// Values by node, and by row and column if the node depends on them.
    values: HashMap<(Id, Option<usize>, Option<u32>), Value<R>>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreBlock<'_, R, I> {
    /// The value in a row and in a column, which is counted from the block's first key.
    pub fn at(&mut self, score: ScoreProduct<R>, row: usize, column: u32) -> R {
        let root = self.tile.expr.nodes().len() as Id - 1;
        self.value(root, Place { score, row, column }).real()
    }

    fn value(&mut self, id: Id, at: Place<R>) -> Value<R> {
        if let Some(&value) = self.tile.values.get(&id) {
            return value;
        }
        let kind = self.tile.kinds[usize::from(id)];
        let place = (id, kind.of_row.then_some(at.row), kind.of_key.then_some(at.column));
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

    /// The value of a node, of its value for the block's first key.
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
        let (node, kind) = (self.tile.expr.nodes()[usize::from(id)], self.tile.kinds[usize::from(id)]);
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
        if !kind.is_used_once || !kind.of_row || !kind.of_key || kind.step.is_some() {
            return None;
        }
        let node = self.tile.expr.nodes()[usize::from(id)];
        if node == Node::Leaf(Leaf::Score) {
            return Some([at.score.product, at.score.unit]);
        }
        let Node::Op(Op::Mul, factors) = node else { return None };
        Some(factors.map(|id| self.value(id, at).real()))
    }

    /// The value of a node, of the values of its operands.
    fn evaluated(&mut self, id: Id, at: Place<R>) -> Value<R> {
        let node = self.tile.expr.nodes()[usize::from(id)];
        let operands: Vec<(Id, Value<R>)> = node.operands().map(|id| (id, self.value(id, at))).collect();
        let score = || at.score.product * at.score.unit;
        let leaf = |leaf: Leaf| leaf.value(&self.tile.inputs, at.row, score, || self.key);
        let of = |id| operands.iter().find(|(operand, _)| *operand == id).map(|(_, value)| *value);
        node.value(&self.tile.inputs, leaf, |id| of(id).expect("these are the node's operands"))
    }
}
