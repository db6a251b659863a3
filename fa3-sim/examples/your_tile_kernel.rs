//! A kernel that loads and stores tiles by TMA: `cargo run --release -p fa3-sim --example your_tile_kernel`.

use std::error::Error;

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sim::{Policy, ProgramOutcome, ProgramSimulation, Rule, SimError};

const TILE: u32 = 64;

/// The line that is left out of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    Nothing,
    WaitForTheLoad,
    FlipOfTheParity,
    ProxyFence,
}

/// y = x² in bf16, in tiles of 64 rows of 64 numbers. There are `rows` rows, so the last tile may have fewer.
fn square(rows: u32, bug: Bug) -> Program<Kernel> {
    let kernel = Kernel::build("square", Launch::threads(128), |b| {
        let shape = TileShape::new(Elem::Bf16, TILE, TILE);
        let (x, y, tiles) = (b.tile_map("x", shape), b.tile_map("y", shape), b.param_u32("tiles"));
        let (loaded, squared) = (b.tile("loaded", shape), b.tile("squared", shape));
        let full = b.mbarriers("full", 1, 1);
        b.init_mbarriers();
        let parity = b.var("parity", 0);
        let (row, column) = (b.tid() >> 1, (b.tid() & 1) * 32); // each thread has half of a row
        b.for_each((b.cta_x(), tiles), b.grid_x(), |tile| {
            // One thread expects the bytes of the copy, and begins it.
            b.once_per_role(|| {
                b.mbarrier_arrive_expect(full, shape.bytes());
                b.load_tile(loaded, &x, (0, tile * TILE), full, LoadOptions::default());
            });
            if bug != Bug::WaitForTheLoad {
                b.mbarrier_wait(full, parity);
            }
            if bug != Bug::FlipOfTheParity {
                parity.update(|parity| parity ^ 1);
            }
            let pairs =
                [0, 8, 16, 24].map(|n| b.load_vector::<B32, 4>(loaded.element(row, column + n).at(0)));
            // Waits until the previous tile's store has read `squared`; the barrier orders all threads after the wait.
            b.once_per_role(|| b.bulk_wait_read(0));
            b.sync_cta();
            for (n, pairs) in [0, 8, 16, 24].into_iter().zip(pairs) {
                let squares = pairs.map(|pair| V::pack_bf16x2(pair.unpack_bf16x2().map(|x| x * x)));
                b.store_vector(squared.element(row, column + n).at(0), squares);
            }
            // A fence and a barrier order the threads' reads and writes before the next copies.
            if bug != Bug::ProxyFence {
                b.fence(FenceInst::ProxyAsyncShared);
            }
            b.sync_cta();
            b.once_per_role(|| {
                b.store_tile(squared, &y, (0, tile * TILE));
                b.bulk_commit();
            });
        });
        b.once_per_role(|| b.bulk_wait(0));
    });
    let mut program = Program::new();
    let x = program.buffer("x", Elem::Bf16, &[rows, TILE], BufferRole::Input);
    let y = program.buffer("y", Elem::Bf16, &[rows, TILE], BufferRole::Output);
    let tiles = Passed::U32(rows.div_ceil(TILE));
    program.step(kernel, [2, 1, 1], [("x", program.tensor(x)), ("y", program.tensor(y)), ("tiles", tiles)]);
    program
}

/// For each bug, the rules that the first finding may name, depending on the schedule.
const FIRST: [(Bug, &[Rule]); 3] = [
    (Bug::WaitForTheLoad, &[Rule::Race]),
    (Bug::FlipOfTheParity, &[Rule::M3, Rule::Race]),
    (Bug::ProxyFence, &[Rule::W4]),
];

/// Runs the kernel on 300 rows that repeat the numbers 0 to 96.
fn run(bug: Bug, policy: Policy) -> Result<ProgramOutcome, SimError> {
    let numbers = (0..300 * TILE).map(|i| (i % 97) as f32);
    let x = numbers.flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(); // exact in bf16
    ProgramSimulation::new(&square(300, bug)).policy(policy).run(&[x, Vec::new()])
}

fn main() -> Result<(), Box<dyn Error>> {
    for seed in 0..20 {
        let outcome = run(Bug::Nothing, Policy::Random(seed))?;
        assert!(outcome.is_clean(), "seed {seed}");
        for (bytes, i) in outcome.buffers[1].as_chunks().0.iter().zip(0..) {
            let (y, x) = (f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16), (i % 97) as f32);
            assert!((y - x * x).abs() <= x * x / 256.0, "{y} is not {x} squared");
        }
    }
    println!("right under 20 schedules");
    for (bug, _) in FIRST {
        let outcome = run(bug, Policy::Random(0))?;
        println!("\nwithout {bug:?}:\n{}", outcome.findings().next().ok_or("nothing is found")?);
    }
    Ok(())
}

#[test]
fn it_is_right_and_bugs_are_found() -> Result<(), Box<dyn Error>> {
    main()?;
    for (bug, rules) in FIRST {
        for seed in 0..10 {
            let outcome = run(bug, Policy::Random(seed))?;
            let first = outcome.findings().next().ok_or("nothing is found")?;
            assert!(rules.contains(&first.rule), "{bug:?}, seed {seed}:\n{first}");
        }
    }
    Ok(())
}
