//! Functions of a score.

mod builder;
mod dual;
mod error;
mod gradients;
mod joint;
mod kind;
mod node;
mod op;
mod open;
mod parts;
mod reads;
mod real;
mod row;
mod symbol;
mod table;
mod text;
mod tile;
mod value;

use std::sync::Arc;

pub use dual::Dual;
pub use error::ScoreError;
pub use gradients::ScoreGradients;
pub use joint::ScoreSlope;
pub use open::OpenScore;
pub use reads::{LineAxis, ReadBy, TableRead};
pub use real::{HostReal, ScoreIndex, ScoreReal};
pub use row::{ScoreRead, ScoreRow};
pub use table::ScoreTable;
pub use tile::{ScoreBlock, ScoreProduct, ScoreRows, ScoreTile};
pub use value::ScoreInputs;

use node::Node;

use crate::{KnownProblem, Lengths};

/// An expression over a score, without the values of its numbers and tables. Kernels are compiled for an expression.
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

    /// Number of numbers.
    pub fn numbers(&self) -> usize {
        let numbers = self.nodes().iter().filter(|node| matches!(node, Node::Number(_)));
        numbers.count()
    }

    /// Number of axes of each table.
    pub fn axes(&self) -> Vec<usize> {
        let mut axes = Vec::new();
        for node in self.nodes() {
            // Tables are counted in the order of their first use.
            if let Node::Read { table, at } = *node
                && usize::from(table) == axes.len()
            {
                axes.push(at.into_iter().flatten().count());
            }
        }
        axes
    }

    /// The nodes. Operands come before the operation, and the last node is the value, which is a real number.
    fn nodes(&self) -> &[Node] {
        &self.0
    }
}

/// A function of a score without the elements of its tables: all that a [`Problem`](crate::Problem) has of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreForm {
    expr: ScoreExpr,
    numbers: Arc<[f32]>,
    extents: Arc<[Arc<[usize]>]>,
    gradients: ScoreGradients,
}

impl ScoreForm {
    /// The expression.
    pub fn expr(&self) -> &ScoreExpr {
        &self.expr
    }

    /// The numbers `x0`, `x1` and so on.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// The extents of the tables `t0`, `t1` and so on.
    pub fn extents(&self) -> &[Arc<[usize]>] {
        &self.extents
    }

    /// The tables whose gradients the backward pass computes.
    pub fn gradients(&self) -> ScoreGradients {
        self.gradients
    }

    /// The function, whose backward pass computes the gradients of these tables.
    #[must_use]
    pub fn with_gradients(self, gradients: ScoreGradients) -> ScoreForm {
        ScoreForm { gradients, ..self }
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
    form: ScoreForm,
    tables: Arc<[ScoreTable]>,
}

impl ScoreFunction {
    /// The function without the elements of its tables.
    pub fn form(&self) -> &ScoreForm {
        &self.form
    }

    /// The expression.
    pub fn expr(&self) -> &ScoreExpr {
        &self.form.expr
    }

    /// The numbers `x0`, `x1` and so on.
    pub fn numbers(&self) -> &[f32] {
        &self.form.numbers
    }

    /// The tables `t0`, `t1` and so on.
    pub fn tables(&self) -> &[ScoreTable] {
        &self.tables
    }

    /// The function of one row of a query head of a sequence, as [`KnownProblem::score_row`] gives it.
    fn row<R: HostReal>(&self, at: [usize; 3], len: Lengths) -> ScoreRow<'_, R> {
        ScoreRow::new(self, at, len, None)
    }

    /// The elements of one row, as [`KnownProblem::score_reads`] gives them.
    fn reads<R: HostReal>(&self, at: [usize; 3], len: Lengths) -> Vec<ScoreRead<'_, R>> {
        self.expr().reads(self.form.gradients).map(|read| ScoreRead::new(self, at, len, read)).collect()
    }
}

impl KnownProblem {
    /// The function of the scores of one row of a query head of a sequence, if the problem has such a function.
    pub fn score_row<R: HostReal>(&self, at: [usize; 3]) -> Option<ScoreRow<'_, R>> {
        self.score_function().map(|function| function.row(at, self.lengths(at[0])))
    }

    /// The elements of tables with gradients that the function of scores reads in one row of a query head of a
    /// sequence.
    pub fn score_reads<R: HostReal>(&self, at: [usize; 3]) -> Vec<ScoreRead<'_, R>> {
        self.score_function().map_or_else(Vec::new, |function| function.reads(at, self.lengths(at[0])))
    }

    /// Zeros for the gradient of each table of the function of scores: no numbers for a table without gradient, and no
    /// tables if none has a gradient.
    pub fn score_zeros<F: Clone + Default>(&self) -> Vec<Vec<F>> {
        let Some(form) = self.score().filter(|form| !form.gradients.is_empty()) else { return vec![] };
        let elements = form.extents().iter().map(|extents| extents.iter().product());
        let of_table = |(table, elements): (usize, usize)| {
            vec![F::default(); if form.gradients.has(table) { elements } else { 0 }]
        };
        elements.enumerate().map(of_table).collect()
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
