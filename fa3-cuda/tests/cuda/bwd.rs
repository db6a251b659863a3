//! Programs of the backward pass.

use fa3_cuda::kernels::bwd::program;
use fa3_ir::BufferId;
use fa3_sched::DeviceLimits;
use fa3_sched::backward::Plan;
use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};

#[test]
fn one_tile_of_keys_has_no_sums() {
    let bytes = |keys| {
        let q = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 64 };
        let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: keys, ..q });
        let problem = BackwardSpec::contiguous(forward).validate().expect("shapes agree");
        let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).expect("there is a tile");
        let program = program(&plan);
        let BufferId(sums) = program.find("sums").expect("dQ is added up");
        program.buffers[sums].bytes()
    };
    assert_eq!([77, 128, 129].map(bytes), [0, 0, 2 * 8 * 4096 * 64 * 4]);
}
