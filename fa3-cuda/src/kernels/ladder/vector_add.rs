//! z = x + y, with one element per thread.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};

use super::launch;
use crate::kernels::Spec;

const THREADS: u32 = 256;

/// Builds the kernel.
pub fn kernel() -> Kernel {
    Kernel::build("vector_add", Launch::threads(THREADS), |b| {
        let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");

        let i = b.cta_x().mad(THREADS, b.tid());
        b.if_lanes(i.lt(n), || {
            let [x, y, z] = [x, y, z].map(|array| i.mad_wide(4, array));
            b.store(z, b.load::<F32>(x) + b.load::<F32>(y));
        });
    })
}

/// The program for `n` elements.
pub fn program(n: u32) -> Program<Spec> {
    let mut program = Program::new();
    let [x, y] = ["x", "y"].map(|name| program.buffer(name, Elem::F32, &[n], BufferRole::Input));
    let z = program.buffer("z", Elem::F32, &[n], BufferRole::Output);
    let args = [
        ("x", Passed::Pointer(x)),
        ("y", Passed::Pointer(y)),
        ("z", Passed::Pointer(z)),
        ("n", Passed::U32(n)),
    ];
    launch(program, super::Spec::VectorAdd, [n.div_ceil(THREADS), 1, 1], args)
}
