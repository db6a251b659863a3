//! Kernels in ptxas's opinion: those of the catalogue for every dtype that they take, and the forward pass for every tile and
//! mask. None may spill registers, and none may have its products serialised. Where there is nvdisasm, the forward kernels' loops must
//! have the order that makes the overlap.

mod loops;

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use fa3_cuda::host::JitReport;
use fa3_cuda::kernels::catalogue;
use fa3_cuda::kernels::fwd::{self, FwdSpec};
use fa3_cuda::sass::Listing;
use fa3_ir::{Elem, Kernel, ptx};
use fa3_sched::forward::{CtaTile, Loads, MaskClass, Overlap, Rescale, TileRow};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_types::Mask;
use loops::Fault;

/// What the ptxas of `$PTXAS` or of the path says of a kernel, and its cubin. `None` if there is none.
fn assemble(ptx: &str, name: &str) -> Option<(String, Vec<u8>)> {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| OsString::from("ptxas"));
    let stem = std::env::temp_dir().join(format!("fa3-cuda-{}-{name}", std::process::id()));
    let [path, cubin] = ["ptx", "cubin"].map(|extension| stem.with_extension(extension));
    fs::write(&path, ptx).unwrap();
    let mut command = Command::new(ptxas);
    command.args(["-arch=sm_90a", "-v", "-o"]).args([&cubin, &path]).stdin(Stdio::null());
    let output = command.output();
    fs::remove_file(&path).unwrap();
    let output = output.ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    let code = fs::read(&cubin).unwrap();
    fs::remove_file(&cubin).unwrap();
    Some((said, code))
}

/// What the nvdisasm of `$NVDISASM` or of the path reads in a cubin. `None` if there is none.
fn disassemble(cubin: &[u8], name: &str) -> Option<Listing> {
    let nvdisasm = std::env::var_os("NVDISASM").unwrap_or_else(|| OsString::from("nvdisasm"));
    let path = std::env::temp_dir().join(format!("fa3-cuda-{}-{name}.cubin", std::process::id()));
    fs::write(&path, cubin).unwrap();
    let output = Command::new(nvdisasm).arg("-c").arg(&path).stdin(Stdio::null()).output();
    fs::remove_file(&path).unwrap();
    let output = output.ok()?;
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    Some(Listing::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// The cubin of a kernel of which ptxas has nothing to say. `None` if there is no ptxas.
fn clean(kernel: &Kernel, name: &str) -> Option<Vec<u8>> {
    let ptx = ptx::emit(kernel).unwrap_or_else(|errors| panic!("{name}: {errors:?}"));
    let (said, cubin) = assemble(&ptx.text, name)?;
    let report = JitReport::parse(&said).unwrap_or_else(|| panic!("{name}: {said}"));
    // Registers that setmaxnreg gives to roles are not in this number; those at entry are.
    let entry_registers = kernel.launch.entry_registers();
    assert!(report.is_clean() && report.registers <= entry_registers, "{name}: {report}");
    println!("{name}: {report}");
    Some(cubin)
}

#[test]
fn the_catalogues_kernels() {
    for entry in catalogue::ALL {
        for job in entry.jobs().unwrap() {
            if clean(&job.kernel, &format!("{}-{}", entry.name, job.arrays[0].elem)).is_none() {
                println!("skipped: no ptxas");
                return;
            }
        }
    }
}

/// The tile in other forms, with fewer keys where a form needs more registers.
fn ablations(tile: CtaTile) -> [CtaTile; 6] {
    let rescale = Rescale::EveryBlock;
    [
        CtaTile { overlap: Overlap::None, rescale, ..tile },
        CtaTile { rescale, ..tile },
        CtaTile { overlap: Overlap::ThreeStage, rescale, tile_n: 48, ..tile },
        CtaTile { overlap: Overlap::None, rescale, ping_pong: false, ..tile },
        CtaTile { rescale, ping_pong: false, ..tile },
        CtaTile { loads: Loads::Consumers, rescale, ..tile },
    ]
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
            let (tile, head_dim_v) = (row.tile, row.tile.head_dim_v);
            let (elem, softcap) = (Elem::Bf16, false);
            specs.push(FwdSpec { elem, tile, head_dim_v, mask, softcap, order, scheduler });
        }
    }
    assert!(specs.len() > 30, "{} kernels", specs.len());
    // And with a soft cap, which takes registers of its own, where the mask takes most.
    let has_left = |spec: &&FwdSpec| spec.mask.reach().0.is_some();
    let capped: Vec<FwdSpec> =
        specs.iter().filter(has_left).map(|spec| FwdSpec { softcap: true, ..*spec }).collect();
    specs.extend(capped);
    // And what ablations of the longest sequences' tile measure.
    let is_measured = |spec: &&FwdSpec| spec.tile.head_dim == 128 && spec.mask == Mask::None;
    let measured = *specs.iter().find(is_measured).expect("the table has the tile");
    specs.extend(ablations(measured.tile).map(|tile| FwdSpec { tile, ..measured }));
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(|| {
                while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let FwdSpec {
                        tile:
                            CtaTile {
                                head_dim, tile_m, tile_n, stages, overlap, rescale, loads, ping_pong, ..
                            },
                        head_dim_v,
                        mask,
                        ..
                    } = *spec;
                    let cap = if spec.softcap { "-cap" } else { "" };
                    let turns = if ping_pong { "turns" } else { "free" };
                    let form = format!("{overlap:?}-{rescale:?}-{loads:?}-{turns}");
                    let name =
                        format!("fwd-{head_dim}-{head_dim_v}-{tile_m}x{tile_n}x{stages}-{form}-{mask}{cap}");
                    let Some(cubin) = clean(&fwd::kernel(spec), &name) else {
                        println!("skipped: no ptxas");
                        return;
                    };
                    // What becomes of loops without turns or without a producer is what the ablation measures.
                    let ablated = loads == Loads::Consumers || rescale == Rescale::EveryBlock && !ping_pong;
                    if ablated {
                        continue;
                    }
                    let Some(listing) = disassemble(&cubin, &name) else {
                        println!("skipped: no nvdisasm");
                        continue;
                    };
                    let faults = loops::faults(spec, &listing).into_iter();
                    wrong.lock().unwrap().extend(
                        faults.map(|(address, fault)| format!("{name}: loop at {address:#06x}: {fault}")),
                    );
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Loops are found wrong in which ptxas waits after every instruction for want of a fence (C7519) or of registers (C7512), and,
/// which nothing else would tell, one in which the kernel waits for both products at once.
#[test]
fn serialised_loops_are_found() {
    let is_it = |row: &&TileRow| row.tile.head_dim == 128 && row.tile.overlap == Overlap::TwoStage;
    let tile = TileRow::table().iter().find(is_it).unwrap().tile;
    let (order, scheduler) = (Order::Linear, Scheduler::StaticPersistent);
    let (elem, head_dim_v) = (Elem::Bf16, tile.head_dim_v);
    let spec = FwdSpec { elem, tile, head_dim_v, mask: Mask::None, softcap: false, order, scheduler };
    let sound = ptx::emit(&fwd::kernel(&spec)).unwrap().text;
    let registers = tile.registers();
    let [consumer, poor] = [registers.consumer, registers.entry]
        .map(|registers| format!("setmaxnreg.inc.sync.aligned.u32 {registers};"));
    type Expected = fn(&Fault) -> bool;
    let edits: [(&str, &str, Expected); 3] = [
        ("wgmma.fence.sync.aligned;", "", |fault| matches!(fault, Fault::Products { found: 3.. })),
        (&consumer, &poor, |fault| matches!(fault, Fault::Spills { .. })),
        ("wait_group.sync.aligned 1;", "wait_group.sync.aligned 0;", |fault| matches!(fault, Fault::OneWait)),
    ];
    for (index, (from, to, expected)) in edits.into_iter().enumerate() {
        let (broken, name) = (sound.replace(from, to), format!("serial-{index}"));
        assert_ne!(broken, sound, "no {from}");
        let listing = assemble(&broken, &name).and_then(|(_, cubin)| disassemble(&cubin, &name));
        let Some(listing) = listing else {
            println!("skipped: no ptxas, or no nvdisasm");
            return;
        };
        let faults = loops::faults(&spec, &listing);
        assert!(faults.iter().any(|(_, fault)| expected(fault)), "without {from}: {faults:?}");
    }
}
