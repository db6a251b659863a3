//! The value of a node.

use super::ScoreReal;
use super::node::{Id, Leaf, Node};

/// A node's value.
#[derive(Clone, Copy)]
pub(super) enum Value<R: ScoreReal> {
    Real(R),
    Index(R::Index),
    Bool(R::Bool),
}

impl<R: ScoreReal> Value<R> {
    pub(super) fn real(self) -> R {
        match self {
            Value::Real(real) => real,
            Value::Index(index) => R::of_index(index),
            Value::Bool(_) => unreachable!("the builder checks the types of operands"),
        }
    }

    pub(super) fn index(self) -> R::Index {
        match self {
            Value::Index(index) => index,
            Value::Real(_) | Value::Bool(_) => unreachable!("the builder checks the types of operands"),
        }
    }

    pub(super) fn condition(self) -> R::Bool {
        match self {
            Value::Bool(condition) => condition,
            Value::Real(_) | Value::Index(_) => unreachable!("the builder checks the types of operands"),
        }
    }
}

/// The inputs of an expression beside scores and keys: constants, numbers, tables, and the places of rows.
pub trait ScoreInputs<R: ScoreReal> {
    /// The real constant `value`.
    fn real(&self, value: f32) -> R;

    /// The integer constant `value`.
    fn index(&self, value: i32) -> R::Index;

    /// The number `x{number}`.
    fn number(&self, number: usize) -> R;

    /// The element of the table `t{table}` at one index for each axis, as [`ScoreTable`](super::ScoreTable) has it.
    fn element(&self, table: usize, at: &[R::Index]) -> R;

    /// The sequence.
    fn sequence(&self) -> R::Index;

    /// The query head of a row.
    fn head(&self, row: usize) -> R::Index;

    /// The query of a row of the tile, as the row of its sequence; the key, if the tile's rows are keys.
    fn row(&self, row: usize) -> R::Index;

    /// The position of a row of the sequence's queries among the sequence's keys.
    fn position(&self, query: R::Index) -> R::Index;
}

impl Leaf {
    /// The value in a row of a tile, where the score of a `query` and a `key` is `score`.
    pub(super) fn value<R: ScoreReal>(
        self,
        inputs: &impl ScoreInputs<R>,
        row: usize,
        score: impl FnOnce() -> R,
        query: impl FnOnce() -> R::Index,
        key: impl FnOnce() -> R::Index,
    ) -> Value<R> {
        match self {
            Leaf::Score => Value::Real(score()),
            Leaf::Batch => Value::Index(inputs.sequence()),
            Leaf::Head => Value::Index(inputs.head(row)),
            Leaf::Row => Value::Index(query()),
            Leaf::Query => Value::Index(inputs.position(query())),
            Leaf::Key => Value::Index(key()),
        }
    }
}

impl Node {
    /// The value, of the values `of` operands and of leaves.
    pub(super) fn value<R: ScoreReal>(
        self,
        inputs: &impl ScoreInputs<R>,
        leaf: impl FnOnce(Leaf) -> Value<R>,
        of: impl Fn(Id) -> Value<R>,
    ) -> Value<R> {
        let are_indices = |ids: [Id; 2]| ids.into_iter().all(|id| matches!(of(id), Value::Index(_)));
        match self {
            Node::Leaf(of) => leaf(of),
            Node::Real(bits) => Value::Real(inputs.real(f32::from_bits(bits))),
            Node::Index(index) => Value::Index(inputs.index(index)),
            Node::Number(slot) => Value::Real(inputs.number(slot.into())),
            Node::Read { table, at } => {
                let mut indices = [inputs.index(0); 4];
                let mut count = 0;
                for id in at.into_iter().flatten() {
                    indices[count] = of(id).index();
                    count += 1;
                }
                Value::Real(inputs.element(table.into(), &indices[..count]))
            }
            Node::OfIndex([index]) => Value::Real(of(index).real()),
            Node::ToIndex([number]) => Value::Index(of(number).real().to_index()),
            Node::OfIndices(op, operands) => Value::Index(op.of(operands.map(|id| of(id).index()))),
            Node::Op(op, operands) if are_indices(operands) && op.takes_indices() => {
                let value = op.of_indices(operands.map(|id| of(id).index()));
                Value::Index(value.expect("the operation takes indices"))
            }
            Node::Op(op, operands) => Value::Real(op.of_reals(operands.map(|id| of(id).real()))),
            Node::Test(test, operands) if are_indices(operands) => {
                Value::Bool(test.of_indices(operands.map(|id| of(id).index())))
            }
            Node::Test(test, operands) => Value::Bool(test.of_reals::<R>(operands.map(|id| of(id).real()))),
            Node::Not([a]) => Value::Bool(R::not(of(a).condition())),
            Node::And([a, b]) => Value::Bool(of(a).condition() & of(b).condition()),
            Node::Or([a, b]) => Value::Bool(of(a).condition() | of(b).condition()),
            Node::Select([condition, yes, no]) => {
                let condition = of(condition).condition();
                match (of(yes), of(no)) {
                    (Value::Index(yes), Value::Index(no)) => {
                        Value::Index(super::ScoreIndex::select(condition, yes, no))
                    }
                    (yes, no) => Value::Real(R::select(condition, yes.real(), no.real())),
                }
            }
        }
    }
}
