//! The difference between two locks.

use std::collections::BTreeSet;
use std::fmt;

use super::{Code, Lock, Usage};

/// The kernels that differ from the lock, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    changed: Vec<(String, String)>,
    new: Vec<String>,
    gone: Vec<String>,
}

impl Diff {
    /// Compares `now` with `lock`. Numbers from ptxas are compared only if both come from the same version of ptxas.
    pub fn of(lock: &Lock, now: &Lock) -> Diff {
        let same_ptxas = lock.ptxas == now.ptxas;
        let mut diff = Diff::default();
        let names: BTreeSet<&String> = lock.kernels.keys().chain(now.kernels.keys()).collect();
        for name in names {
            match (lock.kernels.get(name), now.kernels.get(name)) {
                (Some(old), Some(new)) => {
                    let changes = changes(old, new, same_ptxas);
                    if !changes.is_empty() {
                        diff.changed.push((name.clone(), changes.join(", ")));
                    }
                }
                (None, _) => diff.new.push(name.clone()),
                (_, None) => diff.gone.push(name.clone()),
            }
        }
        diff
    }

    /// Whether every kernel matches the lock.
    pub fn is_empty(&self) -> bool {
        *self == Diff::default()
    }
}

/// The properties of a kernel's code that have changed.
fn changes(old: &Code, new: &Code, same_ptxas: bool) -> Vec<String> {
    let usage = |number: fn(Usage) -> u32| {
        [old, new]
            .map(|code| code.assembled.map_or_else(|| "-".to_owned(), |usage| number(usage).to_string()))
    };
    let count = |number: fn(&Code) -> usize| [old, new].map(|code| number(code).to_string());
    let mut columns = vec![
        ("smem", count(|code| code.smem as usize)),
        ("instructions", count(|code| code.instructions)),
        ("wgmma", count(|code| code.wgmma)),
    ];
    if same_ptxas {
        columns.push(("registers", usage(|usage| usage.registers)));
        columns.push(("spills", usage(|usage| usage.spills)));
    }
    let columns = columns.into_iter().filter(|(_, [old, new])| old != new);
    let columns = columns.map(|(name, [old, new])| format!("{name} {old} -> {new}"));
    (old.ptx != new.ptx).then(|| "ptx".to_owned()).into_iter().chain(columns).collect()
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diff { changed, new, gone } = self;
        changed.iter().try_for_each(|(name, what)| writeln!(f, "changed  {name}: {what}"))?;
        new.iter().try_for_each(|name| writeln!(f, "new      {name}"))?;
        gone.iter().try_for_each(|name| writeln!(f, "gone     {name}"))?;
        write!(f, "{} kernels changed, {} are new, {} are gone", changed.len(), new.len(), gone.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: Code = Code {
        ptx: 1,
        assembled: Some(Usage { registers: 168, spills: 0 }),
        smem: 1024,
        instructions: 70,
        wgmma: 8,
    };

    fn lock(ptxas: Option<&str>, kernels: &[(&str, Code)]) -> Lock {
        let kernels = kernels.iter().map(|&(name, code)| (name.to_owned(), code)).collect();
        Lock { ptxas: ptxas.map(str::to_owned), kernels }
    }

    fn diff(old: Code, new: Code) -> String {
        let [old, new] = [old, new].map(|code| lock(Some("13.5"), &[("gemm", code)]));
        let diff = Diff::of(&old, &new);
        assert!(!diff.is_empty());
        diff.to_string().lines().next().unwrap_or_default().to_owned()
    }

    #[test]
    fn every_column_counts() {
        let usage = |registers, spills| Some(Usage { registers, spills });
        assert_eq!(diff(CODE, Code { ptx: 2, ..CODE }), "changed  gemm: ptx");
        assert_eq!(diff(CODE, Code { smem: 8, ..CODE }), "changed  gemm: smem 1024 -> 8");
        assert_eq!(diff(CODE, Code { instructions: 8, ..CODE }), "changed  gemm: instructions 70 -> 8");
        assert_eq!(diff(CODE, Code { ptx: 2, wgmma: 7, ..CODE }), "changed  gemm: ptx, wgmma 8 -> 7");
        let registers = Code { assembled: usage(170, 0), ..CODE };
        assert_eq!(diff(CODE, registers), "changed  gemm: registers 168 -> 170");
        assert_eq!(diff(CODE, Code { assembled: usage(168, 4), ..CODE }), "changed  gemm: spills 0 -> 4");
        assert_eq!(
            diff(Code { assembled: None, ..CODE }, CODE),
            "changed  gemm: registers - -> 168, spills - -> 0"
        );
    }

    #[test]
    fn kernels_come_and_go() {
        let old = lock(None, &[("a", CODE), ("b", CODE)]);
        let new = lock(None, &[("b", CODE), ("c", CODE)]);
        assert!(Diff::of(&old, &old).is_empty());
        let said = Diff::of(&old, &new).to_string();
        assert_eq!(said, "new      c\ngone     a\n0 kernels changed, 1 are new, 1 are gone");
    }

    #[test]
    fn another_ptxas_is_not_compared() {
        let old = lock(Some("13.5"), &[("a", CODE)]);
        let unlike = Code { assembled: None, ..CODE };
        assert!(Diff::of(&old, &lock(None, &[("a", unlike)])).is_empty());
        assert!(Diff::of(&old, &lock(Some("13.4"), &[("a", unlike)])).is_empty());
        assert!(!Diff::of(&old, &lock(None, &[("a", Code { ptx: 2, ..unlike })])).is_empty());
    }
}
