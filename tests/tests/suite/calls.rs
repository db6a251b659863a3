//! Calls of the public API on the CPU, with their gradients, judged by the error law. The same calls run on a GPU:
//! `--test gpu facade::calls`.

use fa3::Device;
use fa3_tests::fwd::dense;
use fa3_tests::intervals::Kind;
use fa3_tests::{Case, facade, testdata};
use fa3_types::Dtype;
use rayon::prelude::*;

#[test]
fn chosen_calls_obey_the_error_law() {
    let cases = testdata::chosen("facade.toml");
    let check = |case: &Case| facade::check(case, &Device::Cpu).err();
    let faults: Vec<String> = cases.par_iter().filter_map(check).collect();
    assert!(faults.is_empty(), "{} faults of {}\n\n{}", faults.len(), cases.len(), faults.join("\n\n"));
}

/// Each row has two intervals, with a gap that begins and ends within blocks. Query heads that share a KV head have
/// different intervals.
#[test]
fn calls_under_intervals_obey_the_error_law() {
    let spec = dense(Dtype::F16, 1, (300, 1700), (2, 1), 16);
    let case = Case::normal("intervals", Kind::FarApart.of(spec, false, true), 1);
    facade::check(&case, &Device::Cpu).unwrap();
}
