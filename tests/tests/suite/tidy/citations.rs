//! Citations of lines of the paper's algorithms, in comments beside the code that computes them.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::sources;

/// The algorithm of the paper that the files below a path implement, and its lines.
struct Cited {
    files: &'static str,
    algorithm: usize,
    lines: RangeInclusive<usize>,
    /// The lines of the algorithm that no code implements, each with its purpose.
    unused: &'static [(usize, &'static str)],
}

/// All code that computes an algorithm of the paper.
const CITED: [Cited; 13] = [
    Cited {
        files: "fa3-ref/src/tiled",
        algorithm: 1,
        lines: 13..=25,
        unused: &[
            (14, "waits for Q"),
            (22, "releases a stage of the buffer"),
            (23, "ends the loop"),
            (25, "writes to memory, as the caller does"),
        ],
    },
    Cited {
        files: "fa3-ref/src/tiled",
        algorithm: 2,
        lines: 2..=20,
        unused: &[(5, "releases a stage"), (15, "releases two stages"), (17, "ends the loop")],
    },
    Cited { files: "fa3-ref/src/tiled", algorithm: 3, lines: 1..=1, unused: &[] },
    Cited {
        files: "fa3-ref/src/tiled",
        algorithm: 3,
        lines: 16..=33,
        unused: &[
            (17, "waits for K and V"),
            (29, "ends the loop"),
            (30, "begins the dQ writer's role"),
            (31, "is the dQ writer's loop, which here is the consumer's"),
        ],
    },
    Cited { files: "fa3-ref/src/tiled", algorithm: 4, lines: 1..=25, unused: &[(17, "ends the loop")] },
    Cited {
        files: "fa3-quant/src/emulate",
        algorithm: 1,
        lines: 13..=25,
        unused: &[
            (14, "waits for Q"),
            (16, "waits for K"),
            (22, "releases a stage of the buffer"),
            (23, "ends the loop"),
            (25, "writes to memory, as the caller does"),
        ],
    },
    Cited {
        files: "fa3/src/cpu",
        algorithm: 1,
        lines: 13..=24,
        unused: &[
            (14, "waits for Q"),
            (15, "is the loop over blocks"),
            (16, "waits for K"),
            (20, "waits for V"),
            (22, "releases a stage of the buffer"),
            (23, "ends the loop"),
        ],
    },
    Cited { files: "fa3/src/cpu", algorithm: 3, lines: 1..=1, unused: &[] },
    Cited {
        files: "fa3/src/cpu",
        algorithm: 3,
        lines: 16..=33,
        unused: &[
            (17, "waits for K and V"),
            (19, "waits for Q and dO"),
            (29, "ends the loop"),
            (30, "begins the dQ writer's role"),
            (31, "is the dQ writer's loop, which here is the consumer's"),
        ],
    },
    Cited {
        files: "fa3-cuda/src/kernels",
        algorithm: 1,
        lines: 4..=25,
        unused: &[
            (10, "ends the producer's loop"),
            (11, "begins the consumers' role"),
            (12, "gives them registers, as the kernel's roles say"),
            (15, "is the loop over blocks"),
            (23, "ends it"),
        ],
    },
    Cited { files: "fa3-cuda/src/kernels", algorithm: 2, lines: 3..=19, unused: &[(17, "ends the loop")] },
    Cited {
        files: "fa3-cuda/src/kernels/bwd",
        algorithm: 3,
        lines: 1..=33,
        unused: &[
            (2, "divides Q, K and V, as the plan does"),
            (3, "divides dO and the LSE, as the plan does"),
            (13, "ends the producer's loop"),
            (14, "begins the consumers' role"),
            (15, "gives them registers, as the kernel's roles say"),
            (29, "ends the consumers' loop"),
            (30, "begins the dQ writer's role"),
            (31, "is the dQ writer's loop, which here is the consumers'"),
        ],
    },
    Cited { files: "fa3-cuda/src/kernels", algorithm: 4, lines: 2..=24, unused: &[(17, "ends the loop")] },
];

/// The (algorithm, line) pairs that a comment such as `// A1:16-17, in flight` cites.
fn citations(comment: &str) -> Vec<(usize, usize)> {
    let words = comment.split([' ', ',', ';']);
    let parse = |word: &str| -> Option<Vec<(usize, usize)>> {
        let (algorithm, lines) = word.strip_prefix('A')?.split_once(':')?;
        let algorithm = algorithm.parse().ok()?;
        let (first, last) = lines.split_once('-').unwrap_or((lines, lines));
        Some((first.parse().ok()?..=last.parse().ok()?).map(|line| (algorithm, line)).collect())
    };
    words.filter_map(parse).flatten().collect()
}

#[test]
fn citations_are_read() {
    assert_eq!(citations("A4:10, A4:12, in flight"), [(4, 10), (4, 12)]);
    assert_eq!(citations("A3:22-23, dP"), [(3, 22), (3, 23)]);
    assert_eq!(citations("About A, and A1"), []);
}

/// The (file, algorithm, line) triples that comments beside code cite, in the files below `files`.
fn cited(files: &str) -> BTreeSet<(String, usize, usize)> {
    let sources = sources().into_iter().filter(|(name, _)| name.starts_with(files));
    let triples = sources.flat_map(|(name, text)| {
        // The module's own text about the algorithms does not count.
        let comments = text.lines().filter_map(|line| line.split_once("// ")).map(|(_, comment)| comment);
        let pairs: Vec<(usize, usize)> = comments.flat_map(citations).collect();
        pairs.into_iter().map(move |(algorithm, line)| (name.clone(), algorithm, line))
    });
    triples.collect()
}

#[test]
fn every_line_of_the_paper_that_computes_is_cited() {
    for Cited { files, algorithm, lines, unused } in CITED {
        let cited: BTreeSet<(usize, usize)> =
            cited(files).into_iter().map(|(_, algorithm, line)| (algorithm, line)).collect();
        for line in lines {
            let reason = unused.iter().find(|(unused, _)| *unused == line).map(|(_, reason)| reason);
            match (cited.contains(&(algorithm, line)), reason) {
                (true, None) | (false, Some(_)) => {}
                (false, None) => panic!("nothing in {files} cites A{algorithm}:{line}"),
                (true, Some(reason)) => panic!("{files} cites A{algorithm}:{line}, although it {reason}"),
            }
        }
    }
}

/// A comment may cite only lines of the algorithms that its file implements, and only lines of its own role.
#[test]
fn no_other_line_of_the_paper_is_cited() {
    for (file, algorithm, line) in cited("") {
        let known = CITED.iter().any(|cited| {
            file.starts_with(cited.files) && cited.algorithm == algorithm && cited.lines.contains(&line)
        });
        // The lines cited in this file are examples.
        assert!(known || file.ends_with("citations.rs"), "{file} cites A{algorithm}:{line}");
    }
}
