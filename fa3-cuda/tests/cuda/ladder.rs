//! Programs of the ladder.

use fa3_cuda::kernels::KernelSpec;
use fa3_cuda::kernels::ladder::*;
use fa3_ir::Elem;

/// The check of a program refuses sizes that cannot be launched.
#[test]
fn products_of_any_size_are_programs() {
    for (m, n, k) in [(0, 0, 0), (0, 8, 8), (8, 0, 8), (8, 8, 0), (u32::MAX, u32::MAX, u32::MAX)] {
        let size = GemmSize { m, n, k };
        let products = [
            gemm::program(Elem::Bf16, size, 132),
            gemm_cluster::program(Elem::F16, size, 0),
            gemm_fp8::program(size, u32::MAX),
            gemm_pipeline::program(Elem::Bf16, size),
            gemm_simple::program(Elem::F16, size),
            gemm_split_k::program(Elem::Bf16, size, 0),
        ];
        for program in products {
            assert!(program.map(|spec| spec.kernel()).check().is_err(), "{size:?}");
        }
    }
}

#[test]
fn kernels_have_their_names() {
    for spec in Spec::ALL {
        assert_eq!(spec.kernel().name, spec.name());
    }
}
