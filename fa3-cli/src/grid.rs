//! Settings that are measured: every combination of some options.

use fa3_types::{Dtype, Mask, Problem, ProblemError, ProblemSpec, Shape};
use serde::{Serialize, Serializer};

use crate::args::mask::MaskList;
use crate::args::number::{size, size_label};

/// Which settings to measure. Those of the paper's Figure 5 if nothing else is said.
#[derive(Debug, clap::Args)]
pub(crate) struct GridArgs {
    /// Head dimensions
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64,128,256")]
    head_dim: Vec<usize>,
    #[command(flatten)]
    masks: MaskList,
    /// Rows of a sequence; k is 1024
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "512,1k,2k,4k,8k,16k",
        value_parser = size
    )]
    seqlen: Vec<usize>,
    /// Sequences, instead of --tokens
    #[arg(long, value_name = "N", conflicts_with = "tokens")]
    batch: Option<usize>,
    /// Rows of all sequences: as many sequences as they hold, and at least one
    #[arg(long, value_name = "N", default_value = "16k", value_parser = size)]
    tokens: usize,
    /// Columns of all query heads: as many heads as they hold
    #[arg(long, value_name = "N", default_value = "2048", value_parser = size, conflicts_with = "heads")]
    hidden: usize,
    /// Query heads, instead of --hidden
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key/value heads, as many as query heads if absent
    #[arg(long, value_name = "N")]
    heads_kv: Option<usize>,
}

/// The options of [`GridArgs`], which do not go with fixed settings.
pub(crate) const OPTIONS: [&str; 10] =
    ["head_dim", "no_mask", "causal", "window", "seqlen", "batch", "tokens", "hidden", "heads", "heads_kv"];

/// One attention problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Setting {
    #[serde(serialize_with = "text")]
    pub(crate) dtype: Dtype,
    pub(crate) head_dim: usize,
    #[serde(serialize_with = "text")]
    pub(crate) mask: Mask,
    pub(crate) seqlen: usize,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) heads_kv: usize,
}

/// Why the options describe no settings.
#[derive(Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum GridError {
    #[error(
        "{hidden} columns are no whole number of heads with head_dim {head_dim}; --heads gives their number"
    )]
    Hidden { hidden: usize, head_dim: usize },
    #[error(
        "there is nothing to compute with batch {batch}, seqlen {seqlen}, heads {heads} and head_dim {head_dim}"
    )]
    Empty { batch: usize, seqlen: usize, heads: usize, head_dim: usize },
    #[error("{setting}: {source}")]
    Problem { setting: Setting, source: ProblemError },
}

impl GridArgs {
    /// Every combination with its problem: sequence lengths fastest, then masks.
    pub(crate) fn settings(&self, dtype: Dtype) -> Result<Vec<(Setting, Problem)>, GridError> {
        let (masks, mut settings) = (self.masks.masks(), Vec::new());
        for &head_dim in &self.head_dim {
            let heads = match self.heads {
                Some(heads) => heads,
                None if head_dim > 0 && self.hidden.is_multiple_of(head_dim) => self.hidden / head_dim,
                None => return Err(GridError::Hidden { hidden: self.hidden, head_dim }),
            };
            let heads_kv = self.heads_kv.unwrap_or(heads);
            for (&mask, &seqlen) in
                masks.iter().flat_map(|mask| self.seqlen.iter().map(move |seqlen| (mask, seqlen)))
            {
                let batch = self.batch.unwrap_or_else(|| (self.tokens / seqlen.max(1)).max(1));
                let setting = Setting { dtype, head_dim, mask, seqlen, batch, heads, heads_kv };
                if settings.iter().all(|(known, _)| *known != setting) {
                    settings.push((setting, setting.problem()?));
                }
            }
        }
        Ok(settings)
    }
}

impl Setting {
    /// The problem, whose tensors are contiguous.
    pub(crate) fn problem(&self) -> Result<Problem, GridError> {
        let Setting { dtype, head_dim, mask, seqlen, batch, heads, heads_kv } = *self;
        if [batch, seqlen, heads, head_dim].contains(&0) {
            return Err(GridError::Empty { batch, seqlen, heads, head_dim });
        }
        let q = Shape { batch, seqlen, heads, head_dim };
        let spec = ProblemSpec::dense(dtype, q, Shape { heads: heads_kv, ..q }).mask(mask);
        spec.validate().map_err(|source| GridError::Problem { setting: *self, source })
    }
}

/// What tells it from others in a table: the rest is the same in all.
impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Setting { head_dim, mask, seqlen, .. } = self;
        write!(f, "head_dim {head_dim}, mask {mask}, seqlen {}", size_label(*seqlen))
    }
}

fn text<T: ToString, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        grid: GridArgs,
    }

    fn settings(options: &str) -> Result<Vec<Setting>, GridError> {
        let words = std::iter::once("fa3").chain(options.split_whitespace());
        let settings = Command::try_parse_from(words).unwrap().grid.settings(Dtype::Bf16)?;
        Ok(settings.into_iter().map(|(setting, _)| setting).collect())
    }

    /// §4.1: 16k tokens, hidden size 2048, that is 32, 16 or 8 heads.
    #[test]
    fn figure_5_is_what_is_measured_if_nothing_is_said() {
        let settings = settings("").unwrap();
        assert_eq!(settings.len(), 36);
        let heads = |head_dim| settings.iter().filter(move |x| x.head_dim == head_dim).map(|x| x.heads);
        assert!(heads(64).all(|heads| heads == 32) && heads(128).all(|heads| heads == 16));
        assert!(heads(256).all(|heads| heads == 8));
        assert!(settings.iter().all(|x| x.batch * x.seqlen == 16384 && x.heads_kv == x.heads));
        let first: Vec<usize> = settings.iter().take(6).map(|x| x.seqlen).collect();
        assert_eq!(first, [512, 1024, 2048, 4096, 8192, 16384]);
        assert!(settings[..6].iter().all(|x| (x.head_dim, x.mask) == (64, Mask::None)));
        assert!(settings[30..].iter().all(|x| (x.head_dim, x.mask) == (256, Mask::Causal)));
    }

    #[test]
    fn every_option_counts() {
        let options =
            "--head-dim 96 --window 256,0 --window -1,3 --seqlen 3k,100 --batch 5 --heads 6 --heads-kv 2";
        let settings = settings(options).unwrap();
        let window = |left, right| Mask::Window { left, right };
        let expected = [
            (window(Some(256), Some(0)), 3072),
            (window(Some(256), Some(0)), 100),
            (window(None, Some(3)), 3072),
            (window(None, Some(3)), 100),
        ];
        let expected = expected.map(|(mask, seqlen)| Setting {
            dtype: Dtype::Bf16,
            head_dim: 96,
            mask,
            seqlen,
            batch: 5,
            heads: 6,
            heads_kv: 2,
        });
        assert_eq!(settings, expected);
        assert_eq!(self::settings("--tokens 10 --seqlen 12").unwrap()[0].batch, 1);
    }

    #[test]
    fn settings_that_are_none() {
        let error = |options| settings(options).unwrap_err();
        assert_eq!(error("--head-dim 96"), GridError::Hidden { hidden: 2048, head_dim: 96 });
        assert_eq!(error("--head-dim 0"), GridError::Hidden { hidden: 2048, head_dim: 0 });
        assert!(matches!(error("--seqlen 0"), GridError::Empty { seqlen: 0, .. }));
        let heads = error("--head-dim 64 --causal --seqlen 1k --heads-kv 5").to_string();
        assert_eq!(heads, "head_dim 64, mask causal, seqlen 1k: heads_q 32 is not a multiple of heads_kv 5");
        for options in ["--batch 2 --tokens 4k", "--heads 2 --hidden 128", "--window 5", "--seqlen k"] {
            let words = std::iter::once("fa3").chain(options.split_whitespace());
            assert!(Command::try_parse_from(words).is_err(), "{options}");
        }
    }
}
