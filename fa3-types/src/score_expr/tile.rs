//! The function of the scores of a tile.

use std::collections::HashMap;

use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreIndex, ScoreReal};

/// A length that sequences do not reach. Below it, distances of queries and keys do not wrap.
const LENGTH: f64 = (1_u32 << 29) as f64;

/// An expression in the rows of a tile. Each node is evaluated as seldom as its leaves allow: once a tile, a row of a
/// block, a column of a block, or a score. A node that changes by a constant from key to key is evaluated for a block's
/// first key, and other keys add a constant. So a kernel converts a distance to a real number once a row, and not for
/// each score. Real numbers of integers above 2²⁴ are then rounded twice.
pub struct ScoreTile<R: ScoreReal, I> {
    expr: ScoreExpr,
    inputs: I,
    kinds: Vec<Kind>,
    /// The values of the nodes that have one value in the tile.
    values: HashMap<Id, Value<R>>,
}

/// What a node's value depends on.
#[derive(Clone, Copy)]
struct Kind {
    of_row: bool,
    of_key: bool,
    is_index: bool,
    /// A bound of the absolute value of an integer that does not wrap.
    most: f64,
    /// The difference of the values at neighbouring keys, if it is a constant.
    step: Option<i32>,
}

impl Kind {
    /// The kind of the node after `nodes`, whose kinds are known.
    fn new(node: Node, nodes: &[Node], kinds: &[Kind], heads_differ: bool) -> Kind {
        let of = |id: Id| kinds[usize::from(id)];
        let any = |is: fn(Kind) -> bool| node.operands().any(|id| is(of(id)));
        let [of_row, of_key] = match node {
            Node::Leaf(Leaf::Score) => [true; 2],
            Node::Leaf(Leaf::Head) => [heads_differ, false],
            Node::Leaf(Leaf::Row | Leaf::Query) => [true, false],
            Node::Leaf(Leaf::Key) => [false, true],
            _ => [any(|kind| kind.of_row), any(|kind| kind.of_key)],
        };
        let is_index = match node {
            Node::Leaf(leaf) => leaf != Leaf::Score,
            Node::Index(_) => true,
            Node::Op(op, operands) => op.takes_indices() && operands.into_iter().all(|id| of(id).is_index),
            Node::Select([_, yes, no]) => of(yes).is_index && of(no).is_index,
            _ => false,
        };
        let most = match node {
            Node::Leaf(_) => LENGTH,
            Node::Index(index) => f64::from(index).abs(),
            Node::Op(Op::Add | Op::Sub, [a, b]) => of(a).most + of(b).most,
            Node::Op(Op::Mul, [a, b]) => of(a).most * of(b).most,
            _ => node.operands().map(|id| of(id).most).fold(0.0, f64::max),
        };
        let step = match node {
            Node::OfIndex([index]) => of(index).step.filter(|_| of(index).most < f64::from(i32::MAX)),
            _ if !is_index => None,
            _ if !of_key => Some(0),
            Node::Leaf(_) => Some(1),
            Node::Op(op, [a, b]) => {
                let constant = |id: Id| match nodes[usize::from(id)] {
                    Node::Index(index) => Some(index),
                    _ => None,
                };
                let steps = of(a).step.zip(of(b).step);
                match op {
                    Op::Add => steps.map(|(a, b)| a.wrapping_add(b)),
                    Op::Sub => steps.map(|(a, b)| a.wrapping_sub(b)),
                    Op::Neg => of(a).step.map(i32::wrapping_neg),
                    Op::Mul => {
                        let factor = constant(a).or(constant(b));
                        steps.zip(factor).map(|((a, b), factor)| a.wrapping_add(b).wrapping_mul(factor))
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        Kind { of_row, of_key, is_index, most, step }
    }
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreTile<R, I> {
    /// The expression in a tile. `heads_differ` says whether its rows have different heads.
    pub fn new(expr: &ScoreExpr, inputs: I, heads_differ: bool) -> ScoreTile<R, I> {
        let nodes = expr.nodes();
        let mut kinds = Vec::with_capacity(nodes.len());
        let mut values: HashMap<Id, Value<R>> = HashMap::new();
        for (id, &node) in nodes.iter().enumerate() {
            let kind = Kind::new(node, nodes, &kinds, heads_differ);
            kinds.push(kind);
            if !kind.of_row && !kind.of_key {
                let leaf = |leaf: Leaf| leaf.value(&inputs, 0, || unreachable!("the tile has many keys"));
                let value = node.value(&inputs, leaf, |id| values[&id]);
                values.insert(id as Id, value);
            }
        }
        ScoreTile { expr: expr.clone(), inputs, kinds, values }
    }

    /// The block of keys that begins with `key`.
    pub fn block(&self, key: R::Index) -> ScoreBlock<'_, R, I> {
        ScoreBlock { tile: self, key, values: HashMap::new() }
    }
}

/// An expression in the rows of a tile and a block of keys.
pub struct ScoreBlock<'t, R: ScoreReal, I> {
    tile: &'t ScoreTile<R, I>,
    /// The first key.
    key: R::Index,
    /// Values by node and, of nodes that depend on them, row and column.
    values: HashMap<(Id, Option<usize>, Option<u32>), Value<R>>,
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreBlock<'_, R, I> {
    /// The value where the score of a row and of a column, counted from the block's first key, is `score`.
    pub fn at(&mut self, score: R, row: usize, column: u32) -> R {
        let root = self.tile.expr.nodes().len() as Id - 1;
        self.value(root, score, row, column).real()
    }

    fn value(&mut self, id: Id, score: R, row: usize, column: u32) -> Value<R> {
        let ScoreTile { expr, inputs, kinds, values } = self.tile;
        if let Some(&value) = values.get(&id) {
            return value;
        }
        let (node, kind) = (expr.nodes()[usize::from(id)], kinds[usize::from(id)]);
        let place = (id, kind.of_row.then_some(row), kind.of_key.then_some(column));
        if let Some(&value) = self.values.get(&place) {
            return value;
        }
        let value = match kind.step {
            Some(step) if kind.of_key && column > 0 => {
                self.value(id, score, row, 0).after(step.wrapping_mul(column as i32))
            }
            _ => {
                let operands: Vec<(Id, Value<R>)> =
                    node.operands().map(|id| (id, self.value(id, score, row, column))).collect();
                let leaf = |leaf: Leaf| leaf.value(inputs, row, || (score, self.key));
                let of = |id| operands.iter().find(|(operand, _)| *operand == id).map(|(_, value)| *value);
                node.value(inputs, leaf, |id| of(id).expect("these are the node's operands"))
            }
        };
        self.values.insert(place, value);
        value
    }
}

impl<R: ScoreReal> Value<R> {
    /// The value plus a constant.
    fn after(self, distance: i32) -> Value<R> {
        match self {
            _ if distance == 0 => self,
            Value::Real(real) => Value::Real(real + real.lit(distance.into())),
            Value::Index(index) => Value::Index(index + index.lit(distance)),
            Value::Bool(_) => unreachable!("conditions have no difference"),
        }
    }
}
