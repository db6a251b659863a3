//! Ping-pong (§3.1 of the paper): consumer warpgroups take turns on the tensor cores, the softmax of one under the products of
//! the others.

use fa3_ir::{B32, Builder, V};

/// Threads of two warpgroups: who waits for a turn, and who passes it on.
const THREADS: u32 = 256;

/// The barriers by which a turn goes round, one a warpgroup.
pub(super) struct Turns {
    first: u32,
    warpgroups: u32,
}

/// One warpgroup's place in the round; or none, if nobody waits for a turn.
pub(super) struct Turn(Option<Place>);

struct Place {
    me: V<B32>,
    mine: V<B32>,
    next: V<B32>,
}

impl Turns {
    /// Declares the barriers.
    pub(super) fn declare(b: &mut Builder, warpgroups: u32) -> Turns {
        Turns { first: b.barriers("turn", warpgroups, THREADS), warpgroups }
    }

    /// The place of warpgroup `me`. The last one gives the first its first turn.
    #[track_caller]
    pub(super) fn of(&self, b: &mut Builder, me: V<B32>) -> Turn {
        let last = b.eq_b32(me, self.warpgroups - 1);
        let after = b.add(me, 1);
        let after = b.select(last, 0, after);
        let (mine, next) = (b.add(me, self.first), b.add(after, self.first));
        b.if_uniform(last, |b| b.arrive_computed(next, THREADS));
        Turn(Some(Place { me, mine, next }))
    }
}

impl Turn {
    /// A place in no round.
    pub(super) fn none() -> Turn {
        Turn(None)
    }

    /// Waits for the warpgroup's turn.
    #[track_caller]
    pub(super) fn take(&self, b: &mut Builder) {
        if let Turn(Some(place)) = self {
            b.sync_computed(place.mine, THREADS);
        }
    }

    /// Gives the turn to the next one.
    #[track_caller]
    pub(super) fn pass(&self, b: &mut Builder) {
        if let Turn(Some(place)) = self {
            b.arrive_computed(place.next, THREADS);
        }
    }

    /// Takes back the turn that [`Turns::of`] began with.
    #[track_caller]
    pub(super) fn end(self, b: &mut Builder) {
        if let Turn(Some(place)) = self {
            let first = b.eq_b32(place.me, 0);
            b.if_uniform(first, |b| b.sync_computed(place.mine, THREADS));
        }
    }
}
