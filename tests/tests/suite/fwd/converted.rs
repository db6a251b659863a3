//! Keys and values of e4m3 that are converted to Q's type: with scales of 1, results have the bits of 16-bit keys.

use fa3_quant::E4m3;
use fa3_sched::forward::SplitKeys;
use fa3_sim::{Mode, Policy};
use fa3_tests::cache::{Case, Keys, Pages, Queries};
use fa3_tests::fwd::{Layout, encode};
use fa3_tests::{Dist, Trial};
use fa3_types::{Dtype, Mask};

/// The bytes of a buffer of a trial.
fn buffer<'t>(trial: &'t mut Trial, name: &str) -> Option<&'t mut Vec<u8>> {
    let at = trial.program.buffers.iter().position(|buffer| buffer.name == name)?;
    Some(&mut trial.before[at])
}

/// O and LSE, in bytes.
fn results(trial: &Trial) -> [Vec<u8>; 2] {
    let after = trial.simulate(Policy::Eager, Mode::Exact).unwrap_or_else(|fault| panic!("{fault}"));
    ["o", "lse"].map(|name| {
        let at = trial.program.buffers.iter().position(|buffer| buffer.name == name);
        after[at.expect("a forward pass has both")].clone()
    })
}

#[test]
fn results_have_the_bits_of_16_bit_keys() {
    for (dtype, (head_dim, head_dim_v), softcap) in [
        (Dtype::Bf16, (128, 128), None),
        (Dtype::F16, (64, 64), Some(3.0)),
        (Dtype::Bf16, (192, 128), None),
        (Dtype::F16, (256, 256), None),
    ] {
        let case = Case {
            lengths: vec![300, 0, 65],
            keys: Keys::Pages(Pages::of(16)),
            queries: Queries::Dense(2),
            heads: (4, 2),
            columns: (head_dim, head_dim_v),
            dtype,
            e4m3_keys: true,
            mask: Mask::Causal,
            softcap,
            sink: false,
            layout: Layout::Contiguous,
            dist: Dist::Normal,
            split_keys: Some(SplitKeys::Equally),
            sms: 5,
            seed: 11,
        };
        let mut converted = case.clone().trial();
        let mut of_16_bits = Case { e4m3_keys: false, ..case }.trial();
        for name in ["k_descale", "v_descale"] {
            let scales = buffer(&mut converted, name).expect("e4m3 has scales");
            scales.as_chunks_mut::<4>().0.fill(1_f32.to_le_bytes());
        }
        for name in ["k", "v"] {
            let codes = buffer(&mut converted, name).expect("all have keys").iter();
            let numbers = codes.flat_map(|&code| encode(dtype, E4m3::from_bits(code).to_f32()).to_le_bytes());
            let numbers = numbers.collect::<Vec<u8>>();
            let of_16_bits = buffer(&mut of_16_bits, name).expect("all have keys");
            assert_eq!(of_16_bits.len(), numbers.len());
            *of_16_bits = numbers;
        }
        assert!(buffer(&mut of_16_bits, "k_descale").is_none());
        assert_eq!(results(&converted), results(&of_16_bits), "{dtype} {head_dim}/{head_dim_v}");
    }
}
