//! Runs of small kernels.

use fa3_ir::{ArgValue, Kernel};
use fa3_sim::{Buffer, Memory, Outcome, Policy, Simulation};

/// Every kind of schedule.
pub(crate) fn policies() -> impl Iterator<Item = Policy> {
    [Policy::Eager, Policy::Lazy].into_iter().chain((0..20).map(Policy::Random))
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn floats(memory: &Memory, buffer: Buffer) -> Vec<f32> {
    memory.read(buffer).as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()
}

/// The findings of a run, as text.
pub(crate) fn findings(outcome: &Outcome) -> String {
    outcome.findings.iter().map(ToString::to_string).collect()
}

pub(crate) fn assert_clean(outcome: &Outcome) {
    assert!(outcome.is_clean(), "{}", findings(outcome));
}

/// The numbers that a kernel writes to y. Each number is written once. The kernel's optional parameter x holds `x`.
pub(crate) fn results(kernel: &Kernel, policy: Policy, x: &[f32], numbers: usize) -> Vec<f32> {
    let mut memory = Memory::new();
    let (x, y) = (memory.alloc_from("x", &bytes_of(x)), memory.alloc("y", 4 * numbers));
    memory.expect_written_once(y);
    let of = |name: &str| if name == "x" { x } else { y };
    let args = kernel.params.iter().map(|param| ArgValue::Pointer(of(&param.name).address()));
    let simulation = Simulation::new(kernel).args(args.collect()).policy(policy);
    assert_clean(&simulation.run(&mut memory).unwrap());
    floats(&memory, y)
}
