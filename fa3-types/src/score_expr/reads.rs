//! The elements of tables with gradients that an expression reads.

use std::collections::HashMap;

use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::tile::ScoreRows;
use super::value::{ScoreInputs, Value};
use super::{ScoreExpr, ScoreGradients, ScoreReal};

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
    /// Query and key, or the score, decide.
    Score,
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
        let kinds = Kind::of_nodes(self.nodes(), [], ScoreRows::OfHead);
        let of_read = |id: Id| {
            let Node::Read { table, at } = self.nodes()[usize::from(id)] else { unreachable!("it reads") };
            let indices: Vec<Id> = at.into_iter().flatten().collect();
            let kinds = || indices.iter().map(|&id| kinds[usize::from(id)]);
            let by = match [kinds().any(|kind| kind.of_row), kinds().any(|kind| kind.of_column)] {
                [false, false] => ReadBy::Head,
                [true, false] => ReadBy::Row,
                [false, true] => ReadBy::Key,
                _ if kinds().all(|kind| kind.of_diagonal || !kind.of_row && !kind.of_column) => {
                    ReadBy::Distance
                }
                _ => ReadBy::Score,
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
