//! Nodes of an expression.

use super::op::{IndexOp, Op, Test};
use super::table::ScoreTable;

/// The number of an operand among an expression's nodes.
pub(super) type Id = u16;

/// A quantity that an element has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Leaf {
    /// The score.
    Score,
    /// The number of the sequence.
    Batch,
    /// The query head.
    Head,
    /// The row of the sequence's queries.
    Row,
    /// The position of the query among the sequence's keys, if the last query stands at the last key.
    Query,
    /// The key of the sequence.
    Key,
}

impl Leaf {
    pub(super) const ALL: [Leaf; 6] =
        [Leaf::Score, Leaf::Batch, Leaf::Head, Leaf::Row, Leaf::Query, Leaf::Key];

    pub(super) fn text(self) -> &'static str {
        match self {
            Leaf::Score => "s",
            Leaf::Batch => "b",
            Leaf::Head => "h",
            Leaf::Row => "row",
            Leaf::Query => "q",
            Leaf::Key => "k",
        }
    }
}

/// The type of a node's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A real number.
    Real,
    /// An integer of 32 bits.
    Index,
    /// True or false.
    Bool,
}

impl Class {
    pub(super) fn name(self) -> &'static str {
        match self {
            Class::Real => "a real number",
            Class::Index => "an index",
            Class::Bool => "a condition",
        }
    }
}

/// An operation or a leaf of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Node {
    Leaf(Leaf),
    /// A real constant, by its bits.
    Real(u32),
    Index(i32),
    /// A number whose value is data.
    Number(u8),
    /// An element of a table.
    Read {
        table: u8,
        at: [Option<Id>; ScoreTable::MOST_AXES],
    },
    /// The real number of an index.
    OfIndex([Id; 1]),
    /// An operation. One operand is given twice.
    Op(Op, [Id; 2]),
    Test(Test, [Id; 2]),
    Not([Id; 1]),
    And([Id; 2]),
    Or([Id; 2]),
    /// The second operand where the first one holds, the third one elsewhere.
    Select([Id; 3]),
    /// The index of a real number, rounded to zero.
    ToIndex([Id; 1]),
    OfIndices(IndexOp, [Id; 2]),
}

impl Node {
    /// The operands, in order.
    pub(super) fn operands(self) -> impl Iterator<Item = Id> {
        let operands: [Option<Id>; 4] = match self {
            Node::Leaf(_) | Node::Real(_) | Node::Index(_) | Node::Number(_) => [None; 4],
            Node::Read { at, .. } => at,
            Node::OfIndex([a]) | Node::ToIndex([a]) | Node::Not([a]) => [Some(a), None, None, None],
            Node::Op(_, [a, b])
            | Node::OfIndices(_, [a, b])
            | Node::Test(_, [a, b])
            | Node::And([a, b])
            | Node::Or([a, b]) => [Some(a), Some(b), None, None],
            Node::Select([a, b, c]) => [Some(a), Some(b), Some(c), None],
        };
        operands.into_iter().flatten()
    }

    /// The node with other operands, numbers and tables.
    pub(super) fn map(
        self,
        id: impl Fn(Id) -> Id + Copy,
        number: impl FnOnce(u8) -> u8,
        of_table: impl FnOnce(u8) -> u8,
    ) -> Node {
        match self {
            Node::Leaf(_) | Node::Real(_) | Node::Index(_) => self,
            Node::Number(slot) => Node::Number(number(slot)),
            Node::Read { table, at } => Node::Read { table: of_table(table), at: at.map(|at| at.map(id)) },
            Node::OfIndex(of) => Node::OfIndex(of.map(id)),
            Node::ToIndex(of) => Node::ToIndex(of.map(id)),
            Node::Op(op, of) => Node::Op(op, of.map(id)),
            Node::OfIndices(op, of) => Node::OfIndices(op, of.map(id)),
            Node::Test(test, of) => Node::Test(test, of.map(id)),
            Node::Not(of) => Node::Not(of.map(id)),
            Node::And(of) => Node::And(of.map(id)),
            Node::Or(of) => Node::Or(of.map(id)),
            Node::Select(of) => Node::Select(of.map(id)),
        }
    }
}
