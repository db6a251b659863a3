//! What the value of a node depends on.

use super::node::{Id, Leaf, Node};
use super::op::Op;

/// A length that sequences do not reach. Below it, distances of queries and keys do not wrap.
const LENGTH: f64 = (1_u32 << 29) as f64;

/// What the value of a node in a tile depends on.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) of_row: bool,
    pub(super) of_key: bool,
    pub(super) is_index: bool,
    /// The difference of the values at neighbouring keys, if the node depends on keys and all differences are equal.
    pub(super) step: Option<Step>,
    /// Whether one operation uses the node, and once.
    pub(super) is_used_once: bool,
    /// A bound of the absolute value of an integer, if no operation wraps.
    most: f64,
}

/// The difference of a node's values at neighbouring keys.
#[derive(Clone, Copy)]
pub(super) enum Step {
    Constant(i32),
    /// A constant times the value of another node, which does not depend on keys.
    Multiple(Id, i32),
}

impl Kind {
    /// The kinds of the nodes of an expression. `heads_differ` says whether rows have different heads.
    pub(super) fn of_nodes(nodes: &[Node], heads_differ: bool) -> Vec<Kind> {
        let mut kinds = Vec::with_capacity(nodes.len());
        nodes.iter().for_each(|&node| kinds.push(Kind::new(node, nodes, &kinds, heads_differ)));
        let mut uses = vec![0; nodes.len()];
        nodes.iter().flat_map(|node| node.operands()).for_each(|id| uses[usize::from(id)] += 1);
        kinds.iter_mut().zip(uses).for_each(|(kind, uses)| kind.is_used_once = uses == 1);
        kinds
    }

    /// The kind of the node whose operands have these kinds.
    fn new(node: Node, nodes: &[Node], kinds: &[Kind], heads_differ: bool) -> Kind {
        let of = |id: Id| kinds[usize::from(id)];
        let any = |is: fn(Kind) -> bool| node.operands().any(|id| is(of(id)));
        let [of_row, of_key] = match node {
            Node::Leaf(Leaf::Score) => [true; 2],
            Node::Leaf(Leaf::Head) => [heads_differ, false],
            Node::Leaf(Leaf::Row | Leaf::Query) => [true, false],
            Node::Leaf(Leaf::Key) => [false, true],
            _ => [any(|kind| kind.of_row), any(|kind| kind.of_key)],
        };
        let is_index = match node {
            Node::Leaf(leaf) => leaf != Leaf::Score,
            Node::Index(_) => true,
            Node::Op(op, operands) => op.takes_indices() && operands.into_iter().all(|id| of(id).is_index),
            Node::Select([_, yes, no]) => of(yes).is_index && of(no).is_index,
            _ => false,
        };
        let most = match node {
            Node::Leaf(_) => LENGTH,
            Node::Index(index) => f64::from(index).abs(),
            Node::Op(Op::Add | Op::Sub, [a, b]) => of(a).most + of(b).most,
            Node::Op(Op::Mul, [a, b]) => of(a).most * of(b).most,
            _ => node.operands().map(|id| of(id).most).fold(0.0, f64::max),
        };
        let constant = |id: Id| match of(id) {
            Kind { of_key: false, .. } => Some(0),
            Kind { step: Some(Step::Constant(step)), .. } => Some(step),
            _ => None,
        };
        let step = match node {
            _ if !of_key => None,
            Node::Leaf(Leaf::Key) => Some(Step::Constant(1)),
            Node::OfIndex([index]) if of(index).most < f64::from(i32::MAX) => of(index).step,
            Node::Op(op, [a, b]) if is_index => {
                let steps = constant(a).zip(constant(b));
                let step = match (op, nodes[usize::from(a)], nodes[usize::from(b)]) {
                    (Op::Add, ..) => steps.map(|(a, b)| a.wrapping_add(b)),
                    (Op::Sub, ..) => steps.map(|(a, b)| a.wrapping_sub(b)),
                    (Op::Neg, ..) => constant(a).map(i32::wrapping_neg),
                    (Op::Mul, Node::Index(factor), _) | (Op::Mul, _, Node::Index(factor)) => {
                        steps.map(|(a, b)| a.wrapping_add(b).wrapping_mul(factor))
                    }
                    _ => None,
                };
                step.map(Step::Constant)
            }
            Node::Op(Op::Mul, [a, b]) => {
                let times = |factor: Id, other: Id| {
                    let step = constant(other).filter(|_| !of(factor).of_key)?;
                    Some(Step::Multiple(factor, step))
                };
                times(a, b).or_else(|| times(b, a))
            }
            _ => None,
        };
        Kind { of_row, of_key, is_index, step, is_used_once: false, most }
    }
}
