//! Ping-pong (§3.1 of the paper): consumer warpgroups take turns on the tensor cores, the softmax of one under the
//! products of the others.

use fa3_ir::lang::*;

/// The barriers by which the turn goes round: one a warpgroup, at which it meets who passes it the turn.
pub(crate) struct PingPong<'k>(WarpgroupBarriers<'k>);

/// One warpgroup's part in the ping-pong; or none, if warpgroups take no turns.
pub(crate) struct Turn<'k>(Option<TurnBarriers<'k>>);

struct TurnBarriers<'k> {
    me: V<'k, B32>,
    mine: WarpgroupBarrier<'k>,
    next: WarpgroupBarrier<'k>,
}

impl<'k> PingPong<'k> {
    /// Declares the barriers.
    pub(crate) fn declare(b: &'k Builder, warpgroups: u32) -> PingPong<'k> {
        PingPong(b.warpgroup_barriers("turn", warpgroups, 2))
    }

    /// The part of warpgroup `me`. The last one gives the first its first turn.
    #[track_caller]
    pub(crate) fn of(&self, b: &'k Builder, me: V<'k, B32>) -> Turn<'k> {
        let PingPong(barriers) = self;
        let last = me.eq(barriers.len() - 1);
        let after = last.select(0, me + 1);
        let (mine, next) = (barriers.of(me), barriers.of(after));
        b.if_uniform(last, || next.arrive());
        Turn(Some(TurnBarriers { me, mine, next }))
    }
}

impl<'k> Turn<'k> {
    /// The turn of a kernel without turns: taking and passing it do nothing.
    pub(crate) fn none() -> Turn<'k> {
        Turn(None)
    }

    /// Waits for the warpgroup's turn.
    #[track_caller]
    pub(crate) fn take(&self) {
        if let Turn(Some(place)) = self {
            place.mine.sync();
        }
    }

    /// Gives the turn to the next one.
    #[track_caller]
    pub(crate) fn pass(&self) {
        if let Turn(Some(place)) = self {
            place.next.arrive();
        }
    }

    /// Takes back the turn that [`PingPong::of`] began with.
    #[track_caller]
    pub(crate) fn end(self, b: &'k Builder) {
        if let Turn(Some(place)) = self {
            b.if_uniform(place.me.eq(0), || place.mine.sync());
        }
    }
}
