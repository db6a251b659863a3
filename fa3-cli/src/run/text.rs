//! Formats names and numbers from files for messages, shortened if they are long.

use std::fmt;

/// Names of a file's tensors. Only the first few are printed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names(pub(crate) Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 8;
        let join = |names: &[String]| names.iter().map(|name| short(name)).collect::<Vec<_>>().join(", ");
        match self.0.as_slice() {
            [] => f.write_str("nothing"),
            names if names.len() <= MOST => f.write_str(&join(names)),
            names => write!(f, "{} and {} more", join(&names[..MOST]), names.len() - MOST),
        }
    }
}

/// A name from a file, shortened if it is unusually long.
pub(super) fn short(name: &str) -> String {
    cut(name, 60)
}

/// Formats the extents of a tensor in a file, which may have any number of them.
pub(crate) fn extents(shape: &[usize]) -> String {
    const MOST: usize = 8;
    match shape.get(..MOST) {
        Some(first) if shape.len() > MOST => {
            let first = first.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            format!("[{first}, ... ({} extents)]", shape.len())
        }
        _ => format!("{shape:?}"),
    }
}

/// At most `most` characters of a text from a file.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.chars().count() {
        count if count > most => {
            let start: String = text.chars().take(most).collect();
            format!("{start}... ({count} characters)")
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_cut() {
        let names = |count: usize| Names((0..count).map(|i| i.to_string()).collect()).to_string();
        assert_eq!(names(0), "nothing");
        assert_eq!(names(2), "0, 1");
        assert_eq!(names(10), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }

    #[test]
    fn long_shapes_are_cut() {
        assert_eq!(extents(&[]), "[]");
        assert_eq!(extents(&[1; 8]), "[1, 1, 1, 1, 1, 1, 1, 1]");
        assert_eq!(extents(&[1; 100_000]), "[1, 1, 1, 1, 1, 1, 1, 1, ... (100000 extents)]");
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(short(&"ä".repeat(60)), "ä".repeat(60));
        let cut = "ä".repeat(60) + "... (100000 characters)";
        assert_eq!(short(&"ä".repeat(100_000)), cut);
        assert_eq!(Names(vec!["ä".repeat(100_000)]).to_string(), cut);
    }
}
