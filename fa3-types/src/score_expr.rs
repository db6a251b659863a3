//! Functions of a score.

mod builder;
mod dual;
mod error;
mod node;
mod op;
mod real;
mod row;
mod table;
mod text;

use std::sync::Arc;

pub use dual::Dual;
pub use error::ScoreError;
pub use real::ScoreReal;
pub use row::ScoreRow;
pub use table::ScoreTable;

use node::Node;

use crate::{KnownProblem, Lengths};

/// An expression over a score, without the values of its numbers and tables. It changes what is computed, so it is a
/// part of a [`Problem`](crate::Problem). Values are data, which a [`ScoreFunction`] has beside the expression.
///
/// Nodes are shared, operands of commutative operations have one order, and numbers and tables are counted in the order
/// of their first use. So expressions of the same operations are equal, and have equal hashes, whatever the order of
/// these operands and the names were. [`ScoreFunction::parse`] describes the text that `Display` prints; there the
/// numbers are `x0`, `x1` and so on, and the tables `t0`, `t1` and so on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScoreExpr(Arc<[Node]>);

impl ScoreExpr {
    /// The largest number of nodes.
    pub const MOST_NODES: usize = 96;

    /// The nodes. Operands come before the operation, and the last node is the value, which is a real number.
    fn nodes(&self) -> &[Node] {
        &self.0
    }
}

/// A function of a score: an expression, and the values of its numbers and tables. It replaces the score of each query
/// and key, after softmax_scale and soft cap, before the mask:
///
/// ```text
/// S = cap(softmax_scale · Q Kᵀ)        E = f(S, batch, head, query, key)        P = softmax(mask(E))
/// ```
///
/// E = -inf hides a key. +inf or NaN makes O and LSE of its row NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreFunction {
    expr: ScoreExpr,
    numbers: Arc<[f32]>,
    tables: Arc<[ScoreTable]>,
}

impl ScoreFunction {
    /// The expression.
    pub fn expr(&self) -> &ScoreExpr {
        &self.expr
    }

    /// The numbers `x0`, `x1` and so on.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// The tables `t0`, `t1` and so on.
    pub fn tables(&self) -> &[ScoreTable] {
        &self.tables
    }

    /// The function of one row of a query head of a sequence, as [`KnownProblem::score_row`] gives it.
    fn row<R: ScoreReal>(&self, at: [usize; 3], len: Lengths) -> ScoreRow<'_, R> {
        ScoreRow::new(self, at, len)
    }
}

impl KnownProblem {
    /// The function of the scores of one row of a query head of a sequence, if the problem has such a function.
    pub fn score_row<R: ScoreReal>(&self, at: [usize; 3]) -> Option<ScoreRow<'_, R>> {
        self.score_function().map(|function| function.row(at, self.lengths(at[0])))
    }
}

/// The value of a name in the text of a [`ScoreFunction`].
#[derive(Clone, Debug, PartialEq)]
pub enum ScoreValue {
    /// A number. Another value of it is the same expression.
    Number(f32),
    /// A table.
    Table(ScoreTable),
}

impl From<f32> for ScoreValue {
    fn from(number: f32) -> ScoreValue {
        ScoreValue::Number(number)
    }
}

impl From<ScoreTable> for ScoreValue {
    fn from(table: ScoreTable) -> ScoreValue {
        ScoreValue::Table(table)
    }
}

#[cfg(test)]
mod tests;
