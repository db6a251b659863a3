//! A kernel of your own, on this CPU: `cargo run --release -p fa3-sim --example your_kernel`.

use std::error::Error;

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sim::{Costs, Policy, ProgramSimulation, Timeline};

const COLS: u32 = 128;

/// y = x / |x| for each row of 128 numbers, with one warp for each of `rows` rows.
fn normalize(rows: u32) -> Program<Kernel> {
    let kernel = Kernel::build("normalize", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let rows = b.param_u32("rows");
        let (lane, warp) = (b.lane_id(), (b.tid() >> 5).shfl_idx(0));
        b.for_each((b.cta_x().mad(4, warp), rows), b.grid_x() * 4, |row| {
            let first = row.mad(COLS, lane * 4);
            let numbers: [V<F32>; 4] = b.load_vector(first.mad_wide(4, x));
            let squares = numbers.iter().fold(b.value(0.0), |sum, x| x.fma(*x, sum));
            let sum = [16, 8, 4, 2, 1].iter().fold(squares, |sum, &mask| sum + sum.shfl_bfly(mask));
            b.probe("sum of squares", sum);
            b.assert(sum.gt(0.0), "no row is zero");
            b.store_vector(first.mad_wide(4, y), numbers.map(|x| x * sum.rsqrt()));
        });
    });
    let mut program = Program::new();
    let x = program.buffer("x", Elem::F32, &[rows, COLS], BufferRole::Input);
    let y = program.buffer("y", Elem::F32, &[rows, COLS], BufferRole::Output);
    let args = [("x", Passed::Pointer(x)), ("y", Passed::Pointer(y)), ("rows", Passed::U32(rows))];
    program.step(kernel, [2, 1, 1], args); // 2 CTAs: each warp has several rows
    program
}

fn main() -> Result<(), Box<dyn Error>> {
    const ROWS: u32 = 20;
    let x: Vec<f32> = (0..ROWS * COLS).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();

    let program = normalize(ROWS);
    for seed in 0..20 {
        let simulation = ProgramSimulation::new(&program).policy(Policy::Random(seed)).trace(seed == 0);
        let outcome = simulation.run(&[bytes.clone(), Vec::new()])?; // an output has no initial bytes
        for finding in outcome.findings() {
            println!("{finding}");
        }
        assert!(outcome.is_clean(), "seed {seed}");
        let y = outcome.buffers[1].as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        for (y, expected) in y.zip(x.chunks(COLS as usize).flat_map(normalized)) {
            assert!((f64::from(y) - expected).abs() < 1e-6, "{y} is not {expected}");
        }
        if let Some(trace) = &outcome.steps[0].trace {
            outcome.probes().take(3).for_each(|probe| println!("{probe}"));
            std::fs::write("normalize.svg", Timeline::new(trace, &Costs::HOPPER).to_svg())?;
        }
    }
    println!("right under 20 schedules; normalize.svg is its timeline");
    Ok(())
}

/// Normalizes one row in f64, as the reference.
fn normalized(row: &[f32]) -> Vec<f64> {
    let norm = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    row.iter().map(|&x| f64::from(x) / norm).collect()
}

#[test]
fn it_is_right_and_draws() -> Result<(), Box<dyn Error>> {
    std::env::set_current_dir(std::env::temp_dir())?;
    main()?;
    assert!(std::fs::read_to_string("normalize.svg")?.starts_with("<svg"));
    Ok(())
}
