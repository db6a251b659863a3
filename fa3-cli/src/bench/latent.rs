//! Latent attention over a cache, as DeepSeek's models decode: time, TFLOP/s and TB/s.

use std::error::Error;

use fa3_types::Problem;

use super::cached::{self, CachedArgs, Figure, MICROS, Setting, SettingError, TERABYTES, TFLOPS};
use crate::args::number::{multiple_of, size};

/// The rotated columns of a key, and the latent ones.
const ROTARY: usize = 64;
const LATENT: usize = 512;

/// TFLOP/s are drawn: with many query heads the tensor cores bound it, not memory.
pub(super) const FIGURE: Figure =
    Figure { name: "Latent attention", rows: &[MICROS, TFLOPS, TERABYTES], panels: &[TFLOPS] };

/// The first text of `fa3 bench latent --help`.
pub(super) const ABOUT: &str = "\
Measures latent attention of a few new tokens over a cache on a Hopper GPU, as DeepSeek's models decode. A row of the cache has \
512 latent columns, which are the value and the most of the key, and 64 rotated ones, in bf16 1152 bytes. All query heads share \
it, and the mask is causal. CTAs share the keys of all sequences where new tokens are few, up to 8.

It prints microseconds a call; TFLOP/s, 2 · (576 + 512) operations for each query head, new token and key; and TB/s, the rows in \
use, read once.

Times and checks are those of fa3 bench decode: calls over several caches, together several times as large as L2, are replayed as \
a CUDA graph, and nothing is reported that was not checked.";

/// Options of `fa3 bench latent`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 bench latent --svg latent.svg
  fa3 bench latent --heads 64 --batch 32 --seqlen-new 2 --seqlen-k 3000,32k --page-size 1

Exit code: 0, or 1 if a result is wrong or there is none, or 2 without a Hopper GPU.")]
pub(crate) struct Options {
    /// Query heads, a panel and a table for each number
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "128,16")]
    heads: Vec<usize>,
    /// Sequences
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,16,128")]
    batch: Vec<usize>,
    /// New tokens of each
    #[arg(long, value_name = "N", default_value_t = 1)]
    seqlen_new: usize,
    /// Keys of a sequence, those of the new tokens among them; k is 1024
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1k,2k,4k,8k",
        value_parser = size
    )]
    seqlen_k: Vec<usize>,
    /// Rows of a page of the cache, in random order
    #[arg(long, value_name = "N", value_parser = multiple_of(1, 1 << 20), default_value_t = 64)]
    page_size: u32,
    #[command(flatten)]
    cached: CachedArgs,
}

/// Measures, prints and writes. False if a result is wrong or missing.
///
/// # Errors
/// Options that describe no setting, no GPU, or a file that cannot be written.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    cached::run(&FIGURE, options.settings()?, &options.cached)
}

impl Options {
    /// Every combination with its problem, numbers of keys fastest.
    fn settings(&self) -> Result<Vec<(Setting, Problem)>, SettingError> {
        let Options { heads, batch, seqlen_k, .. } = self;
        let pairs = heads.iter().flat_map(|heads| batch.iter().map(move |batch| (heads, batch)));
        let all = pairs.flat_map(|(&heads, &batch)| seqlen_k.iter().map(move |&keys| (heads, batch, keys)));
        cached::with_problems(all.map(|(heads, batch, seqlen_k)| Setting {
            dtype: self.cached.dtype,
            head_dim: ROTARY,
            latent: Some(LATENT),
            heads,
            heads_kv: 1,
            seqlen_q: self.seqlen_new,
            page_size: Some(self.page_size as usize),
            skewed: false,
            batch,
            seqlen_k,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_sched::DeviceLimits;
    use fa3_sched::forward::{Plan, PlanOptions, SplitKeys, Way};
    use fa3_types::Dtype;

    fn settings(options: &str) -> Result<Vec<(Setting, Problem)>, SettingError> {
        cached::parse::<Options>(options).settings()
    }

    #[test]
    fn deepseeks_shape_is_what_is_measured_if_nothing_is_said() {
        let settings = settings("").unwrap();
        assert_eq!(settings.len(), 2 * 3 * 4);
        let (setting, problem) = &settings[11];
        assert_eq!((setting.heads, setting.batch, setting.seqlen_k), (128, 128, 8192));
        assert_eq!(problem.q().shape.dims(), [128, 1, 128, 64]);
        assert_eq!(problem.qv().map(|qv| qv.shape.dims()), Some([128, 1, 128, 512]));
        // Pages of all sequences and one that is nobody's; rows of K and V are 576 columns apart.
        let [pages, rows] = [128 * 128 + 1, 64];
        assert_eq!(
            [problem.k(), problem.v()].map(|x| x.shape.dims()),
            [64, 512].map(|d| [pages, rows, 1, d])
        );
        assert_eq!([problem.k(), problem.v()].map(|x| x.strides.seqlen), [576; 2]);
        let keys = 128.0 * 8192.0;
        assert_eq!((setting.bytes(), setting.flops()), (keys * 1152.0, 2.0 * 128.0 * keys * 1088.0));
    }

    /// Rows of one cache are what kernels take, and few new tokens share their keys, as the help says.
    #[test]
    fn every_setting_has_a_plan() {
        let equally = PlanOptions::default().split_keys(SplitKeys::Equally);
        for (options, is_shared) in
            [("", true), ("--page-size 1 --seqlen-new 8 --dtype f16", true), ("--seqlen-new 9", false)]
        {
            for (_, problem) in settings(options).unwrap() {
                let plan = Plan::with(&problem, &DeviceLimits::h100_sxm(), &equally).unwrap();
                assert_eq!(matches!(plan.way(), Way::Shared(_)), is_shared, "{problem}");
            }
        }
    }

    #[test]
    fn every_example_is_understood() {
        let examples = cached::examples::<Options>("latent");
        assert_eq!(examples.len(), 2);
        for example in examples {
            settings(&example).unwrap();
        }
    }

    #[test]
    fn every_option_counts() {
        let options = "--heads 8 --batch 3 --seqlen-new 2 --seqlen-k 2k --page-size 16 --dtype f16";
        let settings = settings(options).unwrap();
        let [(setting, problem)] = settings.as_slice() else { panic!("one setting") };
        assert_eq!((problem.dtype(), problem.q().shape.dims()), (Dtype::F16, [3, 2, 8, 64]));
        assert_eq!((problem.seqs_k().pages(), problem.longest().k), (Some(128), 2048));
        assert_eq!(setting.flops(), f64::from(2 * 8 * 2 * 3 * 2048 * 1088));
    }
}
