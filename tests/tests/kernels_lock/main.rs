//! Checks of every shipped kernel: its code matches `tests/kernels.lock` (`FA3_UPDATE=1` rewrites the lock); ptxas
//! spills no more registers than the lock states and serializes no product; the main loops of forward kernels have the
//! order that gives overlap.
//!
//! Kernels are built once for all tests of this file. If ptxas is installed, kernels that stand for others are
//! assembled.

mod canonical;
mod loops;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::{env, fs};

use fa3_cuda::JitReport;
use fa3_cuda::kernels::fwd::FwdSpec;
use fa3_cuda::kernels::shipped::{Shipped, shipped};
use fa3_ir::ptx;
use fa3_sched::Scheduler;
use fa3_sched::forward::{Loads, Pipeline, Precision};
use fa3_tests::lock::{Code, Diff, Lock, Module, NoTool, Nvdisasm, Ptxas, Usage};
use loops::Fault;
use rayon::prelude::*;

static PTXAS: LazyLock<Result<Ptxas, NoTool>> = LazyLock::new(Ptxas::find);
static ALL: LazyLock<Vec<Batch>> = LazyLock::new(|| {
    let all: Vec<Shipped> = shipped().collect();
    all.par_chunks(BATCH).map(Batch::of).collect()
});

/// Kernels that are assembled as one module.
const BATCH: usize = 8;

/// A shipped kernel, built.
struct Built {
    shipped: Shipped,
    code: Code,
    entry_registers: u32,
    /// `None` without ptxas, or if another kernel stands for this one.
    report: Option<JitReport>,
}

/// Shipped kernels, built, and the module of those that are assembled.
struct Batch {
    kernels: Vec<Built>,
    module: Option<Module>,
}

impl Batch {
    fn of(shipped: &[Shipped]) -> Batch {
        let built = shipped.iter().map(|shipped| {
            let kernel = shipped.kernel();
            let ptx = ptx::emit(&kernel).unwrap_or_else(|errors| panic!("{}: {errors:?}", shipped.name));
            (shipped, ptx, kernel.launch.entry_registers())
        });
        let built: Vec<_> = built.collect();
        let assembled = built.iter().filter(|(shipped, ..)| shipped.stands_for_others());
        let texts: Vec<&str> = assembled.map(|(_, ptx, _)| ptx.text.as_str()).collect();
        let ptxas = PTXAS.as_ref().ok().filter(|_| !texts.is_empty());
        let module = ptxas.map(|ptxas| ptxas.assemble(&shipped[0].name, &texts));
        let mut reports = module.iter().flat_map(|module| &module.reports);
        let kernels = built.iter().map(|(shipped, ptx, entry_registers)| {
            let report = reports.by_ref().take(shipped.stands_for_others().into()).next().cloned();
            let usage = |report: &JitReport| Usage {
                registers: report.registers,
                spills: report.spill_store_bytes + report.spill_load_bytes,
            };
            let code = Code { assembled: report.as_ref().map(usage), ..Code::of(ptx) };
            Built { shipped: (*shipped).clone(), code, entry_registers: *entry_registers, report }
        });
        Batch { kernels: kernels.collect(), module }
    }

    /// The kernels of the module, in its order.
    fn assembled(&self) -> impl Iterator<Item = (&Built, &JitReport)> {
        self.kernels.iter().filter_map(|built| Some((built, built.report.as_ref()?)))
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels.lock")
}

fn read() -> Lock {
    let text = fs::read_to_string(path()).expect("the lock can be read");
    Lock::parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn kernels_are_as_the_lock_says() {
    let kernels = ALL
        .iter()
        .flat_map(|batch| &batch.kernels)
        .map(|built| (built.shipped.name.clone(), built.code))
        .collect();
    let now = Lock { ptxas: PTXAS.as_ref().ok().map(|ptxas| ptxas.version.clone()), kernels };
    let lock = read();
    let more = lock.more_spills(&now);
    assert!(
        more.is_empty(),
        "the lock is the most that a kernel spills; if more is meant, remove the kernel's line first:\n{}",
        more.join("\n")
    );
    let update = env::var_os("FA3_UPDATE").is_some();
    if update {
        assert!(now.ptxas.is_some(), "the lock has what ptxas says, and there is no ptxas: set $PTXAS");
        fs::write(path(), now.to_string()).expect("the lock can be written");
        return;
    }
    match (&now.ptxas, &lock.ptxas) {
        (None, _) => println!("skipped: no ptxas"),
        (now, lock) if now == lock => {}
        (Some(now), lock) => {
            println!("skipped: ptxas {now}, the lock has {}", lock.as_deref().unwrap_or("none"));
        }
    }
    let diff = Diff::of(&lock, &now);
    assert!(
        diff.is_empty(),
        "{diff}\nIf that is meant: FA3_UPDATE=1 cargo test -p fa3-tests --test kernels_lock"
    );
}

/// Documents state the number of kernels that spill. It must equal the number in the lock.
#[test]
fn documents_count_the_spills() {
    type IsMeant = fn(&str) -> bool;
    let documents: [(&str, IsMeant); 3] = [
        ("docs/backward.md", |name| name.starts_with("bwd/")),
        ("docs/decode.md", |name| name.contains("/shares-of-")),
        ("docs/fp8.md", |name| name.starts_with("fwd/e4m3/")),
    ];
    for (document, is_meant) in documents {
        let (kernels, spilling, most) = read().count_spills(is_meant);
        let sentence = format!("{spilling} of the {kernels} kernels spill registers, the worst {most} bytes");
        let text = fs::read_to_string(path().with_file_name("..").join(document)).expect("it can be read");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(words.join(" ").contains(&sentence), "{document} does not say: {sentence}");
    }
}

/// ptxas reports neither serialization nor warnings.
#[test]
fn ptxas_has_nothing_to_say() {
    for (Built { shipped, entry_registers, .. }, report) in ALL.iter().flat_map(Batch::assembled) {
        // The reported number excludes registers that setmaxnreg gives to roles, and includes registers at entry.
        let is_clean = report.warnings.is_empty() && report.registers <= *entry_registers;
        assert!(is_clean, "{}: {report}", shipped.name);
    }
}

/// Whether a kernel's main loops must overlap. 16-bit kernels without ping-pong or without a producer need not, because
/// they exist for the ablation study, unless their warpgroups share rows. A loop whose PV has several parts has more
/// than two products.
fn overlaps(spec: &FwdSpec) -> bool {
    let tile = &spec.tile;
    match tile.precision {
        Precision::Half | Precision::Converted { .. } => {
            let is_free = tile.pipeline != Pipeline::Paired && !tile.ping_pong && tile.column_groups() == 1;
            tile.loads == Loads::Producer && !is_free
        }
        Precision::Fp8(_) => tile.pv_cols() == tile.head_dim_v,
    }
}

#[test]
fn loops_overlap() {
    let Ok(nvdisasm) = Nvdisasm::find() else {
        println!("skipped: no nvdisasm");
        return;
    };
    let wrong = ALL.par_iter().flat_map_iter(|batch| {
        let specs = batch.assembled().map(|(built, _)| built.shipped.forward().filter(|spec| overlaps(spec)));
        let specs: Vec<_> = specs.collect();
        let module = batch.module.as_ref().filter(|_| specs.iter().any(Option::is_some));
        let listings = module.map(|module| nvdisasm.disassemble(&batch.kernels[0].shipped.name, module));
        let listings = listings.into_iter().flatten();
        batch.assembled().zip(specs).zip(listings).flat_map(|(((built, _), spec), listing)| {
            let faults = spec.map(|spec| loops::faults(spec, &listing));
            let name = &built.shipped.name;
            let faults = faults.into_iter().flatten();
            faults.map(move |(address, fault)| format!("{name}: loop at {address:#06x}: {fault}"))
        })
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The checks find serialized loops, which have a wait after every instruction because a fence (C7519) or registers
/// (C7512) are missing. They also find a loop that waits for both products at once, which ptxas does not report.
#[test]
fn serialised_loops_are_found() {
    let (Ok(ptxas), Ok(nvdisasm)) = (PTXAS.as_ref(), Nvdisasm::find()) else {
        println!("skipped: no ptxas, or no nvdisasm");
        return;
    };
    let is_it = |spec: &FwdSpec| {
        (spec.tile.head_dim, spec.tile.consumers) == (128, 3) && spec.scheduler == Scheduler::StaticPersistent
    };
    let is_it = |shipped: &Shipped| shipped.forward().is_some_and(is_it);
    let shipped = shipped().find(is_it).expect("there is one for head dimension 128");
    let spec = shipped.forward().expect("it is a forward kernel");
    let sound = ptx::emit(&shipped.kernel()).unwrap().text;
    let registers = spec.tile.registers();
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
        let listings = nvdisasm.disassemble(&name, &ptxas.assemble(&name, &[&broken]));
        let faults = loops::faults(spec, &listings[0]);
        assert!(faults.iter().any(|(_, fault)| expected(fault)), "without {from}: {faults:?}");
    }
}
