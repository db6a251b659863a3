//! What can be chosen of a kernel and its problem.

use std::fmt;

use fa3_ir::{Elem, Swizzle};

use super::CatalogueError;

/// Something that can be chosen of a kernel and its problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionInfo {
    /// Its name, the same for the same thing in all kernels.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// The values it may have, and the one it has if nobody chooses.
    pub domain: Domain,
}

/// The values of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentence above each variant names its fields")]
pub enum Domain {
    /// Multiples of `multiple_of` from there up to `at_most`.
    Number { default: u32, multiple_of: u32, at_most: u32 },
    /// One of these; the first if nobody chooses.
    OneOf(&'static [Value]),
    /// One of these words; the first if nobody chooses.
    Word(&'static [&'static str]),
}

/// The value of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A whole number.
    Number(u32),
    /// The type of elements.
    Dtype(Elem),
    /// A swizzle of shared memory.
    Swizzle(Swizzle),
    /// A word that means something to the kernel.
    Word(&'static str),
}

/// An option's name and its value.
pub type Chosen = (&'static str, Value);

impl OptionInfo {
    /// The value that `text` means.
    ///
    /// # Errors
    /// [`CatalogueError::Value`] if the option cannot have it.
    pub fn parse(&self, text: &str) -> Result<Chosen, CatalogueError> {
        let value = match self.domain {
            Domain::Number { .. } => text.parse().ok().map(Value::Number),
            Domain::OneOf(values) => values.iter().copied().find(|value| value.to_string() == text),
            Domain::Word(words) => words.iter().copied().find(|word| *word == text).map(Value::Word),
        };
        value.map_or_else(|| Err(self.refuse(text)), |value| self.check(value))
    }

    pub(super) fn check(&self, value: Value) -> Result<Chosen, CatalogueError> {
        let fits = match (self.domain, value) {
            (Domain::Number { multiple_of, at_most, .. }, Value::Number(given)) => {
                (multiple_of..=at_most).contains(&given) && given.is_multiple_of(multiple_of)
            }
            (Domain::Number { .. }, _) => false,
            (Domain::OneOf(values), _) => values.contains(&value),
            (Domain::Word(words), Value::Word(given)) => words.contains(&given),
            (Domain::Word(_), _) => false,
        };
        if fits { Ok((self.name, value)) } else { Err(self.refuse(value)) }
    }

    fn refuse(&self, given: impl fmt::Display) -> CatalogueError {
        CatalogueError::Value { option: self.name, given: given.to_string(), domain: self.domain }
    }

    /// What it is if nobody chooses.
    ///
    /// # Panics
    /// If there are no values to choose from.
    pub const fn default(&self) -> Value {
        match self.domain {
            Domain::Number { default, .. } => Value::Number(default),
            Domain::OneOf(values) => values[0],
            Domain::Word(words) => Value::Word(words[0]),
        }
    }
}

/// The values of all options of an entry.
pub(super) struct Options(pub(super) Vec<Chosen>);

impl Options {
    /// # Panics
    /// If the entry has no such option.
    fn get(&self, name: &str) -> Value {
        let chosen = self.0.iter().rev().find(|(option, _)| *option == name);
        chosen.unwrap_or_else(|| panic!("the entry has an option {name}")).1
    }

    /// # Panics
    /// If the entry has no such option, or it is no number.
    pub(super) fn number(&self, name: &str) -> u32 {
        let Value::Number(number) = self.get(name) else { panic!("{name} is no number") };
        number
    }

    /// # Panics
    /// If the entry has no dtype.
    pub(super) fn dtype(&self) -> Elem {
        let Value::Dtype(elem) = self.get("dtype") else { panic!("dtype is no type") };
        elem
    }

    /// # Panics
    /// If the entry has no such option, or it is no word.
    pub(super) fn word(&self, name: &str) -> &'static str {
        let Value::Word(word) = self.get(name) else { panic!("{name} is no word") };
        word
    }

    /// # Panics
    /// If the entry has no swizzle.
    pub(super) fn swizzle(&self) -> Swizzle {
        let Value::Swizzle(swizzle) = self.get("swizzle") else { panic!("swizzle is no swizzle") };
        swizzle
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Value {
        Value::Number(number)
    }
}

impl From<Elem> for Value {
    fn from(elem: Elem) -> Value {
        Value::Dtype(elem)
    }
}

impl From<Swizzle> for Value {
    fn from(swizzle: Swizzle) -> Value {
        Value::Swizzle(swizzle)
    }
}

/// As it is written on a command line.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{number}"),
            Value::Dtype(elem) => write!(f, "{elem}"),
            Value::Swizzle(Swizzle::None) => write!(f, "none"),
            Value::Swizzle(swizzle) => write!(f, "{}", swizzle.row_bytes()),
            Value::Word(word) => write!(f, "{word}"),
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Number { multiple_of: 1, at_most, .. } => write!(f, "a whole number from 1 to {at_most}"),
            Domain::Number { multiple_of, at_most, .. } => {
                write!(f, "a multiple of {multiple_of} from {multiple_of} to {at_most}")
            }
            Domain::OneOf(values) => write!(f, "{}", listed(values.iter())),
            Domain::Word(words) => write!(f, "{}", listed(words.iter())),
        }
    }
}

/// `a, b or c`.
pub(super) fn listed(items: impl Iterator<Item = impl fmt::Display>) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    match items.split_last() {
        None => "none".to_owned(),
        Some((only, [])) => only.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
    }
}
