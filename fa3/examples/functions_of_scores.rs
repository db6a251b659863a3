//! Times attention with functions of scores beside attention without one, forward and backward, under a causal mask:
//! `cargo run --release -p fa3 --example functions_of_scores`. Head dimensions may be given as arguments.
//!
//! All calls take turns, and the median of the rounds is printed, with its share of the speed without a function.

use std::error::Error;

use fa3::cuda::{Backward, Device, DeviceBuffer, Forward, OperationError, Stream, Tensors, Workspace};
use fa3::half::bf16;
use fa3::problem::{BackwardSpec, Dtype, ProblemSpec, Shape};
use fa3::{ScoreError, ScoreFunction, ScoreTable};

const ROUNDS: usize = 9;
/// Launches of a pass in a round.
const LAUNCHES: u32 = 10;
const BATCH: usize = 2;
const SEQLEN: usize = 8192;
/// Columns of all heads.
const HIDDEN: usize = 2048;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: no GPU: {why}");
            return Ok(());
        }
    };
    let given: Vec<usize> = std::env::args().skip(1).map(|dim| dim.parse()).collect::<Result<_, _>>()?;
    let head_dims = if given.is_empty() { vec![64, 128, 256] } else { given };
    for head_dim in head_dims {
        let shape = Shape { batch: BATCH, seqlen: SEQLEN, heads: HIDDEN / head_dim, head_dim };
        let mut calls = calls(&device, shape)?;
        let mut arrays = Arrays::new(&device, shape)?;
        for _ in 0..ROUNDS {
            calls.iter_mut().try_for_each(|call| call.time(&mut arrays))?;
        }
        // Half of 4 · seqlen² · head_dim FLOP, and two and a half times as many.
        let flops = 2.0 * (BATCH * HIDDEN) as f64 * (SEQLEN * SEQLEN) as f64;
        println!("head_dim {head_dim}, {SEQLEN} rows, TFLOP/s forward and backward, share of no function");
        let plain = calls[0].medians();
        for call in &calls {
            let [forward, backward] = call.medians();
            let speeds = [flops / forward, 2.5 * flops / backward].map(|speed| speed / 1e9);
            let shares = [plain[0] / forward, plain[1] / backward];
            let name = &call.name;
            println!("{name:42} {:5.0} {:5.0}   {:.2} {:.2}", speeds[0], speeds[1], shares[0], shares[1]);
        }
    }
    Ok(())
}

/// Q, K, V and dO, the results, and the stream.
struct Arrays {
    stream: Stream,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    dout: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
    gradients: [DeviceBuffer; 3],
}

impl Arrays {
    fn new(device: &Device, shape: Shape) -> Result<Arrays, Box<dyn Error>> {
        let (stream, [batch, seqlen, heads, head_dim]) = (device.stream()?, shape.dims());
        let (rows, mut state) = (batch * seqlen * heads, 1_u32);
        let bytes = rows * head_dim * size_of::<bf16>();
        let mut random = || {
            let numbers = std::iter::repeat_with(|| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                bf16::from_f32(state as f32 / (1_u32 << 30) as f32 - 2.0)
            });
            device.upload(&stream, &numbers.take(rows * head_dim).collect::<Vec<_>>())
        };
        let (q, k, v, dout) = (random()?, random()?, random()?, random()?);
        let (o, lse) = (device.alloc(bytes)?, device.alloc(rows * size_of::<f32>())?);
        let gradients = [device.alloc(bytes)?, device.alloc(bytes)?, device.alloc(bytes)?];
        Ok(Arrays { stream, q, k, v, dout, o, lse, gradients })
    }
}

/// Both passes with one function of scores, and their times in milliseconds.
struct Call {
    name: String,
    forward: Forward,
    backward: Backward,
    workspaces: [Workspace; 2],
    tables: Vec<(&'static str, DeviceBuffer)>,
    /// Gradients of tables.
    dtables: Vec<(&'static str, DeviceBuffer)>,
    millis: [Vec<f64>; 2],
}

impl Call {
    fn new(
        device: &Device,
        name: &str,
        spec: ProblemSpec,
        function: Option<&ScoreFunction>,
    ) -> Result<Call, Box<dyn Error>> {
        let stream = device.stream()?;
        let spec = match function {
            Some(function) => spec.score(function.form().clone()),
            None => spec,
        };
        let forward = Forward::new(device, &spec.clone().validate()?)?;
        let backward = Backward::new(device, &BackwardSpec::contiguous(spec).validate()?)?;
        let sizes = [forward.workspace_bytes(), backward.workspace_bytes()];
        let [first, second] = sizes.map(|bytes| Workspace::new(device, &stream, bytes));
        let (mut tables, mut dtables) = (vec![], vec![]);
        let names = ScoreTable::NAMES.into_iter().zip(ScoreTable::OF_GRADIENTS);
        for ((name, of_gradient), table) in names.zip(function.map_or(&[][..], ScoreFunction::tables)) {
            tables.push((name, device.upload(&stream, table.elements())?));
            if table.has_gradient() {
                dtables.push((of_gradient, device.alloc(size_of_val(table.elements()))?));
            }
        }
        stream.synchronize()?;
        let workspaces = [first?, second?];
        let (name, millis) = (name.to_owned(), [vec![], vec![]]);
        Ok(Call { name, forward, backward, workspaces, tables, dtables, millis })
    }

    /// Times both passes, each after a launch that is not timed.
    fn time(&mut self, arrays: &mut Arrays) -> Result<(), OperationError> {
        let Arrays { stream, q, k, v, dout, o, lse, gradients: [dq, dk, dv] } = arrays;
        let Call { forward, backward, workspaces: [first, second], tables, dtables, millis, .. } = self;
        let of_forward = timed(stream, || {
            let tensors =
                Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", &mut *o), ("lse", &mut *lse)]);
            forward.run(stream, beside(tensors, tables), first)
        })?;
        let of_backward = timed(stream, || {
            let inputs = [("q", &*q), ("k", &*k), ("v", &*v), ("o", &*o), ("lse", &*lse), ("dout", &*dout)];
            let outputs = [("dq", &mut *dq), ("dk", &mut *dk), ("dv", &mut *dv)];
            let tensors = beside(Tensors::new(inputs, outputs), tables);
            let tensors = dtables.iter_mut().fold(tensors, |tensors, (name, x)| tensors.output(name, x));
            backward.run(stream, tensors, second)
        })?;
        millis[0].push(of_forward);
        millis[1].push(of_backward);
        Ok(())
    }

    fn medians(&self) -> [f64; 2] {
        self.millis.each_ref().map(|millis| {
            let mut sorted = millis.clone();
            sorted.sort_by(f64::total_cmp);
            sorted[sorted.len() / 2]
        })
    }
}

/// Tensors with the tables of a function of scores.
fn beside<'a>(tensors: Tensors<'a>, tables: &'a [(&'static str, DeviceBuffer)]) -> Tensors<'a> {
    tables.iter().fold(tensors, |tensors, (name, table)| tensors.input(name, table))
}

/// Milliseconds of a launch.
fn timed(
    stream: &Stream,
    mut launch: impl FnMut() -> Result<(), OperationError>,
) -> Result<f64, OperationError> {
    launch()?;
    let start = stream.record()?;
    (0..LAUNCHES).try_for_each(|_| launch())?;
    Ok(f64::from(stream.record()?.millis_since(&start)?) / f64::from(LAUNCHES))
}

/// Attention without a function of scores, with the built-in soft cap, and with functions.
fn calls(device: &Device, shape: Shape) -> Result<Vec<Call>, Box<dyn Error>> {
    let spec = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
    let mut calls = vec![
        Call::new(device, "no function", spec.clone(), None)?,
        Call::new(device, "soft cap, built in", spec.clone().softcap(30.0), None)?,
    ];
    for text in [
        "s + slope[h] * (k - q)",
        "cap * tanh(s / cap)",
        "s + near[min(q - k, 127)]",
        "s + by_head[h]",
        "s + far[q - k]",
        "if q - k < 4096 then s else -inf",
        "s / (1 + abs(s))",
        "s + bias[q, k]",
    ] {
        calls.push(Call::new(device, text, spec.clone(), Some(&function(text, shape.heads, false)?))?);
    }
    for text in [
        "s + slope[h] * (k - q)",
        "s + slope[h] * tanh(s)",
        "s + by_query[h, q]",
        "s + near[min(q - k, 127)]",
        "s + bias[q, k]",
    ] {
        let (name, function) = (format!("{text}, learned"), function(text, shape.heads, true)?);
        calls.push(Call::new(device, &name, spec.clone(), Some(&function))?);
    }
    Ok(calls)
}

/// A function, whose tables have gradients if they are `learned`.
fn function(text: &str, heads: usize, learned: bool) -> Result<ScoreFunction, ScoreError> {
    let of = |extents: &[usize]| {
        let table = ScoreTable::new(extents, vec![0.01; extents.iter().product()])?;
        Ok::<_, ScoreError>(if learned { table.with_gradient() } else { table })
    };
    let table = |count: usize| of(&[count]);
    let [slope, by_head, by_query] = [table(heads)?, table(heads)?, of(&[heads, SEQLEN])?];
    // Such a table is large, and one function reads it.
    let bias = of(&[if text.contains("bias") { SEQLEN } else { 1 }; 2])?;
    ScoreFunction::parse(
        text,
        [
            ("slope", slope.into()),
            ("by_head", by_head.into()),
            ("by_query", by_query.into()),
            ("bias", bias.into()),
            ("near", table(128)?.into()),
            ("far", table(SEQLEN)?.into()),
            ("cap", 30.0.into()),
        ],
    )
}
