//! The rules that a kernel must keep, each with an id and a sentence.

use std::fmt;

macro_rules! rules {
    ($($rule:ident = $id:literal: $sentence:literal;)+) => {
        /// A rule of the machine. [`Rule::sentence`] says the requirement.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Rule {
            $(#[doc = $sentence] $rule,)+
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &[Rule] = &[$(Rule::$rule),+];

            /// Its id, as findings print it.
            pub const fn id(self) -> &'static str {
                match self { $(Rule::$rule => $id,)+ }
            }

            /// The rule as a sentence.
            pub const fn sentence(self) -> &'static str {
                match self { $(Rule::$rule => $sentence,)+ }
            }
        }
    };
}

rules! {
    W1 = "W1": "a wgmma.fence lies between any access to a register and a product that uses it, unless products of one shape accumulate one after the other";
    W2 = "W2": "accumulators and A registers are not touched between a product and the wait that retires its group";
    W3 = "W3": "a product is committed before a wait can retire it";
    W4 = "W4": "fence.proxy.async lies between generic writes and the asynchronous reads of the same bytes";
    W5 = "W5": "fence.proxy.async lies between generic accesses and the asynchronous writes of the same bytes";
    W6 = "W6": "shared memory that a product reads is not overwritten before every warp's wait has retired the product";
    W7 = "W7": "the four warps of a warpgroup execute the same products with the same descriptors";
    W8 = "W8": "matrix descriptors are aligned to their pattern and stay in shared memory";
    M1 = "M1": "an mbarrier is 8 aligned bytes, initialised once before use, and not accessed otherwise while it lives";
    M2 = "M2": "arrivals never exceed what a phase misses, and its bytes stay within 2^20 - 1";
    M3 = "M3": "a wait by parity is for the current phase or the previous one";
    M4 = "M4": "a thread has observed that a phase is complete before any thread arrives at the next";
    M5 = "M5": "the bytes that a phase expects are the bytes that complete in it";
    M6 = "M6": "the initialisation of an mbarrier is fenced and ordered before its use by other threads and by copies";
    T1 = "T1": "copies have aligned addresses, whole 16 bytes, and stores no negative coordinates";
    T2 = "T2": "the source of a bulk store is not overwritten before its wait_group.read, its result not read before its wait_group";
    T3 = "T3": "the thread that commits bulk copies is the one that waits for them";
    T4 = "T4": "two asynchronous writes of the same bytes are ordered by a completion between them";
    T5 = "T5": "no CTA exits while a bulk copy reads its shared memory or another CTA may still access it";
    B1 = "B1": "the warps of a barrier's generation agree on its thread count and never exceed it";
    B2 = "B2": "a warp arrives once in a generation of a barrier";
    R1 = "R1": "setmaxnreg is executed by all four warps, dec lowers, inc raises, and the pool suffices";
    L1 = "L1": "rows of ldmatrix and stmatrix are aligned to 16 bytes";
    I1 = "I1": "nothing uninitialised is read, and every output byte is written exactly once";
    G1 = "G1": "griddepcontrol.wait comes before any access to memory that the previous grid writes";
    Race = "RACE": "conflicting accesses of two agents are ordered by synchronisation";
    Lanes = "LANES": "lanes of a warp are ordered by bar.warp.sync or a wider barrier, also before one lane releases other lanes' accesses";
    Deadlock = "DEADLOCK": "some warp can go on until all have finished";
    Bounds = "BOUNDS": "accesses lie in an allocation and are aligned to their size";
    Uniform = "UNIFORM": "values that must be uniform are equal in all lanes";
    Trap = "TRAP": "no trap is executed";
    Assert = "ASSERT": "an assertion of the kernel holds in every lane that reaches it";
}

/// The page with a right and a wrong kernel for each rule.
const PAGE: &str = "https://github.com/fa3-rs/fa3/blob/main/docs/simulator-rules.md";

impl Rule {
    /// The address of the rule's explanation, with a kernel that keeps the rule and a kernel that breaks it.
    pub fn page(self) -> String {
        format!("{PAGE}#{}", self.id().to_lowercase())
    }

    /// Whether another broken rule of the run is likely the reason why this rule is broken.
    pub fn is_consequence(self) -> bool {
        self.order() == LAST
    }

    /// The position of the rule's findings among all findings of a run: causes come before consequences. A warp that
    /// waits for a wrong phase, or for too few phases, races. Accesses that race lack the fences and waits that would
    /// order them, and may read bytes that are not written yet.
    pub fn order(self) -> u32 {
        match self {
            Rule::M1 | Rule::M3 | Rule::M6 => 0,
            Rule::Race | Rule::Lanes | Rule::G1 | Rule::M5 => 1,
            Rule::W1 | Rule::W2 | Rule::W3 | Rule::W4 | Rule::W5 | Rule::W6 | Rule::W7 | Rule::W8 => 2,
            Rule::T1 | Rule::T2 | Rule::T3 | Rule::T4 | Rule::T5 | Rule::M2 | Rule::M4 => 2,
            Rule::B1 | Rule::B2 | Rule::R1 | Rule::L1 | Rule::Uniform | Rule::Bounds => 2,
            Rule::I1 | Rule::Deadlock | Rule::Trap | Rule::Assert => LAST,
        }
    }
}

/// The position of consequences.
const LAST: u32 = 3;

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}
