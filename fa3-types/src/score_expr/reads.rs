//! The elements of tables with gradients that an expression reads.

use std::collections::HashMap;

use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::tile::ScoreRows;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreForm, ScoreGradients, ScoreReal};
use crate::Lengths;

/// The places of an attention matrix on which it depends which element of a table an expression reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReadBy {
    /// All scores of a sequence and a head read one element.
    Head,
    /// All scores of a row read one element.
    Row,
    /// All scores of a sequence, a head and a key read one element.
    Key,
    /// All scores of a sequence and a head with one difference of query and key read one element.
    Distance,
    /// Each score of a sequence and a head reads its own element: the query plus a number is the index along one axis,
    /// the key plus a number along another one. The indices along others depend on sequence and head.
    QueryAndKey {
        /// The axis along which queries run.
        query: LineAxis,
        /// The axis along which keys run.
        key: LineAxis,
    },
    /// Query and key, or the score, decide in other ways.
    Score,
}

/// The axis of a table along which queries or keys run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LineAxis {
    /// The number of the axis.
    pub axis: usize,
    /// The number that is added to the query or key.
    plus: i32,
    /// Whether queries are counted so that the last one is the last key.
    are_positions: bool,
}

impl LineAxis {
    /// The index of the first query or key, in sequences of these lengths.
    pub fn first(&self, lens: Lengths) -> i64 {
        let of_row = if self.are_positions { lens.k as i64 - lens.q as i64 } else { 0 };
        of_row + i64::from(self.plus)
    }
}

/// An element of a table with a gradient that an expression reads for each score.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableRead {
    /// The number of the table.
    pub table: usize,
    /// The places on which it depends which element it is.
    pub by: ReadBy,
    /// For each axis, the difference of its indices in neighbouring rows, if all differences are equal; in neighbouring
    /// keys, if the table is read by key.
    pub steps: Vec<Option<i32>>,
    indices: Vec<Id>,
}

impl ScoreExpr {
    /// The nodes that read elements of tables with gradients.
    pub(super) fn reads(&self, gradients: ScoreGradients) -> impl Iterator<Item = Id> {
        let has = move |node: &Node| matches!(*node, Node::Read { table, .. } if gradients.has(table.into()));
        (0..).zip(self.nodes()).filter(move |(_, node)| has(node)).map(|(id, _)| id)
    }

    /// The elements of tables with gradients that the expression reads for each score.
    pub fn table_reads(&self, gradients: ScoreGradients) -> Vec<TableRead> {
        let of_nodes = Kind::of_nodes(self.nodes(), [], ScoreRows::OfHead);
        let of_read = |id: Id| {
            let Node::Read { table, at } = self.nodes()[usize::from(id)] else { unreachable!("it reads") };
            let indices: Vec<Id> = at.into_iter().flatten().collect();
            let kinds = || indices.iter().map(|&id| of_nodes[usize::from(id)]);
            let by = match [kinds().any(|kind| kind.of_row), kinds().any(|kind| kind.of_column)] {
                [false, false] => ReadBy::Head,
                [true, false] => ReadBy::Row,
                [false, true] => ReadBy::Key,
                _ if kinds().all(|kind| kind.of_diagonal || !kind.of_row && !kind.of_column) => {
                    ReadBy::Distance
                }
                _ => self.by_query_and_key(&indices, &of_nodes).unwrap_or(ReadBy::Score),
            };
            let steps = kinds().map(|kind| match (kind.of_row, kind.of_column, kind.step) {
                (false, false, _) => Some(0),
                (false, true, Some(Step::Constant(step))) => Some(step),
                (true, ..) => kind.row_step,
                (false, true, _) => None,
            });
            TableRead { table: table.into(), by, steps: steps.collect(), indices }
        };
        self.reads(gradients).map(of_read).collect()
    }

    /// How an element is read of which some indices depend on rows and some on columns, if each score has its own.
    fn by_query_and_key(&self, indices: &[Id], kinds: &[Kind]) -> Option<ReadBy> {
        let (mut query, mut key) = (None, None);
        for (axis, &id) in indices.iter().enumerate() {
            let kind = kinds[usize::from(id)];
            if !kind.of_row && !kind.of_column {
                continue;
            }
            let (leaf, plus) = self.leaf_plus(id)?;
            let found = LineAxis { axis, plus, are_positions: leaf == Leaf::Query };
            if if leaf == Leaf::Key { &mut key } else { &mut query }.replace(found).is_some() {
                return None;
            }
        }
        Some(ReadBy::QueryAndKey { query: query?, key: key? })
    }

    /// The row, query or key, and the number that is added to it, if the node is such a sum.
    fn leaf_plus(&self, id: Id) -> Option<(Leaf, i32)> {
        let node = |id: Id| self.nodes()[usize::from(id)];
        if let Node::Leaf(leaf @ (Leaf::Row | Leaf::Query | Leaf::Key)) = node(id) {
            return Some((leaf, 0));
        }
        let Node::Op(op @ (Op::Add | Op::Sub), [a, b]) = node(id) else { return None };
        let (of, plus) = match (op, node(a), node(b)) {
            (Op::Add, Node::Index(plus), _) => (b, plus),
            (Op::Add, _, Node::Index(plus)) => (a, plus),
            (_, _, Node::Index(minus)) => (a, minus.checked_neg()?),
            _ => return None,
        };
        let (leaf, more) = self.leaf_plus(of)?;
        Some((leaf, plus.checked_add(more)?))
    }

    /// The indices of an element, which do not depend on the score, in the row `inputs.row(0)`, at `key`.
    pub fn indices<R: ScoreReal>(
        &self,
        read: &TableRead,
        inputs: &impl ScoreInputs<R>,
        key: R::Index,
    ) -> Vec<R::Index> {
        let mut values = HashMap::new();
        read.indices.iter().map(|&id| self.without_score(id, inputs, key, &mut values).index()).collect()
    }

    /// The value of a node that does not depend on the score.
    fn without_score<R: ScoreReal>(
        &self,
        id: Id,
        inputs: &impl ScoreInputs<R>,
        key: R::Index,
        values: &mut HashMap<Id, Value<R>>,
    ) -> Value<R> {
        if let Some(&value) = values.get(&id) {
            return value;
        }
        let node = self.nodes()[usize::from(id)];
        for operand in node.operands() {
            self.without_score(operand, inputs, key, values);
        }
        let score = || unreachable!("no score decides");
        let leaf = |leaf: Leaf| leaf.value(inputs, 0, score, || inputs.row(0), || key);
        let value = node.value(inputs, leaf, |id| values[&id]);
        values.insert(id, value);
        value
    }
}

impl ScoreForm {
    /// The tables with gradients that are read by query and key.
    pub fn bias_gradients(&self) -> ScoreGradients {
        let reads = self.expr.table_reads(self.gradients);
        let is_bias = |read: &&TableRead| matches!(read.by, ReadBy::QueryAndKey { .. } | ReadBy::Score);
        let biases: Vec<usize> = reads.iter().filter(is_bias).map(|read| read.table).collect();
        ScoreGradients::of((0..self.extents.len()).map(|table| biases.contains(&table)))
    }

    /// The tables with gradients that are read by head, by query, by key or by distance.
    pub fn summed_gradients(&self) -> ScoreGradients {
        let biases = self.bias_gradients();
        let is_summed = |table| self.gradients.has(table) && !biases.has(table);
        ScoreGradients::of((0..self.extents.len()).map(is_summed))
    }
}
