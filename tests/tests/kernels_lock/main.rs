//! Every shipped kernel: whether its code is what `tests/kernels.lock` says. `FA3_UPDATE=1` writes the lock again.
//!
//! Kernels are built once for all tests of this file, and those that stand for others are assembled, where there is ptxas.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::{env, fs};

use fa3_cuda::kernels::shipped::{Shipped, shipped};
use fa3_ir::ptx;
use fa3_tests::lock::{Assembled, Code, Diff, Lock, NoTool, Ptxas, Usage};
use rayon::prelude::*;

static PTXAS: LazyLock<Result<Ptxas, NoTool>> = LazyLock::new(Ptxas::find);
static ALL: LazyLock<Vec<Built>> = LazyLock::new(|| {
    let all: Vec<Shipped> = shipped().collect();
    all.into_par_iter().map(Built::of).collect()
});

/// A shipped kernel, built.
struct Built {
    shipped: Shipped,
    code: Code,
    entry_registers: u32,
    /// `None` if there is no ptxas, or if another kernel stands for it.
    assembled: Option<Assembled>,
}

impl Built {
    fn of(shipped: Shipped) -> Built {
        let kernel = shipped.kernel();
        let ptx = ptx::emit(&kernel).unwrap_or_else(|errors| panic!("{}: {errors:?}", shipped.name));
        let ptxas = PTXAS.as_ref().ok().filter(|_| shipped.stands_for_others());
        let assembled = ptxas.map(|ptxas| ptxas.assemble(&shipped.name, &ptx.text));
        let usage = assembled.as_ref().map(|Assembled { report, .. }| Usage {
            registers: report.registers,
            spills: report.spill_store_bytes + report.spill_load_bytes,
        });
        let code = Code { assembled: usage, ..Code::of(&ptx) };
        Built { shipped, code, entry_registers: kernel.launch.entry_registers(), assembled }
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels.lock")
}

#[test]
fn kernels_are_as_the_lock_says() {
    let kernels = ALL.iter().map(|built| (built.shipped.name.clone(), built.code)).collect();
    let now = Lock { ptxas: PTXAS.as_ref().ok().map(|ptxas| ptxas.version.clone()), kernels };
    let update = env::var_os("FA3_UPDATE").is_some();
    if update {
        assert!(now.ptxas.is_some(), "the lock has what ptxas says, and there is no ptxas: set $PTXAS");
        fs::write(path(), now.to_string()).expect("the lock can be written");
        return;
    }
    let text = fs::read_to_string(path()).expect("the lock can be read");
    let lock = Lock::parse(&text).unwrap_or_else(|error| panic!("{error}"));
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

/// ptxas spills no registers, serialises no products and warns of nothing.
#[test]
fn ptxas_has_nothing_to_say() {
    for Built { shipped, assembled, entry_registers, .. } in ALL.iter() {
        let Some(Assembled { report, .. }) = assembled else { continue };
        // Registers that setmaxnreg gives to roles are not in this number; those at entry are.
        assert!(report.is_clean() && report.registers <= *entry_registers, "{}: {report}", shipped.name);
    }
}
