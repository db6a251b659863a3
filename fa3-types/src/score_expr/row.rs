//! The function of a score in one row.

use std::num::Wrapping;

use super::node::{Id, Leaf, Node};
use super::value::{ScoreInputs, Value};
use super::{Dual, HostReal, ScoreFunction, ScoreTable};
use crate::Lengths;

/// The function of the scores of one row of a query head. What depends on neither score nor key is computed once.
pub struct ScoreRow<'a, R: HostReal> {
    inputs: RowInputs<'a>,
    values: Vec<Value<R>>,
    /// The nodes that depend on score or key.
    varying: Vec<usize>,
    /// A node, and what is added to its value.
    added: Option<(usize, R)>,
}

/// The inputs of an expression in one row.
pub(super) struct RowInputs<'a> {
    function: &'a ScoreFunction,
    /// Sequence, head and row, and the keys beyond the queries.
    row: [Wrapping<i32>; 4],
}

impl<'a> RowInputs<'a> {
    pub(super) fn new(function: &'a ScoreFunction, at: [usize; 3], len: Lengths) -> RowInputs<'a> {
        let [sequence, head, row, len_q, len_k] = [at[0], at[1], at[2], len.q, len.k].map(|x| x as i32);
        RowInputs { function, row: [sequence, head, row, len_k - len_q].map(Wrapping) }
    }
}

impl<R: HostReal> ScoreInputs<R> for RowInputs<'_> {
    fn real(&self, value: f32) -> R {
        R::of_index(Wrapping(0)).lit(value.into())
    }

    fn index(&self, value: i32) -> Wrapping<i32> {
        Wrapping(value)
    }

    fn number(&self, number: usize) -> R {
        self.real(self.function.numbers()[number])
    }

    fn element(&self, table: usize, at: &[Wrapping<i32>]) -> R {
        self.real(self.function.tables()[table].element(at.iter().map(|index| index.0)))
    }

    fn sequence(&self) -> Wrapping<i32> {
        self.row[0]
    }

    fn head(&self, _: usize) -> Wrapping<i32> {
        self.row[1]
    }

    fn row(&self, _: usize) -> Wrapping<i32> {
        self.row[2]
    }

    fn position(&self, query: Wrapping<i32>) -> Wrapping<i32> {
        query + self.row[3]
    }
}

impl<'a, R: HostReal> ScoreRow<'a, R> {
    pub(super) fn new(
        function: &'a ScoreFunction,
        at: [usize; 3],
        len: Lengths,
        added: Option<(usize, R)>,
    ) -> ScoreRow<'a, R> {
        let (nodes, inputs) = (function.expr().nodes(), RowInputs::new(function, at, len));
        let mut this = ScoreRow { inputs, values: Vec::with_capacity(nodes.len()), varying: vec![], added };
        for (id, node) in nodes.iter().enumerate() {
            let varies = matches!(node, Node::Leaf(Leaf::Score | Leaf::Key))
                || node.operands().any(|operand| this.varying.contains(&operand.into()));
            let value = this.value(id, *node, R::of_index(Wrapping(0)), 0);
            this.values.push(value);
            this.varying.extend(varies.then_some(id));
        }
        this
    }

    /// The value where the score of `key` is `score`.
    pub fn at(&mut self, score: R, key: usize) -> R {
        for i in 0..self.varying.len() {
            let id = self.varying[i];
            self.values[id] = self.value(id, self.inputs.function.expr().nodes()[id], score, key as i32);
        }
        self.values[self.values.len() - 1].real()
    }

    fn value(&self, id: usize, node: Node, score: R, key: i32) -> Value<R> {
        let query = self.inputs.row[2];
        let leaf = |leaf: Leaf| leaf.value(&self.inputs, 0, || score, || query, || Wrapping(key));
        let value = node.value(&self.inputs, leaf, |id| self.values[usize::from(id)]);
        match self.added {
            Some((to, added)) if to == id => Value::Real(value.real() + added),
            _ => value,
        }
    }
}

impl<R: HostReal> ScoreRow<'_, Dual<R>> {
    /// The value where the score of `key` is `score`, and its derivative, if the derivative of the score is `slope`. It
    /// is 0 where the value is -inf, which hides the key.
    pub fn with_slope(&mut self, score: R, slope: R, key: usize) -> (R, R) {
        let Dual { value, slope } = self.at(Dual { value: score, slope }, key);
        (value, R::select(value.le(value.lit(f64::NEG_INFINITY)), value.lit(0.0), slope))
    }
}

/// An element of a table with a gradient, which the function reads in one row of a query head.
pub struct ScoreRead<'a, R: HostReal> {
    row: ScoreRow<'a, Dual<R>>,
    table: usize,
    at: [Option<Id>; ScoreTable::MOST_AXES],
}

impl<'a, R: HostReal> ScoreRead<'a, R> {
    pub(super) fn new(
        function: &'a ScoreFunction,
        at: [usize; 3],
        len: Lengths,
        read: Id,
    ) -> ScoreRead<'a, R> {
        let Node::Read { table, at: indices } = function.expr().nodes()[usize::from(read)] else {
            unreachable!("it is an element of a table")
        };
        let zero = R::of_index(Wrapping(0));
        let added = Some((read.into(), Dual { value: zero, slope: zero.lit(1.0) }));
        let row = ScoreRow::new(function, at, len, added);
        ScoreRead { row, table: table.into(), at: indices }
    }

    /// The element where the score of `key` is `score`: its table, its place in row-major order, and the derivative of
    /// the function by it. The derivative is 0 where the value is -inf, which hides the key.
    pub fn at(&mut self, score: R, key: usize) -> (usize, usize, R) {
        let (_, slope) = self.row.with_slope(score, score.lit(0.0), key);
        let indices = self.at.into_iter().flatten();
        let indices = indices.map(|id| self.row.values[usize::from(id)].index().0);
        (self.table, self.row.inputs.function.tables()[self.table].place(indices), slope)
    }
}
