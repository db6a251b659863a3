//! Words that stand for a noun, which a reader has to look for in another sentence.

use super::{PROSE, files};

/// The number of such words in the repository. It may fall, but not grow.
const ALONE: usize = 34;

/// Phrases that are counted wherever they stand.
const PHRASES: [&str; 8] =
    ["so many", "one's", "nobody", "somebody", "whoever", "makes no sense", "make no sense", "nobody's"];

/// Phrases that are counted if no noun follows.
const PRONOUNS: [&str; 2] = ["those", "the same"];

/// Words after which a phrase of [`PRONOUNS`] has no noun.
const NO_NOUNS: [&str; 30] = [
    "", "and", "are", "at", "below", "above", "by", "for", "from", "has", "have", "in", "is", "it", "of",
    "on", "or", "that", "they", "to", "was", "were", "which", "who", "whose", "with", "if", "but", "than",
    "where",
];

/// The numbers of the lines with such words in a text, from 1. A phrase may continue in the next line.
fn alone(text: &str) -> Vec<usize> {
    // Marks of comments become blanks, so that a phrase is found across two lines.
    let plain = text.to_lowercase().replace(['/', '#', '!', '*'], " ");
    let words: Vec<(usize, &str)> = plain
        .lines()
        .zip(1..)
        .flat_map(|(line, number)| line.split_whitespace().map(move |word| (number, word)))
        .collect();
    let starts = |at: usize, phrase: &str| {
        let mut rest = words[at..].iter().map(|&(_, word)| word);
        let mut parts = phrase.split(' ').peekable();
        while let Some(part) = parts.next() {
            let word = rest.next().unwrap_or("");
            let word = if parts.peek().is_some() {
                word
            } else {
                word.trim_end_matches(|c: char| !c.is_alphanumeric())
            };
            if word.trim_start_matches(|c: char| !c.is_alphanumeric()) != part {
                return None;
            }
        }
        Some(at + phrase.split(' ').count())
    };
    let has_no_noun = |end: usize| {
        let ends_sentence = words[end - 1].1.ends_with(|c: char| !c.is_alphanumeric());
        ends_sentence || words.get(end).is_none_or(|(_, word)| NO_NOUNS.contains(word))
    };
    let is_alone = |at: usize| {
        PHRASES.iter().any(|phrase| starts(at, phrase).is_some())
            || PRONOUNS.iter().filter_map(|phrase| starts(at, phrase)).any(has_no_noun)
    };
    (0..words.len()).filter(|&at| is_alone(at)).map(|at| words[at].0).collect()
}

#[test]
fn words_without_their_noun_are_found() {
    let text = "/// So many.\n/// Those rows, and those\n/// of Q; those\n/// keys. (Nobody's.)\n//! The\n//! same, the same tile\n";
    assert_eq!(alone(text), [1, 2, 4, 5]);
    assert_eq!(alone("It makes no sense. It is the same as before, the same\nrow."), [1]);
}

#[test]
fn words_have_their_nouns() {
    // This file quotes the phrases.
    let sources = PROSE.into_iter().flat_map(files).filter(|(name, _)| !name.ends_with("tidy/words.rs"));
    let found: Vec<String> = sources
        .flat_map(|(name, text)| alone(&text).into_iter().map(move |number| format!("{name}:{number}")))
        .collect();
    assert!(
        found.len() <= ALONE,
        "{} words of PHRASES and PRONOUNS have no noun, {ALONE} may:\n{}",
        found.len(),
        found.join("\n")
    );
    assert_eq!(found.len(), ALONE, "fewer words have no noun than ALONE says: lower it");
}
