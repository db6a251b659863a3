//! Attention in 8 bits of 16-bit tensors, as one program in the simulator: what its parts give one by one, bit for bit.

use fa3::{Device, Quantize, Quantized, Scaling};
use fa3_cuda::kernels::fwd::buffers;
use fa3_cuda::kernels::{Spec, fp8, fwd};
use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_quant::{Granularity, Incoherent, Rope, RopeStyle, RopeTable};
use fa3_sched::fp8::Plan;
use fa3_sim::{Mode, Policy, ProgramSimulation, Rule};
use fa3_tests::fwd::device;
use fa3_types::{Dtype, Fp8Problem, Fp8Spec, Mask, Positions, ProblemSpec, QkRotary, SequenceRows, Shape};
use half::bf16;
use ndarray::{Array4, ArrayView4, Axis, Slice};

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

/// Rows of Q and of K of each sequence: blocks and tiles in part and in full, nothing of either.
const LENGTHS: [(usize, usize); 5] = [(100, 140), (0, 30), (33, 0), (130, 260), (1, 1)];

/// A problem of dense or packed sequences with its program, and the bytes of the caller's tensors: Q, K and V, O and
/// LSE, tables, lists.
struct Call {
    program: Program<Kernel>,
    before: Vec<Vec<u8>>,
}

impl Call {
    fn new(spec: ProblemSpec, rotary: &RopeTable, mut before: Vec<Vec<u8>>, lists: [&[i32]; 2]) -> Call {
        let (style, rotary_dim, table_rows) = (rotary.style(), rotary.rotary_dim(), rotary.positions());
        let (q_positions, k_positions) = (Positions::From(2), Positions::From(0));
        let rotary_spec = QkRotary { style, rotary_dim, table_rows, q_positions, k_positions };
        let mut fp8 = Fp8Spec::new(spec).rotary(rotary_spec);
        fp8.signs = Incoherent::new(64, SEED).signs();
        let plan = Plan::new(&fp8.validate().unwrap(), &device(3)).unwrap();
        let program = fp8::program(&plan).map(Spec::kernel);
        assert_eq!(program.check(), Ok(()));
        before.extend([3, 4].map(|at: usize| vec![UNWRITTEN; program.buffers[at].bytes()]));
        before.extend([rotary.cos(), rotary.sin()].map(f32_bytes));
        let of_list = |list: &&[i32]| list.iter().flat_map(|end| end.to_le_bytes()).collect();
        before.extend(lists.iter().filter(|list| !list.is_empty()).map(of_list));
        Call { program, before }
    }

    fn results(&self) -> [Vec<u8>; 2] {
        run(&self.program, &self.before, [BufferId(3), BufferId(4)])
    }
}

fn packed(mask: Mask, ends: [&[i32]; 2], qkv: &[Array4<bf16>; 3], table: &RopeTable) -> Call {
    let [of_q, of_k] = [0, 1].map(|side| {
        let lengths = LENGTHS.map(|length| [length.0, length.1][side]);
        SequenceRows::packed_lengths(&lengths)
    });
    let mut spec = ProblemSpec::packed(Dtype::Bf16, (2, 1), 64, &of_q, &of_k).mask(mask);
    // Rows behind the last sequence.
    spec.q.shape.seqlen += 20;
    spec.o.shape.seqlen += 20;
    spec.k.shape.seqlen += 7;
    spec.v.shape.seqlen += 7;
    Call::new(spec, table, qkv.each_ref().map(bytes_of).into(), ends)
}

fn of_rows(x: &Array4<bf16>, first: usize, count: usize) -> Array4<bf16> {
    x.slice_axis(Axis(1), Slice::from(first..first + count)).to_owned()
}

/// O and LSE of each sequence in a pack, with NaN in all rows that are nobody's, are those of a dense problem of it
/// alone. There V is transposed by the quantizer, and here by the attention.
#[test]
fn packed_sequences_have_the_bits_that_they_have_alone() {
    let total = LENGTHS.iter().fold((0, 0), |sum, length| (sum.0 + length.0, sum.1 + length.1));
    let shape = |seqlen, heads| Shape { batch: 1, seqlen, heads, head_dim: 64 };
    let mut qkv = [(total.0 + 20, 2, 3), (total.1 + 7, 1, 5), (total.1 + 7, 1, 11)]
        .map(|(rows, heads, step)| wave(shape(rows, heads), step));
    for (x, end) in qkv.iter_mut().zip([total.0, total.1, total.1]) {
        x.slice_axis_mut(Axis(1), Slice::from(end..)).fill(bf16::NAN);
    }
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(300);
    let ends = [0, 1].map(|side| {
        SequenceRows::packed_lengths(&LENGTHS.map(|length| [length.0, length.1][side])).cu_seqlens()
    });
    for mask in [Mask::None, Mask::Causal] {
        let [o, lse] = packed(mask, [&ends[0], &ends[1]], &qkv, &table).results();
        let mut first = (0, 0);
        for (rows, keys) in LENGTHS {
            let spec = ProblemSpec::dense(Dtype::Bf16, shape(rows, 2), shape(keys, 1)).mask(mask);
            let [q, k, v] = [(first.0, rows), (first.1, keys), (first.1, keys)];
            let parts = [of_rows(&qkv[0], q.0, q.1), of_rows(&qkv[1], k.0, k.1), of_rows(&qkv[2], v.0, v.1)];
            let alone = Call::new(spec, &table, parts.each_ref().map(bytes_of).into(), [&[], &[]]);
            let [o_alone, lse_alone] = if rows > 0 { alone.results() } else { Default::default() };
            let row = 2 * 2 * 64;
            assert!(o[first.0 * row..][..rows * row] == o_alone, "{rows} x {keys}, {mask:?}");
            for head in 0..2 {
                let of_pack = &lse[4 * (head * (total.0 + 20) + first.0)..][..4 * rows];
                assert!(*of_pack == lse_alone[4 * head * rows..4 * (head + 1) * rows], "{rows} x {keys}");
            }
            first = (first.0 + rows, first.1 + keys);
        }
        // What is nobody's has O = 0 and LSE = -inf.
        assert!(o[total.0 * 2 * 2 * 64..].iter().all(|&byte| byte == 0));
    }
}

/// Lists that make no sense give wrong numbers. Nothing is read or written elsewhere, and nobody waits for ever.
#[test]
fn lists_that_make_no_sense_do_no_harm() {
    let lists: [[i32; 6]; 7] = [
        [0, 100, 0, 100, 0, 100],
        [200, 10, 190, 20, 180, 30],
        [-5, 1 << 30, -7, i32::MAX, i32::MIN, 3],
        [i32::MAX; 6],
        [i32::MIN; 6],
        [0, 431, 1, 430, 2, 429],
        [100, 100, 50, 264, 0, 431],
    ];
    let total = LENGTHS.iter().fold((20, 7), |sum, length| (sum.0 + length.0, sum.1 + length.1));
    let shape = |seqlen, heads| Shape { batch: 1, seqlen, heads, head_dim: 64 };
    let qkv = [(total.0, 2, 3), (total.1, 1, 5), (total.1, 1, 11)]
        .map(|(rows, heads, step)| wave(shape(rows, heads), step));
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(50);
    for (index, list) in lists.iter().enumerate() {
        let call = packed(Mask::Causal, [list, &lists[(3 * index + 1) % 7]], &qkv, &table);
        let mut before: Vec<Vec<u8>> = call
            .program
            .buffers
            .iter()
            .map(|buffer| {
                let nobody_wrote = if buffer.role == BufferRole::Ticket { 0 } else { UNWRITTEN };
                vec![nobody_wrote; buffer.bytes()]
            })
            .collect();
        before.iter_mut().zip(&call.before).for_each(|(to, from)| to.clone_from(from));
        let outcome = ProgramSimulation::new(&call.program).policy(Policy::Random(7)).run(&before).unwrap();
        assert!(outcome.left_over.is_empty(), "{:?}", outcome.left_over);
        // Rows of several sequences are written twice, and codes and scales of others never.
        let harm = |rule| !matches!(rule, Rule::Race | Rule::I1);
        if let Some(finding) = outcome.findings().find(|finding| harm(finding.rule)) {
            panic!("{list:?}: {finding}");
        }
    }
}
