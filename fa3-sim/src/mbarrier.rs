//! An mbarrier: arrivals and bytes that complete phase after phase.

use std::collections::VecDeque;

use crate::clock::{Bundle, Epoch};

/// Largest number of bytes that a phase may lack, or have in excess.
const LIMIT: i64 = (1 << 20) - 1;
/// Number of arrivals that an mbarrier remembers.
const HISTORY: usize = 3;

#[derive(Default)]
pub(crate) struct Mbarrier {
    pub(crate) offset: u32,
    /// Arrivals per phase.
    pub(crate) expected: u32,
    /// Number of arrivals that the current phase still needs.
    pub(crate) pending: u32,
    /// Number of bytes that the current phase still needs; negative while copies complete before their bytes are
    /// expected.
    pub(crate) bytes: i64,
    /// Phases completed so far. The hardware keeps only the lowest bit.
    pub(crate) phase: u32,
    /// Whether a warp has seen that the previous phase is complete.
    pub(crate) observed: bool,
    /// The cluster's component that counts its phases.
    pub(crate) component: u16,
    /// Everything that its arrivals have released so far.
    pub(crate) collected: Bundle,
    /// Everything that arrivals had released when the previous phase completed.
    pub(crate) complete: Bundle,
    /// Copies that will signal it: the phase that was current when they were issued, and their bytes.
    pub(crate) copies: Vec<(u32, u32)>,
    /// The components of the warps that issued copies in the current phase, and in the previous one.
    issuers: [Vec<u16>; 2],
    /// One more than the last phase in which a copy was issued.
    pub(crate) loaded: u32,
    /// The last arrivals.
    pub(crate) arrivals: VecDeque<u32>,
    /// The epoch of the initialisation. Another warp's accesses come after it if that warp has acquired the release of
    /// the fence that follows the initialisation.
    pub(crate) initialised: Epoch,
    /// The component of the warp that initialised the mbarrier.
    pub(crate) initialiser: u16,
    /// The initialisation's index in the log.
    pub(crate) event: u32,
    /// Whether a fence followed the initialisation.
    pub(crate) fenced: bool,
}

/// Effect of an arrival or a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    /// The phase is complete. If `early`, copies that belong to it are still under way.
    Complete {
        early: bool,
    },
}

/// A violation of rule M2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Excess {
    Arrivals { given: u32, pending: u32 },
    Bytes { bytes: i64 },
}

impl Mbarrier {
    pub(crate) fn new(
        offset: u32,
        expected: u32,
        component: u16,
        initialised: Epoch,
        (initialiser, event): (u16, u32),
    ) -> Mbarrier {
        Mbarrier {
            offset,
            expected,
            pending: expected,
            observed: true,
            component,
            initialised,
            initialiser,
            event,
            ..Mbarrier::default()
        }
    }

    /// The phase that a wait by parity means, for a warp that has seen `known` phases complete: the next phase, or the
    /// last completed one.
    pub(crate) fn intended(known: u32, parity: u32) -> i64 {
        if known & 1 == parity { known.into() } else { i64::from(known) - 1 }
    }

    /// Whether a wait by parity passes.
    pub(crate) fn passes(&self, parity: u32) -> bool {
        self.phase & 1 != parity
    }

    pub(crate) fn expect(&mut self, bytes: u32) -> Result<(), Excess> {
        self.bytes += i64::from(bytes);
        self.check_bytes()
    }

    pub(crate) fn arrive(&mut self, count: u32) -> Result<Change, Excess> {
        if count > self.pending {
            let pending = std::mem::take(&mut self.pending);
            return Err(Excess::Arrivals { given: count, pending });
        }
        self.pending -= count;
        Ok(self.advance())
    }

    /// Records that a warp issues a copy of `bytes` bytes. Returns the phase that it belongs to.
    pub(crate) fn issue(&mut self, by: u16, bytes: u32) -> u32 {
        self.copies.push((self.phase, bytes));
        self.loaded = self.phase + 1;
        if !self.issuers[0].contains(&by) {
            self.issuers[0].push(by);
        }
        self.phase
    }

    /// Number of bytes that the current phase needs and that no copy under way brings.
    pub(crate) fn unaccounted(&self) -> i64 {
        self.bytes - self.copies.iter().map(|&(_, bytes)| i64::from(bytes)).sum::<i64>()
    }

    /// Whether all warps that issued copies in the previous phase have issued copies in this one.
    pub(crate) fn all_issued(&self) -> bool {
        self.issuers[1].iter().all(|warp| self.issuers[0].contains(warp))
    }

    /// Remembers an arrival, for reports.
    pub(crate) fn remember(&mut self, event: u32) {
        if self.arrivals.len() == HISTORY {
            self.arrivals.pop_front();
        }
        self.arrivals.push_back(event);
    }

    /// Records that a copy that was issued in phase `issued` has brought its bytes.
    pub(crate) fn complete_bytes(&mut self, bytes: u32, issued: u32) -> Result<Change, Excess> {
        if let Some(index) = self.copies.iter().position(|&copy| copy == (issued, bytes)) {
            self.copies.swap_remove(index);
        }
        self.bytes -= i64::from(bytes);
        self.check_bytes()?;
        Ok(self.advance())
    }

    fn check_bytes(&self) -> Result<(), Excess> {
        if self.bytes.abs() > LIMIT { Err(Excess::Bytes { bytes: self.bytes }) } else { Ok(()) }
    }

    fn advance(&mut self) -> Change {
        if self.pending != 0 || self.bytes != 0 {
            return Change::Nothing;
        }
        let early = self.copies.iter().any(|&(issued, _)| issued == self.phase);
        self.phase += 1;
        self.issuers.swap(0, 1);
        self.issuers[0].clear();
        self.pending = self.expected;
        self.observed = false;
        if !early {
            self.collected.complete(self.component, self.phase);
        }
        self.complete.clone_from(&self.collected);
        Change::Complete { early }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mbarrier(expected: u32) -> Mbarrier {
        Mbarrier::new(0, expected, 0, Epoch::PREDECESSOR, (0, 0))
    }

    #[test]
    fn a_phase_completes_when_nothing_is_missing() {
        let mut barrier = mbarrier(2);
        assert!(barrier.passes(1) && !barrier.passes(0), "a fresh barrier lets producers start");
        assert_eq!(
            barrier.complete_bytes(64, 0),
            Ok(Change::Nothing),
            "bytes may come before they are expected"
        );
        barrier.expect(64).unwrap();
        assert_eq!(barrier.arrive(1), Ok(Change::Nothing));
        assert_eq!(barrier.arrive(1), Ok(Change::Complete { early: false }));
        assert!(barrier.passes(0) && !barrier.passes(1));
        assert_eq!((barrier.pending, barrier.phase), (2, 1));
        assert_eq!(barrier.arrive(3), Err(Excess::Arrivals { given: 3, pending: 2 }));
    }

    #[test]
    fn bytes_have_a_limit() {
        let mut barrier = mbarrier(1);
        assert_eq!(barrier.expect(1 << 20), Err(Excess::Bytes { bytes: 1 << 20 }));
    }

    #[test]
    fn who_knows_k_phases_means_phase_k_or_the_one_before() {
        assert_eq!(Mbarrier::intended(0, 0), 0);
        assert_eq!(Mbarrier::intended(0, 1), -1);
        assert_eq!(Mbarrier::intended(3, 1), 3);
        assert_eq!(Mbarrier::intended(3, 0), 2);
    }
}
