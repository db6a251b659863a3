//! Attention in 8 bits of 16-bit tensors, as one program in the simulator: what its parts give one by one, bit for bit.

use fa3::{Device, Quantize, Quantized, Scaling};
use fa3_cuda::kernels::fwd::buffers;
use fa3_cuda::kernels::{Spec, fp8, fwd};
use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_quant::{Granularity, Incoherent, Rope, RopeStyle, RopeTable};
use fa3_sched::fp8::Plan;
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::fwd::device;
use fa3_types::{Dtype, Fp8Problem, Fp8Spec, ProblemSpec, QkRotary, SequenceRows, Shape};
use half::bf16;
use ndarray::{Array4, ArrayView4};

/// Bytes that nobody has written.
const UNWRITTEN: u8 = 0xFF;
const SEED: u64 = 7;
const Q_POSITION: usize = 150;

fn wave(shape: Shape, step: usize) -> Array4<bf16> {
    Array4::from_shape_fn(shape.dims(), |(b, s, h, d)| {
        bf16::from_f32(0.5 + ((7 * b + step * s + 5 * h + 3 * d) as f32).sin())
    })
}

fn bytes_of(x: &Array4<bf16>) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f32_bytes<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The bytes of O and of LSE after a program that begins with these.
fn run(program: &Program<Kernel>, first: &[Vec<u8>], [o, lse]: [BufferId; 2]) -> [Vec<u8>; 2] {
    let mut before: Vec<Vec<u8>> = program
        .buffers
        .iter()
        .map(|buffer| {
            let nobody_wrote = if buffer.role == BufferRole::Ticket { 0 } else { UNWRITTEN };
            vec![nobody_wrote; buffer.bytes()]
        })
        .collect();
    before.iter_mut().zip(first).for_each(|(to, from)| {
        assert_eq!(to.len(), from.len());
        to.clone_from(from);
    });
    let outcome = ProgramSimulation::new(program).mode(Mode::Exact).run(&before).unwrap();
    assert!(outcome.findings().next().is_none(), "{:?}", outcome.findings().next());
    [o, lse].map(|BufferId(at)| outcome.buffers[at].clone())
}

/// Codes, scales and means as the forward pass alone takes them, from the CPU.
fn parts(
    problem: &Fp8Problem,
    [q, k, v]: [ArrayView4<'_, bf16>; 3],
    hadamard: bool,
    table: Option<&RopeTable>,
) -> Vec<Vec<u8>> {
    let of_qk = |x, first| {
        let quantize = Quantize::new(x);
        let quantize = match table {
            Some(table) => quantize.rotary(table).first_position(first),
            None => quantize,
        };
        if hadamard { quantize.hadamard(SEED) } else { quantize }
    };
    let of_v = Quantize::new(v);
    let of_v = if problem.codes().has_v_channels() { of_v.scaling(Scaling::Channel) } else { of_v };
    let [q, k, v] =
        [of_qk(q, Q_POSITION), of_qk(k, 0), of_v].map(|quantize| quantize.run(&Device::Cpu).unwrap());
    let codes = |x: &Quantized| x.codes.iter().map(|code| code.to_bits()).collect();
    let (batch, seqlen, ..) = v.codes.dim();
    let sequences = SequenceRows::dense(batch, seqlen);
    let rows =
        fa3_quant::Quantized::new(v.codes.clone(), &sequences, Granularity::Tensor, vec![1.0]).unwrap();
    let transposed = rows.transposed().iter().map(|code| code.to_bits()).collect();
    let o = vec![UNWRITTEN; problem.codes().o().extent_bytes().0 as usize];
    let lse = vec![UNWRITTEN; 4 * problem.codes().lse_shape().iter().product::<usize>()];
    let mut all = vec![codes(&q), codes(&k), transposed, o, lse];
    all.extend([&q, &k, &v].map(|x| f32_bytes(&x.scales)));
    all.extend(v.mean.as_ref().map(f32_bytes));
    all
}

#[test]
fn the_chain_is_what_its_parts_are() {
    let q = Shape { batch: 2, seqlen: 150, heads: 4, head_dim: 64 };
    let dense = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 300, heads: 2, ..q }).head_dim_v(32);
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(300);
    for (spec, hadamard, v_channels, table) in [
        (dense.clone(), false, false, None),
        (dense.clone().causal(), true, true, Some(&table)),
        (dense.softcap(5.0), false, true, None),
    ] {
        let mut fp8 = Fp8Spec::new(spec);
        fp8.v_channels = v_channels;
        fp8.signs = Incoherent::new(64, SEED).signs().filter(|_| hadamard);
        fp8.rotary = table.map(|table| QkRotary {
            style: table.style(),
            rotary_dim: table.rotary_dim(),
            table_rows: table.positions(),
            q_position: Q_POSITION,
            k_position: 0,
        });
        let problem = fp8.validate().unwrap();
        let plan = Plan::new(&problem, &device(3)).unwrap();
        let attention = problem.attention();
        let [q, k, v] = [(attention.q(), 3), (attention.k(), 5), (attention.v(), 11)]
            .map(|(x, step)| wave(x.shape, step));

        let chain = fp8::program(&plan).map(Spec::kernel);
        assert_eq!(chain.check(), Ok(()));
        let [o, lse] = [BufferId(3), BufferId(4)];
        assert_eq!(["o", "lse"].map(|name| chain.find(name)), [Some(o), Some(lse)]);
        let mut first: Vec<Vec<u8>> = [&q, &k, &v].map(bytes_of).into();
        first.extend([o, lse].map(|BufferId(at)| vec![UNWRITTEN; chain.buffers[at].bytes()]));
        first.extend(table.into_iter().flat_map(|table| [table.cos(), table.sin()].map(f32_bytes)));
        let of_chain = run(&chain, &first, [o, lse]);

        let alone = fwd::program(plan.forward()).map(Spec::kernel);
        let parts = parts(&problem, [q.view(), k.view(), v.view()], hadamard, table);
        let of_parts = run(&alone, &parts, [buffers::O, buffers::LSE]);
        assert!(of_chain == of_parts, "{attention}, by channels: {v_channels}");
    }
}
