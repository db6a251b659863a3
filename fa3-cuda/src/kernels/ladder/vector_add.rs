//! z = x + y, one element a thread.

use fa3_ir::{Elem, F32, Kernel, Launch};

use crate::kernels::{Array, Job, JobArg};

const THREADS: u32 = 256;

/// The kernel.
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

/// `n` elements.
pub fn job(n: u32) -> Job {
    let arrays = vec![
        Array::input("x", Elem::F32, &[n]),
        Array::input("y", Elem::F32, &[n]),
        Array::output("z", Elem::F32, &[n]),
    ];
    let args = vec![JobArg::Pointer(0), JobArg::Pointer(1), JobArg::Pointer(2), JobArg::U32(n)];
    Job { kernel: kernel(), grid: [n.div_ceil(THREADS), 1, 1], arrays, args }
}
