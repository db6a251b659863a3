//! Violations that the verifier reports.

use std::fmt;

use crate::{Source, TensorMapError, Ty, Value};

/// A violated rule, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyError {
    /// The violation.
    pub fault: Fault,
    /// The offending statement, if the fault belongs to one.
    pub source: Option<Source>,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(source) = self.source {
            write!(f, "{}:{}: ", source.file(), source.line())?;
        }
        write!(f, "{} ({})", self.fault, self.fault.rule())
    }
}

impl std::error::Error for VerifyError {}

/// A violated rule, with the offending numbers. See the rules at [`mod@crate::verify`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum Fault {
    #[error("{operand} is {given} where {expected} is needed")]
    Type { operand: String, given: Ty, expected: Ty },
    #[error("{value} is read outside the block that defines it, or before")]
    NotVisible { value: Value },
    #[error("{value} is assigned twice")]
    AssignedTwice { value: Value },
    #[error("variable {value} is read where it may be unassigned")]
    Unassigned { value: Value },
    #[error("{what} {index} is none of the kernel's {count}")]
    Unknown { what: &'static str, index: u32, count: usize },
    #[error("{what}: {given} is not one of {min} to {max}{}", steps(*multiple))]
    Limit { what: &'static str, given: u32, min: u32, max: u32, multiple: u32 },
    #[error("{op} takes no constants")]
    Constant { op: &'static str },
    #[error("a vector of {width} {ty} is not 1, 2 or 4 elements of at most 16 bytes")]
    Vector { width: usize, ty: Ty },
    #[error("{given} {what} where {expected} are needed")]
    Count { what: &'static str, given: usize, expected: usize },
    #[error("an operand of an 8-bit product is not k-major")]
    MajorOf8Bit,
    #[error("{coords} coordinates for tensor map {param} of {rank} dimensions")]
    Rank { param: String, coords: usize, rank: u32 },
    #[error("parameter {param} is not a {expected}")]
    ParamKind { param: String, expected: &'static str },
    #[error("what needs the whole warp is under a condition of lanes")]
    CollectiveDiverged,
    #[error("a wait loop cannot be guarded")]
    GuardedWait,
    #[error("region {region} holds mbarriers, which only their own operations may touch")]
    DataOnMbarrier { region: String },
    #[error("a loop has no break")]
    EndlessLoop,
    #[error("a break is outside of any loop")]
    BreakOutsideLoop,
    #[error("a break is under a condition of lanes")]
    BreakDiverged,
    #[error("role {role} has warps {start} to {end}, outside the {warps} of the cta")]
    RoleWarps { role: String, start: u32, end: u32, warps: u32 },
    #[error("warp {warp} has {given} roles")]
    RoleCover { warp: u32, given: usize },
    #[error("warps {start} to {end} are not whole warpgroups")]
    Warpgroup { start: u32, end: u32 },
    #[error("setmaxnreg goes the wrong way from {before} registers to {given}")]
    SetMaxRegisters { given: u32, before: u32 },
    #[error("setmaxnreg is in a branch or a loop")]
    SetMaxRegistersNested,
    #[error("roles take {given} registers of the {pool} that the cta has at entry")]
    RegisterPool { given: u32, pool: u32 },
    #[error("a cta of {threads} threads is not whole warps, or not 32 to 1024")]
    Threads { threads: u32 },
    #[error("a cluster of {cluster} ctas is not 1 to 16")]
    Cluster { cluster: u32 },
    #[error("{per_sm} ctas of {threads} threads on an sm are not 1 to 32, or more than 2048 threads")]
    PerSm { per_sm: u32, threads: u32 },
    #[error("barrier {name} has number {id}, not 1 to 15 or taken")]
    BarrierId { name: String, id: u32 },
    #[error("barrier {name} has {threads} threads, not whole warps up to the {limit} of the cta")]
    BarrierThreads { name: String, threads: u32, limit: u32 },
    #[error("region {name} at {offset} is not aligned to {align}, or that is no power of two up to 1024")]
    RegionAlign { name: String, offset: u32, align: u32 },
    #[error("regions {first} and {second} share bytes and neither overlays the other")]
    RegionOverlap { first: String, second: String },
    #[error("shared memory takes {given} bytes of {limit}")]
    SmemTotal { given: u32, limit: u32 },
    #[error("bytes {start} to {end} are outside region {region} of {size}")]
    OutsideRegion { region: String, start: i64, end: i64, size: u32 },
    #[error("offset {offset} in region {region} is not aligned to {align}")]
    Misaligned { region: String, offset: i32, align: u32 },
    #[error("region {region} holds no mbarriers")]
    NoMbarrier { region: String },
    #[error("an mbarrier of {region} is initialised for {given} arrivals, declared for {declared}")]
    Arrivals { region: String, given: u32, declared: u32 },
    #[error("{what} {name:?} is no identifier")]
    Identifier { what: &'static str, name: String },
    #[error("tensor map {param}: {error}")]
    TensorMap { param: String, error: TensorMapError },
    #[error("{}", what.replacen(" is ", " is never ", 1))]
    NotDone { what: String },
    #[error("{what}, but in another block than where it became due")]
    DoneElsewhere { what: String },
    #[error("pipeline {pipeline} is declared for {declared} warps that release its stages, but {given} do")]
    PipelineWarps { pipeline: String, declared: u32, given: u32 },
    #[error("a product is never waited for")]
    NeverWaited,
    #[error("{what}: {first} does not fit {second}")]
    Shapes { what: &'static str, first: String, second: String },
    #[error("role {role} is declared inside a role, a branch or a loop")]
    RoleInside { role: String },
    #[error("two {what}s are called {name}")]
    SameName { what: &'static str, name: String },
}

fn steps(multiple: u32) -> String {
    if multiple == 1 { String::new() } else { format!(" in steps of {multiple}") }
}

impl Fault {
    /// The id of the rule.
    pub fn rule(&self) -> &'static str {
        match self {
            Fault::Type { .. } | Fault::ParamKind { .. } => "V-1",
            Fault::NotVisible { .. } => "V-2",
            Fault::AssignedTwice { .. } => "V-3",
            Fault::Unassigned { .. } => "V-4",
            Fault::Unknown { .. } => "V-5",
            Fault::Limit { .. } | Fault::Constant { .. } => "V-6",
            Fault::Vector { .. } => "V-7",
            Fault::Count { .. } => "V-8",
            Fault::MajorOf8Bit => "V-9",
            Fault::Rank { .. } => "V-10",
            Fault::CollectiveDiverged | Fault::GuardedWait => "V-11",
            Fault::BreakOutsideLoop | Fault::BreakDiverged | Fault::EndlessLoop => "V-12",
            Fault::RoleWarps { .. } | Fault::RoleCover { .. } => "V-13",
            Fault::Warpgroup { .. } => "V-14",
            Fault::SetMaxRegisters { .. } | Fault::SetMaxRegistersNested => "V-15",
            Fault::RegisterPool { .. } => "V-16",
            Fault::Threads { .. } | Fault::Cluster { .. } | Fault::PerSm { .. } => "V-17",
            Fault::BarrierId { .. } | Fault::BarrierThreads { .. } => "V-18",
            Fault::RegionAlign { .. } | Fault::RegionOverlap { .. } => "V-19",
            Fault::SmemTotal { .. } => "V-20",
            Fault::OutsideRegion { .. } | Fault::Misaligned { .. } => "V-21",
            Fault::NoMbarrier { .. } | Fault::DataOnMbarrier { .. } | Fault::Arrivals { .. } => "V-22",
            Fault::Identifier { .. } | Fault::SameName { .. } => "V-23",
            Fault::TensorMap { .. } => "V-24",
            Fault::NotDone { .. } | Fault::DoneElsewhere { .. } => "V-25",
            Fault::NeverWaited => "V-26",
            Fault::Shapes { .. } => "V-27",
            Fault::RoleInside { .. } => "V-28",
            Fault::PipelineWarps { .. } => "V-29",
        }
    }
}
