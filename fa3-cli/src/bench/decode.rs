//! Decoding over a cache: the figure of the FlashAttention-3 authors' talk, and other settings.

use std::error::Error;

use fa3_types::Problem;

use super::cached::{self, CachedArgs, Figure, GIGABYTES, MICROS, Setting, SettingError};
use crate::args::number::{multiple_of, size};

/// The talk's figure: time, and GB/s.
pub(super) const FIGURE: Figure =
    Figure { name: "Decoding", rows: &[MICROS, GIGABYTES], panels: &[MICROS, GIGABYTES] };

/// The first text of `fa3 bench decode --help`.
pub(super) const ABOUT: &str = "\
Measures attention of a few new tokens over a cache of keys and values on a Hopper GPU, and prints microseconds a call and \
GB/s: the bytes of keys and values in use, read once. The settings are those of a figure that FlashAttention-3's authors \
showed in a talk, speculative decoding with one key/value head, or any others. CTAs share the keys of all sequences, and the \
mask is causal.

Calls are captured into a CUDA graph, one for each of several caches, together several times as large as L2. The time of a \
call is that of a replay divided by the calls; the median of the rounds counts. Nothing is reported that was not checked: O \
and LSE are computed into memory full of NaN, of which none may remain; rows of the first and of the last sequence are held \
to the error law against arithmetic in f64; and a call after the timed ones must give the same bits.";

/// Options of `fa3 bench decode`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 bench decode --svg decode.svg
  fa3 bench decode --heads 32 --heads-kv 8 --seqlen-new 1 --page-size 64 --batch 1,16,128 --seqlen-k 1k,8k --skewed

Exit code: 0, or 1 if a result is wrong or there is none, or 2 without a Hopper GPU.")]
pub(crate) struct Options {
    /// Sequences
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,16,64")]
    batch: Vec<usize>,
    /// New tokens of each
    #[arg(long, value_name = "N", default_value_t = 4)]
    seqlen_new: usize,
    /// Keys of a sequence, those of the new tokens among them; k is 1024
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1k,2k,4k,8k,16k,32k,64k",
        value_parser = size
    )]
    seqlen_k: Vec<usize>,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 16)]
    heads: usize,
    /// Key/value heads
    #[arg(long, value_name = "N", default_value_t = 1)]
    heads_kv: usize,
    /// Head dimension
    #[arg(long, value_name = "N", default_value_t = 128)]
    head_dim: usize,
    /// Rows of a page of the cache, in random order; without it, a sequence's rows lie one after the other
    #[arg(long, value_name = "N", value_parser = multiple_of(1, 1 << 20))]
    page_size: Option<u32>,
    /// Only the first sequence of a batch has all keys, the others have 16 times fewer
    #[arg(long)]
    skewed: bool,
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
        let &Options { seqlen_new, heads, heads_kv, head_dim, skewed, .. } = self;
        let (dtype, page_size) = (self.cached.dtype, self.page_size.map(|rows| rows as usize));
        let pairs = self.batch.iter().flat_map(|&batch| self.seqlen_k.iter().map(move |&keys| (batch, keys)));
        cached::with_problems(pairs.map(|(batch, seqlen_k)| Setting {
            dtype,
            head_dim,
            latent: None,
            heads,
            heads_kv,
            seqlen_q: seqlen_new,
            page_size,
            skewed,
            batch,
            seqlen_k,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::Dtype;

    fn settings(options: &str) -> Result<Vec<(Setting, Problem)>, SettingError> {
        cached::parse::<Options>(options).settings()
    }

    #[test]
    fn the_talks_figure_is_what_is_measured_if_nothing_is_said() {
        let settings = settings("").unwrap();
        assert_eq!(settings.len(), 28);
        let (setting, problem) = &settings[27];
        assert_eq!((setting.batch, setting.seqlen_k), (64, 65_536));
        assert_eq!((problem.heads().q(), problem.heads().kv(), problem.q().shape.seqlen), (16, 1, 4));
        // 64 · 64k rows of K and V, of 256 bytes each.
        assert_eq!(setting.bytes(), f64::from(1_u32 << 31));
    }

    #[test]
    fn every_example_is_understood() {
        let examples = cached::examples::<Options>("decode");
        assert_eq!(examples.len(), 2);
        for example in examples {
            settings(&example).unwrap();
        }
    }

    #[test]
    fn every_option_counts() {
        let options = "--batch 3 --seqlen-new 1 --seqlen-k 2k --heads 8 --heads-kv 2 --head-dim 64 --page-size 16 \
                       --skewed --dtype f16";
        let settings = settings(options).unwrap();
        let [(setting, problem)] = settings.as_slice() else { panic!("one setting") };
        assert_eq!(setting.layout().seqlens, [2048, 128, 128]);
        assert_eq!((problem.seqs_k().pages(), problem.k().shape.dims()), (Some(128), [145, 16, 2, 64]));
        assert_eq!((problem.dtype(), problem.longest().q, problem.longest().k), (Dtype::F16, 1, 2048));
        assert_eq!(setting.bytes(), f64::from(2 * (2048 + 256) * 2 * 64 * 2));
    }

    #[test]
    fn settings_that_are_none() {
        let said = |options| settings(options).unwrap_err().to_string();
        let empty = "there is nothing to compute with batch 0, seqlen 4 x 1024, heads 16, head_dim 128";
        assert_eq!(said("--batch 0"), empty);
        assert_eq!(
            said("--seqlen-new 70 --seqlen-k 64"),
            "70 new tokens are more than the 64 keys of a sequence"
        );
        let tokens = "4 new tokens are more than the 2 keys of a sequence";
        assert_eq!(said("--batch 2 --seqlen-k 32 --skewed"), tokens);
        assert_eq!(
            said("--heads-kv 3 --batch 2"),
            "batch 2, seqlen_k 1k: heads_q 16 is not a multiple of heads_kv 3"
        );
    }
}
