//! PTX in a canonical form, which does not depend on names.

use std::collections::{HashMap, HashSet};

/// The canonical form of a kernel's PTX. Two kernels have the same form exactly if they have the same instructions.
/// Registers of each class, labels and parameters are numbered in order of first appearance, and the entry loses its
/// name. Comments, register declarations and indentation are dropped. A line is an instruction, a label or a directive.
pub fn canonical(ptx: &str) -> String {
    let lines: Vec<&str> = ptx.lines().map(code).filter(|line| !line.is_empty()).collect();
    let mut names = Names::declared(&lines);
    let lines = lines.iter().map(|line| names.rewrite(&without_declarations(line)));
    lines.filter(|line| !line.is_empty()).map(|line| line + "\n").collect()
}

/// The 64-bit FNV-1a hash. It is stable across platforms and versions.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The line without its comment.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code).trim()
}

/// The kinds of a kernel's names, and the numbers given so far.
struct Names {
    /// Class of each register, by the register's name. `prefixes` has the classes of declarations such as `%r<100>`.
    classes: HashMap<String, String>,
    prefixes: HashMap<String, String>,
    labels: HashSet<String>,
    numbered: HashMap<String, String>,
    /// Number of names seen, by kind.
    counts: HashMap<String, usize>,
}

impl Names {
    fn declared(lines: &[&str]) -> Names {
        let mut names = Names {
            classes: HashMap::new(),
            prefixes: HashMap::new(),
            labels: HashSet::new(),
            numbered: HashMap::new(),
            counts: HashMap::new(),
        };
        for line in lines {
            for declaration in declarations(line) {
                let mut words = declaration.split_whitespace().skip(1);
                let class = words.next().unwrap_or_default().trim_start_matches('.').to_owned();
                let name = words.next().unwrap_or_default();
                match name.split_once('<') {
                    Some((prefix, _)) => names.prefixes.insert(prefix.to_owned(), class),
                    None => names.classes.insert(name.to_owned(), class),
                };
            }
            let labels = line.split([' ', ';', '{']).filter_map(|word| word.strip_suffix(':'));
            names.labels.extend(labels.map(str::to_owned));
        }
        names
    }

    fn rewrite(&mut self, line: &str) -> String {
        let mut text = String::new();
        let mut rest = line;
        while let Some(first) = rest.chars().next() {
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$');
            let end = rest[first.len_utf8()..]
                .find(|c| !is_name(c))
                .map_or(rest.len(), |end| end + first.len_utf8());
            let (token, after) =
                rest.split_at(if is_name(first) || first == '%' { end } else { first.len_utf8() });
            // Separators and the parts of an opcode are not names.
            let is_name = token.len() > 1 || is_name(first);
            text += if text.ends_with('.') || !is_name { token } else { self.name(token) };
            rest = after;
        }
        match text.split_once(".entry ") {
            Some((before, _)) => format!("{before}.entry"),
            None => text,
        }
    }

    /// The canonical form of a token.
    fn name<'a>(&'a mut self, token: &'a str) -> &'a str {
        if self.numbered.contains_key(token) {
            return &self.numbered[token];
        }
        let prefix = token.trim_end_matches(|c: char| c.is_ascii_digit());
        let class = self.classes.get(token).or_else(|| self.prefixes.get(prefix)).cloned();
        let kind = match class {
            Some(class) => format!("%{class}_"),
            None if self.labels.contains(token) => "label_".to_owned(),
            None if token.starts_with("param_") => "param_".to_owned(),
            None => return token,
        };
        let count = self.counts.entry(kind.clone()).or_default();
        self.numbered.insert(token.to_owned(), format!("{kind}{count}"));
        *count += 1;
        &self.numbered[token]
    }
}

/// The declarations of registers in a line, without their semicolons.
fn declarations(line: &str) -> impl Iterator<Item = &str> {
    line.split([';', '{']).map(str::trim).filter(|part| part.starts_with(".reg "))
}

fn without_declarations(line: &str) -> String {
    let declared = declarations(line).collect::<Vec<_>>();
    let line = declared
        .iter()
        .fold(line.to_owned(), |line, declaration| line.replace(&format!("{declaration};"), ""));
    line.trim().to_owned()
}
