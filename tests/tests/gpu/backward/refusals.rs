//! Refused calls, and the numbers in their errors.

use fa3_cuda::host::{Backward, Device};
use fa3_sched::backward::{DqTile, PlanError, PlanOptions, TileError};
use fa3_tests::fwd::dense;
use fa3_types::{Dtype, ProblemSpec};

use super::valid;
use crate::Fallible;
use crate::launches::refused;

/// Problems that every plan refuses.
pub(super) fn problems(device: &Device) -> Fallible<String> {
    let spec = |dtype, head_dim| dense(dtype, 2, (300, 200), (4, 2), head_dim);
    let new = |spec: ProblemSpec, options: &PlanOptions| Backward::with(device, &valid(spec), options).err();
    let default = &PlanOptions::default();
    let mut said = Vec::new();

    let error = new(spec(Dtype::F32, 64), default);
    let wrong = PlanError::Dtype { dtype: Dtype::F32, output: Dtype::F32 };
    said.push(refused(error, wrong)?);

    let error = new(spec(Dtype::F16, 264), default);
    let wrong = PlanError::HeadDim { head_dim: 264, head_dim_v: 264 };
    said.push(refused(error, wrong)?);

    let limits = device.limits();
    let tile = DqTile::choose(64, 64, &limits).ok_or("there is no tile")?;
    let error = new(spec(Dtype::Bf16, 128), &default.dq(tile));
    let wrong = PlanError::Narrow { most: 64, most_v: 64, head_dim: 128, head_dim_v: 128 };
    said.push(refused(error, wrong)?);

    let deep = DqTile { k_stages: 16, v_stages: 16, ..tile };
    let (needed, available) = (deep.smem_bytes(), limits.smem_bytes);
    let error = new(spec(Dtype::Bf16, 64), &default.dq(deep));
    let wrong = PlanError::Tile(TileError::SharedMemory { needed, available });
    said.push(refused(error, wrong)?);
    Ok(said.join("; "))
}
