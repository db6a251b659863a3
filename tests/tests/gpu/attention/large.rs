//! Tensors of more than 2^31 elements, whose offsets need more than 32 bits.

use fa3_cuda::host::Device;
use fa3_tests::fwd::dense;
use fa3_types::{Dtype, Problem};

use super::groups::valid;
use super::try_one;
use crate::Fallible;

pub(super) fn queries(device: &Device) -> Fallible<String> {
    check(device, valid(dense(Dtype::Bf16, 2, (65_603, 129), (128, 8), 128)))
}

pub(super) fn keys(device: &Device) -> Fallible<String> {
    check(device, valid(dense(Dtype::F16, 1, (3, 2_097_169), (8, 8), 128)))
}

fn check(device: &Device, problem: Problem) -> Fallible<String> {
    let largest = [problem.q(), problem.k()].map(|x| x.extent().0).into_iter().max().unwrap_or_default();
    if largest <= 1 << 31 {
        return Err(format!("{largest} elements are not enough").into());
    }
    let judged = try_one(device, &problem.into(), 5)?;
    Ok(format!("{largest} elements, {} rows judged, error / bound up to {:.2}", judged.rows, judged.ratio))
}
