//! A kernel made of parts of the forward kernel: `cargo run --release -p fa3-cuda --example your_fused_kernel`.

use std::error::Error;

use fa3_cuda::kernels::fwd::RowSoftmax;
use fa3_cuda::kernels::parts::visible::Visible;
use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sim::{Policy, ProgramSimulation};
use half::bf16;

/// Number of rows of Q in a CTA, of keys in a block, and of columns of Q and K.
const TILE: u32 = 64;

/// lse = ln Σ exp(q · k / 8) over the keys up to the row's own position, for a head of `rows` rows of 64 bf16.
fn causal_lse(rows: u32) -> Program<Kernel> {
    let kernel = Kernel::build("causal_lse", Launch::threads(256), |b| {
        let shape = TileShape::new(Elem::Bf16, TILE, TILE);
        let (q, k) = (b.tile_map("q", shape), b.tile_map("k", shape));
        let (lse, rows) = (b.param_pointer("lse", Elem::F32), b.param_u32("rows"));
        let of_q = b.pipeline("q", 1, 4, [("q", shape)]);
        let of_k = b.pipeline("k", 2, 4, [("k", shape)]);
        b.init_mbarriers();
        let (first, blocks) = (b.cta_x() * TILE, b.cta_x() + 1);
        b.role(Role::new("producer", 0..4), || {
            b.once_per_role(|| {
                let (mut of_q, mut of_k) = (of_q.producer(), of_k.producer());
                let mut stage = of_q.acquire();
                stage.load(0, &q, (0, first));
                stage.commit();
                b.for_each((0, blocks), 1, |block| {
                    let mut stage = of_k.acquire();
                    stage.load(0, &k, (0, block * TILE));
                    stage.commit();
                });
            });
        });
        b.role(Role::new("consumer", 4..8), || {
            let (mut of_q, mut of_k) = (of_q.consumer(), of_k.consumer());
            let scale = 0.125 * std::f32::consts::LOG2_E; // for exponentials of base 2
            let softmax = RowSoftmax::new(b, b.value(scale), 0.0);
            let row = |half: Half| first + b.frag_row() + half.rows();
            let q = of_q.wait();
            b.for_each((0, blocks), 1, |block| {
                let k = of_k.wait();
                let mut s = gemm(q.tile(), k.tile().t(), Fresh).wait();
                k.release();
                for half in Half::BOTH {
                    let keys = Visible { start: None, end: row(half) + 1, other: None, tree: None };
                    let keys = keys.from(block * TILE + b.frag_col());
                    s.map_row_in_place(half, |score, at| keys.hide(score, at.col, f32::NEG_INFINITY));
                }
                softmax.step(&mut s); // with V, O would be multiplied by the result
            });
            q.release();
            let of_rows = softmax.finish(None).lse;
            for half in Half::BOTH {
                let is_first_of_quad = (b.tid() & 3).eq(0);
                b.guarded(is_first_of_quad & row(half).lt(rows), || {
                    b.store(row(half).mad_wide(4, lse), of_rows[half]);
                });
            }
        });
    });
    let mut program = Program::new();
    let [q, k] = ["q", "k"].map(|name| program.buffer(name, Elem::Bf16, &[rows, TILE], BufferRole::Input));
    let lse = program.buffer("lse", Elem::F32, &[rows], BufferRole::Output);
    let tensors = [("q", program.tensor(q)), ("k", program.tensor(k))];
    let args = [("lse", Passed::Pointer(lse)), ("rows", Passed::U32(rows))];
    program.step(kernel, [rows.div_ceil(TILE), 1, 1], tensors.into_iter().chain(args));
    program
}

fn main() -> Result<(), Box<dyn Error>> {
    const ROWS: usize = 150;
    let [q, k] = [0.7_f32, 1.1].map(|step| {
        let numbers = (0..ROWS * TILE as usize).map(|i| bf16::from_f32(2.0 * (step * i as f32).sin()));
        numbers.collect::<Vec<bf16>>()
    });
    let bytes = |x: &[bf16]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let program = causal_lse(ROWS as u32);
    for seed in 0..20 {
        let simulation = ProgramSimulation::new(&program).policy(Policy::Random(seed));
        let outcome = simulation.run(&[bytes(&q), bytes(&k), Vec::new()])?;
        for finding in outcome.findings() {
            println!("{finding}");
        }
        assert!(outcome.is_clean(), "seed {seed}");
        for (row, lse) in outcome.buffers[2].as_chunks().0.iter().enumerate() {
            let (lse, expected) = (f64::from(f32::from_le_bytes(*lse)), expected(&q, &k, row));
            assert!((lse - expected).abs() < 1e-4, "row {row}: {lse} is not {expected}");
        }
    }
    println!("right under 20 schedules");
    Ok(())
}

/// The log-sum-exp of a row in f64, as the reference.
fn expected(q: &[bf16], k: &[bf16], row: usize) -> f64 {
    let rows = |x: &[bf16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
    let (q, k) = (rows(q), rows(k));
    let columns = TILE as usize;
    let q = &q[row * columns..][..columns];
    let scores =
        k.chunks(columns).take(row + 1).map(|k| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / 8.0);
    scores.map(f64::exp).sum::<f64>().ln()
}

#[test]
fn it_is_right() -> Result<(), Box<dyn Error>> {
    main()
}
