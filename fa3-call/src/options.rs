//! The options of a call.

use std::cell::RefCell;

use fa3::problem::hint;
use fa3_types::{OpenScore, RopeStyle};

use crate::error::Error;

/// The keys that a query sees, as given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// Number of keys to the left of its position; -1 is unbounded.
    pub left: i64,
    /// Number of keys to the right of its position; -1 is unbounded.
    pub right: i64,
    /// Number of keys of a chunk; 0 for no chunks.
    pub chunk: i64,
}

/// The values of a caller's options, by their names. An option that is not given is `None`.
pub trait Values {
    /// A bool.
    ///
    /// # Errors
    /// The option is not a bool.
    fn flag(&self, name: &str) -> Result<Option<bool>, Error>;

    /// An integer.
    ///
    /// # Errors
    /// The option is not an integer.
    fn integer(&self, name: &str) -> Result<Option<i128>, Error>;

    /// A number.
    ///
    /// # Errors
    /// The option is not a number.
    fn real(&self, name: &str) -> Result<Option<f64>, Error>;

    /// Three integers.
    ///
    /// # Errors
    /// The option does not consist of three integers.
    fn integers(&self, name: &str) -> Result<Option<[i64; 3]>, Error>;

    /// A text.
    ///
    /// # Errors
    /// The option is not a text.
    fn text(&self, name: &str) -> Result<Option<String>, Error>;

    /// The names of all options.
    fn names(&self) -> Vec<String>;
}

/// A call's options.
pub struct Options<'a> {
    values: &'a dyn Values,
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> Options<'a> {
    /// Options with these values.
    pub fn new(values: &'a dyn Values) -> Options<'a> {
        Options { values, asked: RefCell::default() }
    }

    fn asked(&self, name: &'static str) -> &'static str {
        self.asked.borrow_mut().push(name);
        name
    }

    /// An integer, if given.
    pub(crate) fn integer<T: TryFrom<i128>>(&self, name: &'static str) -> Result<Option<T>, Error> {
        let given = self.values.integer(self.asked(name))?;
        let number = |given: i128| given.try_into().map_err(|_| Error::Number { given: given.to_string() });
        given.map(number).transpose()
    }

    /// A number, if given.
    pub(crate) fn real(&self, name: &'static str) -> Result<Option<f64>, Error> {
        self.values.real(self.asked(name))
    }

    /// A function of scores, if given.
    pub(crate) fn score(&self) -> Result<Option<OpenScore>, Error> {
        let text = self.values.text(self.asked("score"))?;
        Ok(text.map(|text| OpenScore::parse(&text)).transpose()?)
    }

    /// A bool; false if it is not given.
    pub(crate) fn flag(&self, name: &'static str) -> Result<bool, Error> {
        Ok(self.values.flag(self.asked(name))?.unwrap_or(false))
    }

    /// Hints of the lengths of the longest sequences of Q, and of K and V, as plans need them. A hint only affects how
    /// a call is computed. A negative hint counts as none.
    pub(crate) fn hints(&self) -> Result<[Option<usize>; 2], Error> {
        let hint = |name| -> Result<Option<usize>, Error> {
            Ok(self.integer::<i64>(name)?.and_then(|rows| usize::try_from(rows).ok()))
        };
        let (longest_q, longest_k) = (hint("max_seqlen_q")?, hint("max_seqlen_k")?);
        Ok([longest_q.map(hint::rounded_up), longest_k.map(hint::rounded_down)])
    }

    /// The keys that a query sees; all keys if the option is missing.
    pub(crate) fn window(&self) -> Result<Bounds, Error> {
        let window = self.values.integers(self.asked("window"))?;
        let [left, right, chunk] = window.unwrap_or([-1, -1, 0]);
        Ok(Bounds { left, right, chunk })
    }

    /// Which elements of a row rotate together.
    pub(crate) fn style(&self) -> Result<RopeStyle, Error> {
        Ok(if self.flag("interleaved")? { RopeStyle::Interleaved } else { RopeStyle::HalfSplit })
    }

    /// Refuses options that the operation does not know.
    ///
    /// # Errors
    /// [`Error::UnknownOption`].
    pub fn refuse_others(&self) -> Result<(), Error> {
        let asked = self.asked.borrow();
        match self.values.names().into_iter().find(|name| !asked.contains(&name.as_str())) {
            Some(name) => Err(Error::UnknownOption { name }),
            None => Ok(()),
        }
    }
}
