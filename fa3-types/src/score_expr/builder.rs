//! A builder of expressions.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::Wrapping;
use std::sync::Arc;

use super::node::{Class, Id, Leaf, Node};
use super::op::{IndexOp, Op, Test};
use super::table::ScoreTable;
use super::{OpenScore, ScoreError, ScoreExpr};

/// Real constants that are part of an expression. Other ones are numbers, whose values are data.
const CONSTANTS: [f32; 9] = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, f32::INFINITY, f32::NEG_INFINITY];

/// A bound of numbers, of scores and of indices, and of the reciprocals of numbers. With larger ones, derivatives may
/// be NaN.
const MOST: f64 = (1_u64 << 40) as f64;

/// An expression under construction.
#[derive(Default)]
pub(super) struct Builder {
    /// The largest number of nodes.
    limit: usize,
    nodes: Vec<Node>,
    classes: Vec<Class>,
    /// Bounds of the nodes' absolute values; infinite where a value may be infinite or NaN.
    most: Vec<f64>,
    /// Hashes of the nodes' structure, which know neither names nor the order of construction.
    hashes: Vec<u64>,
    ids: HashMap<Node, Id>,
    numbers: Vec<f32>,
    tables: usize,
    /// The numbers of constants, by their bits.
    of_constants: HashMap<u32, u8>,
}

impl Builder {
    /// A builder of at most `limit` nodes.
    pub(super) fn new(limit: usize) -> Builder {
        Builder { limit, ..Builder::default() }
    }

    pub(super) fn leaf(&mut self, leaf: Leaf) -> Result<Id, ScoreError> {
        self.push(Node::Leaf(leaf), if leaf == Leaf::Score { Class::Real } else { Class::Index })
    }

    pub(super) fn index(&mut self, index: i32) -> Result<Id, ScoreError> {
        self.push(Node::Index(index), Class::Index)
    }

    pub(super) fn constant(&mut self, value: f32) -> Result<Id, ScoreError> {
        // 0 and -0 differ.
        if CONSTANTS.iter().any(|constant| constant.to_bits() == value.to_bits()) {
            return self.real(value);
        }
        let slot = match self.of_constants.get(&value.to_bits()) {
            Some(&slot) => slot,
            None => self.number(value)?,
        };
        self.of_constants.insert(value.to_bits(), slot);
        self.read_number(slot)
    }

    /// A real constant that is part of the expression.
    pub(super) fn real(&mut self, value: f32) -> Result<Id, ScoreError> {
        self.push(Node::Real(value.to_bits()), Class::Real)
    }

    /// A new number.
    pub(super) fn number(&mut self, value: f32) -> Result<u8, ScoreError> {
        if !value.is_finite() {
            return Err(ScoreError::Number { value });
        }
        self.numbers.push(value);
        slot(self.numbers.len(), "numbers", ScoreExpr::MOST_NODES)
    }

    pub(super) fn read_number(&mut self, slot: u8) -> Result<Id, ScoreError> {
        self.push(Node::Number(slot), Class::Real)
    }

    /// A new table.
    pub(super) fn table(&mut self) -> Result<u8, ScoreError> {
        self.tables += 1;
        slot(self.tables, "tables", ScoreTable::NAMES.len())
    }

    /// An element of a table that has as many axes as there are indices.
    pub(super) fn read(&mut self, table: u8, indices: &[Id]) -> Result<Id, ScoreError> {
        for &index in indices {
            self.check("an index of a table", index, Class::Index, "an index")?;
        }
        let at = std::array::from_fn(|axis| indices.get(axis).copied());
        self.push(Node::Read { table, at }, Class::Real)
    }

    /// An operation of as many operands as it takes.
    pub(super) fn op(&mut self, op: Op, mut operands: [Id; 2]) -> Result<Id, ScoreError> {
        let class = self.unite(op.text(), &mut operands, op.takes_indices())?;
        if op.is_commutative() {
            self.order(&mut operands);
        }
        match (op, self.node(operands[0])) {
            (Op::Neg, Node::Real(bits)) => self.real(-f32::from_bits(bits)),
            (Op::Neg, Node::Index(index)) => self.index(index.wrapping_neg()),
            (Op::Neg, Node::Op(Op::Neg, [of, _])) => Ok(of),
            _ => match self.without_operation(op, operands) {
                Some(id) => Ok(id),
                None => self.push(Node::Op(op, operands), class),
            },
        }
    }

    /// An operation of two indices. Quotients by constant powers of two are shifts.
    pub(super) fn of_indices(&mut self, op: IndexOp, mut operands: [Id; 2]) -> Result<Id, ScoreError> {
        for operand in operands {
            self.check(op.text(), operand, Class::Index, "indices")?;
        }
        if op.is_commutative() {
            self.order(&mut operands);
        }
        match operands.map(|id| self.node(id)) {
            [_, Node::Index(divisor @ 1..)] if op == IndexOp::Div && divisor.count_ones() == 1 => {
                let bits = self.index(divisor.trailing_zeros() as i32)?;
                self.of_indices(IndexOp::Right, [operands[0], bits])
            }
            [Node::Index(a), Node::Index(b)] => self.index(op.of([a, b].map(Wrapping)).0),
            [_, Node::Index(0)] if op == IndexOp::Right => Ok(operands[0]),
            _ => self.push(Node::OfIndices(op, operands), Class::Index),
        }
    }

    /// The remainder of an index, which has the divisor's sign.
    pub(super) fn remainder(&mut self, [a, b]: [Id; 2]) -> Result<Id, ScoreError> {
        for operand in [a, b] {
            self.check("%", operand, Class::Index, "indices")?;
        }
        if let Node::Index(divisor @ 1..) = self.node(b)
            && divisor.count_ones() == 1
        {
            let below = self.index(divisor - 1)?;
            return self.of_indices(IndexOp::And, [a, below]);
        }
        let quotient = self.of_indices(IndexOp::Div, [a, b])?;
        let product = self.op(Op::Mul, [quotient, b])?;
        self.op(Op::Sub, [a, product])
    }

    /// The index of a number.
    pub(super) fn index_of(&mut self, number: Id) -> Result<Id, ScoreError> {
        if self.classes[usize::from(number)] == Class::Index {
            return Ok(number);
        }
        self.check("int", number, Class::Real, "a number")?;
        self.push(Node::ToIndex([number]), Class::Index)
    }

    /// The operand that an operation with 0 or 1 leaves as it is.
    fn without_operation(&self, op: Op, [a, b]: [Id; 2]) -> Option<Id> {
        let has = |operand, cases: &[(Op, f32)]| {
            cases.iter().any(|&(of, value)| op == of && self.is_real(operand, value))
        };
        if has(a, &[(Op::Add, 0.0), (Op::Mul, 1.0)]) {
            return Some(b);
        }
        has(b, &[(Op::Add, 0.0), (Op::Sub, 0.0), (Op::Mul, 1.0), (Op::Div, 1.0)]).then_some(a)
    }

    /// Whether a node is this real constant. 0 and -0 are equal.
    pub(super) fn is_real(&self, id: Id, value: f32) -> bool {
        matches!(self.node(id), Node::Real(bits) if f32::from_bits(bits) == value)
    }

    /// Whether the value of a real node is neither infinite nor NaN.
    pub(super) fn is_finite(&self, id: Id) -> bool {
        self.most[usize::from(id)].is_finite()
    }

    /// The real number of an index.
    pub(super) fn of_index(&mut self, index: Id) -> Result<Id, ScoreError> {
        self.push(Node::OfIndex([index]), Class::Real)
    }

    pub(super) fn test(&mut self, test: Test, mut operands: [Id; 2]) -> Result<Id, ScoreError> {
        self.unite(test.text(), &mut operands, true)?;
        if test == Test::Equal {
            self.order(&mut operands);
        }
        self.push(Node::Test(test, operands), Class::Bool)
    }

    pub(super) fn not(&mut self, operand: Id) -> Result<Id, ScoreError> {
        self.check("!", operand, Class::Bool, "a condition")?;
        self.push(Node::Not([operand]), Class::Bool)
    }

    /// One of `&&` and `||`.
    pub(super) fn both(
        &mut self,
        node: fn([Id; 2]) -> Node,
        mut operands: [Id; 2],
    ) -> Result<Id, ScoreError> {
        for operand in operands {
            self.check("&& or ||", operand, Class::Bool, "conditions")?;
        }
        self.order(&mut operands);
        self.push(node(operands), Class::Bool)
    }

    pub(super) fn select(&mut self, condition: Id, mut values: [Id; 2]) -> Result<Id, ScoreError> {
        self.check("if", condition, Class::Bool, "a condition")?;
        let class = self.unite("then or else", &mut values, true)?;
        if values[0] == values[1] {
            return Ok(values[0]);
        }
        self.push(Node::Select([condition, values[0], values[1]]), class)
    }

    /// The function whose value is `root`.
    pub(super) fn finish(mut self, root: Id) -> Result<OpenScore, ScoreError> {
        let mut root = [root; 2];
        self.unite("the root", &mut root, false)?;
        let Canonical { nodes, slots: [numbers, tables], .. } = self.canonical(&root[..1]);
        let bits = |slot| self.numbers[usize::from(slot)].to_bits();
        Ok(OpenScore {
            expr: ScoreExpr(nodes.into()),
            numbers: numbers.into_iter().map(bits).collect(),
            tables: tables.into(),
        })
    }

    /// The nodes that several roots use, and the places of the roots among them.
    pub(super) fn joint(&self, roots: &[Id]) -> (Arc<[Node]>, impl Fn(Id) -> Id) {
        let Canonical { nodes, ids, .. } = self.canonical(roots);
        (nodes.into(), move |root| ids[&root])
    }

    fn canonical(&self, roots: &[Id]) -> Canonical<'_> {
        let mut canonical =
            Canonical { from: self, ids: HashMap::new(), nodes: vec![], slots: [vec![], vec![]] };
        roots.iter().for_each(|&root| canonical.visit(root));
        canonical
    }

    fn node(&self, id: Id) -> Node {
        self.nodes[usize::from(id)]
    }

    /// Converts an index to a real number where the other operand is one, or the operation takes no indices.
    fn unite(
        &mut self,
        operation: &'static str,
        operands: &mut [Id; 2],
        takes_indices: bool,
    ) -> Result<Class, ScoreError> {
        let classes = operands.map(|id| self.classes[usize::from(id)]);
        if classes.contains(&Class::Bool) {
            let given = Class::Bool.name();
            return Err(ScoreError::Operand { operation, given, expected: "numbers" });
        }
        if takes_indices && classes == [Class::Index; 2] {
            return Ok(Class::Index);
        }
        for id in operands {
            if let Node::Index(index) = self.node(*id) {
                *id = self.constant(index as f32)?;
            } else if self.classes[usize::from(*id)] == Class::Index {
                *id = self.of_index(*id)?;
            }
        }
        Ok(Class::Real)
    }

    fn check(
        &self,
        operation: &'static str,
        id: Id,
        class: Class,
        expected: &'static str,
    ) -> Result<(), ScoreError> {
        match self.classes[usize::from(id)] {
            given if given == class => Ok(()),
            given => Err(ScoreError::Operand { operation, given: given.name(), expected }),
        }
    }

    /// Brings operands of a commutative operation into their order.
    fn order(&self, operands: &mut [Id; 2]) {
        operands.sort_by_key(|&id| self.hashes[usize::from(id)]);
    }

    fn push(&mut self, node: Node, class: Class) -> Result<Id, ScoreError> {
        if let Some(&id) = self.ids.get(&node) {
            return Ok(id);
        }
        if self.nodes.len() == self.limit {
            return Err(ScoreError::TooLarge { what: "nodes", limit: self.limit });
        }
        let mut hasher = DefaultHasher::new();
        node.map(|_| 0, |_| 0, |_| 0).hash(&mut hasher);
        node.operands().for_each(|id| self.hashes[usize::from(id)].hash(&mut hasher));
        self.hashes.push(hasher.finish());
        self.most.push(self.bound(node));
        let id = self.nodes.len() as Id;
        self.nodes.push(node);
        self.classes.push(class);
        self.ids.insert(node, id);
        Ok(id)
    }

    /// A bound of a node's absolute value, of the bounds of its operands.
    fn bound(&self, node: Node) -> f64 {
        let of = |id: Id| self.most[usize::from(id)];
        let most = match node {
            Node::Leaf(_) | Node::Number(_) | Node::Index(_) | Node::OfIndex(_) => MOST,
            Node::ToIndex(_) | Node::OfIndices(..) => MOST,
            Node::Real(bits) => f32::from_bits(bits).abs().into(),
            Node::Select([_, a, b]) => of(a).max(of(b)),
            Node::Read { .. } | Node::Test(..) | Node::Not(_) | Node::And(_) | Node::Or(_) => f64::INFINITY,
            Node::Op(op, [a, b]) => match op {
                Op::Add | Op::Sub => of(a) + of(b),
                Op::Mul => of(a) * of(b),
                Op::Neg | Op::Abs => of(a),
                Op::Floor => of(a) + 1.0,
                Op::Min | Op::Max => of(a).max(of(b)),
                Op::Exp2 => of(a).exp2(),
                Op::Tanh if of(a).is_finite() => 1.0,
                Op::Div if matches!(self.node(b), Node::Number(_)) => of(a) * MOST,
                Op::Div if matches!(self.node(b), Node::Real(_)) => of(a) / of(b),
                Op::Tanh | Op::Div | Op::Log2 | Op::Sqrt => f64::INFINITY,
            },
        };
        if most <= f32::MAX.into() { most } else { f64::INFINITY }
    }
}

/// The slot of the last of `count` numbers or tables.
fn slot(count: usize, what: &'static str, limit: usize) -> Result<u8, ScoreError> {
    if count > limit { Err(ScoreError::TooLarge { what, limit }) } else { Ok(count as u8 - 1) }
}

/// Nodes that an expression uses, in post-order.
struct Canonical<'a> {
    from: &'a Builder,
    ids: HashMap<Id, Id>,
    nodes: Vec<Node>,
    /// The numbers and the tables that are used, in the order of their first use.
    slots: [Vec<u8>; 2],
}

impl Canonical<'_> {
    fn visit(&mut self, id: Id) {
        if self.ids.contains_key(&id) {
            return;
        }
        let node = self.from.node(id);
        node.operands().for_each(|operand| self.visit(operand));
        let [numbers, tables] = &mut self.slots;
        let node = node.map(|id| self.ids[&id], |slot| place(numbers, slot), |slot| place(tables, slot));
        self.ids.insert(id, self.nodes.len() as Id);
        self.nodes.push(node);
    }
}

/// The place of `slot` in a list, to which it is added if it is not there.
fn place(slots: &mut Vec<u8>, slot: u8) -> u8 {
    let place = slots.iter().position(|&other| other == slot).unwrap_or_else(|| {
        slots.push(slot);
        slots.len() - 1
    });
    place as u8
}
