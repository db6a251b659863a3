//! The architecture's invariants that can be checked in the text of the repository.

mod citations;
mod contents;
mod openings;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates of this repository that each crate depends on. A new crate needs a line here and in ARCHITECTURE.md.
const EDGES: [(&str, &[&str]); 14] = [
    ("fa3-types", &[]),
    ("fa3-ref", &["fa3-types"]),
    ("fa3-quant", &["fa3-types"]),
    ("fa3-sched", &["fa3-types"]),
    ("fa3-ir", &["fa3-types"]),
    ("fa3-sim", &["fa3-ir"]),
    ("fa3-cuda", &["fa3-ir", "fa3-sched", "fa3-sim", "fa3-types"]),
    ("fa3", &["fa3-types", "fa3-ref", "fa3-quant", "fa3-sched", "fa3-cuda"]),
    ("fa3-call", &["fa3", "fa3-cuda", "fa3-quant", "fa3-sched", "fa3-types"]),
    ("fa3-c", &["fa3-call", "fa3-cuda", "fa3-types"]),
    ("fa3-cli", &OPEN),
    ("fa3-trials", &OPEN),
    ("fa3-tests", &ALL),
    ("fa3-python", &["fa3-call", "fa3-cuda", "fa3-types"]),
];

/// The crates on which command, trials and tests may depend, and which depend on none of them. Tests may use trials.
const OPEN: [&str; 8] =
    ["fa3", "fa3-cuda", "fa3-ir", "fa3-quant", "fa3-ref", "fa3-sched", "fa3-sim", "fa3-types"];
const ALL: [&str; 9] =
    ["fa3", "fa3-cuda", "fa3-ir", "fa3-quant", "fa3-ref", "fa3-sched", "fa3-sim", "fa3-trials", "fa3-types"];

/// The files with unsafe code, and their crates: the host layer, the memory of bindings, the command's allocator, and
/// tests on a GPU.
const UNSAFE: [(&str, &str); 8] = [
    ("fa3", "fa3/examples/decode_on_device.rs"),
    ("fa3-c", "fa3-c/src"),
    ("fa3-call", "fa3-call/src/cpu"),
    ("fa3-cli", "fa3-cli/src/memory.rs"),
    ("fa3-cuda", "fa3-cuda/src/host.rs"),
    ("fa3-cuda", "fa3-cuda/examples/launch_kernel.rs"),
    ("tests", "tests/src/gpu.rs"),
    ("tests", "tests/tests/gpu"),
];

/// Limit of lines of a file, so that it can be read in one go.
const LINES: usize = 500;

/// Limit of columns of comments, docstrings and Markdown, so that a window of this text fits beside other windows.
const COLUMNS: usize = 120;

/// Extensions of the files that have prose.
const PROSE: [&str; 5] = ["md", "rs", "py", "pyi", "toml"];

/// Hidden files that have comments.
const HIDDEN: [&str; 3] = [".cargo/config.toml", ".ci/run", ".ci/wheel"];

/// Beginning and end of a docstring.
const QUOTES: &str = "\"\"\"";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A manifest of the workspace, parsed.
fn manifest(path: &Path) -> toml::Table {
    read(path).parse().unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The folders of the workspace's crates.
fn members() -> Vec<String> {
    let workspace = manifest(&root().join("Cargo.toml"));
    let members = workspace["workspace"]["members"].as_array().expect("members are a list");
    members.iter().map(|member| member.as_str().expect("members are paths").to_owned()).collect()
}

/// Every file of the repository with this extension, by its path from the root, except hidden files and build results.
fn files(extension: &str) -> BTreeMap<String, String> {
    fn walk(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository can be read") {
            let entry = entry.expect("its entries too");
            let (path, name) = (entry.path(), entry.file_name());
            let skipped = name == "target" || name.to_string_lossy().starts_with('.');
            if path.is_dir() && !skipped {
                walk(&path, extension, found);
            } else if path.extension().is_some_and(|other| other == extension) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), extension, &mut found);
    let name = |path: &Path| path.strip_prefix(root()).expect("below the root").display().to_string();
    found.iter().map(|path| (name(path), read(path))).collect()
}

/// Every Rust file of the workspace's crates, by its path from the root.
fn sources() -> BTreeMap<String, String> {
    let members = members();
    let ours = |name: &str| members.iter().any(|member| Path::new(name).starts_with(member));
    files("rs").into_iter().filter(|(name, _)| ours(name)).collect()
}

/// Crates depend on each other as `EDGES` states: it has no edge that is unused, and no edge is missing.
#[test]
fn crates_depend_on_each_other_as_allowed() {
    let ours: BTreeMap<&str, &[&str]> = EDGES.into();
    for member in [members(), vec!["bindings/python".to_owned()]].concat() {
        let manifest = manifest(&root().join(&member).join("Cargo.toml"));
        let name = manifest["package"]["name"].as_str().expect("a package has a name");
        let allowed = ours.get(name).unwrap_or_else(|| panic!("{name} has no line in EDGES"));
        let sections = ["", "dev-", "build-"].map(|kind| manifest.get(&format!("{kind}dependencies")));
        let used = sections.into_iter().flatten().filter_map(toml::Value::as_table).flat_map(|of| of.keys());
        let used = used.map(String::as_str).filter(|dependency| ours.contains_key(dependency)).collect();
        assert_eq!(BTreeSet::from_iter(allowed.iter().copied()), used, "allowed and used by {name}");
    }
}

/// An example needs no crate besides its own: it takes other crates from where its crate re-exports them.
#[test]
fn examples_take_other_crates_from_where_they_are_re_exported() {
    let re_exporting = ["fa3/", "fa3-ref/", "fa3-quant/"];
    for (file, text) in sources() {
        if !re_exporting.iter().any(|folder| file.starts_with(folder)) {
            continue;
        }
        for line in text.lines().map(str::trim_start) {
            let shown = line.strip_prefix("//! ").or(line.strip_prefix("/// "));
            let shown = shown.or(file.contains("/examples/").then_some(line));
            let unknown = ["use half::", "use ndarray::"];
            let is_known = shown.is_none_or(|code| unknown.iter().all(|krate| !code.starts_with(krate)));
            assert!(is_known, "{file}: {line}");
        }
    }
}

/// Only the host layer, its tests, bindings and the command's allocator have unsafe code.
#[test]
fn unsafe_code_stays_where_the_gpu_is() {
    let workspace = manifest(&root().join("Cargo.toml"));
    assert_eq!(workspace["workspace"]["lints"]["rust"]["unsafe_code"].as_str(), Some("forbid"));
    for member in members() {
        let manifest = manifest(&root().join(&member).join("Cargo.toml"));
        let lints = &manifest["lints"];
        if UNSAFE.iter().any(|(exception, _)| *exception == member) {
            assert_eq!(lints["rust"]["unsafe_code"].as_str(), Some("deny"));
            continue;
        }
        assert_eq!(lints["workspace"].as_bool(), Some(true), "{member} does not take the workspace's lints");
        let crate_root = ["src/lib.rs", "src/main.rs"].map(|file| root().join(&member).join(file));
        let crate_root = crate_root.iter().find(|path| path.exists()).expect("a crate has a root");
        let forbids = read(crate_root).lines().any(|line| line == "#![forbid(unsafe_code)]");
        assert!(forbids, "{} does not forbid unsafe code", crate_root.display());
    }
    for (file, text) in sources() {
        let may = UNSAFE.iter().any(|(_, only)| file.starts_with(only));
        let allows = |line: &str| line.starts_with('#') && line.contains("allow(unsafe_code");
        assert!(may || !text.lines().any(|line| allows(line.trim_start())), "{file}");
    }
}

/// A package has all that registries require besides its code, and includes no file from outside of its folder.
#[test]
fn crates_can_be_published() {
    for member in members() {
        let manifest = manifest(&root().join(&member).join("Cargo.toml"));
        let package = manifest["package"].as_table().expect("a package is a table");
        if package.contains_key("publish") {
            continue;
        }
        for key in
            ["description", "documentation", "homepage", "repository", "readme", "keywords", "categories"]
        {
            assert!(package.contains_key(key), "{member} has no {key}");
        }
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(root().join(&member).join(file).exists(), "{member} has no {file}");
        }
    }
    for (name, text) in sources() {
        let depth = name.split('/').count() - 2;
        let included = ["include_str!(\"", "include_bytes!(\""].map(|include| text.split(include).skip(1));
        for path in included.into_iter().flatten() {
            let up = path.split("../").take_while(|folder| folder.is_empty()).count();
            assert!(up <= depth, "{name} includes a file from outside its crate");
        }
    }
}

/// Relative links and pictures in Markdown files have targets that exist.
#[test]
fn links_lead_somewhere() {
    let mut links = 0;
    for (name, text) in files("md") {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (target, heading) = link.split_once('#').unwrap_or((link, ""));
            if target.starts_with("http") {
                continue;
            }
            links += 1;
            let page = root().join(&name);
            let target = if target.is_empty() { page } else { page.with_file_name(target) };
            assert!(target.exists(), "{name} links to {link}");
            // Every second part, between two fences, is code.
            let is_heading = |text: &str| text.lines().any(|line| anchor(line) == heading);
            let is_there = heading.is_empty() || read(&target).split("```").step_by(2).any(is_heading);
            assert!(is_there, "{name} links to {link}, a heading that is not there");
        }
    }
    assert!(links >= 5, "{links} links: are they looked for?");
}

/// The anchor that Markdown renderers give a heading. It is an empty string if the line is no heading.
fn anchor(line: &str) -> String {
    let heading = line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#'));
    let named = |c: char| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then_some(c),
    };
    heading.unwrap_or_default().to_lowercase().chars().filter_map(named).collect()
}

/// Code that a document quotes, in a fence below `<!-- quote: FILE -->`, equals the file but for its indent. In
/// documents that no crate includes, all code in Rust, C and TOML is quoted, or says why it does not run.
#[test]
fn quotations_are_true() {
    let unindented = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
    let mut quotations = 0;
    for (name, text) in files("md") {
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.windows(2).filter(|_| name == "README.md" || name.starts_with("docs/")) {
            let is_code = ["```rust", "```c", "```toml"].contains(&pair[1]);
            let is_marked = pair[0].starts_with("<!-- quote: ") || pair[0].starts_with("<!-- not run: ");
            assert!(!is_code || is_marked, "{name} has code that no test runs, below {:?}", pair[0]);
        }
        for quotation in text.split("<!-- quote: ").skip(1) {
            let (file, rest) = quotation.split_once(" -->").expect("a quotation names its file");
            let code = rest.split("```").nth(1).and_then(|fence| fence.split_once('\n'));
            let (_, code) = code.expect("a quotation is fenced");
            let known = unindented(&read(&root().join(file))).contains(&unindented(code));
            assert!(known, "{name} quotes what {file} does not have:\n{code}");
            quotations += 1;
        }
    }
    assert!(quotations >= 5, "{quotations} quotations: are they looked for?");
}

/// The line numbers of prose that is too long, in Markdown or in the comments and docstrings of another file. Tables,
/// fenced code, and lines with a word that does not fit on a line, such as a link, may be longer.
fn long_lines(name: &str, text: &str) -> Vec<usize> {
    let of_python = name.ends_with(".py") || name.ends_with(".pyi");
    let marker = match name.rsplit('.').next() {
        Some("md") => "",
        Some("rs") => "//",
        _ => "#",
    };
    let (mut long, mut fenced, mut string, mut docstring) = (Vec::new(), false, false, false);
    for (line, number) in text.lines().zip(1..) {
        let trimmed = line.trim_start();
        if !string {
            // A quote that begins elsewhere in a line belongs to code.
            docstring = of_python && trimmed.starts_with(QUOTES);
        }
        string ^= trimmed.matches(QUOTES).count() % 2 == 1;
        let prose = if docstring { Some(trimmed) } else { trimmed.strip_prefix(marker) };
        let Some(prose) = prose.map(|prose| prose.trim_start_matches(['/', '!', ' '])) else {
            fenced = false;
            continue;
        };
        if prose.starts_with("```") {
            fenced = !fenced;
        }
        let columns = |text: &str| text.chars().count();
        let indent = columns(line) - columns(prose);
        let breaks = prose.split(' ').all(|word| indent + columns(word) <= COLUMNS);
        if columns(line) > COLUMNS && breaks && !fenced && !prose.starts_with('|') {
            long.push(number);
        }
    }
    long
}

#[test]
fn long_lines_are_found() {
    let words = "word ".repeat(25);
    let fence = format!("```text\n{words}\n```\n{words}\n");
    assert_eq!(long_lines("a.md", &format!("{words}\n\n  - {words}\n| {words} |\n{fence}")), [1, 3, 8]);
    let code = format!("    let x = 1; // {words}");
    let comments = format!("//! {words}\n{code}\n    /// {words}\n    // {words}");
    assert_eq!(long_lines("a.rs", &comments), [1, 3, 4]);
    assert_eq!(long_lines("a.rs", &format!("/// ```\n/// {words}\n/// ```\n/// - {words}")), [4]);
    assert_eq!(long_lines("a.toml", &format!("# {words}\na = '{words}'")), [1]);
    assert_eq!(long_lines(".ci/run", &format!("# {words}\necho {words}")), [1]);
    let docstrings = format!("'''{words}'''\n'''Short.\n\n  {words}\n'''\n{words}").replace("'''", QUOTES);
    assert_eq!(long_lines("a.pyi", &docstrings), [1, 4]);
    let string = format!("x = f'''\n{words}\n'''\n{words}\n  # {words}").replace("'''", QUOTES);
    assert_eq!(long_lines("a.py", &string), [5]);
    assert!(long_lines("a.md", &format!("See [this]({})", "x".repeat(COLUMNS))).is_empty());
    assert!(long_lines("a.md", &"é ".repeat(COLUMNS / 2)).is_empty());
}

#[test]
fn prose_is_wrapped() {
    let hidden = HIDDEN.map(|name| (name.to_owned(), read(&root().join(name))));
    let long = PROSE.into_iter().flat_map(files).chain(hidden).flat_map(|(name, text)| {
        long_lines(&name, &text).into_iter().map(move |number| format!("{name}:{number}"))
    });
    let long: Vec<String> = long.collect();
    assert!(long.is_empty(), "longer than {COLUMNS} columns:\n{}", long.join("\n"));
}

#[test]
fn nothing_is_left_of_merges() {
    let is_mark =
        |line: &&str| ["<<<<<<< ", "||||||| ", ">>>>>>> "].iter().any(|mark| line.starts_with(mark));
    for (name, text) in PROSE.into_iter().flat_map(files) {
        let mark = text.lines().find(is_mark);
        assert!(mark.is_none(), "{name}: {mark:?}");
    }
}

#[test]
fn files_are_short() {
    for (name, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LINES, "{name} has {lines} lines: split it");
    }
}

#[test]
fn the_architecture_names_every_crate() {
    let text = read(&root().join("ARCHITECTURE.md"));
    for member in members() {
        assert!(text.contains(&format!("**{member}**")), "ARCHITECTURE.md does not describe {member}");
    }
}
