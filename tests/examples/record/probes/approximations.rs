//! Distance of the special-function unit from the nearest binary32, over the whole range of binary32.

use std::collections::BTreeMap;
use std::error::Error;
use std::thread;

use fa3_cuda::host::Device;
use fa3_ir::Launch;
use fa3_ir::lang::{F32, V};
use fa3_sim::data::approx;

use super::{Said, measure, words};

/// Stride between tested numbers.
const STEP: u32 = 61;
/// Numbers per launch.
const BATCH: u32 = 1 << 24;

type Function = (&'static str, fn(V<'_, F32>) -> V<'_, F32>, fn(f32) -> f32);

pub(super) fn errors(device: &Device) -> Said {
    let functions: [Function; 6] = [
        ("ex2", |x| x.ex2(), approx::ex2),
        ("lg2", |x| x.lg2(), approx::lg2),
        ("rcp", |x| x.rcp(), approx::rcp),
        ("rsqrt", |x| x.rsqrt(), approx::rsqrt),
        ("sqrt", |x| x.sqrt(), approx::sqrt),
        ("tanh", |x| x.tanh_approx(), approx::tanh),
    ];
    let said: Result<Vec<String>, _> = functions.into_iter().map(|function| of(device, function)).collect();
    Ok(said?.join("\n"))
}

/// Number of results at each distance from the model's, in steps of adjacent binary32 numbers.
type Distances = BTreeMap<i64, u64>;

fn of(device: &Device, (name, build, model): Function) -> Result<String, Box<dyn Error>> {
    let mut all = Distances::new();
    for batch in 0..u32::MAX / STEP / BATCH {
        let written = measure(device, (name, Launch::threads(256), BATCH / 256), 4 * BATCH, |meter| {
            let index = meter.b.cta_x().mad(256, meter.tid);
            let x = index.mad(STEP, batch * BATCH * STEP).as_f32();
            let y = build(x);
            meter.b.store(index.mad_wide(4, meter.out), y);
        })?;
        let results = words(&written);
        let part = results.len() / 16;
        thread::scope(|scope| {
            let parts = results.chunks(part).zip(0..).map(|(results, i)| {
                let first = batch * BATCH + i * part as u32;
                scope.spawn(move || count(results, first, model))
            });
            for counted in parts.collect::<Vec<_>>() {
                for (distance, count) in counted.join().expect("no thread panics") {
                    *all.entry(distance).or_default() += count;
                }
            }
        });
    }
    let total: u64 = all.values().sum();
    let share = |distance| 100.0 * all.get(&distance).copied().unwrap_or(0) as f64 / total as f64;
    let [least, most] = [all.keys().next(), all.keys().last()].map(|distance| distance.copied().unwrap_or(0));
    Ok(format!("{name}: {:.2} % are the nearest number, the others {least} to {most} from it", share(0)))
}

fn count(results: &[u32], first: u32, model: fn(f32) -> f32) -> Distances {
    let mut counts = Distances::new();
    for (&bits, index) in results.iter().zip(first..) {
        let (ours, theirs) = (model(f32::from_bits(index.wrapping_mul(STEP))), f32::from_bits(bits));
        let distance = match (ours.is_nan(), theirs.is_nan()) {
            (true, true) if ours.to_bits() == bits => 0,
            (false, false) => order(theirs) - order(ours),
            _ => i64::MAX,
        };
        *counts.entry(distance).or_default() += 1;
    }
    counts
}

/// Index of the number in the order of all binary32 numbers.
fn order(x: f32) -> i64 {
    let magnitude = i64::from(x.to_bits() & 0x7FFF_FFFF);
    if x.is_sign_negative() { -magnitude } else { magnitude }
}
