//! The kernels that are shipped, under stable names: the list for tests and tools that look at all kernels.
//!
//! Features multiply: head dimensions, masks, inputs, outputs, schedulers. So the list has only the kernels of plans
//! for chosen problems, in which every two features meet; other plans may choose further kernels.

mod append;
mod backward;
mod chunks;
mod combine;
mod e4m3_cache;
mod fixed_size;
mod forward;
mod lists;
mod packed;
mod quantize;
mod scored;
mod wide_cache;

use fa3_ir::{Elem, Kernel};
use fa3_sched::Scheduler;
use fa3_types::{BlockSide, IntervalsOfRow, Mask};

use super::bwd::BwdSpec;
use super::fwd::FwdSpec;
use super::quantize::transpose_v::TransposeSpec;
use super::{KernelSpec, Spec, ladder};

/// A kernel that is shipped.
#[derive(Clone, Debug)]
pub struct Shipped {
    /// The kernel's name, which is unique.
    pub name: String,
    /// The spec that builds the kernel.
    pub spec: Spec,
}

impl Shipped {
    fn new(name: String, spec: impl KernelSpec) -> Shipped {
        Shipped { name, spec: spec.into() }
    }

    /// Builds the kernel.
    pub fn kernel(&self) -> Kernel {
        self.spec.kernel()
    }

    /// Whether slow tests, such as tests that run ptxas, include this kernel. They leave out attention kernels whose
    /// output is f16, because the kernels for bf16 take equal numbers of registers.
    pub fn stands_for_others(&self) -> bool {
        let backward = self.spec.downcast_ref::<BwdSpec>();
        self.forward().is_none_or(|spec| spec.output == Elem::Bf16)
            && backward.and_then(BwdSpec::elem).is_none_or(|elem| elem == Elem::Bf16)
    }

    /// The spec, if this is a forward kernel.
    pub fn forward(&self) -> Option<&FwdSpec> {
        self.spec.downcast_ref()
    }
}

/// Every kernel that is shipped, once.
pub fn shipped() -> impl Iterator<Item = Shipped> {
    ladder()
        .chain(quantize::quantized())
        .chain(quantize::scales())
        .chain(backward::backward())
        .chain(transposed_v())
        .chain(packed::packed())
        .chain(combine::combine())
        .chain(append::append())
        .chain(forward::forward())
}

/// The ladder's kernels, for every element type that they take.
fn ladder() -> impl Iterator<Item = Shipped> {
    let name = |spec: ladder::Spec| format!("ladder/{}/{}", spec.name(), spec.elem());
    ladder::Spec::ALL.into_iter().map(move |spec| Shipped::new(name(spec), spec))
}

/// The kernels that transpose e4m3 V for a forward pass.
fn transposed_v() -> impl Iterator<Item = Shipped> {
    let of = |head_dim| Shipped::new(format!("transpose-v/d{head_dim}"), TransposeSpec { head_dim });
    [128, 256].into_iter().map(of)
}

/// The words in a kernel's name for the bounded sides of a mask or for its chunks, and for its intervals.
fn sides_word(mask: Mask) -> String {
    let sides = match mask.reach() {
        _ if mask.chunks().is_some() => "chunks",
        (None, None) => "none",
        (None, Some(_)) => "causal",
        (Some(_), None) => "left",
        (Some(_), Some(_)) => "window",
    };
    let intervals = mask.intervals().map(|form| match form.of_row {
        IntervalsOfRow::One => "intervals",
        IntervalsOfRow::Two => "two-intervals",
        IntervalsOfRow::Causal { .. } => "causal-sequences",
        IntervalsOfRow::Tree { .. } => "tree",
        IntervalsOfRow::Blocks { side: BlockSide::Of64, .. } => "blocks-of-64",
        IntervalsOfRow::Blocks { side: BlockSide::Of128, .. } => "blocks",
    });
    match intervals {
        None => sides.to_owned(),
        Some(word) if sides == "none" => word.to_owned(),
        Some(word) => format!("{sides}-{word}"),
    }
}

fn scheduler_word(scheduler: Scheduler) -> &'static str {
    match scheduler {
        Scheduler::OneTile => "one",
        Scheduler::StaticPersistent => "static",
        Scheduler::DynamicPersistent => "dynamic",
    }
}
