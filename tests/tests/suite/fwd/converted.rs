//! Keys and values of e4m3, and Q of e4m3, that are converted: with scales of 1, results have the bits of 16-bit
//! inputs.

use fa3_ir::{BufferId, Kernel, Program};
use fa3_quant::E4m3;
use fa3_sched::forward::{CtaTile, Precision, SplitKeys, TileRow};
use fa3_sim::ProgramSimulation;
use fa3_tests::cache::{Case, Keys, Pages, Queries};
use fa3_tests::fwd::{Launch, Layout, dense, device, encode, initial, with_tile};
use fa3_tests::{Dist, Trial};
use fa3_types::{Dtype, Mask};

/// A program, and the bytes of its buffers before.
struct Run {
    program: Program<Kernel>,
    before: Vec<Vec<u8>>,
}

impl From<Trial> for Run {
    fn from(Trial { program, before, .. }: Trial) -> Run {
        Run { program, before }
    }
}

impl Run {
    /// The bytes of a buffer.
    fn buffer(&mut self, name: &str) -> Option<&mut Vec<u8>> {
        self.program.find(name).map(|BufferId(at)| &mut self.before[at])
    }

    /// O and LSE, in bytes.
    fn results(&self) -> [Vec<u8>; 2] {
        let outcome = ProgramSimulation::new(&self.program).run(&self.before).expect("it ends");
        assert_eq!(outcome.findings().next(), None);
        ["o", "lse"].map(|name| {
            let BufferId(at) = self.program.find(name).expect("a forward pass has both");
            outcome.buffers[at].clone()
        })
    }
}

/// Whether a kernel that converts has the bits of one of 16 bits, whose keys become those of the other. Q of e4m3 does,
/// too, times a scale that is a power of 2.
fn agree(mut converted: Run, mut of_16_bits: Run, dtype: Dtype) -> bool {
    const OF_Q: f32 = 4.0;
    let converts_q = converted.buffer("q_descale").is_some();
    for (name, scale) in [("q_descale", OF_Q), ("k_descale", 1.0), ("v_descale", 1.0)] {
        if let Some(scales) = converted.buffer(name) {
            scales.as_chunks_mut::<4>().0.fill(scale.to_le_bytes());
        }
        assert!(of_16_bits.buffer(name).is_none());
    }
    let tensors = [("q", OF_Q), ("k", 1.0), ("v", 1.0)];
    for (name, scale) in tensors.into_iter().filter(|(name, _)| converts_q || *name != "q") {
        let codes = converted.buffer(name).expect("all have it").iter();
        let numbers = codes.map(|&code| encode(dtype, E4m3::from_bits(code).to_f32() * scale));
        let numbers: Vec<u8> = numbers.flat_map(u16::to_le_bytes).collect();
        let tensor = of_16_bits.buffer(name).expect("all have it");
        assert_eq!(tensor.len(), numbers.len());
        *tensor = numbers;
    }
    converted.results() == of_16_bits.results()
}

#[test]
fn shared_keys_have_the_bits_of_16_bit_keys() {
    for (dtype, columns, softcap, page) in [
        (Dtype::Bf16, (128, 128), None, 16),
        (Dtype::F16, (64, 64), Some(3.0), 1),
        (Dtype::Bf16, (192, 128), None, 12),
        (Dtype::F16, (256, 256), None, 16),
    ] {
        let case = Case {
            lengths: vec![300, 0, 65],
            keys: Keys::Pages(Pages::of(page)),
            queries: Queries::Dense(2),
            heads: (4, 2),
            columns,
            dtype,
            e4m3_keys: true,
            qv: false,
            mask: Mask::Causal,
            softcap,
            sink: false,
            layout: Layout::Contiguous,
            dist: Dist::Normal,
            split_keys: Some(SplitKeys::Equally),
            sms: 5,
            seed: 11,
        };
        let of_16_bits = Case { e4m3_keys: false, ..case.clone() };
        let of_q = Case { e4m3_keys: false, dtype: Dtype::E4m3, ..case.clone() };
        assert!(agree(case.trial().into(), of_16_bits.clone().trial().into(), dtype), "{dtype} {columns:?}");
        // Of e4m3 problems O is bf16.
        let of_bf16 = Case { dtype: Dtype::Bf16, ..of_16_bits };
        assert!(agree(of_q.trial().into(), of_bf16.trial().into(), Dtype::Bf16), "Q of e4m3, {columns:?}");
    }
}

/// Each of the table's tiles, on two tiles of rows and three blocks of keys.
#[test]
fn tiles_have_the_bits_of_16_bit_keys() {
    let tiles = TileRow::table().iter().map(|row| row.tile);
    for tile in tiles.filter(|tile| tile.precision == Precision::Converted { q: false }) {
        let lengths = (tile.tile_m as usize + 9, 2 * tile.tile_n as usize + 5);
        let spec = dense(Dtype::Bf16, 1, lengths, (2, 1), tile.head_dim as usize).causal();
        let spec = spec.head_dim_v(tile.head_dim_v as usize);
        let run = |spec: fa3_types::ProblemSpec, tile| {
            let case = fa3_tests::Case::normal("converted", spec.known().expect("a tile's own columns"), 3);
            let launch = Launch::new(&case.problem, &device(3), &with_tile(tile));
            let program = launch.unwrap_or_else(|fault| panic!("{tile}: {fault}")).program;
            let before = initial(&case.problem, &program, &case.values());
            Run { program, before }
        };
        let of_16_bits = run(spec.clone(), CtaTile { precision: Precision::Half, ..tile });
        assert!(agree(run(spec.e4m3_keys(), tile), of_16_bits, Dtype::Bf16), "{tile}");
    }
}
