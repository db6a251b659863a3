//! Ping-pong (§3.1 of the paper): consumer warpgroups take turns on the tensor cores, and the softmax of one warpgroup
//! overlaps the products of the others.

use fa3_ir::lang::*;

/// The ping-pong barriers, one for each warpgroup. A warpgroup waits at its own barrier until the previous warpgroup
/// passes the turn.
pub(crate) struct PingPong<'k>(WarpgroupBarriers<'k>);

/// A warpgroup's ping-pong barriers; `None` in a kernel without ping-pong.
pub(crate) struct Turn<'k>(Option<TurnBarriers<'k>>);

struct TurnBarriers<'k> {
    me: U32<'k>,
    mine: WarpgroupBarrier<'k>,
    next: WarpgroupBarrier<'k>,
}

impl<'k> PingPong<'k> {
    /// Declares the barriers.
    pub(crate) fn declare(b: &'k Builder, warpgroups: u32) -> PingPong<'k> {
        PingPong(b.warpgroup_barriers("turn", warpgroups, 2))
    }

    /// The barriers of warpgroup `me`. The last warpgroup arrives at the first warpgroup's barrier, which
    /// lets the first warpgroup begin.
    #[track_caller]
    pub(crate) fn of(&self, b: &'k Builder, me: U32<'k>) -> Turn<'k> {
        let PingPong(barriers) = self;
        let last = me.eq(barriers.len() - 1);
        let after = last.select(0, me + 1);
        let (mine, next) = (barriers.of(me), barriers.of(after));
        b.if_uniform(last, || next.arrive());
        Turn(Some(TurnBarriers { me, mine, next }))
    }
}

impl<'k> Turn<'k> {
    /// A ping-pong that does nothing, for kernels without it.
    pub(crate) fn none() -> Turn<'k> {
        Turn(None)
    }

    /// Waits for the warpgroup's turn on the tensor cores.
    #[track_caller]
    pub(crate) fn take(&self) {
        if let Turn(Some(place)) = self {
            place.mine.sync();
        }
    }

    /// Passes the turn to the next warpgroup.
    #[track_caller]
    pub(crate) fn pass(&self) {
        if let Turn(Some(place)) = self {
            place.next.arrive();
        }
    }

    /// Consumes the last arrival at the barrier of the first warpgroup, which balances the arrival in [`PingPong::of`].
    #[track_caller]
    pub(crate) fn end(self, b: &'k Builder) {
        if let Turn(Some(place)) = self {
            b.if_uniform(place.me.eq(0), || place.mine.sync());
        }
    }
}
