//! Some numbers of a channel: the sum of the finite ones, the smallest and the largest of them.

use std::array::from_fn;

use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::quantize::GROUPS;

/// Of some numbers of a channel.
#[derive(Clone, Copy)]
pub(super) struct Span<'k> {
    pub(super) sum: V<'k, F32>,
    pub(super) min: V<'k, F32>,
    pub(super) max: V<'k, F32>,
}

/// What there is of a span: where it lies in memory, in this order.
pub(super) const KINDS: u32 = 3;

/// The spans of no numbers.
pub(super) const NONE: [f32; KINDS as usize] = [0.0, f32::INFINITY, f32::NEG_INFINITY];

impl<'k> Span<'k> {
    pub(super) fn new([sum, min, max]: [V<'k, F32>; KINDS as usize]) -> Span<'k> {
        Span { sum, min, max }
    }

    pub(super) fn none(b: &'k Builder) -> Span<'k> {
        Span::new(NONE.map(|number| b.value(number)))
    }

    /// In the order of [`KINDS`].
    pub(super) fn all(self) -> [V<'k, F32>; KINDS as usize] {
        [self.sum, self.min, self.max]
    }

    /// With another number, finite or not: if it is not, the sum is not.
    #[track_caller]
    pub(super) fn and_any(self, x: V<'k, F32>) -> Span<'k> {
        Span { sum: self.sum + x, min: self.min.min(x), max: self.max.max(x) }
    }

    /// With another number, if it is finite.
    #[track_caller]
    pub(super) fn and_finite(self, x: V<'k, F32>) -> Span<'k> {
        let is_finite = x.abs().lt(f32::INFINITY);
        let (number, otherwise) = (is_finite.select::<F32>(x, f32::NAN), is_finite.select::<F32>(x, 0.0));
        // Of a number and NaN, the smaller and the larger is the number.
        Span { sum: self.sum + otherwise, min: self.min.min(number), max: self.max.max(number) }
    }

    /// With those of another one.
    #[track_caller]
    pub(super) fn and(self, other: Span<'k>) -> Span<'k> {
        Span { sum: self.sum + other.sum, min: self.min.min(other.min), max: self.max.max(other.max) }
    }
}

/// Where the threads of a CTA put together what each has of its columns: thread t is of group
/// t / (head_dim / columns), and has the `columns` columns from t mod (head_dim / columns) times as many on.
pub(super) struct Groups<'k> {
    builder: &'k Builder,
    head_dim: u32,
    slots: Region,
    met: fa3_ir::Barrier,
    /// The thread's group, and its first column.
    pub(super) group: V<'k, B32>,
    pub(super) col: V<'k, B32>,
}

impl<'k> Groups<'k> {
    /// For rows of so many elements, of which each thread has some columns.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, head_dim: u32, columns: u32) -> Groups<'k> {
        let of_row = FastDiv::new(head_dim / columns).map(|number| b.value(number));
        let (group, place) = of_row.div_rem(b.tid());
        Groups {
            builder: b,
            head_dim,
            slots: b.region("spans", 4 * KINDS * GROUPS * head_dim, 16),
            met: b.barrier("spans", GROUPS * head_dim / columns),
            group,
            col: place * columns,
        }
    }

    /// The address of a number of a group's column.
    #[track_caller]
    fn at(&self, kind: u32, group: V<'k, B32>, col: V<'k, B32>) -> V<'k, B32> {
        let base = self.builder.address(self.slots) + 4 * kind * GROUPS * self.head_dim;
        group.mad(self.head_dim, col).mad(4, base)
    }

    /// Puts the spans of all groups together, in the order of groups, and calls `then` with those of column t in thread
    /// t. Each thread gives the spans of its columns, a multiple of four.
    #[track_caller]
    pub(super) fn put_together(&self, spans: &[Span<'k>], then: impl FnOnce(V<'k, B32>, Span<'k>)) {
        let b = self.builder;
        for kind in 0..KINDS {
            let at = self.at(kind, self.group, self.col);
            for (quad, spans) in (0..).zip(spans.chunks_exact(4)) {
                let numbers: [_; 4] = from_fn(|col| spans[col].all()[kind as usize]);
                b.store_vector(at.at(16 * quad), numbers);
            }
        }
        b.sync(self.met);
        let col = b.tid();
        b.if_lanes(col.lt(self.head_dim), || {
            let groups = (0..GROUPS).map(|group| {
                Span::new(from_fn(|kind| {
                    let at = self.at(kind as u32, b.value(0), col);
                    b.load(at.at((4 * group * self.head_dim) as i32))
                }))
            });
            let all = groups.reduce(Span::and).expect("there are groups");
            then(col, all);
        });
    }
}
