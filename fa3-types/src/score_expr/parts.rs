//! The part of a function that is added after its scores' exponents: terms of a sum without the score.

use std::f64::consts::LOG2_E;

use super::ScoreReal;
use super::kind::{Kind, Step};
use super::node::{Id, Leaf, Node};
use super::op::Op;
use super::tile::{Place, ScoreBlock, ScoreProduct, ScoreTile};
use super::value::ScoreInputs;

/// An expression as `base · factor` and terms, with conditions under which it is -inf:
///
/// ```text
/// hidden ? -inf : base · factor + early terms + late terms
/// ```
///
/// A late term costs one addition for each score at most, because it is equal in all columns of a row, or changes in
/// equal steps. So it may be added to exponents, in place of the softmax's reference.
pub(super) struct Parts {
    base: Id,
    /// A factor that has one value in the tile.
    factor: Option<Id>,
    early: Vec<Term>,
    late: Vec<Term>,
    /// Conditions, and whether scores are visible where they hold.
    conditions: Vec<(Id, bool)>,
}

#[derive(Clone, Copy)]
struct Term {
    id: Id,
    is_subtracted: bool,
}

impl Parts {
    /// The parts of the node `value`.
    pub(super) fn of(nodes: &[Node], kinds: &[Kind], value: Id) -> Parts {
        let node = |id: Id| nodes[usize::from(id)];
        let kind = |id: Id| kinds[usize::from(id)];
        let mut reads = Vec::with_capacity(nodes.len());
        for node in nodes {
            let any = node.operands().any(|id| reads[usize::from(id)]);
            reads.push(any || *node == Node::Leaf(Leaf::Score));
        }
        let is_hidden = |id: Id| node(id) == Node::Real(f32::NEG_INFINITY.to_bits());
        let (mut visible, mut conditions) = (value, Vec::new());
        while let Node::Select([condition, yes, no]) = node(visible) {
            if !is_hidden(yes) && !is_hidden(no) {
                break;
            }
            conditions.push((condition, is_hidden(no)));
            visible = if is_hidden(no) { yes } else { no };
        }
        let (mut base, mut early, mut late) = (visible, Vec::new(), Vec::new());
        while let Node::Op(op @ (Op::Add | Op::Sub), [a, b]) = node(base) {
            let is_subtracted = op == Op::Sub;
            let (term, rest) = match [a, b].map(|id| reads[usize::from(id)]) {
                [true, false] => (Term { id: b, is_subtracted }, a),
                [false, true] if !is_subtracted => (Term { id: a, is_subtracted }, b),
                _ => break,
            };
            let Kind { of_column, step, is_index, .. } = kind(term.id);
            let terms = if !of_column || (step.is_some() && !is_index) { &mut late } else { &mut early };
            terms.push(term);
            base = rest;
        }
        if late.is_empty() {
            (base, early) = (visible, Vec::new());
        }
        let is_of_tile = |id: Id| !kind(id).of_row && !kind(id).of_column;
        let bounded = |id: Id| matches!(node(id), Node::Op(Op::Tanh, _));
        let mut factor = None;
        if let Node::Op(Op::Mul, [a, b]) = node(base)
            && early.is_empty()
        {
            factor = [[a, b], [b, a]].into_iter().find(|&[factor, of]| is_of_tile(factor) && bounded(of));
        }
        let base = factor.map_or(base, |[_, of]| of);
        Parts { base, factor: factor.map(|[factor, _]| factor), early, late, conditions }
    }

    /// Whether products stay products until the softmax.
    fn is_product(&self, nodes: &[Node]) -> bool {
        self.early.is_empty() && nodes[usize::from(self.base)] == Node::Leaf(Leaf::Score)
    }
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreTile<R, I> {
    /// Whether [`ScoreBlock::kept`] is the product.
    pub fn keeps_products(&self) -> bool {
        self.parts.is_product(&self.joint.nodes) && self.parts.conditions.is_empty()
    }

    /// Whether [`ScoreBlock::kept`] of a hidden score may become anything but -inf.
    pub fn must_hide_again(&self) -> bool {
        self.parts.factor.is_some() || !self.parts.late.is_empty()
    }

    /// Whether the function itself hides scores.
    pub fn hides(&self) -> bool {
        !self.parts.conditions.is_empty()
    }

    /// The factor of [`ScoreBlock::kept`] in an exponent of 2. `unit` is the unit of a product, times log2 e.
    pub fn scale_log2(&self, unit: R) -> R {
        match self.parts.factor {
            _ if self.parts.is_product(&self.joint.nodes) => unit,
            Some(factor) => {
                let factor = self.values[&factor].real();
                factor * factor.lit(LOG2_E)
            }
            None => unit.lit(LOG2_E),
        }
    }
}

impl<R: ScoreReal, I: ScoreInputs<R>> ScoreBlock<'_, R, I> {
    /// The value without the factor and the late terms, which the exponent of 2 gets:
    /// `kept · ScoreTile::scale_log2 + shift`.
    pub fn kept(&mut self, score: ScoreProduct<R>, row: usize, column: u32) -> R {
        let at = Place { score, row, column };
        let Parts { base, ref early, ref conditions, .. } = self.tile.parts;
        let (mut early, is_score) =
            (early.iter(), self.tile.joint.nodes[usize::from(base)] == Node::Leaf(Leaf::Score));
        let first = if is_score { early.next() } else { None };
        let mut kept = match first {
            None if is_score => score.product,
            None => self.value(base, at).real(),
            Some(&term) => score.product.fma(score.unit, self.term(term, at)),
        };
        for &term in early {
            kept = kept + self.term(term, at);
        }
        for &(condition, is_visible) in conditions {
            let (condition, hidden) = (self.value(condition, at).condition(), kept.lit(f64::NEG_INFINITY));
            kept = if is_visible {
                R::select(condition, kept, hidden)
            } else {
                R::select(condition, hidden, kept)
            };
        }
        kept
    }

    /// Evaluates what [`ScoreBlock::first_shift`] and [`ScoreBlock::shift`] need.
    pub fn prepare_shifts(&mut self, score: ScoreProduct<R>) {
        for row in [0, 1] {
            let at = Place { score, row, column: 0 };
            for &Term { id, .. } in &self.tile.parts.late {
                self.value(id, at);
                if let Some(Step::Multiple(factor, _)) = self.tile.kinds[usize::from(id)].step {
                    self.value(factor, at);
                }
            }
        }
    }

    /// The late terms of a row in the block's first column, times log2 e, plus `shift`.
    pub fn first_shift(&mut self, score: ScoreProduct<R>, shift: R, row: usize) -> R {
        let at = Place { score, row, column: 0 };
        self.tile.parts.late.iter().fold(shift, |shift, &Term { id, is_subtracted }| {
            let value = self.value(id, at).real();
            value.fma(value.lit(sign(is_subtracted) * LOG2_E), shift)
        })
    }

    /// The late terms of a row in a column, times log2 e, plus the `shift` of [`ScoreBlock::first_shift`].
    pub fn shift(&mut self, score: ScoreProduct<R>, first: R, row: usize, column: u32) -> R {
        let at = Place { score, row, column: 0 };
        let log2 = f64::from(column) * LOG2_E;
        self.tile.parts.late.iter().fold(first, |shift, &Term { id, is_subtracted }| {
            let log2 = sign(is_subtracted) * log2;
            match self.tile.kinds[usize::from(id)].step {
                _ if column == 0 => shift,
                None | Some(Step::Constant(0)) => shift,
                Some(Step::Constant(step)) => shift + shift.lit(log2 * f64::from(step)),
                Some(Step::Multiple(factor, step)) => {
                    let factor = self.value(factor, at).real();
                    factor.fma(factor.lit(log2 * f64::from(step)), shift)
                }
            }
        })
    }

    fn term(&mut self, Term { id, is_subtracted }: Term, at: Place<R>) -> R {
        let value = self.value(id, at).real();
        if is_subtracted { -value } else { value }
    }
}

fn sign(is_subtracted: bool) -> f64 {
    if is_subtracted { -1.0 } else { 1.0 }
}
