//! The parameters of the kernels of scales.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::quantize::{ChannelPlan, Plan};
use fa3_sched::{Decoder, Longest, Order, TileCounts};

use crate::kernels::params::{Form, Host, Pass, Side};
use crate::kernels::parts::strided::Strided;

/// What a launch passes to the kernel that sums the rows of parts.
pub(super) struct PartsParams<S: Side> {
    pub(super) x: Strided<S>,
    pub(super) spans: S::Pointer,
    pub(super) seqlen: S::U32,
    pub(super) heads: S::U32,
    /// Parts of a head.
    pub(super) parts: S::U32,
    pub(super) decoder: Decoder<S::U32>,
}

/// What a launch passes to the kernel that finds the largest of maxima.
pub(super) struct HeadsParams<S: Side> {
    pub(super) maxima: S::Pointer,
    pub(super) scales: S::Pointer,
    pub(super) inverse: S::Pointer,
    /// Maxima of a scale.
    pub(super) count: S::U32,
    /// Heads of a scale.
    pub(super) heads: S::U32,
}

/// What a launch passes to the kernel that sums the parts of heads.
pub(super) struct WholeParams<S: Side> {
    pub(super) spans: S::Pointer,
    pub(super) scales: S::Pointer,
    pub(super) mean: S::Pointer,
    pub(super) inverse: S::Pointer,
    /// Parts of a head.
    pub(super) parts: S::U32,
    /// Rows of a head.
    pub(super) rows: S::F32,
}

impl<A: Side> PartsParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> PartsParams<B> {
        PartsParams {
            x: self.x.pass(by),
            spans: by.pointer("spans", self.spans),
            seqlen: by.u32("seqlen", self.seqlen),
            heads: by.u32("heads", self.heads),
            parts: by.u32("parts", self.parts),
            decoder: self.decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
        }
    }
}

impl<A: Side> WholeParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> WholeParams<B> {
        WholeParams {
            spans: by.pointer("spans", self.spans),
            scales: by.pointer("scales", self.scales),
            mean: by.pointer("mean", self.mean),
            inverse: by.pointer("inverse", self.inverse),
            parts: by.u32("parts", self.parts),
            rows: by.f32("rows", self.rows),
        }
    }
}

impl<A: Side> HeadsParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> HeadsParams<B> {
        HeadsParams {
            maxima: by.pointer("maxima", self.maxima),
            scales: by.pointer("scales", self.scales),
            inverse: by.pointer("inverse", self.inverse),
            count: by.u32("count", self.count),
            heads: by.u32("heads", self.heads),
        }
    }
}

impl HeadsParams<Form> {
    /// Those of the kernel.
    pub(super) fn form() -> HeadsParams<Form> {
        HeadsParams { maxima: Elem::F32, scales: Elem::F32, inverse: Elem::F32, count: (), heads: () }
    }
}

impl PartsParams<Form> {
    /// Those of a kernel.
    pub(super) fn form(elem: Elem) -> PartsParams<Form> {
        let order = Order::LongestFirst { section: 1, longest: Longest::First };
        PartsParams {
            x: Strided::form("x", elem),
            spans: Elem::F32,
            seqlen: (),
            heads: (),
            parts: (),
            decoder: Decoder::new(TileCounts::ONE, order).map(|_| ()),
        }
    }
}

impl WholeParams<Form> {
    /// Those of a kernel.
    pub(super) fn form() -> WholeParams<Form> {
        let pointer = Elem::F32;
        WholeParams { spans: pointer, scales: pointer, mean: pointer, inverse: pointer, parts: (), rows: () }
    }
}

impl PartsParams<Host> {
    /// The values of a launch.
    pub(super) fn of(
        plan: &Plan,
        channels: &ChannelPlan,
        [x, spans]: [BufferId; 2],
        decoder: Decoder<u32>,
    ) -> PartsParams<Host> {
        let desc = plan.problem().x();
        PartsParams {
            x: Strided::of("x", x, desc),
            spans,
            seqlen: desc.shape.seqlen as u32,
            heads: desc.shape.heads as u32,
            parts: channels.parts(),
            decoder,
        }
    }
}
