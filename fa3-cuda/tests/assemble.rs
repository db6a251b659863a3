//! Kernels in ptxas's opinion: those of the catalogue for every dtype that they take, and the forward pass for every tile and
//! mask. None may spill registers, and none may have its products serialised.

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use fa3_cuda::host::JitReport;
use fa3_cuda::kernels::catalogue;
use fa3_cuda::kernels::fwd::{self, FwdSpec};
use fa3_ir::{Elem, Kernel, Ptx, ptx};
use fa3_sched::{Inputs, Loads, Longest, MaskClass, Order, Scheduler, TileRow, TileShape};
use fa3_types::Mask;

/// What the ptxas of `$PTXAS` or of the path says of a kernel. `None` if there is none.
fn assemble(ptx: &Ptx, name: &str) -> Option<String> {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| OsString::from("ptxas"));
    let path = std::env::temp_dir().join(format!("fa3-cuda-{}-{name}.ptx", std::process::id()));
    fs::write(&path, &ptx.text).unwrap();
    let mut command = Command::new(ptxas);
    command.args(["-arch=sm_90a", "-v", "-o", "/dev/null"]).arg(&path).stdin(Stdio::null());
    let output = command.output();
    fs::remove_file(&path).unwrap();
    let output = output.ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    Some(said)
}

/// Whether ptxas has nothing to say of a kernel. False if there is no ptxas.
fn is_clean(kernel: &Kernel, name: &str) -> bool {
    let ptx = ptx::emit(kernel).unwrap_or_else(|errors| panic!("{name}: {errors:?}"));
    let Some(said) = assemble(&ptx, name) else { return false };
    let report = JitReport::parse(&said).unwrap_or_else(|| panic!("{name}: {said}"));
    // Registers that setmaxnreg gives to roles are not in this number; those at entry are.
    let entry_registers = kernel.launch.entry_registers();
    assert!(report.is_clean() && report.registers <= entry_registers, "{name}: {report}");
    println!("{name}: {report}");
    true
}

#[test]
fn the_catalogues_kernels() {
    for entry in catalogue::ALL {
        for job in entry.jobs().unwrap() {
            if !is_clean(&job.kernel, &format!("{}-{}", entry.name, job.arrays[0].elem)) {
                println!("skipped: no ptxas");
                return;
            }
        }
    }
}

/// The forward kernels that plans choose: for every row of the tile table its masks, with the scheduler that they get.
#[test]
fn forward_kernels() {
    let mut specs = Vec::new();
    for row in TileRow::table() {
        for mask in row.masks {
            let mask = match mask {
                MaskClass::Dense => Mask::None,
                MaskClass::Causal => Mask::Causal,
                MaskClass::Window => Mask::window(Some(0), Some(0)),
            };
            let (order, scheduler) = match mask {
                Mask::None => (Order::Linear, Scheduler::StaticPersistent),
                Mask::Causal | Mask::Window { .. } => {
                    let order = Order::LongestFirst { section: 1, longest: Longest::from(mask) };
                    (order, Scheduler::DynamicPersistent)
                }
            };
            let (tile, head_dim_v) = (row.shape, row.shape.head_dim_v);
            let (elem, softcap) = (Elem::Bf16, false);
            specs.push(FwdSpec { elem, tile, head_dim_v, mask, softcap, order, scheduler });
        }
    }
    // Tiles of 8-bit inputs, and those whose warpgroups share rows, are other kernels'.
    specs.retain(|FwdSpec { tile, .. }| tile.inputs == Inputs::Bits16 && tile.tile_m == 64 * tile.consumers);
    assert!(specs.len() > 30, "{} kernels", specs.len());
    // And with a soft cap, which takes registers of its own, where the mask takes most.
    let has_left = |spec: &&FwdSpec| spec.mask.reach().0.is_some();
    let capped: Vec<FwdSpec> =
        specs.iter().filter(has_left).map(|spec| FwdSpec { softcap: true, ..*spec }).collect();
    specs.extend(capped);
    // And without a producer, what the paper's ablation measures.
    let is_measured =
        |spec: &&FwdSpec| (spec.tile.head_dim, spec.tile.tile_n, spec.mask) == (128, 176, Mask::None);
    let measured = *specs.iter().find(is_measured).expect("the table has the tile");
    let loads = Loads::Consumers;
    specs.push(FwdSpec { tile: TileShape { loads, ..measured.tile }, ..measured });
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(|| {
                while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let FwdSpec {
                        tile: TileShape { head_dim, tile_m, tile_n, loads, .. },
                        head_dim_v,
                        mask,
                        ..
                    } = *spec;
                    let cap = if spec.softcap { "-cap" } else { "" };
                    let alone = if loads == Loads::Consumers { "-alone" } else { "" };
                    let name = format!("fwd-{head_dim}-{head_dim_v}-{tile_m}x{tile_n}-{mask}{cap}{alone}");
                    if !is_clean(&fwd::kernel(spec), &name) {
                        println!("skipped: no ptxas");
                        return;
                    }
                }
            });
        }
    });
}
