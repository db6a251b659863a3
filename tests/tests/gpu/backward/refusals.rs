//! Refused calls, and the numbers in their errors.

use std::mem::replace;

use fa3_cuda::host::{Backward, Device, DeviceBuffer, OperationError, PlacementError, Workspace};
use fa3_sched::backward::{DqTile, PlanError, PlanOptions, TileError};
use fa3_tests::bwd::Form;
use fa3_tests::fwd::dense;
use fa3_types::{Dtype, ProblemSpec};

use super::bench::Bench;
use super::tensors::{part, sizes};
use super::valid;
use crate::{Fallible, ensure};

/// Places among the tensors.
const K: usize = 1;
const DK: usize = 8;

/// Memory that is too small, another tensor's, or not aligned. Nothing is launched then, and the next run is as ever.
pub(super) fn memories(device: &Device) -> Fallible<String> {
    let problem = valid(dense(Dtype::Bf16, 2, (300, 200), (4, 2), 64));
    let mut said = Vec::new();
    for form in Form::DETERMINISTIC {
        let mut bench = Bench::new(device, &problem, form)?;
        let expected = bench.runs(1)?;
        for (index, (tensor, needed)) in sizes(&problem).into_iter().enumerate() {
            let given = needed as usize - 1;
            let error = run_with(&mut bench, index, device.alloc(given)?);
            let given = given as u64;
            let wrong = PlacementError::BufferSize { tensor, given, needed };
            said.push(refused(error, &wrong.into(), &[given, needed])?);
        }
        let needed = bench.backward.workspace_bytes();
        let given = needed - 1;
        let whole = replace(&mut bench.workspace, Workspace::new(device, &bench.stream, given)?);
        let error = bench.run().err();
        bench.workspace = whole;
        let wrong = PlacementError::WorkspaceSize { given, needed };
        said.push(refused(error, &wrong.into(), &[given as u64, needed as u64])?);

        let (start, bytes) = (bench.tensors.0[K].address(), bench.tensors.0[K].bytes());
        let over = part(device, &bench.tensors.0[K], 0, bytes);
        let error = run_with(&mut bench, DK, over);
        let at = start..start + bytes as u64;
        let wrong = PlacementError::Overlap { output: "dk", at: at.clone(), other: "k", other_at: at };
        said.push(refused(error, &wrong.into(), &[])?);
        let longer = device.alloc(bytes + 8)?;
        let error = run_with(&mut bench, K, part(device, &longer, 8, bytes));
        let address = longer.address() + 8;
        let wrong = PlacementError::Misaligned { tensor: "k", address, alignment: 16 };
        said.push(refused(error, &wrong.into(), &[16])?);
        ensure(bench.runs(1)? == expected, &format!("{form:?} differs after what was refused"))?;
    }
    Ok(said.join("; "))
}

/// Problems that no plan computes.
pub(super) fn problems(device: &Device) -> Fallible<String> {
    let spec = |dtype, head_dim| dense(dtype, 2, (300, 200), (4, 2), head_dim);
    let new = |spec: ProblemSpec, options: &PlanOptions| Backward::with(device, &valid(spec), options).err();
    let default = &PlanOptions::default();
    let mut said = Vec::new();

    let error = new(spec(Dtype::F32, 64), default);
    let wrong = PlanError::Dtype { dtype: Dtype::F32, output: Dtype::F32 };
    said.push(refused(error, &wrong.into(), &[])?);

    let error = new(spec(Dtype::F16, 264), default);
    let wrong = PlanError::HeadDim { head_dim: 264, head_dim_v: 264 };
    said.push(refused(error, &wrong.into(), &[264])?);

    let limits = device.limits();
    let tile = DqTile::choose(64, 64, &limits).ok_or("there is no tile")?;
    let error = new(spec(Dtype::Bf16, 128), &default.dq(tile));
    let wrong = PlanError::Narrow { most: 64, most_v: 64, head_dim: 128, head_dim_v: 128 };
    said.push(refused(error, &wrong.into(), &[64, 128])?);

    let deep = DqTile { k_stages: 16, v_stages: 16, ..tile };
    let (needed, available) = (deep.smem_bytes(), limits.smem_bytes);
    let error = new(spec(Dtype::Bf16, 64), &default.dq(deep));
    let wrong = PlanError::Tile(TileError::SharedMemory { needed, available });
    said.push(refused(error, &wrong.into(), &[needed.into(), available.into()])?);
    Ok(said.join("; "))
}

/// The error of a run with this memory in the place of a tensor.
fn run_with(bench: &mut Bench, index: usize, memory: DeviceBuffer) -> Option<OperationError> {
    let own = replace(&mut bench.tensors.0[index], memory);
    let error = bench.run().err();
    bench.tensors.0[index] = own;
    error
}

/// The sentence of the error, if it is the expected one and has these numbers.
fn refused(
    error: Option<OperationError>,
    expected: &OperationError,
    numbers: &[u64],
) -> Result<String, String> {
    let error = error.ok_or_else(|| format!("not refused: {expected}"))?;
    let sentence = error.to_string();
    let names = |number: &u64| sentence.contains(&number.to_string());
    if error == *expected && numbers.iter().all(names) {
        Ok(sentence)
    } else {
        Err(format!("refused otherwise than with {expected}, {numbers:?}: {sentence}"))
    }
}
