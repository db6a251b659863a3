//! `tests/kernels.lock`: a line with the hash and resources of each shipped kernel. It shows every change of a kernel's
//! code.
//!
//! The hash is computed from the [`canonical`] PTX, which depends neither on register numbers nor on names. Registers
//! at entry and spilled bytes come from ptxas; they are `-` for kernels that are not assembled: see
//! [`Shipped::stands_for_others`](fa3_cuda::kernels::shipped::Shipped::stands_for_others).

mod diff;
mod tools;

use std::collections::BTreeMap;
use std::fmt;

use fa3_ir::Ptx;

use crate::canonical::{canonical, fnv1a};

pub use diff::Diff;
pub use tools::{Module, NoTool, Nvdisasm, Ptxas};

/// Header: the tool that wrote the lock, and the command that writes it.
const HEAD: &str = "\
# The code of every shipped kernel. A test compares it, and writes it again:
#   FA3_UPDATE=1 cargo test -p fa3-tests --test kernels_lock
";

/// The contents of the lock file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lock {
    /// Version of ptxas, if the kernels were assembled.
    pub ptxas: Option<String>,
    /// The kernels by name.
    pub kernels: BTreeMap<String, Code>,
}

/// The code of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// FNV-1a of its canonical PTX.
    pub ptx: u64,
    /// Registers and spills, if the kernel was assembled.
    pub assembled: Option<Usage>,
    /// Bytes of dynamic shared memory.
    pub smem: u32,
    /// Instructions in the PTX.
    pub instructions: usize,
    /// Matrix products among the instructions.
    pub wgmma: usize,
}

/// Register usage of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Registers per thread at entry.
    pub registers: u32,
    /// Bytes of spill stores and spill loads.
    pub spills: u32,
}

/// The error that a line of a text is not a line of a lock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the lock is no kernel: {text}")]
pub struct Malformed {
    line: usize,
    text: String,
}

impl Code {
    /// The code of a kernel, without assembling it.
    pub fn of(ptx: &Ptx) -> Code {
        let text = canonical(&ptx.text);
        let body = text.split_once("\n{\n").map_or("", |(_, body)| body);
        let instructions = || body.lines().filter(|line| line.ends_with([';', '}']) && line.len() > 1);
        Code {
            ptx: fnv1a(text.as_bytes()),
            assembled: None,
            smem: ptx.smem_bytes,
            instructions: instructions().count(),
            wgmma: instructions().filter(|line| line.contains("wgmma.mma_async")).count(),
        }
    }

    fn parse<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Code> {
        let ptx = u64::from_str_radix(words.next()?, 16).ok()?;
        let assembled = match (words.next()?, words.next()?) {
            ("-", "-") => None,
            (registers, spills) => {
                Some(Usage { registers: registers.parse().ok()?, spills: spills.parse().ok()? })
            }
        };
        let code = Code {
            ptx,
            assembled,
            smem: words.next()?.parse().ok()?,
            instructions: words.next()?.parse().ok()?,
            wgmma: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(code)
    }
}

impl Lock {
    /// Parses the text that [`Lock`] prints.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn parse(text: &str) -> Result<Lock, Malformed> {
        let mut lock = Lock::default();
        for (index, text) in text.lines().enumerate() {
            let malformed = || Malformed { line: index + 1, text: text.to_owned() };
            if let Some(version) = text.strip_prefix("# ptxas ") {
                lock.ptxas = Some(version.to_owned());
            } else if !text.starts_with('#') {
                let mut words = text.split_whitespace();
                let name = words.next().ok_or_else(malformed)?;
                let code = Code::parse(words).ok_or_else(malformed)?;
                if lock.kernels.insert(name.to_owned(), code).is_some() {
                    return Err(malformed());
                }
            }
        }
        Ok(lock)
    }
}

impl Lock {
    /// The kernels of `now` that spill more bytes than this lock allows, with both numbers of bytes. A kernel that the
    /// lock does not list may spill any number. A kernel that is listed without a number may spill none.
    pub fn more_spills(&self, now: &Lock) -> Vec<String> {
        let spills = |code: &Code| code.assembled.map_or(0, |usage| usage.spills);
        let kernels = now.kernels.iter().filter_map(|(name, new)| {
            let [old, new] = [self.kernels.get(name)?, new].map(spills);
            (new > old).then(|| format!("{name} spills {new} bytes, the lock has {old}"))
        });
        kernels.collect()
    }

    /// Three numbers: of assembled kernels whose name `is_meant` accepts, of those kernels that spill, and of bytes
    /// that the worst of them spills.
    pub fn count_spills(&self, is_meant: impl Fn(&str) -> bool) -> (usize, usize, u32) {
        let usages =
            self.kernels.iter().filter(|(name, _)| is_meant(name)).filter_map(|(_, code)| code.assembled);
        let spills: Vec<u32> = usages.map(|usage| usage.spills).collect();
        let spilling = spills.iter().filter(|&&bytes| bytes > 0).count();
        (spills.len(), spilling, spills.iter().copied().max().unwrap_or(0))
    }
}

impl fmt::Display for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HEAD}")?;
        if let Some(version) = &self.ptxas {
            writeln!(f, "# ptxas {version}")?;
        }
        let [name, ptx] = ["# kernel", "ptx"];
        writeln!(f, "{name:72} {ptx:16} registers spills   smem instructions wgmma")?;
        for (name, code) in &self.kernels {
            let Code { ptx, assembled, smem, instructions, wgmma } = code;
            let column = |number: fn(&Usage) -> u32| {
                assembled.as_ref().map_or_else(|| "-".to_owned(), |usage| number(usage).to_string())
            };
            let [registers, spills] = [column(|usage| usage.registers), column(|usage| usage.spills)];
            writeln!(
                f,
                "{name:72} {ptx:016x} {registers:>9} {spills:>6} {smem:>6} {instructions:>12} {wgmma:>5}"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fa3_cuda::kernels::ladder::gemm;
    use fa3_ir::{Elem, ptx};

    use super::*;

    /// Checks the hash on test vectors that the authors of FNV publish.
    #[test]
    fn the_hash() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_kernels_code() {
        let kernel = gemm::kernel(Elem::Bf16);
        let ptx = ptx::emit(&kernel).unwrap();
        let code = Code::of(&ptx);
        let lines = |what: &str| ptx.text.lines().filter(|line| line.contains(what)).count();
        assert_eq!((code.smem, code.wgmma), (kernel.smem.bytes(), lines("wgmma.mma_async")));
        let others = lines(".reg .") - lines(".reg .pred done;") + lines(".shared .align");
        assert_eq!(code.instructions, lines(";") - others);
    }

    #[test]
    fn spills_only_fall() {
        let code = |spills| {
            let assembled = Some(Usage { registers: 168, spills });
            Code { ptx: 0, assembled, smem: 0, instructions: 0, wgmma: 0 }
        };
        let lock = |kernels: &[(&str, Code)]| {
            let kernels = kernels.iter().map(|&(name, code)| (name.to_owned(), code)).collect();
            Lock { ptxas: None, kernels }
        };
        let unassembled = Code { assembled: None, ..code(0) };
        let old = lock(&[("a", code(8)), ("b", code(0)), ("c", unassembled)]);
        let now = lock(&[("a", code(9)), ("b", code(0)), ("c", code(4)), ("new", code(12))]);
        let said = ["a spills 9 bytes, the lock has 8", "c spills 4 bytes, the lock has 0"];
        assert_eq!(old.more_spills(&now), said);
        assert_eq!(now.more_spills(&old), [""; 0]);
        assert_eq!(now.count_spills(|name| name != "new"), (3, 2, 9));
        assert_eq!(old.count_spills(|name| name == "c"), (0, 0, 0));
    }

    #[test]
    fn locks_are_read_as_they_are_printed() {
        let assembled = Some(Usage { registers: 168, spills: 12 });
        let code = Code { ptx: 0x0123, assembled, smem: 1024, instructions: 70, wgmma: 8 };
        let kernels = [("b", code), ("a", Code { assembled: None, ..code })];
        let kernels = kernels.map(|(name, code)| (name.to_owned(), code)).into();
        let lock = Lock { ptxas: Some("13.5.37".to_owned()), kernels };
        let text = lock.to_string();
        assert_eq!(Lock::parse(&text), Ok(lock));
        let last = text.lines().last().unwrap();
        assert_eq!(
            last.split_whitespace().collect::<Vec<_>>(),
            ["b", "0000000000000123", "168", "12", "1024", "70", "8"]
        );
        for (from, to) in
            [(" 70 ", " x "), (" 70 ", " "), ("\nb ", "\na "), (" 8\n", " 8 9\n"), (" 12 ", " - ")]
        {
            assert!(Lock::parse(&text.replace(from, to)).is_err(), "{from}");
        }
    }
}
