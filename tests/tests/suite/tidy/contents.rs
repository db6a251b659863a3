//! The list of contents of `docs/decisions.md`.

use super::{read, root};

/// The anchor by which GitHub links to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase()
}

#[test]
fn every_decision_is_in_the_list_of_contents() {
    let text = read(&root().join("docs/decisions.md"));
    let headings = text.lines().filter_map(|line| line.strip_prefix("### "));
    let expected: Vec<String> = headings.map(|title| format!("[{title}](#{}) |", anchor(title))).collect();
    let rows = text.lines().filter(|line| line.starts_with('|') && line.contains("](#"));
    let listed: Vec<&str> = rows.filter_map(|row| row.split_once(" | ").map(|(_, link)| link)).collect();
    assert_eq!(listed, expected);
}
