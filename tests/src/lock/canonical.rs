//! PTX without what a change of names alone changes.

use std::collections::{HashMap, HashSet};

/// The text in a form that two kernels share exactly if their instructions are the same: registers are numbered by
/// class, labels and parameters each by themselves, in order of first appearance, and the entry has no name. Comments,
/// declarations of registers and indentation are left out. A line is an instruction, a label or a directive.
pub fn canonical(ptx: &str) -> String {
    let lines: Vec<&str> = ptx.lines().map(code).filter(|line| !line.is_empty()).collect();
    let mut names = Names::declared(&lines);
    let lines = lines.iter().map(|line| names.rewrite(&without_declarations(line)));
    lines.filter(|line| !line.is_empty()).map(|line| line + "\n").collect()
}

/// The line without its comment.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code).trim()
}

/// Meanings of the names in a kernel, and their numbers so far.
struct Names {
    /// Registers by name, and by prefix those that are declared as `%r<100>`.
    classes: HashMap<String, String>,
    prefixes: HashMap<String, String>,
    labels: HashSet<String>,
    numbered: HashMap<String, String>,
    /// How many names of a kind have a number.
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
            // Parts of an opcode are no names.
            let token = if text.ends_with('.') { token.to_owned() } else { self.name(token) };
            text += &token;
            rest = after;
        }
        match text.split_once(".entry ") {
            Some((before, _)) => format!("{before}.entry"),
            None => text,
        }
    }

    /// The canonical form of a token.
    fn name(&mut self, token: &str) -> String {
        let prefix = token.trim_end_matches(|c: char| c.is_ascii_digit());
        let class = self.classes.get(token).or_else(|| self.prefixes.get(prefix)).cloned();
        let kind = match class {
            Some(class) => format!("%{class}_"),
            None if self.labels.contains(token) => "label_".to_owned(),
            None if token.starts_with("param_") => "param_".to_owned(),
            None => return token.to_owned(),
        };
        let count = self.counts.entry(kind.clone()).or_default();
        let numbered = self.numbered.entry(token.to_owned()).or_insert_with(|| {
            *count += 1;
            format!("{kind}{}", *count - 1)
        });
        numbered.clone()
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

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "\
.extern .shared .align 1024 .b8 smem[];

.visible .entry fwd(
    .param .u64 param_x,
    .param .align 64 .b8 param_map[128]
)
.maxntid 128, 1, 1
{
    .reg .b32 %r<40>;
    .reg .f32 %f<40>;
    .reg .b64 %map_x;
    mov.b64 %map_x, param_map;
    // role producer: warps 0 to 3
    mov.u32 %r7, %tid.x;
loop_3:
    add.u32 %r9, %r7, 1;
    ld.shared.f32 %f9, [smem+1024];
    @!%r9 bra.uni loop_3;
    { .reg .pred done; again: mbarrier.try_wait done, [%r7], 0; @!done bra again; }
    fma.rn.f32 %f9, %f9, 0f3F800000, %f9;
}
";

    #[test]
    fn the_form() {
        let expected = "\
.extern .shared .align 1024 .b8 smem[];
.visible .entry
.param .u64 param_0,
.param .align 64 .b8 param_1[128]
)
.maxntid 128, 1, 1
{
mov.b64 %b64_0, param_1;
mov.u32 %b32_0, %tid.x;
label_0:
add.u32 %b32_1, %b32_0, 1;
ld.shared.f32 %f32_0, [smem+1024];
@!%b32_1 bra.uni label_0;
{  label_1: mbarrier.try_wait %pred_0, [%b32_0], 0; @!%pred_0 bra label_1; }
fma.rn.f32 %f32_0, %f32_0, 0f3F800000, %f32_0;
}
";
        assert_eq!(canonical(KERNEL), expected);
    }

    /// The canonical kernel after replacements everywhere.
    fn edited(edits: &[(&str, &str)]) -> String {
        let edited = edits.iter().fold(KERNEL.to_owned(), |text, (from, to)| {
            assert!(text.contains(from), "no {from}");
            text.replace(from, to)
        });
        canonical(&edited)
    }

    #[test]
    fn names_do_not_count() {
        let names = [
            [("%r7", "%r8"), ("<40>", "<99>")],
            [("%r7", "%r17"), ("%r9", "%r1")],
            [("%f9", "%f3"), ("loop_3", "again_and_again")],
            [("_map", "_q"), ("_x", "_k")],
            [("fwd", "forward"), ("producer", "loader")],
            [("done", "ready"), ("again", "once_more")],
        ];
        for edits in names {
            assert_eq!(edited(&edits), canonical(KERNEL), "{edits:?}");
        }
    }

    #[test]
    fn code_counts() {
        let changes = [
            ("%r9, %r7, 1", "%r7, %r9, 1"),
            ("%r9, %r7, 1", "%r9, %r9, 1"),
            ("add.u32 %r9, %r7, 1", "add.u32 %r9, %r7, 2"),
            ("smem+1024", "smem+2048"),
            ("align 1024", "align 128"),
            ("@!%r9", "@%r9"),
            ("0f3F800000", "0f40000000"),
            ("%tid.x", "%tid.y"),
            ("maxntid 128", "maxntid 256"),
            (".u64 param_x", ".u32 param_x"),
            ("param_map;", "param_x;"),
            (".reg .f32 %f", ".reg .b32 %f"),
            ("[%r7], 0", "[%r9], 0"),
        ];
        for change in changes {
            assert_ne!(edited(&[change]), canonical(KERNEL), "{change:?}");
        }
    }

    /// Two instructions in another order are another kernel.
    #[test]
    fn order_counts() {
        let lines: Vec<&str> = KERNEL.lines().collect();
        let add = lines.iter().position(|line| line.contains("add.u32")).expect("the kernel adds");
        let mut exchanged = lines.clone();
        exchanged.swap(add, add + 1);
        assert_ne!(canonical(&exchanged.join("\n")), canonical(KERNEL));
    }
}
