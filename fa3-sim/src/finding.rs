//! A finding of a run: a broken rule, the instruction that broke it, what is missing, and how to reproduce it.

use std::fmt;

use fa3_ir::Source;

use crate::rule::Rule;
use crate::schedule::Policy;

/// A broken rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// The event, with its numbers.
    pub what: String,
    /// The instruction that broke the rule.
    pub here: Option<Site>,
    /// The earlier access that the instruction's access conflicts with.
    pub other: Option<Site>,
    /// An instruction or a barrier that would order the two accesses.
    pub missing: Option<&'static str>,
    /// One line for each event that warps wait for.
    pub waits: Vec<String>,
    /// Number of other instructions on the same line that break the rule in the same way.
    pub more: u32,
    /// The rule of the run's first finding, if that is likely the cause of this finding.
    pub cause: Option<Rule>,
    /// How to reproduce the finding.
    pub replay: Replay,
}

/// An execution of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// The role of the warp.
    pub role: String,
    /// The CTA in the grid.
    pub cta: [u32; 3],
    /// The warp in the CTA.
    pub warp: u32,
    /// The line of the kernel that built it.
    pub source: Source,
    /// Number of iterations begun of the outermost and of the innermost loop around the instruction.
    pub iteration: [u32; 2],
    /// Its mnemonic.
    pub instruction: &'static str,
    /// The bytes, the memory and the proxy of its access, if it makes one.
    pub access: Option<String>,
}

/// The launch and the schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The kernel.
    pub kernel: String,
    /// The grid.
    pub grid: [u32; 3],
    /// The policy, with its seed.
    pub policy: Policy,
}

/// The findings of a run: causes before consequences, and findings of one line merged.
pub(crate) fn ordered(findings: Vec<Finding>) -> Vec<Finding> {
    let place = |site: &Option<Site>| site.as_ref().map(|site| (site.source, site.instruction));
    let mut all: Vec<Finding> = Vec::new();
    for finding in findings {
        let same = all.iter_mut().find(|known| {
            let is_here = known.here.is_some() && place(&known.here) == place(&finding.here);
            is_here && known.rule == finding.rule && place(&known.other) == place(&finding.other)
        });
        match same {
            Some(known) => known.more += 1,
            None => all.push(finding),
        }
    }
    all.sort_by_key(|finding| finding.rule.order());
    let first = all.first().map(|finding| finding.rule).filter(|rule| !rule.is_consequence());
    for finding in all.iter_mut().filter(|finding| finding.rule.is_consequence()) {
        finding.cause = first;
    }
    all
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.cta;
        write!(
            f,
            "{}:{} {} by {}.w{} of cta ({x}, {y}, {z})",
            self.source.file(),
            self.source.line(),
            self.instruction,
            self.role,
            self.warp
        )?;
        match self.iteration {
            [0, _] => {}
            [outer, inner] if outer == inner => write!(f, ", iteration {outer}")?,
            [outer, inner] => write!(f, ", iteration {outer}, {inner}")?,
        }
        match &self.access {
            None => Ok(()),
            Some(access) => write!(f, ": {access}"),
        }
    }
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.grid;
        write!(f, "kernel {}, grid [{x}, {y}, {z}], policy {}", self.kernel, self.policy)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.rule, self.what)?;
        writeln!(f, "  rule:    {}", self.rule.sentence())?;
        writeln!(f, "           {}", self.rule.page())?;
        if let Some(cause) = self.cause {
            writeln!(f, "  likely:  a consequence of {cause}, which is broken as well")?;
        }
        for (name, site) in [("here:   ", &self.here), ("earlier:", &self.other)] {
            if let Some(site) = site {
                writeln!(f, "  {name} {site}")?;
            }
        }
        if let Some(missing) = self.missing {
            writeln!(f, "  missing: {missing}")?;
        }
        match self.more {
            0 => {}
            1 => writeln!(f, "  more:    another instruction of this line likewise")?,
            more => writeln!(f, "  more:    {more} other instructions of this line likewise")?,
        }
        for wait in &self.waits {
            writeln!(f, "  waits:   {wait}")?;
        }
        writeln!(f, "  replay:  {}", self.replay)
    }
}
