//! Options that take one of a few words.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A word, its help text, which may be empty, and what it stands for.
pub(crate) type Choice<T> = (&'static str, &'static str, T);

/// The parser of one of these words.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    choices: &'static [Choice<T>],
) -> impl TypedValueParser<Value = T> {
    let words = choices.iter().map(|&(word, help, _)| match help {
        "" => PossibleValue::new(word),
        help => PossibleValue::new(word).help(help),
    });
    let value =
        |word: String| choices.iter().find(|choice| choice.0 == word).expect("clap knows the words").2;
    PossibleValuesParser::new(words).map(value)
}

/// Off or on.
pub(crate) const SWITCH: &[Choice<bool>] = &[("off", "", false), ("on", "", true)];
