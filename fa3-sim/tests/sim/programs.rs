//! Programs: what their buffers are.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sim::{ProgramSimulation, SimError};

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
    program.step(kernel, [1, 1, 1], vec![("x".into(), Passed::Pointer(x)), ("y".into(), Passed::Pointer(y))]);
    let run = |x: Vec<u8>| ProgramSimulation::new(&program).run(&[x, Vec::new()]);
    for (given, expected) in [(3.0_f32.to_le_bytes().repeat(32), 3.0_f32), (Vec::new(), 7.0)] {
        let outcome = run(given).unwrap();
        assert!(outcome.is_clean(), "{:?}", outcome.steps);
        assert_eq!(outcome.buffers[y.0], expected.to_le_bytes().repeat(32));
    }
    assert_eq!(run(vec![0; 4]), Err(SimError::Initial { buffer: "x", given: 4, expected: 128 }));
}
