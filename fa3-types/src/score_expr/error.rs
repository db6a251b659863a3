//! The reasons why a function of a score is rejected.

/// A text is no function of a score, or a table has a wrong shape.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum ScoreError {
    #[error("the score expression has {found} at column {column}, expected {expected}")]
    Syntax { column: usize, found: String, expected: &'static str },
    #[error("the score expression names {name}, which has no value; s, b, h, row, q and k need none")]
    UnknownName { name: String },
    #[error("the score expression gives {name} a value, and it is {what}")]
    ReservedName { name: String, what: &'static str },
    #[error("{name} in the score expression is a {given}, expected a {expected}")]
    Kind { name: String, given: &'static str, expected: &'static str },
    #[error("the table {name} of the score expression has {expected} axes and is read by {given} indices")]
    Indices { name: String, given: usize, expected: usize },
    #[error("{operation} in the score expression takes {expected}, not {given}")]
    Operand { operation: &'static str, given: &'static str, expected: &'static str },
    #[error(
        "a number of the score expression is {value}, expected a finite one; `inf` in the text is infinite"
    )]
    Number { value: f32 },
    #[error("the score expression has more than {limit} {what}")]
    TooLarge { what: &'static str, limit: usize },
    #[error(
        "a table of a score expression has {elements} elements for the shape {extents:?} of one to four axes"
    )]
    TableShape { extents: Vec<usize>, elements: usize },
    #[error("a score expression reads tables of {axes:?} axes, and is given tables of the shapes {given:?}")]
    Extents { given: Vec<Vec<usize>>, axes: Vec<usize> },
}
