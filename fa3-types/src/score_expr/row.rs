//! The function of a score in one row.

use super::node::{Leaf, Node};
use super::{Dual, ScoreFunction, ScoreReal};
use crate::Lengths;

/// A node's value.
#[derive(Clone, Copy)]
enum Value<R> {
    Real(R),
    Index(i32),
    Bool(bool),
}

impl<R: ScoreReal> Value<R> {
    fn real(self) -> R {
        match self {
            Value::Real(real) => real,
            Value::Index(index) => R::of_index(index),
            Value::Bool(_) => unreachable!("the builder checks the types of operands"),
        }
    }

    fn index(self) -> i32 {
        match self {
            Value::Index(index) => index,
            Value::Real(_) | Value::Bool(_) => unreachable!("the builder checks the types of operands"),
        }
    }

    fn holds(self) -> bool {
        match self {
            Value::Bool(holds) => holds,
            Value::Real(_) | Value::Index(_) => unreachable!("the builder checks the types of operands"),
        }
    }
}

/// The function of the scores of one row of a query head. What depends on neither score nor key is computed once.
pub struct ScoreRow<'a, R> {
    function: &'a ScoreFunction,
    /// Sequence, head, row and position.
    row: [i32; 4],
    values: Vec<Value<R>>,
    /// The nodes that depend on score or key.
    varying: Vec<usize>,
}

impl<'a, R: ScoreReal> ScoreRow<'a, R> {
    pub(super) fn new(
        function: &'a ScoreFunction,
        [sequence, head, row]: [usize; 3],
        len: Lengths,
    ) -> ScoreRow<'a, R> {
        let [row, len_q, len_k] = [row, len.q, len.k].map(|x| x as i32);
        let row = [sequence as i32, head as i32, row, row + len_k - len_q];
        let nodes = function.expr.nodes();
        let mut this = ScoreRow { function, row, values: Vec::with_capacity(nodes.len()), varying: vec![] };
        for (id, node) in nodes.iter().enumerate() {
            let varies = matches!(node, Node::Leaf(Leaf::Score | Leaf::Key))
                || node.operands().any(|operand| this.varying.contains(&operand.into()));
            let value = this.value(node, R::of_index(0), 0);
            this.values.push(value);
            this.varying.extend(varies.then_some(id));
        }
        this
    }

    /// The value where the score of `key` is `score`.
    pub fn at(&mut self, score: R, key: usize) -> R {
        for i in 0..self.varying.len() {
            let id = self.varying[i];
            self.values[id] = self.value(&self.function.expr.nodes()[id], score, key as i32);
        }
        self.values[self.values.len() - 1].real()
    }

    fn value(&self, node: &Node, score: R, key: i32) -> Value<R> {
        let of = |id: u8| self.values[usize::from(id)];
        let number = |x: f32| Value::Real(score.lit(x.into()));
        let [sequence, head, row, position] = self.row;
        let are_indices = |ids: [u8; 2]| ids.into_iter().all(|id| matches!(of(id), Value::Index(_)));
        match *node {
            Node::Leaf(leaf) => match leaf {
                Leaf::Score => Value::Real(score),
                Leaf::Batch => Value::Index(sequence),
                Leaf::Head => Value::Index(head),
                Leaf::Row => Value::Index(row),
                Leaf::Query => Value::Index(position),
                Leaf::Key => Value::Index(key),
            },
            Node::Real(bits) => number(f32::from_bits(bits)),
            Node::Index(index) => Value::Index(index),
            Node::Number(slot) => number(self.function.numbers[usize::from(slot)]),
            Node::Read { table, at } => {
                let at = at.into_iter().flatten().map(|id| of(id).index());
                number(self.function.tables[usize::from(table)].element(at))
            }
            Node::OfIndex([index]) => Value::Real(of(index).real()),
            Node::Op(op, operands) if are_indices(operands) && op.takes_indices() => {
                let value = op.of_indices(operands.map(|id| of(id).index()));
                Value::Index(value.expect("the operation takes indices"))
            }
            Node::Op(op, operands) => Value::Real(op.of_reals(operands.map(|id| of(id).real()))),
            Node::Test(test, operands) if are_indices(operands) => {
                Value::Bool(test.of_indices(operands.map(|id| of(id).index())))
            }
            Node::Test(test, operands) => Value::Bool(test.of_reals(operands.map(|id| of(id).real()))),
            Node::Not([a]) => Value::Bool(!of(a).holds()),
            Node::And([a, b]) => Value::Bool(of(a).holds() && of(b).holds()),
            Node::Or([a, b]) => Value::Bool(of(a).holds() || of(b).holds()),
            Node::Select([condition, yes, no]) => of(if of(condition).holds() { yes } else { no }),
        }
    }
}

impl<R: ScoreReal> ScoreRow<'_, Dual<R>> {
    /// The value where the score of `key` is `score`, and its derivative, if the derivative of the score is `slope`. It
    /// is 0 where the value is -inf, which hides the key.
    pub fn with_slope(&mut self, score: R, slope: R, key: usize) -> (R, R) {
        let Dual { value, slope } = self.at(Dual { value: score, slope }, key);
        (value, R::select(value.le(value.lit(f64::NEG_INFINITY)), value.lit(0.0), slope))
    }
}
