//! A kernel with a race, which the simulator finds: `cargo run --release -p fa3-sim --example find_race`.

use fa3_ir::lang::F32;
use fa3_ir::{ArgValue, Elem, Kernel, Launch};
use fa3_sim::{Memory, Policy, SimError, Simulation};

fn main() -> Result<(), SimError> {
    for synchronised in [false, true] {
        let kernel = reverse(synchronised);
        let numbers: Vec<u8> = (0..64_u8).flat_map(|x| f32::from(x).to_le_bytes()).collect();
        let mut memory = Memory::new();
        let (x, y) = (memory.alloc_from("x", &numbers), memory.alloc("y", 4 * 64));
        let args = vec![ArgValue::Pointer(x.address()), ArgValue::Pointer(y.address())];

        let outcome = Simulation::new(&kernel).args(args).policy(Policy::Random(7)).run(&mut memory)?;
        println!("{}: {} findings", kernel.name, outcome.findings.len());
        outcome.findings.iter().for_each(|finding| println!("{finding}"));
    }
    Ok(())
}

/// y[i] = x[63 - i], through shared memory, by two warps.
fn reverse(synchronised: bool) -> Kernel {
    let name = if synchronised { "reverse" } else { "reverse_without_a_barrier" };
    Kernel::build(name, Launch::threads(64), |b| {
        let (x, y) = (b.param_pointer("x", Elem::F32), b.param_pointer("y", Elem::F32));
        let (tile, tid) = (b.region("tile", 4 * 64, 16), b.tid());
        let start = b.address(tile);
        b.store(tid.mad(4, start), b.load::<F32>(tid.mad_wide(4, x)));
        if synchronised {
            b.sync_cta();
        }
        let mirrored = b.load::<F32>((-tid + 63).mad(4, start));
        b.store(tid.mad_wide(4, y), mirrored);
    })
}
