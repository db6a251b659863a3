//! The shipped kernels that write the table of packed sequences. In the kernel `packed/packed/dense-used/window/128`,
//! for example, Q is packed, K and V are dense with seqused, and a CTA has 128 threads.

use fa3_sched::packed::{Arrays, Plan, Side};
use fa3_types::Mask;

use super::{Shipped, sides_word};
use crate::kernels::packed::Spec;

/// Kernels with every combination of arrays of lengths, every side of a mask, and CTAs from one warp to the most
/// threads. The kernels of these sizes merge sorted runs not at all, once, twice and three times.
pub(super) fn packed() -> impl Iterator<Item = Shipped> {
    const BOTH: Mask = Mask::Window { left: Some(1), right: Some(1) };
    const LEFT: Mask = Mask::Window { left: Some(1), right: None };
    let (packed, dense) = (Side::packed(1), Side::dense(1));
    let rows = [
        (32, [packed, packed], Mask::None),
        (128, [packed, dense.with_used()], BOTH),
        (256, [packed, packed], Mask::Causal),
        (512, [dense.with_used(), dense], LEFT),
        (1024, [packed.with_used(); 2], Mask::Causal),
        (128, [packed, packed], Mask::from_chunk(1).expect("it is a size")),
    ];
    let specs = rows.into_iter().map(|(count, sides, mask)| {
        let plan = Plan::new(count, sides, [1, 1], mask).expect("there are few rows");
        let spec = Spec::of(&plan);
        // The backward pass needs the place of each sequence's first row in padded arrays.
        if count == 256 { spec.with_firsts() } else { spec }
    });
    specs.map(|spec| Shipped::new(name(&spec), spec))
}

fn name(Spec { q, k, mask, threads, firsts }: &Spec) -> String {
    let firsts = if *firsts { "/firsts" } else { "" };
    format!("packed/{}/{}/{}/{threads}{firsts}", rows_word(*q), rows_word(*k), sides_word(*mask))
}

/// The word in a kernel's name for the arrays of one side.
pub(super) fn rows_word(Arrays { cu_seqlens, seqused, leftpad }: Arrays) -> String {
    let mut word = String::from(if cu_seqlens { "packed" } else { "dense" });
    if seqused {
        word.push_str("-used");
    }
    if leftpad {
        word.push_str("-padded");
    }
    word
}
