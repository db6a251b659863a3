//! Counters of a run.

use std::collections::BTreeMap;
use std::fmt;

use fa3_ir::Source;

/// Counts of a run, over all CTAs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of instructions of warps, without control flow.
    pub warp_instructions: u64,
    /// Matrix products of a warpgroup: 64 x n x k.
    pub products: u64,
    /// Number of multiplications and additions in these products.
    pub product_flops: u64,
    /// Tensor and bulk copies to shared memory, and their bytes. A multicast counts once.
    pub loads: Count,
    /// Tensor and bulk copies to global memory, and their bytes.
    pub stores: Count,
    /// Tensor and bulk additions to global memory, and their bytes.
    pub reductions: Count,
    /// Instructions of warps at named barriers and at the cluster's barrier.
    pub barriers: u64,
    /// Instructions of lanes at mbarriers. A wait counts once, when it succeeds.
    pub mbarriers: u64,
    /// Wavefronts of generic accesses to shared memory, by the line of the kernel's source.
    pub shared: BTreeMap<Line, Wavefronts>,
}

/// A number of copies, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of copies.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Count {
    pub(crate) fn add(&mut self, bytes: u32) {
        self.count += 1;
        self.bytes += u64::from(bytes);
    }
}

/// A line of a kernel's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    /// The file.
    pub file: &'static str,
    /// The line.
    pub line: u32,
    /// The column.
    pub column: u32,
}

/// The name of the file without its folders, and the line.
impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.rsplit(['/', '\\']).next().unwrap_or_default();
        write!(f, "{file}:{}", self.line)
    }
}

impl From<Source> for Line {
    fn from(source: Source) -> Line {
        Line { file: source.file(), line: source.line(), column: source.column() }
    }
}

/// The cost of accesses to shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wavefronts {
    /// Accesses of a warp.
    pub accesses: u64,
    /// The wavefronts that they would take without bank conflicts.
    pub ideal: u64,
    /// The wavefronts that they take.
    pub actual: u64,
}

impl Wavefronts {
    pub(crate) fn add(&mut self, other: Wavefronts) {
        self.accesses += other.accesses;
        self.ideal += other.ideal;
        self.actual += other.actual;
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "warp instructions  {}", self.warp_instructions)?;
        writeln!(f, "products           {} ({} flop)", self.products, self.product_flops)?;
        // Loads and stores by the threads themselves are not copies.
        for (name, count) in
            [("TMA loads", self.loads), ("TMA stores", self.stores), ("TMA reductions", self.reductions)]
        {
            writeln!(f, "{name:<18} {} ({} bytes)", count.count, count.bytes)?;
        }
        writeln!(f, "barriers           {}", self.barriers)?;
        writeln!(f, "mbarriers          {}", self.mbarriers)?;
        for (line, wavefronts) in &self.shared {
            let Wavefronts { accesses, ideal, actual } = wavefronts;
            writeln!(
                f,
                "shared {}:{:<6} {accesses} accesses, {actual} wavefronts, {ideal} without conflicts",
                line.file, line.line
            )?;
        }
        Ok(())
    }
}
