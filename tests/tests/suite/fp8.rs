//! Attention in 8 bits of 16-bit tensors, as one program in the simulator: what its parts give one by one, bit for bit.

use fa3::{Device, Quantize, Quantized, Scaling};
use fa3_cuda::kernels::fwd::buffers;
use fa3_cuda::kernels::{Spec, fp8, fwd};
use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_quant::{Granularity, Incoherent, Rope, RopeStyle, RopeTable};
use fa3_sched::fp8::Plan;
use fa3_sim::{Mode, ProgramSimulation};
use fa3_tests::fwd::device;
use fa3_types::{Dtype, Fp8Problem, Fp8Spec, Positions, ProblemSpec, QkRotary, SequenceRows, Shape};
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

/// A rotation of Q and K: its table, and the positions that are listed.
#[derive(Clone, Copy)]
struct Rotated<'a> {
    table: &'a RopeTable,
    listed: [Option<&'a [i32]>; 2],
}

impl Rotated<'_> {
    fn of_problem(&self) -> QkRotary {
        let [q_positions, k_positions] = [(0, Q_POSITION), (1, 0)]
            .map(|(index, first)| self.listed[index].map_or(Positions::From(first), |_| Positions::Listed));
        QkRotary {
            style: self.table.style(),
            rotary_dim: self.table.rotary_dim(),
            table_rows: self.table.positions(),
            q_positions,
            k_positions,
        }
    }

    /// The program's inputs.
    fn bytes(&self) -> Vec<Vec<u8>> {
        let mut all: Vec<Vec<u8>> = [self.table.cos(), self.table.sin()].map(f32_bytes).into();
        let of_list = |list: &[i32]| list.iter().flat_map(|position| position.to_le_bytes()).collect();
        all.extend(self.listed.into_iter().flatten().map(of_list));
        all
    }
}

/// Codes, scales and means as the forward pass alone takes them, from the CPU.
fn parts(
    problem: &Fp8Problem,
    [q, k, v]: [ArrayView4<'_, bf16>; 3],
    hadamard: bool,
    rotated: Option<Rotated<'_>>,
) -> Vec<Vec<u8>> {
    let of_qk = |x, index: usize, first| {
        let quantize = Quantize::new(x);
        let quantize = match rotated {
            Some(Rotated { table, listed }) => match listed[index] {
                Some(list) => quantize.rotary(table).positions(list),
                None => quantize.rotary(table).first_position(first),
            },
            None => quantize,
        };
        if hadamard { quantize.hadamard(SEED) } else { quantize }
    };
    let of_v = Quantize::new(v);
    let of_v = if problem.codes().has_v_channels() { of_v.scaling(Scaling::Channel) } else { of_v };
    let [q, k, v] =
        [of_qk(q, 0, Q_POSITION), of_qk(k, 1, 0), of_v].map(|quantize| quantize.run(&Device::Cpu).unwrap());
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
    // Some of Q's, and one of K's, are in no table.
    let of_q: Vec<i32> = (0..2 * 150).map(|row| 7 * row % 305 - 3).collect();
    let of_k: Vec<i32> = (0..2 * 300).map(|row| if row == 299 { 300 } else { 11 * row % 300 }).collect();
    let rotated = |q: bool, k: bool| {
        let listed = [q.then_some(&of_q[..]), k.then_some(&of_k[..])];
        Some(Rotated { table: &table, listed })
    };
    for (spec, hadamard, v_channels, rotated) in [
        (dense.clone(), false, false, None),
        (dense.clone().causal(), true, true, rotated(false, false)),
        (dense.clone().softcap(5.0), false, true, None),
        (dense.clone(), true, false, rotated(true, false)),
        (dense.clone().causal(), false, false, rotated(false, true)),
        (dense, true, true, rotated(true, true)),
    ] {
        let mut fp8 = Fp8Spec::new(spec);
        fp8.v_channels = v_channels;
        fp8.signs = Incoherent::new(64, SEED).signs().filter(|_| hadamard);
        fp8.rotary = rotated.as_ref().map(Rotated::of_problem);
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
        first.extend(rotated.iter().flat_map(Rotated::bytes));
        let of_chain = run(&chain, &first, [o, lse]);

        let alone = fwd::program(plan.forward()).map(Spec::kernel);
        let parts = parts(&problem, [q.view(), k.view(), v.view()], hadamard, rotated);
        let of_parts = run(&alone, &parts, [buffers::O, buffers::LSE]);
        assert!(of_chain == of_parts, "{attention}, by channels: {v_channels}");
    }
}
