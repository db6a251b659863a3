//! z = x + y, one element a thread.

use fa3_ir::{Builder, Elem, F32, Kernel, Launch};

use crate::kernels::{Array, Job, JobArg};

const THREADS: u32 = 256;

/// The kernel.
pub fn kernel() -> Kernel {
    let mut b = Builder::new("vector_add", Launch::threads(THREADS));
    let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
    let n = b.param_u32("n");

    let (cta, tid) = (b.cta_x(), b.tid());
    let i = b.mad_u32(cta, THREADS, tid);
    let inside = b.lt_u32(i, n);
    b.if_lanes(inside, |b| {
        let [x, y, z] = [x, y, z].map(|array| b.mad_wide_u32(i, 4, array));
        let (x, y) = (b.load::<F32>(x), b.load::<F32>(y));
        let sum = b.add(x, y);
        b.store(z, sum);
    });
    b.finish()
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
