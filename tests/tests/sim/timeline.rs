//! The cycle model. Its results for hand-made traces are compared with published numbers of attention, and invariants
//! are checked for these traces and for traces of the simulator.

use std::collections::BTreeMap;

use fa3_ir::WgmmaType;
use fa3_sim::trace::{Action, Gate, Pipe, Trace, TraceRecord, WarpTrace};
use fa3_sim::{Activity, Cause, Costs, Engine, Line, RoleTrack, Span, Timeline};
use proptest::prelude::*;

const HOPPER: &Costs = &Costs::HOPPER;

fn record(line: u32, action: Action) -> TraceRecord {
    TraceRecord { action, line: Line { file: "src/attention.rs", line, column: 1 } }
}

/// Warps of one CTA, four per warpgroup. All warps of a warpgroup have the same records.
fn trace(warpgroups: &[Vec<TraceRecord>]) -> Trace {
    let warp = |warp: u32| WarpTrace {
        cta: 0,
        warp,
        role: "consumer".to_owned(),
        records: warpgroups[warp as usize / 4].clone(),
    };
    let warps = (0..4 * warpgroups.len() as u32).map(warp).collect();
    Trace { kernel: "attention".to_owned(), warps, products: BTreeMap::new() }
}

fn issue(line: u32, pipe: Pipe, count: u32) -> TraceRecord {
    record(line, Action::Issue { pipe, count })
}

/// A product of 64 x `n` x `k` with A in registers, in a commit group of its own.
fn product(line: u32, ty: WgmmaType, n: u32, k: u32) -> Vec<TraceRecord> {
    let one = record(line, Action::Product { ty, n, a_in_registers: true });
    let mut records = vec![one; (k / ty.k()) as usize];
    records.push(record(line, Action::Commit));
    records
}

fn wait(line: u32, pending: u32) -> TraceRecord {
    record(line, Action::Wait { pending })
}

/// The softmax of 64 x 128 scores, 64 per thread: 64 exponentials and about 300 other operations.
fn softmax() -> Vec<TraceRecord> {
    vec![issue(2, Pipe::Float, 300), issue(3, Pipe::Special, 64)]
}

/// Blocks of 128 keys at d = 128, without overlap: S = Q Kᵀ, softmax, O += P V.
fn serial(ty: WgmmaType, blocks: usize) -> Vec<TraceRecord> {
    let block =
        [product(1, ty, 128, 128), vec![wait(1, 0)], softmax(), product(4, ty, 128, 128), vec![wait(4, 0)]];
    vec![block.concat(); blocks].concat()
}

fn utilisation(warpgroups: &[Vec<TraceRecord>], engine: Engine) -> f64 {
    Timeline::new(&trace(warpgroups), HOPPER).utilisation(0, engine)
}

/// S = Q Kᵀ, the exponentials, and O += P V take 512 cycles each, and all other operations take 300. So the tensor core
/// is busy in 1024 of 1836 cycles. The paper's ablation without overlap reaches 570 of 989 TFLOP/s (FlashAttention-3,
/// arXiv 2407.08608, table 2).
#[test]
fn one_warpgroup_in_turn_uses_little_more_than_half_of_the_tensor_core() {
    let blocks = 32;
    let timeline = Timeline::new(&trace(&[serial(WgmmaType::F16, blocks)]), HOPPER);
    let core = &timeline.engines[0];
    assert_eq!((core.engine, core.busy), (Engine::TensorCore, 1024 * blocks as u64));
    let cycles = timeline.length() as f64 / blocks as f64;
    assert!((1836.0..1.04 * 1836.0).contains(&cycles), "{cycles} cycles a block");
    let busy = utilisation(&[serial(WgmmaType::F16, blocks)], Engine::Special);
    assert!((busy - 512.0 / cycles).abs() < 1e-9, "{busy}");
}

/// Section 3.1: while one warpgroup computes its softmax, the other multiplies.
#[test]
fn two_warpgroups_hide_softmax_behind_each_others_products() {
    let two = || [serial(WgmmaType::F16, 32), serial(WgmmaType::F16, 32)];
    let busy = utilisation(&two(), Engine::TensorCore);
    assert!(busy > 0.95, "{busy}");
}

/// Section 3.2: S of the next block begins before the softmax of this block.
#[test]
fn one_warpgroup_hides_softmax_behind_its_own_products() {
    let ty = WgmmaType::F16;
    let step =
        [product(1, ty, 128, 128), product(4, ty, 128, 128), vec![wait(1, 1)], softmax(), vec![wait(4, 0)]];
    let pipelined =
        [product(1, ty, 128, 128), vec![wait(1, 0)], softmax(), vec![step.concat(); 32].concat()].concat();
    let busy = utilisation(&[pipelined], Engine::TensorCore);
    let in_turn = utilisation(&[serial(ty, 32)], Engine::TensorCore);
    assert!(busy > 1.3 * in_turn, "{busy} against {in_turn}");
}

/// e4m3 products take half of the time, but exponentials do not. So both take equally long.
#[test]
fn exponentials_limit_fp8_as_much_as_products() {
    let two = || [serial(WgmmaType::E4m3, 32), serial(WgmmaType::E4m3, 32)];
    let [core, special] = [Engine::TensorCore, Engine::Special].map(|engine| utilisation(&two(), engine));
    assert!((core - special).abs() < 1e-9 && core < 0.9, "{core} {special}");
}

/// In 64 x 64 products, reading the operands from shared memory takes as long as the arithmetic. In narrower products
/// it takes longer.
#[test]
fn narrow_products_wait_for_their_operands() {
    let cycles = |n: u32, a_in_registers| {
        let records = vec![record(1, Action::Product { ty: WgmmaType::F16, n, a_in_registers })];
        Timeline::new(&trace(&[records]), HOPPER).engines[0].busy
    };
    assert_eq!(
        [cycles(256, false), cycles(128, false), cycles(64, false), cycles(32, false)],
        [128, 64, 32, 24]
    );
    assert_eq!([cycles(32, true), cycles(8, true)], [16, 4]);
}

/// A wait that leaves one group pending does not wait for the youngest group.
#[test]
fn waits_are_for_the_older_groups() {
    let two = [product(1, WgmmaType::F16, 128, 16), product(2, WgmmaType::F16, 128, 160)].concat();
    let after = |pending| {
        let records = [two.clone(), vec![wait(3, pending), issue(4, Pipe::Control, 1)]].concat();
        let timeline = Timeline::new(&trace(&[records]), HOPPER);
        timeline.roles[0].spans.last().map(|span| span.end)
    };
    let end =
        |products: u64, instructions: u64| Some(instructions + 64 * products + HOPPER.product_latency + 1);
    assert_eq!([after(1), after(0)], [end(1, 1), end(11, 1)]);
}

/// Two warps of one partition share a scheduler. Each of the other warps has its own scheduler.
#[test]
fn a_partition_issues_one_instruction_a_cycle() {
    let busy = vec![issue(1, Pipe::Float, 1000)];
    for warpgroups in [1, 2] {
        let timeline = Timeline::new(&trace(&vec![busy.clone(); warpgroups]), HOPPER);
        assert_eq!(timeline.length(), 1000 * warpgroups as u64);
    }
}

/// A pipeline between a producer and a consumer: `steps` loads of `bytes`, each followed by a product.
fn pipeline(steps: u32, stages: u32, bytes: u32) -> Trace {
    let gate = |side: u32, step: u32| Gate::Mbarrier { cta: 0, offset: 8 * side, phase: step };
    let (full, empty) = (|step| gate(0, step), |step| gate(1, step));
    let (mut producer, mut consumer) = (Vec::new(), Vec::new());
    for step in 0..steps {
        if step >= stages {
            producer.push(record(1, Action::Await(empty(step - stages))));
        }
        producer.push(record(2, Action::Load { bytes, signals: vec![full(step)] }));
        consumer.push(record(3, Action::Await(full(step))));
        consumer.extend(product(4, WgmmaType::F16, 128, 64));
        consumer.push(wait(5, 0));
        consumer.push(record(6, Action::Signal { gate: empty(step), count: 1 }));
    }
    let mut trace = trace(&[consumer]);
    trace.warps.push(WarpTrace { cta: 0, warp: 4, role: "producer".to_owned(), records: producer });
    trace
}

/// Without prefetching, each step takes the latency, the transfer and the product.
#[test]
fn a_pipeline_of_one_stage_takes_everything_in_turn() {
    let timeline = Timeline::new(&pipeline(100, 1, 16384), HOPPER);
    let step = HOPPER.load_latency + 16384u64.div_ceil(HOPPER.load_bytes) + 256;
    let cycles = timeline.length() as f64 / 100.0;
    assert!((1.0..1.1).contains(&(cycles / step as f64)), "{cycles} cycles a step, not {step}");
}

/// With enough stages, a step takes the longer of transfer and product.
#[test]
fn a_deep_pipeline_takes_the_slower_of_loads_and_products() {
    for bytes in [4096u32, 32768] {
        let timeline = Timeline::new(&pipeline(400, 16, bytes), HOPPER);
        let step = u64::from(bytes).div_ceil(HOPPER.load_bytes).max(256);
        let cycles = timeline.length() as f64 / 400.0;
        assert!((1.0..1.15).contains(&(cycles / step as f64)), "{cycles} cycles a step, not {step}");
    }
}

/// Some warps of a producer load, some store twice, and some execute only the common prologue. The loading warps share
/// a track, and so do the storing warps.
#[test]
fn warps_of_a_producer_that_do_different_things_have_tracks() {
    let warp = |warp: u32, lines: &[u32]| WarpTrace {
        cta: 0,
        warp,
        role: "producer".to_owned(),
        records: lines.iter().map(|&line| issue(line, Pipe::Control, line)).collect(),
    };
    let mut all = trace(&[vec![], serial(WgmmaType::F16, 2)]);
    all.warps.splice(..4, [warp(0, &[1, 10]), warp(1, &[1, 20]), warp(2, &[1, 20, 21]), warp(3, &[1])]);
    let timeline = Timeline::new(&all, HOPPER);
    let last = |track: &RoleTrack| (track.name.clone(), track.spans.last().map_or(0, |span| span.line.line));
    let tracks: Vec<(String, u32)> = timeline.roles.iter().map(last).collect();
    let expected = [("producer, warp 1", 10), ("producer, warp 3", 21), ("consumer", 4)];
    assert_eq!(tracks, expected.map(|(name, line)| (name.to_owned(), line)));
}

fn overlap(spans: &[Span]) -> bool {
    spans.windows(2).any(|pair| pair[0].end > pair[1].start)
}

proptest! {
    /// Slower copies never make a simple chain faster.
    #[test]
    fn slower_loads_are_not_faster(
        steps in 1u32..20, stages in 1u32..5, bytes in 16u32..65536,
        latency in 0u64..2000, more in 0u64..500, rate in 1u64..100, less in 0u64..50,
    ) {
        let trace = pipeline(steps, stages, bytes);
        let fast = Costs { load_latency: latency, load_bytes: rate, ..Costs::HOPPER };
        let later = Costs { load_latency: latency + more, ..fast };
        let slower = Costs { load_bytes: rate.saturating_sub(less).max(1), ..fast };
        let [fast, later, slower] = [fast, later, slower].map(|costs| Timeline::new(&trace, &costs).length());
        prop_assert!(fast <= later && fast <= slower, "{} {} {}", fast, later, slower);
    }

    /// An engine does one thing at a time, for as long as the trace states. A warp works or waits at any time.
    #[test]
    fn nothing_is_lost(steps in 1u32..20, stages in 1u32..5, bytes in 16u32..65536, blocks in 1usize..4) {
        let mut all = pipeline(steps, stages, bytes);
        let more = trace(&[serial(WgmmaType::F16, blocks), serial(WgmmaType::F16, blocks)]);
        all.warps.extend(more.warps.into_iter().map(|warp| WarpTrace { warp: warp.warp + 8, ..warp }));
        let timeline = Timeline::new(&all, HOPPER);
        for track in &timeline.engines {
            prop_assert!(!overlap(&track.spans), "{}", track.engine);
            let union: u64 = track.spans.iter().map(|span| span.end - span.start).sum();
            prop_assert!(union <= track.busy && track.busy <= track.engine.units() * union, "{}", track.engine);
        }
        let busy = |engine| timeline.engines.iter().find(|track| track.engine == engine).unwrap().busy;
        let blocks = blocks as u64;
        prop_assert_eq!(busy(Engine::TensorCore), 256 * u64::from(steps) + 2 * 1024 * blocks);
        prop_assert_eq!(busy(Engine::Special), 8 * 64 * 8 * blocks);
        prop_assert_eq!(busy(Engine::Loads), u64::from(steps) * u64::from(bytes).div_ceil(HOPPER.load_bytes));
        for track in &timeline.roles {
            prop_assert_eq!(track.spans[0].start, 0);
            prop_assert!(track.spans.windows(2).all(|pair| pair[0].end == pair[1].start), "{}", track.name);
        }
        prop_assert_eq!(&timeline, &Timeline::new(&all, HOPPER));
    }
}

/// Two warps wait for each other until all other warps have ended.
#[test]
fn a_run_that_hangs_has_a_timeline() {
    let gate = |id| Gate::Barrier { cta: 0, id, generation: 0 };
    let waits = |awaited, signalled| {
        vec![
            record(7, Action::Await(gate(awaited))),
            record(8, Action::Signal { gate: gate(signalled), count: 1 }),
        ]
    };
    let warp = |warp: u32, role: &str, records| WarpTrace { cta: 0, warp, role: role.to_owned(), records };
    let mut hangs = trace(&[]);
    hangs.warps.push(warp(0, "one", waits(1, 2)));
    hangs.warps.push(warp(1, "other", waits(2, 1)));
    hangs.warps.push(warp(2, "third", vec![issue(1, Pipe::Float, 500)]));
    let timeline = Timeline::new(&hangs, HOPPER);
    assert_eq!(timeline.length(), 500);
    for track in &timeline.roles[..2] {
        let last = track.spans.last().unwrap();
        assert_eq!((last.activity, last.start, last.end), (Activity::Wait(Cause::Barrier), 1, 500));
    }
}

/// A section of a timeline contains exactly the events of its time span.
#[test]
fn a_part_is_what_happens_then() {
    let whole = Timeline::new(&pipeline(50, 2, 16384), HOPPER);
    let half = whole.length() / 2;
    let parts = [whole.between(0..half), whole.between(half..u64::MAX)];
    for engine in [Engine::TensorCore, Engine::Loads] {
        let busy = |timeline: &Timeline| timeline.utilisation(0, engine) * timeline.length() as f64;
        let sum: f64 = parts.iter().map(busy).sum();
        assert!((sum - busy(&whole)).abs() < 1e-6, "{engine}");
    }
}

/// The picture is well-formed and small, states its subject, and names roles, engines and lines.
#[test]
fn the_picture_says_what_it_is() {
    let svg = Timeline::new(&pipeline(5000, 2, 16384), HOPPER).to_svg();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    for text in
        ["model, not measurement", "consumer", "producer", "tensor core", "attention.rs:4", "role=\"img\""]
    {
        assert!(svg.contains(text), "{text}");
    }
    assert!(svg.len() < 1 << 20, "{} bytes", svg.len());
    let opened = svg.matches("<rect").count() + svg.matches("<text").count() + svg.matches("<path").count();
    let closed = svg.matches("/>").count() + svg.matches("</rect>").count() + svg.matches("</text>").count();
    assert_eq!(opened, closed);
}

/// Every span of the timeline is an event in the trace for browsers.
#[test]
fn browsers_get_every_span() {
    let timeline = Timeline::new(&pipeline(7, 2, 16384), HOPPER);
    let trace: serde_json::Value = serde_json::from_str(&timeline.to_chrome_trace()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = timeline
        .roles
        .iter()
        .map(|track| &track.spans)
        .chain(timeline.engines.iter().map(|track| &track.spans));
    let duration = |event: &serde_json::Value| event["dur"].as_u64().unwrap();
    let complete: Vec<u64> = events.iter().filter(|event| event["ph"] == "X").map(duration).collect();
    let expected: Vec<u64> = spans.flatten().map(|span| span.end - span.start).collect();
    assert_eq!(complete, expected);
    assert_eq!(trace["otherData"]["about"], "model, not measurement; a microsecond is a cycle");
}

/// Every constant has a unit and a source, or is marked as assumed.
#[test]
fn constants_have_sources() {
    for row in Costs::TABLE {
        assert!(row.value > 0 && !row.unit.is_empty() && !row.source.is_empty(), "{}", row.name);
    }
}
