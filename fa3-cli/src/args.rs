//! Options that several verbs share.

pub(crate) mod cache;
pub(crate) mod choice;
pub(crate) mod function;
pub(crate) mod json;
pub(crate) mod mask;
pub(crate) mod number;
pub(crate) mod plan;
pub(crate) mod problem;
pub(crate) mod score;
