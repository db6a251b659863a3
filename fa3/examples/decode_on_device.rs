//! Decoding in an engine. Paged caches stay on the GPU. All layers share one plan and one workspace. A graph that is
//! captured once runs every step, with any lengths and pages. Copies do not wait. `cargo run --release -p fa3 --example
//! decode_on_device`.
//!
//! Each step is compared with the CPU engine. Without a GPU the example prints the reason and does nothing.

use std::error::Error;

use fa3::cuda::{
    CachedForward, Device, DeviceBuffer, Graph, HostBuffer, OperationError, Stream, Tensors, Workspace,
};
use fa3::half::bf16;
use fa3::ndarray::{Array4, ArrayView4, Axis, concatenate};
use fa3::problem::{CachedProblem, CachedSpec, Dtype, ProblemSpec, Sequences, Shape, TensorDesc};
use fa3::{Attention, Output};

const LAYERS: usize = 2;
const STEPS: usize = 40;
const SEQUENCES: usize = 3;
/// Number of pages in a layer's pool of K and V, and the largest number of pages of a sequence.
const PAGES: [usize; 2] = [16, 4];
const PAGE_ROWS: usize = 16;
/// Numbers of query heads and of key/value heads.
const HEADS: [usize; 2] = [8, 2];
const HEAD_DIM: usize = 64;
/// Sizes in bytes: Q of one new token of every sequence, K or V of these tokens, and a layer's whole pool of K or V.
const Q_BYTES: usize = SEQUENCES * HEADS[0] * HEAD_DIM * size_of::<bf16>();
const KV_BYTES: usize = SEQUENCES * HEADS[1] * HEAD_DIM * size_of::<bf16>();
const POOL_BYTES: usize = PAGES[0] * PAGE_ROWS * HEADS[1] * HEAD_DIM * size_of::<bf16>();
/// Bytes of a layer's inputs in a step: Q, K and V of one token of every sequence.
const LAYER_BYTES: usize = Q_BYTES + 2 * KV_BYTES;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: no GPU: {why}");
            return Ok(());
        }
    };
    let mut engine = Engine::new(&device, &problem()?)?;
    let (mut numbers, mut next_page) = (random(), 0);
    // K and V of all tokens, layer by layer.
    let nothing = || Array4::from_elem((SEQUENCES, 0, HEADS[1], HEAD_DIM), bf16::ZERO);
    let mut kept: Vec<[Array4<bf16>; 2]> = (0..LAYERS).map(|_| [nothing(), nothing()]).collect();
    let mut most: f32 = 0.0;
    for step in 0..STEPS {
        if step % PAGE_ROWS == 0 {
            // Each sequence needs a page. Pages are assigned in a scattered order: 3 and 16 have no common divisor.
            for sequence in 0..SEQUENCES {
                engine.lists.table[sequence][step / PAGE_ROWS] = (3 * next_page % PAGES[0]) as i32;
                next_page += 1;
            }
        }
        let mut token = |heads| Array4::from_shape_simple_fn((SEQUENCES, 1, heads, HEAD_DIM), &mut numbers);
        let tokens: Vec<_> =
            (0..LAYERS).map(|_| [token(HEADS[0]), token(HEADS[1]), token(HEADS[1])]).collect();
        let o = engine.step(&tokens)?;
        for (layer, [q, k, v]) in tokens.iter().enumerate() {
            for (kept, new) in kept[layer].iter_mut().zip([k, v]) {
                *kept = concatenate(Axis(1), &[kept.view(), new.view()])?;
            }
            let [keys, values] = &kept[layer];
            let expected: Output<bf16> = Attention::new(q, keys, values).forward(&fa3::Device::Cpu)?;
            let o = ArrayView4::from_shape(q.dim(), &o[layer * q.len()..(layer + 1) * q.len()])?;
            most =
                o.iter().zip(&expected.o).map(|(x, y)| (x.to_f32() - y.to_f32()).abs()).fold(most, f32::max);
        }
    }
    println!("on {device}: {STEPS} steps of {LAYERS} layers, O differs from the CPU's by at most {most:.1e}");
    // O consists of means of numbers below 1, with three roundings to the 8 bits of bf16: two of O, and one of P.
    if most < 1.0 / 128.0 { Ok(()) } else { Err("the results differ by more than rounding".into()) }
}

/// One token of every sequence attends to a paged cache, to which its K and V are appended first.
fn problem() -> Result<CachedProblem, Box<dyn Error>> {
    let q = Shape { batch: SEQUENCES, seqlen: 1, heads: HEADS[0], head_dim: HEAD_DIM };
    let new = Shape { heads: HEADS[1], ..q };
    let pool = Shape { batch: PAGES[0], seqlen: PAGE_ROWS, ..new };
    let pages = Sequences::paged(SEQUENCES, PAGES[1]).used();
    let attention = ProblemSpec::dense(Dtype::Bf16, q, pool).seqs_k(pages).causal();
    let new = TensorDesc::contiguous(Dtype::Bf16, new);
    Ok(CachedSpec::new(attention, [new, new], Sequences::dense(SEQUENCES, 1)).validate()?)
}

/// Lengths and pages of all sequences, which the kernels read besides the tokens of a step.
#[derive(Clone, Copy, Default)]
struct Lists {
    /// Number of rows in use of each sequence, without the new row.
    seqused: [i32; SEQUENCES],
    table: [[i32; PAGES[1]]; SEQUENCES],
}

/// All memory of decoding, on which a graph works.
struct Engine {
    graph: Graph,
    stream: Stream,
    lists: Lists,
    /// Tokens, lists and O, in page-locked memory and on the device.
    host: [HostBuffer; 3],
    device: [DeviceBuffer; 3],
    /// K and V of one layer after the other, and scratch memory of all layers. Only the graph uses them.
    _pool: DeviceBuffer,
    _workspace: Workspace,
    /// The owner of the kernels.
    _forward: CachedForward,
}

impl Engine {
    fn new(device: &Device, problem: &CachedProblem) -> Result<Engine, OperationError> {
        // Compiles the kernels, which a capture cannot do. They use split-KV: see CachedForward.
        let forward = CachedForward::new(device, problem)?;
        let stream = device.stream()?;
        // One workspace serves all layers, because their calls run one after another on one stream.
        let mut workspace = Workspace::new(device, &stream, forward.workspace_bytes())?;
        let mut pool = device.alloc(LAYERS * 2 * POOL_BYTES)?;
        pool.fill(&stream, 0)?;
        let bytes = [LAYERS * LAYER_BYTES, size_of::<Lists>(), LAYERS * Q_BYTES];
        let [tokens, lists, o] = bytes.map(|bytes| device.alloc(bytes));
        let (tokens, lists, mut o) = (tokens?, lists?, o?);
        let [of_tokens, of_lists, of_o] = bytes.map(|bytes| device.alloc_host(bytes));

        stream.begin_capture()?;
        let captured = (0..LAYERS).try_for_each(|layer| {
            let (token, of_pool) = (layer * LAYER_BYTES, 2 * layer * POOL_BYTES);
            let tensors = Tensors::default()
                .input_from("q", &tokens, token)
                .input_from("k_new", &tokens, token + Q_BYTES)
                .input_from("v_new", &tokens, token + Q_BYTES + KV_BYTES)
                .input_from("seqused_k", &lists, 0)
                .input_from("page_table", &lists, size_of::<[i32; SEQUENCES]>())
                .all_from(&mut pool, [("k", of_pool), ("v", of_pool + POOL_BYTES)])
                .output_from("o", &mut o, layer * Q_BYTES);
            forward.run(&stream, tensors, &mut workspace)
        });
        // The capture must end even if there was an error.
        let graph = stream.end_capture();
        captured?;
        Ok(Engine {
            graph: graph?,
            stream,
            lists: Lists::default(),
            host: [of_tokens?, of_lists?, of_o?],
            device: [tokens, lists, o],
            _pool: pool,
            _workspace: workspace,
            _forward: forward,
        })
    }

    /// Computes O of all layers, from this Q, K and V of one token of every sequence. K and V are appended to the
    /// caches.
    #[allow(unsafe_code, reason = "a graph works on plain addresses")]
    fn step(&mut self, tokens: &[[Array4<bf16>; 3]]) -> Result<&[bf16], Box<dyn Error>> {
        let [of_tokens, of_lists, of_o] = &mut self.host;
        let [tokens_there, lists_there, o] = &mut self.device;
        for (to, from) in of_tokens.write()?.iter_mut().zip(tokens.iter().flatten().flatten()) {
            *to = *from;
        }
        let Lists { seqused, table } = self.lists;
        for (to, from) in
            of_lists.write::<i32>()?.iter_mut().zip(seqused.iter().chain(table.iter().flatten()))
        {
            *to = *from;
        }
        tokens_there.upload_from(&self.stream, of_tokens)?;
        lists_there.upload_from(&self.stream, of_lists)?;
        // SAFETY: the memory of the graph and its kernels belong to this value. Dropping memory waits for the work.
        // Only this stream uses the memory meanwhile.
        unsafe { self.graph.launch(&self.stream) }?;
        o.download_to(&self.stream, of_o)?;
        self.lists.seqused.iter_mut().for_each(|rows| *rows += 1);
        // An engine would sample the tokens on the device; this example waits for O.
        Ok(of_o.read()?)
    }
}

/// Numbers between -1 and 1.
fn random() -> impl FnMut() -> bf16 {
    let mut state = 1_u32;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    }
}
