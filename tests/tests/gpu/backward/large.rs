//! Tensors of more than 2^31 elements, whose offsets need more than 32 bits.
//!
//! Their contents repeat after an odd number of rows or keys, so that an offset that is wrong by a power of two does
//! not lead to equal contents.

use fa3_cuda::host::Device;
use fa3_tests::bwd::Form;

use super::form;
use super::periodic::{Periodic, Sizes};
use crate::bench::Bench;
use crate::{Fallible, ensure};

/// Two sequences with 67,569 rows each, and 129 keys, which are two tiles.
pub(super) fn rows(device: &Device) -> Fallible<String> {
    check(device, (2, (101, 129), (128, 64)), [669, 1])
}

/// A problem with 526,841 keys and three rows.
pub(super) fn keys(device: &Device) -> Fallible<String> {
    check(device, (1, (3, 1031), (64, 32)), [1, 511])
}

fn check(device: &Device, small: Sizes, copies: [usize; 2]) -> Fallible<String> {
    let periodic = Periodic::new(small, copies)?;
    let problem = periodic.problem();
    let [of_dq, of_dk] = [problem.dq(), problem.dk()].map(|x| x.extent().0);
    let largest = of_dq.max(of_dk);
    ensure(largest > 1 << 31, &format!("{largest} elements are not enough"))?;
    let mut ratio: f64 = 0.0;
    for form in Form::ALL {
        let mut bench = Bench::new(device, form::plan(form, device, &problem)?)?;
        let has_sums = form == Form::DqKernel || bench.call.workspace_bytes as u64 > 4 * of_dq;
        ensure(has_sums, "there are fewer sums than elements of dq")?;
        periodic.give(device, &bench.stream, &bench.memory)?;
        bench.memory.poison(&bench.stream)?;
        bench.run()?;
        let judged = periodic.judge(device, &bench.stream, &bench.memory);
        ratio = ratio.max(judged.map_err(|fault| format!("{form:?}: {fault}"))?);
    }
    Ok(format!("{largest} elements, {} forms, error / bound up to {ratio:.2}", Form::ALL.len()))
}
