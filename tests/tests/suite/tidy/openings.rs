//! A doc comment begins with a noun that says what the thing is, or with a verb in the third person.

use super::{QUOTES, files};

/// Openings after which a reader waits for the noun.
const OPENINGS: [&str; 6] = ["Of", "What", "Whose", "That of", "The same of", "Those"];

/// The numbers of the lines where a doc comment or a docstring begins with one of [`OPENINGS`].
fn odd_openings(name: &str, text: &str) -> Vec<usize> {
    let markers: &[&str] = if name.ends_with(".rs") { &["///", "//!"] } else { &[QUOTES] };
    let (mut odd, mut before) = (Vec::new(), None);
    for (line, number) in text.lines().zip(1..) {
        let line = line.trim_start();
        let marker = markers.iter().copied().find(|marker| line.starts_with(marker));
        if let Some(marker) = marker
            && (marker == QUOTES || before != Some(marker))
        {
            let text = line[marker.len()..].trim_start();
            let rest = OPENINGS.iter().find_map(|opening| text.strip_prefix(opening));
            if rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)) {
                odd.push(number);
            }
        }
        before = marker;
    }
    odd
}

#[test]
fn odd_openings_are_found() {
    let comments =
        "//! What a file has.\n//! Of a line.\n\n/// Those.\nlet a = 1; // Of what\n// Whose\n/// Often.\n";
    assert_eq!(odd_openings("a.rs", comments), [1, 4]);
    let docstrings = "'''The same of it.'''\n'''That of it.'''\n# What\n".replace("'''", QUOTES);
    assert_eq!(odd_openings("a.py", &docstrings), [1, 2]);
}

#[test]
fn doc_comments_begin_with_what_they_are_about() {
    let sources = ["rs", "py", "pyi"].into_iter().flat_map(files);
    let odd = sources.flat_map(|(name, text)| {
        odd_openings(&name, &text).into_iter().map(move |number| format!("{name}:{number}"))
    });
    let odd: Vec<String> = odd.collect();
    assert!(odd.is_empty(), "doc comments begin with a word of OPENINGS:\n{}", odd.join("\n"));
}
