//! Kernels that dequantize e4m3 K and V, or Q. With scales of 1, results equal the results of the 16-bit inputs, except
//! where Q of bf16 is rewritten to f16.

use fa3_quant::E4m3;
use fa3_sched::forward::{CtaTile, PlanOptions, Precision, SplitKeys, TileRow};
use fa3_sim::{Mode, Policy};
use fa3_tests::Trial;
use fa3_tests::cache::{Case, Keys, Pages, paged};
use fa3_tests::fwd::{Layout, decode, dense, encode, trial, with_qv, with_tile};
use fa3_tests::memory::{Memory, tensor_bytes};
use fa3_tests::sparse::{self, Listed};
use fa3_types::{Dtype, ProblemSpec, SCALED_COLUMNS, SequenceRows, Shape, TokenScales};
use ndarray::Array4;

/// Whether a kernel that dequantizes K and V gives the bits of the 16-bit kernel on the dequantized keys. If Q is e4m3,
/// it is dequantized, too, with a scale that is a power of 2.
fn agree(mut converted: Trial, mut of_16_bits: Trial, dtype: Dtype) -> bool {
    const OF_Q: f32 = 4.0;
    let has = |trial: &Trial, name| trial.program.find(name).is_some();
    let converts_q = has(&converted, "q_descale");
    for (name, scale) in [("q_descale", OF_Q), ("k_descale", 1.0), ("v_descale", 1.0)] {
        if has(&converted, name) {
            converted.buffer_mut(name).as_chunks_mut::<4>().0.fill(scale.to_le_bytes());
        }
        assert!(!has(&of_16_bits, name));
    }
    let tensors = [("q", OF_Q), ("k", 1.0), ("v", 1.0)];
    for (name, scale) in tensors.into_iter().filter(|(name, _)| converts_q || *name != "q") {
        let codes = converted.buffer_mut(name).iter();
        let numbers = codes.map(|&code| encode(dtype, E4m3::from_bits(code).to_f32() * scale));
        let numbers: Vec<u8> = numbers.flat_map(u16::to_le_bytes).collect();
        let tensor = of_16_bits.buffer_mut(name);
        assert_eq!(tensor.len(), numbers.len());
        *tensor = numbers;
    }
    let results = |trial: Trial| crate::o_and_lse(&trial.program, &trial.before, Policy::Eager);
    results(converted) == results(of_16_bits)
}

#[test]
fn shared_keys_have_the_bits_of_16_bit_keys() {
    for (dtype, columns, softcap, page, qv) in [
        (Dtype::Bf16, (128, 128), None, 16, false),
        (Dtype::F16, (64, 64), Some(3.0), 1, false),
        (Dtype::Bf16, (192, 128), None, 12, false),
        (Dtype::F16, (256, 256), None, 16, false),
        (Dtype::F16, (512, 512), None, 16, false),
        (Dtype::F16, (336, 272), Some(3.0), 1, false),
        (Dtype::F16, (64, 512), None, 64, true),
        (Dtype::F16, (48, 272), Some(3.0), 12, true),
    ] {
        let (lengths, keys) = (vec![300, 0, 65], Keys::Pages(Pages::of(page)));
        let (e4m3_keys, sink, seed) = (true, false, 11);
        let case = Case { lengths, keys, dtype, e4m3_keys, softcap, sink, seed, qv, ..paged(columns) };
        let of_16_bits = Case { e4m3_keys: false, ..case.clone() };
        if qv || columns.0 > 256 {
            assert!(agree(case.trial(), of_16_bits.trial(), dtype), "{dtype} {columns:?}");
            continue;
        }
        let of_q = Case { e4m3_keys: false, dtype: Dtype::E4m3, ..case.clone() };
        assert!(agree(case.trial(), of_16_bits.clone().trial(), dtype), "{dtype} {columns:?}");
        // O of an e4m3 problem is bf16.
        let of_bf16 = Case { dtype: Dtype::Bf16, ..of_16_bits };
        assert!(agree(of_q.trial(), of_bf16.trial(), Dtype::Bf16), "Q of e4m3, {columns:?}");
    }
}

/// Rows of V with their own scales, which lists name, give the bits of the 16-bit kernel on rows of the products.
#[test]
fn scaled_rows_have_the_bits_of_16_bit_rows() {
    let first = Listed { pages: (5, 24), gap: 7, keys: 300, list_gap: 3, used: true };
    for (columns, split_keys) in
        [((64, 512), SplitKeys::Even), ((40, 336), SplitKeys::FixedSize { keys: 128 })]
    {
        let case =
            sparse::Case { columns, split_keys: Some(split_keys), caches: (first, None), ..sparse::LATENT };
        let scaled = sparse::Case { scaled: true, ..case.clone() }.trial();
        let mut of_16_bits = case.trial();
        let given = Memory::new(&scaled.program, &scaled.before);
        let [k, codes, scales] = ["k", "v", "v_scales"].map(|name| given.tensor(name));
        let v = Array4::from_shape_fn(codes.raw_dim(), |(page, row, head, col)| {
            codes[[page, row, head, col]] * scales[[page, row, head, col / SCALED_COLUMNS]]
        });
        set_rows(&mut of_16_bits, [k, v]);
        let results = |trial: Trial| crate::o_and_lse(&trial.program, &trial.before, Policy::Eager);
        assert!(results(scaled) == results(of_16_bits), "{columns:?}");
    }
}

/// Replaces K and V of a 16-bit trial. They are rounded.
fn set_rows(of_16_bits: &mut Trial, rows: [Array4<f32>; 2]) {
    for (name, rows) in ["k", "v"].into_iter().zip(rows) {
        let buffer = of_16_bits.program.find(name).expect("attention has both");
        let tensor = of_16_bits.program.buffers[buffer.0].tensor.expect("it is a tensor");
        *of_16_bits.buffer_mut(name) = tensor_bytes(&tensor, &rows);
    }
}

/// Scales of tokens give the bits of the 16-bit kernel on rows of the products, which are rounded once. Rows of int8
/// have all codes.
#[test]
fn tokens_with_scales_have_the_bits_of_16_bit_rows() {
    let cases = [
        (Dtype::E4m3, Dtype::Bf16, (128, 128), 16),
        (Dtype::E4m3, Dtype::F16, (96, 64), 1),
        (Dtype::Int8, Dtype::F16, (64, 128), 16),
        (Dtype::Int8, Dtype::Bf16, (96, 64), 1),
    ];
    for (codes, dtype, columns, page) in cases {
        let (lengths, keys) = (vec![300, 0, 65], Keys::Pages(Pages::of(page)));
        let of_16_bits = Case { lengths, keys, dtype, ..paged(columns) };
        let mut scaled = Case { token_scales: Some(codes), ..of_16_bits.clone() }.trial();
        let mut of_16_bits = of_16_bits.trial();
        for name in ["k_scales", "v_scales"] {
            for scale in scaled.buffer_mut(name).as_chunks_mut::<4>().0 {
                let factor = if codes == Dtype::Int8 { 1.234_567 / 64.0 } else { 1.234_567 };
                *scale = (f32::from_le_bytes(*scale) * factor).to_le_bytes();
            }
        }
        for name in ["k", "v"].into_iter().filter(|_| codes == Dtype::Int8) {
            let bytes = scaled.buffer_mut(name).iter_mut().enumerate();
            bytes.for_each(|(number, byte)| {
                *byte = (number as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]
            });
        }
        let given = Memory::new(&scaled.program, &scaled.before);
        let rows = |of| given.tensor(of) * given.tensor(&format!("{of}_scales"));
        set_rows(&mut of_16_bits, ["k", "v"].map(rows));
        let results = |trial: Trial| crate::o_and_lse(&trial.program, &trial.before, Policy::Eager);
        assert!(results(scaled) == results(of_16_bits), "{codes} {dtype} {columns:?}");
    }
}

/// Prefill of dense sequences of e4m3 and of packed sequences of int8 whose tokens have scales.
#[test]
fn tokens_have_scales_outside_of_caches() {
    let shape = Shape { batch: 2, seqlen: 150, heads: 2, head_dim: 64 };
    let of_tokens = |spec: ProblemSpec| {
        let scales = TokenScales::contiguous(spec.k.shape);
        let spec = if spec.seqs_k.is_packed() { spec.int8_keys() } else { spec.e4m3_keys() };
        Layout::HeadsFirst.of(spec.causal().token_scales(scales))
    };
    let dense = ProblemSpec::dense(Dtype::Bf16, Shape { heads: 4, ..shape }, shape);
    let rows = SequenceRows::packed_lengths(&[70, 0, 150]);
    let packed = ProblemSpec::packed(Dtype::F16, (4, 2), 64, &rows, &rows);
    let packed = of_tokens(packed).with_rows(rows.clone(), rows);
    for problem in [of_tokens(dense).known(), packed] {
        let case = fa3_tests::Case::normal("tokens", problem.expect("it is valid"), 5);
        let trial = trial(case, 3, &PlanOptions::default());
        trial.check(&trial.simulate(Policy::Eager, Mode::Exact).unwrap()).unwrap();
    }
}

/// Scales of NaN reach only the sequence that has them, although a block that is not full follows them in a CTA.
#[test]
fn scales_of_nan_stay_in_their_sequence() {
    let of_tokens = paged((64, 64));
    let case = Case { lengths: vec![300, 65], token_scales: Some(Dtype::E4m3), sms: 1, ..of_tokens };
    let of = |trial: &Trial| crate::o_and_lse(&trial.program, &trial.before, Policy::Eager);
    let mut trial = case.trial();
    let expected = of(&trial);
    let table = trial.buffer_mut("page_table").clone();
    let of_first = table[..table.len() / 2].as_chunks::<4>().0.iter().map(|&page| i32::from_le_bytes(page));
    for name in ["k_scales", "v_scales"] {
        let pages = trial.program.buffers[trial.program.find(name).unwrap().0].shape[0] as usize;
        let scales = trial.buffer_mut(name);
        let page = scales.len() / pages;
        for number in of_first.clone().filter(|number| (0..pages as i32).contains(number)) {
            let scales = &mut scales[number as usize * page..][..page];
            scales.as_chunks_mut::<4>().0.fill(f32::NAN.to_le_bytes());
        }
    }
    let found = of(&trial);
    for (found, expected) in found.iter().zip(&expected) {
        let (first, second) = found.split_at(found.len() / 2);
        assert!(first != &expected[..first.len()] && second == &expected[first.len()..]);
    }
}

/// Each tile of the planner's table computes two tiles of rows over three KV blocks.
#[test]
fn tiles_have_the_bits_of_16_bit_keys() {
    let tiles = TileRow::table().iter().map(|row| row.tile);
    for tile in tiles.filter(|tile| tile.precision == Precision::Converted { q: false }) {
        let lengths = (tile.tile_m as usize + 9, 2 * tile.tile_n as usize + 5);
        // Where rows are converted, products are of f16.
        let dtype = if tile.converts_rows() { Dtype::F16 } else { Dtype::Bf16 };
        let spec = of_tile(dtype, &tile, lengths);
        let run = |spec: ProblemSpec, tile| {
            let case = fa3_tests::Case::normal("converted", spec.known().expect("a tile's own columns"), 3);
            trial(case, 3, &with_tile(tile))
        };
        let of_16_bits = run(spec.clone(), CtaTile { precision: Precision::Half, ..tile });
        assert!(agree(run(spec.e4m3_keys(), tile), of_16_bits, dtype), "{tile}");
    }
}

/// A problem with the tile's columns, and `qv` if the tile is for it.
fn of_tile(dtype: Dtype, tile: &CtaTile, lengths: (usize, usize)) -> ProblemSpec {
    let spec = dense(dtype, 1, lengths, (2, 1), tile.head_dim as usize).causal();
    let spec = spec.head_dim_v(tile.head_dim_v as usize);
    if tile.qv { with_qv(spec) } else { spec }
}

/// Q of bf16 that is rewritten to f16 may have any range: a power of 2 that moves from Q to the scale changes no bit.
#[test]
fn powers_of_2_move_from_queries_to_the_scale() {
    for TileRow { tile, .. } in TileRow::table().iter().filter(|row| row.tile.converts_rows()) {
        let run = |power: f32| {
            let spec =
                of_tile(Dtype::Bf16, tile, (70, 70)).softmax_scale(f64::from(0.0625 / power)).e4m3_keys();
            let case = fa3_tests::Case::normal("rewritten", spec.known().expect("a tile's own columns"), 3);
            let mut trial = trial(case, 3, &with_tile(*tile));
            for name in if tile.qv { &["q", "qv"][..] } else { &["q"] } {
                for bits in trial.buffer_mut(name).as_chunks_mut::<2>().0 {
                    let x = decode(Dtype::Bf16, u16::from_le_bytes(*bits)) * power;
                    *bits = encode(Dtype::Bf16, x).to_le_bytes();
                }
            }
            crate::o_and_lse(&trial.program, &trial.before, Policy::Eager)
        };
        let expected = run(1.0);
        for power in [40, -50] {
            assert!(run(2.0_f32.powi(power)) == expected, "{tile}, 2^{power}");
        }
    }
}
