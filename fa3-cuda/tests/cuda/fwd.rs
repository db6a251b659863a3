//! Programs of the forward pass.

use fa3_cuda::kernels::fwd::{buffers, program};
use fa3_sched::DeviceLimits;
use fa3_sched::forward::Plan;
use fa3_types::{Dtype, ProblemSpec, Shape, Strides};

/// The two sequences are 2^36 elements apart.
#[test]
fn a_buffer_is_as_large_as_its_tensor_reaches() {
    let shape = Shape { batch: 2, seqlen: 16, heads: 1, head_dim: 64 };
    let mut spec = ProblemSpec::dense(Dtype::Bf16, shape, shape);
    spec.k.strides = Strides { batch: 1 << 36, ..spec.k.strides };
    let plan = Plan::new(&spec.validate().unwrap(), &DeviceLimits::h100_sxm()).unwrap();
    let program = program(&plan);
    assert_eq!(program.buffers[buffers::K.0].len(), (1 << 36) + 16 * 64);
    assert_eq!(program.buffers[buffers::Q.0].shape, [2, 16, 1, 64]);
}
