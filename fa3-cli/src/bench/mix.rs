//! Mixes of lengths: the sequences of a packed tensor.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fa3_types::SequenceRows;

use crate::args::number::size;

/// Rows that a mix may have, and sequences.
const MOST: usize = 1 << 24;

/// The mixes of docs/packed.md, about 16k tokens each.
const ALL: [&str; 7] = ["8x2048", "32x512", "128x128", "8192+64x128", "zipf", "odd", "1x16384"];

/// Lengths of all sizes, without a common divisor.
const ODD: [usize; 10] = [1537, 3, 911, 4099, 77, 2600, 1, 5003, 640, 1229];

/// Lengths of sequences that are packed one after the other, by a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mix {
    name: String,
    lengths: Vec<usize>,
}

/// One mix or several, by what the command line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mixes(pub(super) Vec<Mix>);

/// Why there is no mix.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum NoMix {
    #[error(
        "expected all, zipf, odd, or lengths such as 8192+64x128: one sequence of 8192 rows and 64 of 128"
    )]
    Name,
    #[error("a mix has 1 to {MOST} rows, and up to as many sequences")]
    Rows,
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: expected whole numbers between blanks, not {word:?}", path.display())]
    Word { path: PathBuf, word: String },
    #[error("{}: {source}", path.display())]
    InFile { path: PathBuf, source: Box<NoMix> },
}

impl Mix {
    fn new(name: &str, lengths: Vec<usize>) -> Result<Mix, NoMix> {
        let rows = lengths.iter().try_fold(0_usize, |sum, &length| sum.checked_add(length));
        match rows {
            Some(1..=MOST) if lengths.len() <= MOST => Ok(Mix { name: name.to_owned(), lengths }),
            _ => Err(NoMix::Rows),
        }
    }

    /// The lengths that a file lists, numbers between blanks.
    ///
    /// # Errors
    /// A file that cannot be read, a word that is no number, or too many rows or none.
    pub(super) fn read(path: &Path) -> Result<Mix, NoMix> {
        let of_path = || path.to_owned();
        let text = std::fs::read_to_string(path).map_err(|source| NoMix::File { path: of_path(), source })?;
        let length = |word: &str| {
            word.parse().map_err(|_| NoMix::Word { path: of_path(), word: word.chars().take(20).collect() })
        };
        let lengths = text.split_whitespace().map(length).collect::<Result<_, _>>()?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        Mix::new(&name, lengths).map_err(|source| NoMix::InFile { path: of_path(), source: Box::new(source) })
    }

    /// The rows of its sequences.
    pub(crate) fn rows(&self) -> SequenceRows {
        SequenceRows::packed_lengths(&self.lengths)
    }
}

impl FromStr for Mix {
    type Err = NoMix;

    fn from_str(text: &str) -> Result<Mix, NoMix> {
        let lengths = match text {
            // Of Zipf's law with exponent 1 the longest ones, and short ones.
            "zipf" => (1..=12).map(|rank| 8192 / rank).chain([64; 20]).collect(),
            "odd" => ODD.into(),
            _ => {
                let mut lengths = Vec::new();
                for part in text.split('+') {
                    let (count, length) = part.split_once('x').unwrap_or(("1", part));
                    let count = size(count).map_err(|_| NoMix::Name)?;
                    let length = size(length).map_err(|_| NoMix::Name)?;
                    if count > MOST || lengths.len() + count > MOST {
                        return Err(NoMix::Rows);
                    }
                    lengths.extend(std::iter::repeat_n(length, count));
                }
                lengths
            }
        };
        Mix::new(text, lengths)
    }
}

impl FromStr for Mixes {
    type Err = NoMix;

    fn from_str(text: &str) -> Result<Mixes, NoMix> {
        match text {
            "all" => ALL.map(str::parse).into_iter().collect::<Result<_, _>>().map(Mixes),
            one => one.parse().map(|mix| Mixes(vec![mix])),
        }
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        text.parse::<Mix>().unwrap().lengths
    }

    #[test]
    fn mixes_are_read() {
        assert_eq!(lengths("3x512"), [512; 3]);
        assert_eq!(lengths("8k+2x0+7"), [8192, 0, 0, 7]);
        assert_eq!((lengths("zipf").len(), lengths("zipf")[11]), (32, 682));
        let Mixes(all) = "all".parse().unwrap();
        let rows: Vec<usize> = all.iter().map(|mix| mix.rows().end()).collect();
        assert_eq!(rows, [16384, 16384, 16384, 16384, 26698, 16100, 16384]);
        assert_eq!(all.iter().map(Mix::to_string).collect::<Vec<_>>(), ALL);
    }

    #[test]
    fn what_is_no_mix_is_refused() {
        for text in ["", "x", "3x", "x3", "5+", "-1", "1.5", "Zipf"] {
            assert!(matches!(text.parse::<Mix>(), Err(NoMix::Name)), "{text}");
        }
        for text in ["0", "4x0", "16777217", "99999999999x1", "2x9223372036854775807", "16777217x0"] {
            assert!(matches!(text.parse::<Mix>(), Err(NoMix::Rows)), "{text}");
        }
    }

    #[test]
    fn files_list_lengths() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Mix::read(&path)
        };
        let mix = of("3 0\n 500\t7\n").unwrap();
        assert_eq!((mix.to_string(), mix.lengths), ("a.txt".to_owned(), vec![3, 0, 500, 7]));
        assert!(
            of("3 x").unwrap_err().to_string().ends_with("expected whole numbers between blanks, not \"x\"")
        );
        assert!(of("").unwrap_err().to_string().contains("a mix has 1 to 16777216 rows"));
        assert!(matches!(Mix::read(Path::new("/no/such/file")), Err(NoMix::File { .. })));
    }
}
