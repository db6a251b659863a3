//! Lists of contents, and the table of models.

use super::{anchor, files, read, root};

#[test]
fn every_decision_is_in_the_list_of_contents() {
    let text = read(&root().join("docs/decisions.md"));
    let headings = text.lines().filter_map(|line| Some((line, line.strip_prefix("### ")?)));
    let expected: Vec<String> =
        headings.map(|(line, title)| format!("[{title}](#{}) |", anchor(line))).collect();
    let rows = text.lines().filter(|line| line.starts_with('|') && line.contains("](#"));
    let listed: Vec<&str> = rows.filter_map(|row| row.split_once(" | ").map(|(_, link)| link)).collect();
    assert_eq!(listed, expected);
}

#[test]
fn every_page_is_in_a_section_of_the_documentation() {
    let contents = read(&root().join("docs/README.md"));
    for name in files("md").keys() {
        let Some(page) = name.strip_prefix("docs/").filter(|page| *page != "README.md") else { continue };
        let begins = |row: &&str| row.starts_with("| [") && row.contains(&format!("]({page}) |"));
        let rows = contents.lines().filter(begins).count();
        assert_eq!(rows, 1, "{page} begins {rows} rows of docs/README.md");
    }
}

/// The text below a heading of a page, to the next heading that is not below it.
fn section(page: &str, heading: &str) -> String {
    let marks = |line: &str| line.len() - line.trim_start_matches('#').len();
    let mut lines = page.lines().skip_while(|line| anchor(line) != heading);
    let level = marks(lines.next().expect("links lead to headings"));
    lines.take_while(|line| !(1..=level).contains(&marks(line))).collect::<Vec<_>>().join("\n")
}

/// A row of the README's table of models has the numbers of the section that it links to, and the page's machine and
/// commit.
#[test]
fn figures_of_models_are_on_their_pages() {
    let readme = read(&root().join("README.md"));
    let (_, table) = readme.split_once("| a model's attention |").expect("there is the table");
    let rows: Vec<&str> = table.split("\n\n").next().expect("a table ends").lines().skip(2).collect();
    assert!(rows.len() >= 10, "{} rows: are they looked for?", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (measured, link) = cells[5].split_once("](").expect("the last cell is a link");
        let (page, heading) = link.trim_end_matches(") |").split_once('#').expect("to a section");
        let page = read(&root().join(page));
        for word in measured.trim_start_matches('[').split(", ") {
            assert!(page.contains(word), "{word} of {row}");
        }
        let text = section(&page, heading);
        let words =
            text.split(|c: char| !c.is_ascii_digit() && c != '.').map(|word| word.trim_end_matches('.'));
        let words: Vec<&str> = words.collect();
        for number in &cells[3..5] {
            assert!(words.contains(number), "{number} of {row}");
        }
    }
}
