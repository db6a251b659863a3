//! The choice of the next warp, and of the times of asynchronous operations.

use std::fmt;

/// When asynchronous operations happen, and how warps take turns. A correct kernel computes the same result under all
/// policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Asynchronous operations happen when they are issued; warps run as long as they can, in order.
    Eager,
    /// Asynchronous operations happen as late as the rules allow; warps run as long as they can, last first.
    Lazy,
    /// All choices are drawn at random from this seed. Waits that may fail sometimes fail, and any lane may be elected.
    Random(u64),
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Eager => f.pad("eager"),
            Policy::Lazy => f.pad("lazy"),
            Policy::Random(seed) => write!(f, "random, seed {seed}"),
        }
    }
}

/// Draws the choices that a [`Policy`] leaves open.
pub(crate) struct Scheduler {
    pub(crate) policy: Policy,
    state: u64,
}

impl Scheduler {
    pub(crate) fn new(policy: Policy) -> Scheduler {
        let state = match policy {
            Policy::Eager | Policy::Lazy => 0,
            Policy::Random(seed) => seed,
        };
        Scheduler { policy, state }
    }

    /// The next of a sequence of random numbers (SplitMix64).
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.state)
    }

    /// A number below `count`, which is not 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.draw() % count as u64) as usize
    }

    /// Whether an asynchronous operation happens when it is issued. Otherwise it happens as late as it may.
    pub(crate) fn at_once(&mut self) -> bool {
        match self.policy {
            Policy::Eager => true,
            Policy::Lazy => false,
            Policy::Random(_) => self.below(2) == 0,
        }
    }

    /// Whether a load happens when it is issued.
    pub(crate) fn loads_at_once(&self) -> bool {
        self.policy == Policy::Eager
    }

    /// The index of the candidate that goes next, of `count` candidates.
    pub(crate) fn choose(&mut self, count: usize) -> usize {
        match self.policy {
            Policy::Eager => 0,
            Policy::Lazy => count - 1,
            Policy::Random(_) => self.below(count),
        }
    }

    /// Whether an event goes before any of `warps` warps that could run.
    pub(crate) fn event_first(&mut self, events: usize, warps: usize) -> bool {
        match self.policy {
            Policy::Eager | Policy::Lazy => false,
            Policy::Random(_) => self.below(4 * warps + events) < events,
        }
    }

    /// How many steps a warp runs before the others get a turn.
    pub(crate) fn steps(&mut self) -> u32 {
        match self.policy {
            Policy::Eager | Policy::Lazy => 10_000,
            Policy::Random(_) => 1 + self.below(64) as u32,
        }
    }

    /// Whether another cluster gets a turn although the current one could go on.
    pub(crate) fn switches_cluster(&mut self) -> bool {
        matches!(self.policy, Policy::Random(_)) && self.below(8) == 0
    }

    /// Whether a try_wait fails although its phase is complete.
    pub(crate) fn fails_spuriously(&mut self) -> bool {
        matches!(self.policy, Policy::Random(_)) && self.below(4) == 0
    }

    /// The lane that elect chooses in a warp.
    pub(crate) fn leader(&self, cta: u32, warp: usize) -> u32 {
        match self.policy {
            Policy::Eager => 0,
            Policy::Lazy => 31,
            Policy::Random(seed) => (mix(seed ^ mix(u64::from(cta) << 8 | warp as u64)) % 32) as u32,
        }
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
