//! A builder of expressions.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::node::{Class, Id, Leaf, Node};
use super::op::{Op, Test};
use super::table::ScoreTable;
use super::{OpenScore, ScoreError, ScoreExpr};

/// Real constants that are part of an expression. Other ones are numbers, whose values are data.
const CONSTANTS: [f32; 9] = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, f32::INFINITY, f32::NEG_INFINITY];

/// An expression under construction.
#[derive(Default)]
pub(super) struct Builder {
    nodes: Vec<Node>,
    classes: Vec<Class>,
    /// Hashes of the nodes' structure, which know neither names nor the order of construction.
    hashes: Vec<u64>,
    ids: HashMap<Node, Id>,
    numbers: Vec<f32>,
    tables: usize,
    /// The numbers of constants, by their bits.
    of_constants: HashMap<u32, u8>,
}

impl Builder {
    pub(super) fn leaf(&mut self, leaf: Leaf) -> Result<Id, ScoreError> {
        self.push(Node::Leaf(leaf), if leaf == Leaf::Score { Class::Real } else { Class::Index })
    }

    pub(super) fn index(&mut self, index: i32) -> Result<Id, ScoreError> {
        self.push(Node::Index(index), Class::Index)
    }

    pub(super) fn constant(&mut self, value: f32) -> Result<Id, ScoreError> {
        // 0 and -0 differ.
        if CONSTANTS.iter().any(|constant| constant.to_bits() == value.to_bits()) {
            return self.push(Node::Real(value.to_bits()), Class::Real);
        }
        let slot = match self.of_constants.get(&value.to_bits()) {
            Some(&slot) => slot,
            None => self.number(value)?,
        };
        self.of_constants.insert(value.to_bits(), slot);
        self.read_number(slot)
    }

    /// A new number.
    pub(super) fn number(&mut self, value: f32) -> Result<u8, ScoreError> {
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
            (Op::Neg, Node::Real(bits)) => self.constant(-f32::from_bits(bits)),
            (Op::Neg, Node::Index(index)) => self.index(index.wrapping_neg()),
            _ => self.push(Node::Op(op, operands), class),
        }
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
        self.push(Node::Select([condition, values[0], values[1]]), class)
    }

    /// The function whose value is `root`.
    pub(super) fn finish(mut self, root: Id) -> Result<OpenScore, ScoreError> {
        let mut root = [root; 2];
        self.unite("the root", &mut root, false)?;
        let mut canonical =
            Canonical { from: &self, ids: HashMap::new(), nodes: vec![], slots: [vec![], vec![]] };
        canonical.visit(root[0]);
        let Canonical { nodes, slots: [numbers, tables], .. } = canonical;
        let bits = |slot| self.numbers[usize::from(slot)].to_bits();
        Ok(OpenScore {
            expr: ScoreExpr(nodes.into()),
            numbers: numbers.into_iter().map(bits).collect(),
            tables: tables.into(),
        })
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
                *id = self.push(Node::OfIndex([*id]), Class::Real)?;
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
        let limit = ScoreExpr::MOST_NODES;
        if self.nodes.len() == limit {
            return Err(ScoreError::TooLarge { what: "nodes", limit });
        }
        let mut hasher = DefaultHasher::new();
        node.map(|_| 0, |_| 0, |_| 0).hash(&mut hasher);
        node.operands().for_each(|id| self.hashes[usize::from(id)].hash(&mut hasher));
        self.hashes.push(hasher.finish());
        let id = self.nodes.len() as Id;
        self.nodes.push(node);
        self.classes.push(class);
        self.ids.insert(node, id);
        Ok(id)
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
