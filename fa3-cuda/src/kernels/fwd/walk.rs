//! Which tiles a CTA computes: the producer and the consumers walk over the same ones.

use fa3_ir::{B32, B64, Builder, Elem, Region, Ring, V};
use fa3_sched::{Scheduler, next_dynamic, next_static};

use super::FwdSpec;
use super::geometry::{Geometry, Work};
use crate::kernels::num::compute;

/// The tiles of a launch and how they reach CTAs.
pub(super) struct Walk {
    pub(super) geometry: Geometry<V<B32>>,
    dealer: Dealer,
}

/// [`Scheduler`], with what it needs in a kernel.
enum Dealer {
    OneTile,
    Static,
    /// The producer draws numbers from `counter` and passes them on in `word`; a slot of `mail` is that word.
    Dynamic {
        counter: V<B64>,
        mail: Ring<0>,
        word: Region,
    },
}

/// The drawing of the tile after this one.
pub(super) enum Draw {
    /// It is known without.
    Nothing,
    /// From this counter; the last draw of a launch puts it back to 0.
    From {
        counter: V<B64>,
        last: V<B32>,
    },
    Drawn(V<B32>),
}

impl Draw {
    /// Draws, if that has not been done. The number is on its way for about a microsecond, and tiles are dealt the more evenly
    /// the later they are drawn.
    #[track_caller]
    pub(super) fn next(&mut self, b: &mut Builder) {
        if let Draw::From { counter, last } = *self {
            *self = Draw::Drawn(b.atomic_inc_u32(counter, last));
        }
    }

    #[track_caller]
    fn drawn(mut self, b: &mut Builder) -> V<B32> {
        self.next(b);
        let Draw::Drawn(ticket) = self else { unreachable!("there is a counter") };
        ticket
    }
}

impl Walk {
    /// Declares its parameters and its shared memory; `consumers` warps walk besides the producer.
    #[track_caller]
    pub(super) fn declare(b: &mut Builder, spec: &FwdSpec, consumers: u32) -> Walk {
        let geometry = Geometry::form(spec.order, spec.mask).declare(b);
        let dealer = match spec.scheduler {
            Scheduler::OneTile => Dealer::OneTile,
            Scheduler::StaticPersistent => Dealer::Static,
            Scheduler::DynamicPersistent => Dealer::Dynamic {
                counter: b.param_pointer("counter", Elem::U32),
                mail: b.ring("mail", 1, consumers, []),
                word: b.region("next tile", 4, 4),
            },
        };
        Walk { geometry, dealer }
    }

    /// Runs `body` for every tile, in the one thread that draws. `body` calls [`Draw::next`] when the next tile should be drawn.
    #[track_caller]
    pub(super) fn produce(&self, b: &mut Builder, body: impl FnOnce(&mut Builder, Work<V<B32>>, &mut Draw)) {
        match &self.dealer {
            Dealer::OneTile => self.one(b, |b, work| body(b, work, &mut Draw::Nothing)),
            Dealer::Static => self.turns(b, |b, work| body(b, work, &mut Draw::Nothing)),
            Dealer::Dynamic { counter, mail, word } => {
                let mut mail = mail.producer(b);
                let (ctas, last) = (b.grid_x(), b.sub(self.geometry.tiles, 1));
                self.each(b, |b, index| {
                    let work = self.geometry.work(b, index);
                    let mut draw = Draw::From { counter: *counter, last };
                    body(b, work, &mut draw);
                    let ticket = draw.drawn(b);
                    let next = compute(b, [ticket, ctas], |[ticket, ctas]| next_dynamic(ticket, ctas));
                    let slot = mail.acquire(b);
                    b.store(*word, next);
                    slot.commit(b);
                    next
                });
            }
        }
    }

    /// Runs `body` for every tile, in a consumer's warps.
    #[track_caller]
    pub(super) fn consume(&self, b: &mut Builder, body: impl FnOnce(&mut Builder, Work<V<B32>>)) {
        match &self.dealer {
            Dealer::OneTile => self.one(b, body),
            Dealer::Static => self.turns(b, body),
            Dealer::Dynamic { mail, word, .. } => {
                let mut mail = mail.consumer(b);
                self.each(b, |b, index| {
                    let work = self.geometry.work(b, index);
                    body(b, work);
                    let slot = mail.wait(b);
                    let next = b.load(*word);
                    // All lanes have read it. The compiler cannot know that they agree; taken from one of them, it does.
                    let next = b.shfl_idx(next, 0);
                    slot.release(b);
                    next
                });
            }
        }
    }

    #[track_caller]
    fn one(&self, b: &mut Builder, body: impl FnOnce(&mut Builder, Work<V<B32>>)) {
        let index = b.cta_x();
        let work = self.geometry.work(b, index);
        body(b, work);
    }

    #[track_caller]
    fn turns(&self, b: &mut Builder, body: impl FnOnce(&mut Builder, Work<V<B32>>)) {
        let ctas = b.grid_x();
        self.each(b, |b, index| {
            let work = self.geometry.work(b, index);
            body(b, work);
            compute(b, [index, ctas], |[index, ctas]| next_static(index, ctas))
        });
    }

    /// Runs `step` from the CTA's own number on, as long as the number it gives is that of a tile.
    #[track_caller]
    fn each(&self, b: &mut Builder, step: impl FnOnce(&mut Builder, V<B32>) -> V<B32>) {
        let cta = b.cta_x();
        let next = b.var("tile", cta);
        b.repeat(|b| {
            let done = b.ge_u32(next, self.geometry.tiles);
            b.break_if(done);
            let index = b.get(next);
            let after = step(b, index);
            b.set(next, after);
        });
    }
}
