//! Kinds of nodes: the sides of a tile that a node's value depends on.

use super::node::{Id, Leaf, Node};
use super::op::{IndexOp, Op};
use super::tile::ScoreRows;

/// A length that sequences do not reach. Below it, distances of queries and keys do not wrap.
const LENGTH: f64 = (1_u32 << 29) as f64;

/// A node's dependence on rows and columns of a tile.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) of_row: bool,
    pub(super) of_column: bool,
    pub(super) is_index: bool,
    /// The difference of the values in neighbouring columns, if the node depends on columns and all differences are
    /// equal.
    pub(super) step: Option<Step>,
    /// The difference of an integer's values in neighbouring rows, if all differences are equal.
    pub(super) row_step: Option<i32>,
    /// Whether the value depends on row and column, and only on their difference.
    pub(super) of_diagonal: bool,
    /// Whether one operation uses the node, and once, and the node is no result.
    pub(super) is_used_once: bool,
    /// A bound of the absolute value of an integer, if no operation wraps.
    pub(super) most: f64,
}

/// The difference of a node's values in neighbouring columns.
#[derive(Clone, Copy)]
pub(super) enum Step {
    Constant(i32),
    /// A constant times the value of another node, which does not depend on columns.
    Multiple(Id, i32),
}

impl Kind {
    /// The kinds of the nodes of an expression, some of which are `results`.
    pub(super) fn of_nodes(
        nodes: &[Node],
        results: impl IntoIterator<Item = Id>,
        rows: ScoreRows,
    ) -> Vec<Kind> {
        let mut kinds = Vec::with_capacity(nodes.len());
        nodes.iter().for_each(|&node| kinds.push(Kind::new(node, nodes, &kinds, rows)));
        let mut uses = vec![0; nodes.len()];
        let used = nodes.iter().flat_map(|node| node.operands()).chain(results);
        used.for_each(|id| uses[usize::from(id)] += 1);
        kinds.iter_mut().zip(uses).for_each(|(kind, uses)| kind.is_used_once = uses == 1);
        kinds
    }

    /// The kind of the node whose operands have these kinds.
    fn new(node: Node, nodes: &[Node], kinds: &[Kind], rows: ScoreRows) -> Kind {
        let of = |id: Id| kinds[usize::from(id)];
        let any = |is: fn(Kind) -> bool| node.operands().any(|id| is(of(id)));
        let [of_row, of_column] = if let Node::Leaf(leaf) = node {
            let are_keys = rows == ScoreRows::Keys;
            match leaf {
                Leaf::Score => [true; 2],
                Leaf::Batch => [false; 2],
                Leaf::Head => [rows == ScoreRows::OfHeads, false],
                Leaf::Row | Leaf::Query => [!are_keys, are_keys],
                Leaf::Key => [are_keys, !are_keys],
            }
        } else {
            [any(|kind| kind.of_row), any(|kind| kind.of_column)]
        };
        let is_index = match node {
            Node::Leaf(leaf) => leaf != Leaf::Score,
            Node::Index(_) | Node::ToIndex(_) | Node::OfIndices(..) => true,
            Node::Op(op, operands) => op.takes_indices() && operands.into_iter().all(|id| of(id).is_index),
            Node::Select([_, yes, no]) => of(yes).is_index && of(no).is_index,
            Node::Real(_) | Node::Number(_) | Node::Read { .. } | Node::OfIndex(_) => false,
            Node::Test(..) | Node::Not(_) | Node::And(_) | Node::Or(_) => false,
        };
        let most = if let Node::Leaf(_) = node {
            LENGTH
        } else if let Node::Index(index) = node {
            f64::from(index).abs()
        } else if let Node::Op(Op::Add | Op::Sub, [a, b]) = node {
            of(a).most + of(b).most
        } else if let Node::Op(Op::Mul, [a, b]) = node {
            of(a).most * of(b).most
        } else if let Node::OfIndices(IndexOp::And | IndexOp::Or | IndexOp::Xor, [a, b]) = node {
            of(a).most + of(b).most + 1.0
        } else if let Node::OfIndices(IndexOp::Left, _) | Node::ToIndex(_) = node {
            -f64::from(i32::MIN)
        } else {
            node.operands().map(|id| of(id).most).fold(0.0, f64::max)
        };
        let row_step = row_step(node, nodes, |id| of(id).row_step, rows);
        let none = Kind {
            of_row,
            of_column,
            is_index,
            step: None,
            row_step,
            of_diagonal: false,
            is_used_once: false,
            most,
        };
        let kind = Kind { step: none.step(node, nodes, kinds), ..none };
        let is_difference =
            matches!((kind.step, row_step), (Some(Step::Constant(column)), Some(row)) if column == -row);
        let operands_are = node.operands().all(|id| {
            let Kind { of_row, of_column, of_diagonal, .. } = of(id);
            of_diagonal || !of_row && !of_column
        });
        let of_diagonal =
            of_row && of_column && (is_difference || operands_are && !matches!(node, Node::Leaf(_)));
        Kind { of_diagonal, ..kind }
    }

    /// The difference of the node's values in neighbouring columns, if all differences are equal.
    fn step(self, node: Node, nodes: &[Node], kinds: &[Kind]) -> Option<Step> {
        let of = |id: Id| kinds[usize::from(id)];
        let constant = |id: Id| match (of(id).of_column, of(id).step) {
            (false, _) => Some(0),
            (true, Some(Step::Constant(step))) => Some(step),
            (true, Some(Step::Multiple(..)) | None) => None,
        };
        if !self.of_column {
            return None;
        }
        if let Node::Leaf(_) = node {
            return (!self.of_row).then_some(Step::Constant(1));
        }
        if let Node::OfIndex([index]) = node {
            return of(index).step.filter(|_| of(index).most < f64::from(i32::MAX));
        }
        let Node::Op(op, [a, b]) = node else { return None };
        if !self.is_index {
            let times = |factor: Id, other: Id| {
                let step = constant(other).filter(|_| !of(factor).of_column)?;
                Some(Step::Multiple(factor, step))
            };
            return times(a, b).or_else(|| times(b, a)).filter(|_| op == Op::Mul);
        }
        let (left, right) = (constant(a)?, constant(b)?);
        let step = match (op, nodes[usize::from(a)], nodes[usize::from(b)]) {
            (Op::Add, ..) => left.wrapping_add(right),
            (Op::Sub, ..) => left.wrapping_sub(right),
            (Op::Neg, ..) => left.wrapping_neg(),
            (Op::Mul, Node::Index(factor), _) => right.wrapping_mul(factor),
            (Op::Mul, _, Node::Index(factor)) => left.wrapping_mul(factor),
            _ => return None,
        };
        Some(Step::Constant(step))
    }
}

/// The difference of an integer's values in neighbouring rows of one head, if all differences are equal. `of` gives the
/// differences of operands.
fn row_step(node: Node, nodes: &[Node], of: impl Fn(Id) -> Option<i32>, rows: ScoreRows) -> Option<i32> {
    let are_keys = match rows {
        ScoreRows::OfHead => false,
        ScoreRows::OfHeads => return None,
        ScoreRows::Keys => true,
    };
    if let Node::Leaf(leaf) = node {
        return match leaf {
            Leaf::Score => None,
            Leaf::Batch | Leaf::Head => Some(0),
            Leaf::Row | Leaf::Query => Some(i32::from(!are_keys)),
            Leaf::Key => Some(i32::from(are_keys)),
        };
    }
    if let Node::Index(_) = node {
        return Some(0);
    }
    let Node::Op(op, [a, b]) = node else { return None };
    let (left, right) = (of(a)?, of(b)?);
    match (op, nodes[usize::from(a)], nodes[usize::from(b)]) {
        (Op::Add, ..) => Some(left.wrapping_add(right)),
        (Op::Sub, ..) => Some(left.wrapping_sub(right)),
        (Op::Neg, ..) => Some(left.wrapping_neg()),
        (Op::Mul, Node::Index(factor), _) => Some(right.wrapping_mul(factor)),
        (Op::Mul, _, Node::Index(factor)) => Some(left.wrapping_mul(factor)),
        _ => None,
    }
}
