//! The report of ptxas, or of the same compiler inside the driver, on a kernel.

use std::fmt;

/// The compiler's report on a kernel, as `ptxas -v` and the driver's verbose log print it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JitReport {
    /// Registers of a thread at entry.
    pub registers: u32,
    /// Bytes of a thread's stack in local memory.
    pub stack_bytes: u32,
    /// Bytes that a thread spills to local memory.
    pub spill_store_bytes: u32,
    /// Bytes that a thread reloads from local memory.
    pub spill_load_bytes: u32,
    /// The compiler's warnings, in order.
    pub warnings: Vec<JitWarning>,
}

/// A warning, or an advisory with a number such as C7510, which says that matrix products are serialised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JitWarning {
    /// The number after the C, if any.
    pub code: Option<u32>,
    /// The sentence.
    pub text: String,
}

impl JitReport {
    /// Parses a log. If it reports several functions, the result has the largest numbers and all warnings. `None` if it
    /// does not report a compiled kernel.
    pub fn parse(log: &str) -> Option<JitReport> {
        let registers = log.lines().filter_map(|line| number_before(line, " registers")).max()?;
        let largest = |what| log.lines().filter_map(|line| number_before(line, what)).max().unwrap_or(0);
        Some(JitReport {
            registers,
            stack_bytes: largest(" bytes stack frame"),
            spill_store_bytes: largest(" bytes spill stores"),
            spill_load_bytes: largest(" bytes spill loads"),
            warnings: log.lines().filter_map(JitWarning::parse).collect(),
        })
    }

    /// Whether there are no spills and no warnings: products overlap as they were written.
    pub fn is_clean(&self) -> bool {
        self.spill_store_bytes == 0 && self.spill_load_bytes == 0 && self.warnings.is_empty()
    }
}

impl JitWarning {
    /// Parses `ptxas info    : (C7510) Potential ...` and `ptxas warning : ...`, with or without the word `ptxas`.
    fn parse(line: &str) -> Option<JitWarning> {
        let (head, message) = line.split_once(" : ")?;
        let numbered = message.trim_start().strip_prefix("(C").and_then(|rest| rest.split_once(") "));
        let numbered = numbered.and_then(|(code, text)| Some((code.parse().ok()?, text)));
        match numbered {
            Some((code, text)) => Some(JitWarning { code: Some(code), text: text.trim().to_owned() }),
            None => {
                let warns = head.trim_end().ends_with("warning");
                warns.then(|| JitWarning { code: None, text: message.trim().to_owned() })
            }
        }
    }
}

/// The number that ends where `what` begins.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let (before, _) = line.split_once(what)?;
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |last| last + 1);
    before[digits..].parse().ok()
}

impl fmt::Display for JitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JitReport { registers, spill_store_bytes, spill_load_bytes, warnings, .. } = self;
        write!(f, "{registers} registers")?;
        if *spill_store_bytes > 0 || *spill_load_bytes > 0 {
            write!(f, ", {spill_store_bytes} bytes spill stores, {spill_load_bytes} bytes spill loads")?;
        }
        warnings.iter().try_for_each(|warning| write!(f, ", {warning}"))
    }
}

impl fmt::Display for JitWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "C{code}: {}", self.text),
            None => write!(f, "{}", self.text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log of ptxas 13.5.37, `-arch=sm_90a -v`.
    const CLEAN: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'vector_add' for 'sm_90a'
ptxas info    : Function properties for vector_add
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compile time = 10.270 ms
";

    #[test]
    fn a_clean_kernel() {
        let report = JitReport::parse(CLEAN).unwrap();
        assert_eq!(report, JitReport { registers: 12, ..JitReport::default() });
        assert!(report.is_clean());
        assert_eq!(report.to_string(), "12 registers");
    }

    /// The driver's log (580.159.04, CUDA 13.0), whose lines begin otherwise than the lines of ptxas.
    #[test]
    fn the_same_from_the_driver() {
        let log = "\
ptxas info    : (C7517) warpgroup.wait is injected in around line 142 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     720 bytes stack frame, 716 bytes spill stores, 708 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers, 720 bytes cumulative stack size
ptxas info    : Compile time = 100.843 ms";
        let report = JitReport::parse(log).unwrap();
        assert_eq!((report.registers, report.stack_bytes), (168, 720));
        assert_eq!((report.spill_store_bytes, report.spill_load_bytes), (716, 708));
        assert_eq!((report.warnings.len(), report.warnings[0].code), (1, Some(7517)));
    }

    #[test]
    fn spills() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    720 bytes stack frame, 716 bytes spill stores, 708 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers, 720 bytes cumulative stack size
";
        let report = JitReport::parse(log).unwrap();
        assert!(!report.is_clean());
        let expected = JitReport {
            registers: 168,
            stack_bytes: 720,
            spill_store_bytes: 716,
            spill_load_bytes: 708,
            warnings: Vec::new(),
        };
        assert_eq!(report, expected);
        assert_eq!(report.to_string(), "168 registers, 716 bytes spill stores, 708 bytes spill loads");
    }

    #[test]
    fn numbered_advice_and_warnings() {
        let log = "\
ptxas info    : (C7517) wgmma.wait_group is injected in around line 141 by compiler to allow use of registers defined by GMMA in function 'k'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas warning : Unresolved extern variable 'x' in whole program compilation, ignoring extern qualifier
ptxas info    : Used 158 registers, used 0 barriers
";
        let report = JitReport::parse(log).unwrap();
        assert!(!report.is_clean());
        let codes: Vec<Option<u32>> = report.warnings.iter().map(|warning| warning.code).collect();
        assert_eq!(codes, [Some(7517), Some(7508), None]);
        let text =
            "Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.";
        assert_eq!(report.warnings[1].text, text);
        assert!(report.warnings[2].text.starts_with("Unresolved extern variable"));
        assert_eq!(report.warnings[1].to_string(), format!("C7508: {text}"));
    }

    /// The log is an error message, or it is empty because the driver found the kernel in its own cache.
    #[test]
    fn no_report_without_a_compiled_kernel() {
        assert_eq!(JitReport::parse(""), None);
        let error = "ptxas d.ptx, line 140; error   : Not a name of any known instruction: 'bogus'
ptxas fatal   : Ptx assembly aborted due to errors";
        assert_eq!(JitReport::parse(error), None);
    }
}
