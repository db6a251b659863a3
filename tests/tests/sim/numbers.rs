//! Runs one generic function over numbers on the host, in f64 and in f32, and in a kernel.

use std::num::Wrapping;

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Memory, Policy, Simulation};
use fa3_types::{ScoreIndex, ScoreReal};

use crate::rules::own_word;
use crate::runs::{assert_clean, bytes_of, floats};

/// The exponential of a capped score that falls with the distance of query and key, or 0 if the key is masked.
fn weight<R: ScoreReal>(score: R, slope: R, query: R::Index, key: R::Index) -> R {
    let distance = R::of_index(query - key);
    let capped = slope.fma(-distance, score).tanh() * score.lit(2.0);
    let kept = key.le(query) & score.lit(-1.9).lt(capped);
    R::select(kept, capped.exp2(), score.lit(0.0))
}

const SLOPE: f32 = 0.031;

/// Thread t has query t / 4, and loads its score and its key.
fn kernel(threads: u32) -> Kernel {
    Kernel::build("weights", Launch::threads(threads), |b| {
        let [scores, keys, y] = ["scores", "keys", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let slope = b.param_f32("slope");
        let query = b.tid() >> 2;
        let (score, key) = (b.load(own_word(b, scores)), b.load(own_word(b, keys)));
        b.store(own_word(b, y), weight(score, slope, query, key));
    })
}

#[test]
fn one_function_runs_everywhere() {
    let threads = 512_u32;
    let queries = || (0..threads).map(|thread| thread / 4);
    let keys: Vec<u32> = (0..threads).map(|thread| thread * 29 % 128).collect();
    let scores: Vec<f32> = (0..threads).map(|thread| (thread * 37 % 1001) as f32 * 0.008 - 4.0).collect();

    let mut memory = Memory::new();
    let key_bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
    let inputs = [("scores", bytes_of(&scores)), ("keys", key_bytes)];
    let [x, k] = inputs.map(|(name, bytes)| memory.alloc_from(name, &bytes));
    let y = memory.alloc("y", 4 * threads as usize);
    let pointers = [x, k, y].map(|buffer| ArgValue::Pointer(buffer.address()));
    let args = pointers.into_iter().chain([ArgValue::F32(SLOPE)]).collect();
    let kernel = kernel(threads);
    assert_clean(&Simulation::new(&kernel).args(args).policy(Policy::Random(3)).run(&mut memory).unwrap());

    let (mut kept, mut small) = (0, 0);
    for (((got, score), query), key) in floats(&memory, y).into_iter().zip(scores).zip(queries()).zip(keys) {
        let [query, key] = [query, key].map(|index| Wrapping(index as i32));
        let exact = weight(f64::from(score), f64::from(SLOPE), query, key);
        let host = weight(score, SLOPE, query, key);
        for number in [f64::from(got), f64::from(host)] {
            assert!((number - exact).abs() <= 1e-6 * exact, "{number} is not {exact}");
        }
        kept += u32::from(got > 0.0);
        small += u32::from(score.abs() < 0.1);
    }
    // The cases contain masked and unmasked keys, and both branches of the tangent.
    assert!((100..400).contains(&kept) && small > 10, "{kept} {small}");
}

/// Recording the function gives one instruction per operation, in source order.
#[test]
fn a_function_over_numbers_is_printed() {
    let text = ptx::emit(&kernel(32)).unwrap().text;
    let instructions = text.lines().filter_map(|line| line.trim().split_once(' '));
    let mnemonics: Vec<&str> = instructions.map(|(mnemonic, _)| mnemonic).collect();
    let begin = mnemonics.iter().position(|&mnemonic| mnemonic == "cvt.rn.f32.s32").unwrap();
    let end = mnemonics.iter().rposition(|&mnemonic| mnemonic == "selp.f32").unwrap();
    let distance = ["cvt.rn.f32.s32", "neg.f32", "fma.rn.f32"];
    let far = ["mul.rn.f32", "ex2.approx.ftz.f32", "add.rn.f32", "rcp.approx.ftz.f32", "fma.rn.f32"];
    let near = ["mul.rn.f32", "fma.rn.f32", "mul.rn.f32", "fma.rn.f32"];
    let tanh = [&far[..], &near, &["abs.f32", "setp.lt.f32", "selp.f32"]].concat();
    let rest = ["mul.rn.f32", "setp.le.s32", "setp.lt.f32", "and.pred", "ex2.approx.ftz.f32", "selp.f32"];
    assert_eq!(mnemonics[begin..=end], [&distance[..], &tanh, &rest].concat());
}

/// The quotients of x by constants, and by y.
fn quotients<I: ScoreIndex>(x: I, y: I) -> [I; 6] {
    [3, 7, 641, i32::MAX, -5, 0].map(|divisor| x.div_floor(if divisor == 0 { y } else { x.lit(divisor) }))
}

/// Kernels have no division of integers.
#[test]
fn quotients_of_integers_are_the_hosts() {
    let near = |x: i32| [x - 2, x - 1, x, x + 1, x + 2];
    let values: Vec<i32> = [0, 21, 641 * 7, 1 << 24, 1 << 30].iter().flat_map(|&x| near(x)).collect();
    let values: Vec<i32> = values.iter().flat_map(|&x| [x, -x]).filter(|x| x.abs() <= 1 << 30).collect();
    let pairs: Vec<[i32; 2]> = values.iter().flat_map(|&x| values.iter().map(move |&y| [x, y])).collect();
    let pairs = &pairs[..pairs.len() / 32 * 32];
    let kernel = Kernel::build("quotients", Launch::threads(32), |b| {
        let [x, y, out] = ["x", "y", "out"].map(|name| b.param_pointer(name, Elem::F32));
        let at = b.cta_x().mad(32, b.tid());
        let [x, y] = [x, y].map(|from| b.load::<F32>(at.mad_wide(4, from)).as_bits());
        for (i, quotient) in quotients(x, y).into_iter().enumerate() {
            b.store(at.mad(6, i as u32).mad_wide(4, out), quotient);
        }
    });
    let mut memory = Memory::new();
    let of = |side: usize| -> Vec<u8> { pairs.iter().flat_map(|pair| pair[side].to_le_bytes()).collect() };
    let [x, y] = [("x", 0), ("y", 1)].map(|(name, side)| memory.alloc_from(name, &of(side)));
    let out = memory.alloc("out", 24 * pairs.len());
    let args = [x, y, out].map(|buffer| ArgValue::Pointer(buffer.address())).into();
    let simulation = Simulation::new(&kernel).grid([pairs.len() as u32 / 32, 1, 1]).args(args);
    assert_clean(&simulation.policy(Policy::Eager).run(&mut memory).unwrap());
    for (&[x, y], got) in pairs.iter().zip(floats(&memory, out).chunks(6)) {
        let exact = quotients(Wrapping(x), Wrapping(y)).map(|quotient| quotient.0);
        assert_eq!(got.iter().map(|x| x.to_bits() as i32).collect::<Vec<_>>(), exact, "{x} by {y}");
    }
}
