//! Expressions as text.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::builder::Builder;
use super::node::{Id, Leaf, Node};
use super::op::{IndexOp, Op, Test};
use super::{OpenScore, ScoreError, ScoreExpr, ScoreFunction, ScoreGradients, ScoreTable, ScoreValue};

/// The largest number of parentheses, operators and functions that lie within one another.
const MOST_DEPTH: usize = 64;

impl ScoreFunction {
    /// The function that a text describes, with the values of the names in it. Values that the text does not name are
    /// not used.
    ///
    /// | text | value |
    /// |---|---|
    /// | `s` | the score, scaled and capped |
    /// | `b`, `h` | sequence, query head |
    /// | `row`, `k` | row of the sequence's queries, key of the sequence, both from 0 |
    /// | `q` | row + keys − rows: the last query stands at the last key, as under a causal mask |
    /// | `name` | a number |
    /// | `name[i, j]` | an element of a table |
    /// | `+ - *` and unary `-`, `abs min max` | numbers or indices; an index beside a number is converted |
    /// | `/`, `exp2 log2 sqrt tanh floor` | numbers |
    /// | `//`, `%`, `& \| ^ << >>` | indices. A quotient is rounded down, and x // 0 is 0 |
    /// | `int` | the index of a number, rounded to zero |
    /// | `< <= > >= == !=`, `! && \|\|` | conditions |
    /// | `if c then x else y` | a choice |
    ///
    /// Indices are integers of 32 bits that wrap, as are integers such as `3` beside them. All other values are real
    /// numbers. Real numbers in the text, except 0, ±1, ±2, ±1/2 and `inf`, are numbers of the function, not constants
    /// of the expression. A table's index below 0 counts from the end; beyond the ends, the first or the last element
    /// counts.
    ///
    /// ```
    /// use fa3_types::{ScoreFunction, ScoreTable};
    ///
    /// let slopes = ScoreTable::new(&[2], [-0.5, -0.25])?;
    /// let alibi = ScoreFunction::parse("s + slope[h] * (q - k)", [("slope", slopes.into())])?;
    /// let cap = |bound: f32| ScoreFunction::parse("cap * tanh(s / cap)", [("cap", bound.into())]);
    /// assert_eq!(cap(30.0)?.expr(), cap(50.0)?.expr());
    /// assert_eq!(alibi.tables()[0].extents(), [2]);
    /// # Ok::<(), fa3_types::ScoreError>(())
    /// ```
    ///
    /// # Errors
    /// [`ScoreError`] with the first violation.
    pub fn parse<'n>(
        text: &str,
        values: impl IntoIterator<Item = (&'n str, ScoreValue)>,
    ) -> Result<ScoreFunction, ScoreError> {
        let (mut parser, mut tables) = (Parser::new(text), Vec::new());
        for (name, value) in values {
            parser.name(name, &value)?;
            if let ScoreValue::Table(table) = value {
                tables.push(table);
            }
        }
        let open = parser.parse()?;
        let tables: Arc<[_]> =
            open.tables().iter().map(|&table| tables[usize::from(table)].clone()).collect();
        let extents: Vec<_> = tables.iter().map(|table: &ScoreTable| table.extents.clone()).collect();
        let gradients = ScoreGradients::of(tables.iter().map(ScoreTable::has_gradient));
        Ok(ScoreFunction { form: open.form(&extents)?.with_gradients(gradients), tables })
    }
}

impl OpenScore {
    /// The function that a text describes, as [`ScoreFunction::parse`] does. Its tables are `t0` to `t7`, and have as
    /// many axes as they are first read with. Other names have no values.
    ///
    /// ```
    /// use fa3_types::OpenScore;
    ///
    /// let bias = OpenScore::parse("s + t1[h] * 0.3 + t0[q, k]")?;
    /// assert_eq!(bias, OpenScore::parse("t0[q, k] + (0.3 * t1[h] + s)")?);
    /// assert_eq!(bias.tables().len(), 2);
    /// # Ok::<(), fa3_types::ScoreError>(())
    /// ```
    ///
    /// # Errors
    /// [`ScoreError`] with the first violation.
    pub fn parse(text: &str) -> Result<OpenScore, ScoreError> {
        let mut parser = Parser::new(text);
        for number in 0..ScoreTable::NAMES.len() {
            let table = parser.builder.table()?;
            parser.names.insert(format!("t{number}"), Slot::Table { table, axes: None });
        }
        parser.parse()
    }
}

/// The slot of a name.
#[derive(Clone, Copy)]
enum Slot {
    Number(u8),
    /// A table. The number of axes is known after the first use, at the latest.
    Table {
        table: u8,
        axes: Option<usize>,
    },
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
    depth: usize,
    builder: Builder,
    names: HashMap<String, Slot>,
}

/// Words of the language beside leaves and operations.
const WORDS: [&str; 5] = ["if", "then", "else", "inf", "int"];

/// Binary operators by rising precedence, which is Rust's.
const LEVELS: [&[&str]; 9] = [
    &["||"],
    &["&&"],
    &["<=", "<", ">=", ">", "==", "!="],
    &["|"],
    &["^"],
    &["&"],
    &["<<", ">>"],
    &["+", "-"],
    &["*", "/", "//", "%"],
];

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Parser<'a> {
        let (builder, names) = (Builder::new(ScoreExpr::MOST_NODES), HashMap::new());
        Parser { rest: text, text, depth: 0, builder, names }
    }

    fn parse(mut self) -> Result<OpenScore, ScoreError> {
        let root = self.expr()?;
        if !self.rest.trim_start().is_empty() {
            return Err(self.error("the end or an operator"));
        }
        self.builder.finish(root)
    }

    fn name(&mut self, name: &str, value: &ScoreValue) -> Result<(), ScoreError> {
        let reserved = |what| ScoreError::ReservedName { name: name.to_owned(), what };
        if Leaf::ALL.iter().any(|leaf| leaf.text() == name) {
            return Err(reserved("a property of each element"));
        }
        if WORDS.contains(&name) || Op::ALL.iter().any(|op| op.text() == name) {
            return Err(reserved("a word of the language"));
        }
        let slot = match value {
            ScoreValue::Number(number) => Slot::Number(self.builder.number(*number)?),
            ScoreValue::Table(table) => {
                let axes = Some(table.extents().len());
                Slot::Table { table: self.builder.table()?, axes }
            }
        };
        self.names.insert(name.to_owned(), slot);
        Ok(())
    }

    fn error(&self, expected: &'static str) -> ScoreError {
        let rest = self.rest.trim_start();
        let column = self.text[..self.text.len() - rest.len()].chars().count() + 1;
        let found = rest.chars().next().map_or("its end".to_owned(), |found| format!("{found:?}"));
        ScoreError::Syntax { column, found, expected }
    }

    /// Takes `token` if it is next.
    fn take(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str, expected: &'static str) -> Result<(), ScoreError> {
        if self.take(token) { Ok(()) } else { Err(self.error(expected)) }
    }

    /// The word that is next, if any.
    fn peek_word(&self) -> &'a str {
        let rest = self.rest.trim_start();
        let is_letter = |c: char| c.is_alphanumeric() || c == '_';
        match rest.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            true => &rest[..rest.find(|c| !is_letter(c)).unwrap_or(rest.len())],
            false => "",
        }
    }

    /// The binary operator that is next, if any: the longest.
    fn peek_operator(&self) -> Option<&'static str> {
        let (rest, operators) = (self.rest.trim_start(), LEVELS.iter().copied().flatten().copied());
        operators.filter(|operator| rest.starts_with(operator)).max_by_key(|operator| operator.len())
    }

    fn expect_word(&mut self, word: &'static str) -> Result<(), ScoreError> {
        if self.peek_word() != word {
            return Err(self.error(word));
        }
        self.take(word);
        Ok(())
    }

    /// Calls `parse` one level deeper.
    fn deeper(&mut self, parse: impl FnOnce(&mut Self) -> Result<Id, ScoreError>) -> Result<Id, ScoreError> {
        if self.depth == MOST_DEPTH {
            return Err(ScoreError::TooLarge { what: "levels", limit: MOST_DEPTH });
        }
        self.depth += 1;
        let id = parse(self)?;
        self.depth -= 1;
        Ok(id)
    }

    fn expr(&mut self) -> Result<Id, ScoreError> {
        self.deeper(|parser| {
            if parser.peek_word() != "if" {
                return parser.binary(0);
            }
            parser.expect_word("if")?;
            let condition = parser.expr()?;
            parser.expect_word("then")?;
            let yes = parser.expr()?;
            parser.expect_word("else")?;
            let no = parser.expr()?;
            parser.builder.select(condition, [yes, no])
        })
    }

    /// Operands and operators of a level and the levels above it.
    fn binary(&mut self, level: usize) -> Result<Id, ScoreError> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = self.peek_operator().filter(|operator| operators.contains(operator)) {
            self.take(operator);
            let right = self.binary(level + 1)?;
            let builder = &mut self.builder;
            left = match operator {
                "||" => builder.both(Node::Or, [left, right]),
                "&&" => builder.both(Node::And, [left, right]),
                "<" => builder.test(Test::Less, [left, right]),
                ">" => builder.test(Test::Less, [right, left]),
                "<=" => builder.test(Test::AtMost, [left, right]),
                ">=" => builder.test(Test::AtMost, [right, left]),
                "==" => builder.test(Test::Equal, [left, right]),
                "!=" => {
                    let equal = builder.test(Test::Equal, [left, right])?;
                    builder.not(equal)
                }
                "+" => builder.op(Op::Add, [left, right]),
                "-" => builder.op(Op::Sub, [left, right]),
                "*" => builder.op(Op::Mul, [left, right]),
                "/" => builder.op(Op::Div, [left, right]),
                "//" => builder.of_indices(IndexOp::Div, [left, right]),
                "%" => builder.remainder([left, right]),
                "&" => builder.of_indices(IndexOp::And, [left, right]),
                "|" => builder.of_indices(IndexOp::Or, [left, right]),
                "^" => builder.of_indices(IndexOp::Xor, [left, right]),
                "<<" => builder.of_indices(IndexOp::Left, [left, right]),
                _ => builder.of_indices(IndexOp::Right, [left, right]),
            }?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Id, ScoreError> {
        if self.take("-") {
            let operand = self.deeper(Parser::unary)?;
            return self.builder.op(Op::Neg, [operand; 2]);
        }
        if self.take("!") {
            let operand = self.deeper(Parser::unary)?;
            return self.builder.not(operand);
        }
        self.atom()
    }

    fn atom(&mut self) -> Result<Id, ScoreError> {
        if self.take("(") {
            let id = self.expr()?;
            self.expect(")", "`)`")?;
            return Ok(id);
        }
        let word = self.peek_word();
        if word.is_empty() {
            return self.literal();
        }
        let start = self.rest;
        self.take(word);
        if let Some(&leaf) = Leaf::ALL.iter().find(|leaf| leaf.text() == word) {
            return self.builder.leaf(leaf);
        }
        if word == "inf" {
            return self.builder.constant(f32::INFINITY);
        }
        if word == "int" {
            self.expect("(", "`(`")?;
            let number = self.expr()?;
            self.expect(")", "`)`")?;
            return self.builder.index_of(number);
        }
        if let Some(&op) = Op::ALL.iter().find(|op| op.text() == word) {
            self.expect("(", "`(`")?;
            let first = self.expr()?;
            let mut operands = [first; 2];
            if op.operands() == 2 {
                self.expect(",", "`,`")?;
                operands[1] = self.expr()?;
            }
            self.expect(")", "`)`")?;
            return self.builder.op(op, operands);
        }
        let kind = |given, expected| ScoreError::Kind { name: word.to_owned(), given, expected };
        let is_read = self.take("[");
        match self.names.get(word).copied() {
            None if WORDS.contains(&word) => {
                self.rest = start;
                Err(self.error("a value"))
            }
            None => Err(ScoreError::UnknownName { name: word.to_owned() }),
            Some(Slot::Number(_)) if is_read => Err(kind("number", "table")),
            Some(Slot::Number(slot)) => self.builder.read_number(slot),
            Some(Slot::Table { .. }) if !is_read => Err(kind("table", "number")),
            Some(Slot::Table { table, axes }) => {
                let mut indices = vec![self.expr()?];
                while self.take(",") {
                    indices.push(self.expr()?);
                }
                self.expect("]", "`,` or `]`")?;
                let expected = axes.unwrap_or(indices.len()).min(ScoreTable::MOST_AXES);
                if indices.len() != expected {
                    let (name, given) = (word.to_owned(), indices.len());
                    return Err(ScoreError::Indices { name, given, expected });
                }
                self.names.insert(word.to_owned(), Slot::Table { table, axes: Some(expected) });
                self.builder.read(table, &indices)
            }
        }
    }

    /// A number: digits, and optionally a fraction and an exponent.
    fn literal(&mut self) -> Result<Id, ScoreError> {
        let rest = self.rest.trim_start();
        let mut before = ' ';
        let is_part = |c: char| {
            let part =
                c.is_ascii_digit() || c == '.' || c == 'e' || (matches!(c, '+' | '-') && before == 'e');
            before = c;
            !part
        };
        let literal = &rest[..rest.find(is_part).unwrap_or(rest.len())];
        let id = match (literal.parse::<i32>(), literal.parse::<f32>()) {
            (Ok(index), _) => self.builder.index(index),
            (_, Ok(number)) => self.builder.constant(number),
            _ => Err(self.error("a value")),
        }?;
        self.take(literal);
        Ok(id)
    }
}

/// The precedence of an operator in [`LEVELS`]; above them of unary operators and of values.
fn level(operator: &str) -> usize {
    LEVELS.iter().position(|operators| operators.contains(&operator)).unwrap_or(UNARY)
}

const UNARY: usize = LEVELS.len();
const ATOM: usize = UNARY + 1;

impl ScoreExpr {
    /// The text of a node, and its precedence.
    fn text(&self, id: Id) -> (String, usize) {
        // An operand, in parentheses if its precedence is below `least`.
        let of = |id: Id, least: usize| match self.text(id) {
            (text, level) if level < least => format!("({text})"),
            (text, _) => text,
        };
        let list = |ids: &mut dyn Iterator<Item = Id>| ids.map(|id| of(id, 0)).collect::<Vec<_>>().join(", ");
        let binary = |operator: &str, [a, b]: [Id; 2]| {
            let level = level(operator);
            (format!("{} {operator} {}", of(a, level), of(b, level + 1)), level)
        };
        let unary = |operator: &str, a: Id| (format!("{operator}{}", of(a, ATOM)), UNARY);
        let negative = |text: String| if text.starts_with('-') { (text, UNARY) } else { (text, ATOM) };
        match self.nodes()[usize::from(id)] {
            Node::Leaf(leaf) => (leaf.text().to_owned(), ATOM),
            Node::Real(bits) => negative(format!("{:?}", f32::from_bits(bits))),
            Node::Index(index) => negative(index.to_string()),
            Node::Number(slot) => (format!("x{slot}"), ATOM),
            node @ Node::Read { table, .. } => (format!("t{table}[{}]", list(&mut node.operands())), ATOM),
            Node::OfIndex([index]) => self.text(index),
            Node::ToIndex([number]) => (format!("int({})", of(number, 0)), ATOM),
            Node::OfIndices(op, operands) => binary(op.text(), operands),
            Node::Op(Op::Neg, [a, _]) => unary(Op::Neg.text(), a),
            Node::Op(op, operands) if level(op.text()) < UNARY => binary(op.text(), operands),
            Node::Op(op, operands) => {
                let operands = list(&mut operands.into_iter().take(op.operands()));
                (format!("{}({operands})", op.text()), ATOM)
            }
            Node::Test(test, operands) => binary(test.text(), operands),
            Node::And(operands) => binary("&&", operands),
            Node::Or(operands) => binary("||", operands),
            Node::Not([a]) => unary("!", a),
            Node::Select([condition, yes, no]) => {
                // A choice is in parentheses anywhere but at the root.
                let [condition, yes, no] = [condition, yes, no].map(|id| of(id, 0));
                (format!("(if {condition} then {yes} else {no})"), ATOM)
            }
        }
    }
}

impl fmt::Display for ScoreExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(self.nodes().len() as Id - 1).0)
    }
}
