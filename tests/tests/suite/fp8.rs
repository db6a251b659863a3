//! FP8 attention of 16-bit tensors as one program in the simulator has the same bits as its steps, run separately.

use fa3::{Device, Quantize, Quantized, Scaling};
use fa3_cuda::kernels::{Spec, fp8, fwd};
use fa3_ir::{Kernel, Program};
use fa3_quant::{Granularity, Incoherent, Rope, RopeStyle, RopeTable};
use fa3_sched::fp8::Plan;
use fa3_sim::Policy;
use fa3_tests::fwd::device;
use fa3_tests::memory::before;
use fa3_types::{Dtype, Fp8Problem, Fp8Spec, Mask, Positions, ProblemSpec, QkRotary, SequenceRows, Shape};
use half::bf16;
use ndarray::{Array4, ArrayView4, Axis, Slice};

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

fn i32_bytes(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn f32_bytes<'a>(numbers: impl IntoIterator<Item = &'a f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Bytes of buffers by name.
type Given = Vec<(&'static str, Vec<u8>)>;

fn memory(program: &Program<Kernel>, given: &Given) -> Vec<Vec<u8>> {
    let bytes = |name: &str| given.iter().find(|(given, _)| *given == name).map(|(_, bytes)| bytes.clone());
    before(program, |buffer| bytes(buffer.name))
}

fn run(program: &Program<Kernel>, given: &Given) -> [Vec<u8>; 2] {
    crate::o_and_lse(program, &memory(program, given), Policy::Eager)
}

/// Rotary embedding of Q and K: the table, and the listed positions.
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

    /// The inputs of the program.
    fn given(&self) -> Given {
        let lists = ["q_positions", "k_positions"].into_iter().zip(self.listed);
        let lists = lists.filter_map(|(name, list)| Some((name, i32_bytes(list?))));
        [("cos", f32_bytes(self.table.cos())), ("sin", f32_bytes(self.table.sin()))]
            .into_iter()
            .chain(lists)
            .collect()
    }
}

/// Codes, scales and means, computed on the CPU, as inputs of the forward pass alone.
fn parts(
    problem: &Fp8Problem,
    [q, k, v]: [ArrayView4<'_, bf16>; 3],
    hadamard: bool,
    rotated: Option<Rotated<'_>>,
) -> Given {
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
    let mut given = vec![("q", codes(&q)), ("k", codes(&k)), ("v", transposed)];
    given.extend(
        [("q_descale", &q), ("k_descale", &k), ("v_descale", &v)]
            .map(|(name, x)| (name, f32_bytes(&x.scales))),
    );
    given.extend(v.mean.as_ref().map(|mean| ("v_mean", f32_bytes(mean))));
    given
}

#[test]
fn the_chain_is_what_its_parts_are() {
    let q = Shape { batch: 2, seqlen: 150, heads: 4, head_dim: 64 };
    let dense = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 300, heads: 2, ..q }).head_dim_v(32);
    let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(300);
    // Some positions of Q, and one of K, lie outside of the table.
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
        let mut given: Given = [("q", &q), ("k", &k), ("v", &v)].map(|(name, x)| (name, bytes_of(x))).into();
        given.extend(rotated.iter().flat_map(Rotated::given));
        let of_chain = run(&chain, &given);

        let alone = fwd::program(plan.forward()).map(Spec::kernel);
        let parts = parts(&problem, [q.view(), k.view(), v.view()], hadamard, rotated);
        assert!(of_chain == run(&alone, &parts), "{attention}, by channels: {v_channels}");
    }
}

/// Rows of Q and of K of each sequence: full and partial tiles and blocks, no rows, and no keys.
const LENGTHS: [(usize, usize); 5] = [(100, 140), (0, 30), (33, 0), (130, 260), (1, 1)];

/// A dense or packed problem: its program, and the bytes of the caller's tensors.
struct Call {
    program: Program<Kernel>,
    given: Given,
}

impl Call {
    fn new(spec: ProblemSpec, rotary: &RopeTable, qkv: &[Array4<bf16>; 3], lists: [&[i32]; 2]) -> Call {
        let (style, rotary_dim, table_rows) = (rotary.style(), rotary.rotary_dim(), rotary.positions());
        let (q_positions, k_positions) = (Positions::From(2), Positions::From(0));
        let rotary_spec = QkRotary { style, rotary_dim, table_rows, q_positions, k_positions };
        let mut fp8 = Fp8Spec::new(spec).rotary(rotary_spec);
        fp8.signs = Incoherent::new(64, SEED).signs();
        let plan = Plan::new(&fp8.validate().unwrap(), &device(3)).unwrap();
        let program = fp8::program(&plan).map(Spec::kernel);
        assert_eq!(program.check(), Ok(()));
        let [q, k, v] = qkv.each_ref().map(bytes_of);
        let [of_q, of_k] = lists.map(i32_bytes);
        let (cos, sin) = (f32_bytes(rotary.cos()), f32_bytes(rotary.sin()));
        let given = [("q", q), ("k", k), ("v", v), ("cos", cos), ("sin", sin)].into_iter();
        let given = given.chain([("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)]).collect();
        Call { program, given }
    }

    fn results(&self) -> [Vec<u8>; 2] {
        run(&self.program, &self.given)
    }
}

fn packed(mask: Mask, ends: [&[i32]; 2], qkv: &[Array4<bf16>; 3], table: &RopeTable) -> Call {
    let [of_q, of_k] = [0, 1].map(|side| {
        let lengths = LENGTHS.map(|length| [length.0, length.1][side]);
        SequenceRows::packed_lengths(&lengths)
    });
    let mut spec = ProblemSpec::packed(Dtype::Bf16, (2, 1), 64, &of_q, &of_k).mask(mask);
    // These rows lie after the last sequence.
    spec.q.shape.seqlen += 20;
    spec.o.shape.seqlen += 20;
    spec.k.shape.seqlen += 7;
    spec.v.shape.seqlen += 7;
    Call::new(spec, table, qkv, ends)
}

fn of_rows(x: &Array4<bf16>, first: usize, count: usize) -> Array4<bf16> {
    x.slice_axis(Axis(1), Slice::from(first..first + count)).to_owned()
}

/// A packed sequence, with NaN in all rows outside of sequences, has the results of a dense problem of this sequence
/// alone. For the dense problem the quantizer transposes V, and for the packed problem the attention kernel does.
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
            let alone = Call::new(spec, &table, &parts, [&[], &[]]);
            let [o_alone, lse_alone] = if rows > 0 { alone.results() } else { Default::default() };
            let row = 2 * 2 * 64;
            assert!(o[first.0 * row..][..rows * row] == o_alone, "{rows} x {keys}, {mask:?}");
            for head in 0..2 {
                let of_pack = &lse[4 * (head * (total.0 + 20) + first.0)..][..4 * rows];
                assert!(*of_pack == lse_alone[4 * head * rows..4 * (head + 1) * rows], "{rows} x {keys}");
            }
            first = (first.0 + rows, first.1 + keys);
        }
        // Rows outside of every sequence have O = 0 and LSE = -inf.
        assert!(o[total.0 * 2 * 2 * 64..].iter().all(|&byte| byte == 0));
    }
}

/// With invalid lists results are unspecified, but there is no access out of bounds and no deadlock.
#[test]
fn invalid_lists_do_no_harm() {
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
        let before = memory(&call.program, &call.given);
        crate::does_no_harm(&call.program, &before, Policy::Random(7), &format!("{list:?}"));
    }
}
