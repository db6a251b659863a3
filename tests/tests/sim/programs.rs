//! Programs and their buffers.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sim::{Loaded, Policy, ProgramSimulation, SimError};

/// An optional input without bytes is at address 0.
#[test]
fn optional_inputs_may_be_absent() {
    let mut program = Program::new();
    let x = program.buffer("x", Elem::F32, &[32], BufferRole::OptionalInput);
    let y = program.buffer("y", Elem::F32, &[32], BufferRole::Output);
    let kernel = Kernel::build("copy", Launch::threads(32), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let (is_there, word) = (x.ne(0_u64), b.var("word", 7.0));
        b.if_uniform(is_there, || word.set(b.load::<F32>(b.tid().mad_wide(4, x))));
        b.store(b.tid().mad_wide(4, y), word.get());
    });
    program.step(kernel, [1, 1, 1], vec![("x", Passed::Pointer(x)), ("y", Passed::Pointer(y))]);
    let run = |x: Vec<u8>| ProgramSimulation::new(&program).run(&[x, Vec::new()]);
    for (given, expected) in [(3.0_f32.to_le_bytes().repeat(32), 3.0_f32), (Vec::new(), 7.0)] {
        let outcome = run(given).unwrap();
        assert!(outcome.is_clean(), "{:?}", outcome.steps);
        assert_eq!(outcome.buffers[y.0], expected.to_le_bytes().repeat(32));
    }
    assert_eq!(run(vec![0; 4]), Err(SimError::Initial { buffer: "x", given: 4, expected: 128 }));
}

/// A loaded kernel behaves like the kernel in any number of runs. If it is unsound, every run reports a fault.
#[test]
fn loaded_kernels_run_again_and_again() {
    let kernel = |stored: u32| {
        Kernel::build("numbers", Launch::threads(64), |b| {
            let y = b.param_pointer("y", Elem::U32);
            b.store(b.tid().mad_wide(4, y), b.tid() + stored);
        })
    };
    let mut program = Program::new();
    let y = program.buffer("y", Elem::U32, &[64], BufferRole::Output);
    program.step(kernel(3), [1, 1, 1], vec![("y", Passed::Pointer(y))]);
    let loaded = program.map(Loaded::new);
    assert_eq!(loaded.steps[0].kernel.verdict(), Ok(()));
    for policy in [Policy::Eager, Policy::Lazy, Policy::Random(1)] {
        let outcome = ProgramSimulation::of(loaded.clone()).policy(policy).run(&[Vec::new()]);
        assert_eq!(outcome, ProgramSimulation::new(&program).policy(policy).run(&[Vec::new()]));
    }

    let mut unsound = kernel(3);
    unsound.launch.threads = 0;
    let broken = Loaded::new(&unsound);
    let errors = broken.verdict().unwrap_err().clone();
    let program = program.map(|_| broken.clone());
    for _ in 0..2 {
        let refused = Err(SimError::Verify { kernel: "numbers".to_owned(), errors: errors.clone() });
        assert_eq!(ProgramSimulation::of(program.clone()).run(&[Vec::new()]), refused);
    }
}
