//! The tile scheduler: which CTA computes which tile.

use std::fmt;
use std::num::NonZeroU32;

use crate::Int;

/// The tile scheduler: how tiles are assigned to CTAs. The order of tiles is separate: see [`crate::Order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// One CTA per tile.
    OneTile,
    /// Static round robin: as many CTAs as SMs, where CTA c computes tiles c, c + CTAs, c + 2 · CTAs, …
    /// ([`next_static`]). A CTA's loads of its next tile overlap the epilogue of its current tile.
    StaticPersistent,
    /// As many CTAs as SMs. CTA c starts with tile c and then fetches tiles from an atomic counter in global memory
    /// ([`next_dynamic`]), so that the CTA that is free first takes the next tile.
    DynamicPersistent,
}

impl Scheduler {
    /// Chooses a scheduler. If all tiles run at once, no loop is needed, and if tiles are equal, no counter. Unequal
    /// tiles need a counter: causal tiles under static round robin ran at two thirds of the counter's speed (H100,
    /// head_dim 256, seqlen 16384).
    pub fn choose(tiles: u32, equal_tiles: bool, sms: NonZeroU32) -> Scheduler {
        if tiles <= sms.get() {
            Scheduler::OneTile
        } else if equal_tiles {
            Scheduler::StaticPersistent
        } else {
            Scheduler::DynamicPersistent
        }
    }

    /// Number of CTAs.
    pub fn grid(self, tiles: u32, sms: NonZeroU32) -> u32 {
        match self {
            Scheduler::OneTile => tiles,
            Scheduler::StaticPersistent | Scheduler::DynamicPersistent => tiles.min(sms.get()),
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Scheduler::OneTile => "one tile a CTA",
            Scheduler::StaticPersistent => "static persistent",
            Scheduler::DynamicPersistent => "dynamic persistent",
        })
    }
}

/// The tile after `tile` of one of `ctas` CTAs under [`Scheduler::StaticPersistent`]. It exists if it is below the
/// number of tiles.
pub fn next_static<T: Int>(tile: T, ctas: T) -> T {
    tile + ctas
}

/// The tile of a CTA that fetched `ticket` from the counter, which starts at 0 and rises by 1 each time, under
/// [`Scheduler::DynamicPersistent`]. It exists if it is below the number of tiles.
pub fn next_dynamic<T: Int>(ticket: T, ctas: T) -> T {
    ctas + ticket
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_rules() {
        let sms = NonZeroU32::new(132).unwrap();
        assert_eq!(Scheduler::choose(132, false, sms), Scheduler::OneTile);
        assert_eq!(Scheduler::choose(133, true, sms), Scheduler::StaticPersistent);
        assert_eq!(Scheduler::choose(133, false, sms), Scheduler::DynamicPersistent);
        assert_eq!(Scheduler::OneTile.grid(0, sms), 0);
        assert_eq!(Scheduler::DynamicPersistent.grid(1000, sms), 132);
    }

    #[test]
    fn static_turns_visit_every_tile_once() {
        for (tiles, ctas) in (1u32..60).flat_map(|tiles| (1..=tiles).map(move |ctas| (tiles, ctas))) {
            let mut visits = vec![0; tiles as usize];
            for cta in 0..ctas {
                let mut tile = cta;
                while tile < tiles {
                    visits[tile as usize] += 1;
                    tile = next_static(tile, ctas);
                }
            }
            assert!(visits.iter().all(|&n| n == 1), "{tiles} tiles, {ctas} CTAs");
        }
    }

    proptest! {
        /// CTAs that fetch tiles in any interleaving visit every tile once and leave the counter at 0.
        #[test]
        fn dynamic_draws_visit_every_tile_once(
            tiles in 1u32..60, share in 1u32..60, turns in proptest::collection::vec(any::<u32>(), 400),
        ) {
            let ctas = share.min(tiles);
            let (mut counter, mut visits) = (0u32, vec![0; tiles as usize]);
            let mut running: Vec<u32> = (0..ctas).collect();
            for turn in turns.into_iter().chain(std::iter::repeat(0)) {
                if running.is_empty() {
                    break;
                }
                let cta = turn as usize % running.len();
                visits[running[cta] as usize] += 1;
                let ticket = counter;
                // The last fetch of a launch resets the counter to 0, as `atom.inc` with the limit tiles - 1 does.
                counter = if ticket == tiles - 1 { 0 } else { counter + 1 };
                match next_dynamic(ticket, ctas) {
                    tile if tile < tiles => running[cta] = tile,
                    _ => drop(running.swap_remove(cta)),
                }
            }
            prop_assert!(visits.iter().all(|&n| n == 1));
            prop_assert_eq!(counter, 0);
        }
    }
}
