//! Approximations of the special-function unit, and the model's distance from them.

use fa3_ir::LaneOp;

use super::lane::{kernel, recorded_name};
use super::values::{FLOATS, Stream};
use super::{Micro, Rule};

/// The lane operations that approximate.
pub(super) const APPROXIMATIONS: [LaneOp; 6] =
    [LaneOp::Ex2, LaneOp::Lg2, LaneOp::Rcp, LaneOp::Rsqrt, LaneOp::Sqrt, LaneOp::Tanh];

/// Number of samples for each operation.
const CASES: u64 = 4096;

/// Tests each function in its most frequent range, with the largest allowed distance of the model from the hardware.
pub(super) fn tests() -> Vec<Micro> {
    let small = f32::MIN_POSITIVE;
    [
        (LaneOp::Ex2, (-24.0, 1.0), Rule::Near { ulp: 2, floor: small }),
        (LaneOp::Lg2, (0.25, 4.0), Rule::Near { ulp: 2, floor: 1.0 }),
        (LaneOp::Rcp, (1.0, 2.0), Rule::Near { ulp: 1, floor: small }),
        (LaneOp::Rsqrt, (1.0, 4.0), Rule::Near { ulp: 1, floor: small }),
        (LaneOp::Sqrt, (1.0, 4.0), Rule::Near { ulp: 1, floor: small }),
        (LaneOp::Tanh, (-4.0, 4.0), Rule::Near { ulp: 124, floor: small }),
    ]
    .map(|(op, range, rule)| kernel(op, &[sample(op, range)], rule))
    .into()
}

/// Samples. The first half has special values, then any numbers. The other half covers the range and [−1, 1] evenly.
fn sample(op: LaneOp, (low, high): (f64, f64)) -> Vec<u64> {
    let stream = Stream::new(&recorded_name(op));
    let any = |case: u64| FLOATS.get(case as usize).copied().unwrap_or(stream.bits(case) & 0xFFFF_FFFF);
    let within = |case: u64| {
        let step = (stream.unit(case) + (case / 2) as f64) / (CASES / 4) as f64;
        let x = if case.is_multiple_of(2) {
            low + (high - low) * step
        } else {
            high.min(1.0) * (2.0 * step - 1.0)
        };
        u64::from((x as f32).to_bits())
    };
    (0..CASES / 2).map(any).chain((0..CASES / 2).map(within)).collect()
}
