//! Settings to measure: every combination of the options' values.

use fa3_types::{Dtype, KnownProblem, Mask, ProblemError, ProblemSpec, Shape};
use serde::{Serialize, Serializer};

use crate::args::mask::MaskList;
use crate::args::number::{size, size_label};

/// The settings to measure; by default, the settings of the paper's Figure 5.
#[derive(Debug, clap::Args)]
pub(crate) struct GridArgs {
    /// Head dimensions
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "64,128,256")]
    head_dim: Vec<usize>,
    /// Head dimensions of V and O; the head dimensions of Q and K if absent
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    head_dim_v: Vec<usize>,
    #[command(flatten)]
    masks: MaskList,
    /// Bounds of scores s, as in C · tanh(s / C); none if absent
    #[arg(long, value_name = "C,..", value_delimiter = ',', allow_negative_numbers = true)]
    softcap: Vec<f64>,
    /// Rows of a sequence; k is 1024
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = size)]
    #[arg(default_value = "512,1k,2k,4k,8k,16k")]
    seqlen: Vec<usize>,
    /// Keys of a sequence; as many as its rows if absent
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = size)]
    seqlen_k: Vec<usize>,
    /// Number of sequences, instead of --tokens
    #[arg(long, value_name = "N", conflicts_with = "tokens")]
    batch: Option<usize>,
    /// Total rows of all sequences: the batch is N / seqlen, and at least 1
    #[arg(long, value_name = "N", default_value = "16k", value_parser = size)]
    tokens: usize,
    /// Total columns of all query heads: the number of heads is N / head_dim
    #[arg(long, value_name = "N", default_value = "2048", value_parser = size, conflicts_with = "heads")]
    hidden: usize,
    /// Query heads, instead of --hidden
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key/value heads, as many as query heads if absent
    #[arg(long, value_name = "N")]
    heads_kv: Option<usize>,
}

/// The options of [`GridArgs`], which conflict with fixed settings.
pub(crate) const OPTIONS: &str = "head_dim head_dim_v no_mask causal window chunk softcap seqlen seqlen_k batch tokens \
                                  hidden heads heads_kv";

/// A pass of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// One attention problem.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Setting {
    pub(crate) pass: Pass,
    #[serde(serialize_with = "text")]
    pub(crate) dtype: Dtype,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    #[serde(serialize_with = "text")]
    pub(crate) mask: Mask,
    pub(crate) softcap: Option<f64>,
    pub(crate) seqlen: usize,
    pub(crate) seqlen_k: usize,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) heads_kv: usize,
}

/// Why the options describe no valid settings.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum GridError {
    #[error(
        "{hidden} columns are no whole number of heads with head_dim {head_dim}; --heads gives their number"
    )]
    Hidden { hidden: usize, head_dim: usize },
    #[error("there is nothing to compute with batch {}, heads {}, {setting}", setting.batch, setting.heads)]
    Empty { setting: Box<Setting> },
    #[error("{setting}: {source}")]
    Problem { setting: Box<Setting>, source: ProblemError },
}

impl GridArgs {
    /// Every pair of a soft cap and a mask; masks vary fastest.
    fn scores(&self) -> Vec<(Option<f64>, Mask)> {
        let caps = self.softcap.iter().map(|&cap| Some(cap));
        let uncapped = self.softcap.is_empty().then_some(None);
        let masks = self.masks.masks();
        caps.chain(uncapped).flat_map(|cap| masks.iter().map(move |&mask| (cap, mask))).collect()
    }

    /// Every pair of a number of rows of Q and a number of keys; keys vary fastest.
    fn lengths(&self) -> impl Iterator<Item = (usize, usize)> {
        let keys = |seqlen| or_same(&self.seqlen_k, seqlen);
        self.seqlen.iter().flat_map(move |&seqlen| keys(seqlen).map(move |seqlen_k| (seqlen, seqlen_k)))
    }

    /// Every combination with its problem; sequence lengths vary fastest, then masks.
    pub(crate) fn settings(&self, dtype: Dtype) -> Result<Vec<(Setting, KnownProblem)>, GridError> {
        let (scores, mut settings) = (self.scores(), Vec::new());
        for &head_dim in &self.head_dim {
            let heads = self.heads_of(head_dim)?;
            let head_dims_v = or_same(&self.head_dim_v, head_dim);
            let parts =
                head_dims_v.flat_map(|head_dim_v| scores.iter().map(move |&score| (head_dim_v, score)));
            for (head_dim_v, (softcap, mask)) in parts {
                for (seqlen, seqlen_k) in self.lengths() {
                    let batch = self.batch.unwrap_or_else(|| (self.tokens / seqlen.max(1)).max(1));
                    let heads_kv = self.heads_kv.unwrap_or(heads);
                    let plain = Setting::plain(dtype, head_dim, mask, (batch, seqlen, heads));
                    let setting = Setting { head_dim_v, softcap, seqlen_k, heads_kv, ..plain };
                    if settings.iter().all(|(known, _)| *known != setting) {
                        settings.push((setting, setting.problem()?));
                    }
                }
            }
        }
        Ok(settings)
    }

    /// The number of query heads at this head dimension.
    fn heads_of(&self, head_dim: usize) -> Result<usize, GridError> {
        match self.heads {
            Some(heads) => Ok(heads),
            None if head_dim > 0 && self.hidden.is_multiple_of(head_dim) => Ok(self.hidden / head_dim),
            None => Err(GridError::Hidden { hidden: self.hidden, head_dim }),
        }
    }
}

impl Pass {
    /// Floating-point operations as the paper counts them: 2.5 times as many in the backward pass.
    pub(crate) fn flops(self, problem: &KnownProblem) -> f64 {
        match self {
            Pass::Forward => problem.forward_flops(),
            Pass::Backward => 2.5 * problem.forward_flops(),
        }
    }
}

impl Setting {
    /// A forward setting with as many keys as rows, one head dimension, no soft cap, and as many key/value heads as
    /// query heads.
    pub(crate) fn plain(
        dtype: Dtype,
        head_dim: usize,
        mask: Mask,
        (batch, seqlen, heads): (usize, usize, usize),
    ) -> Setting {
        let (head_dim_v, seqlen_k, heads_kv) = (head_dim, seqlen, heads);
        let (pass, softcap) = (Pass::Forward, None);
        Setting { pass, dtype, head_dim, head_dim_v, mask, softcap, seqlen, seqlen_k, batch, heads, heads_kv }
    }

    /// The problem, with contiguous tensors, checked against the row limits of the kernels.
    pub(crate) fn problem(&self) -> Result<KnownProblem, GridError> {
        let &Setting {
            pass: _,
            dtype,
            head_dim,
            head_dim_v,
            mask,
            softcap,
            seqlen,
            seqlen_k,
            batch,
            heads,
            heads_kv,
        } = self;
        if [batch, seqlen, seqlen_k, heads, head_dim, head_dim_v].contains(&0) {
            return Err(GridError::Empty { setting: Box::new(*self) });
        }
        let q = Shape { batch, seqlen, heads, head_dim };
        let kv = Shape { heads: heads_kv, seqlen: seqlen_k, ..q };
        let mut spec = ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v).mask(mask);
        spec.softcap = softcap;
        let problem = spec.known().and_then(|problem| problem.check_rows().map(|()| problem));
        problem.map_err(|source| GridError::Problem { setting: Box::new(*self), source })
    }

    /// Whether the settings differ only in their lengths.
    pub(crate) fn is_beside(&self, other: &Setting) -> bool {
        let key = |x: &Setting| (x.head_dim, x.head_dim_v, x.mask, x.softcap);
        key(self) == key(other)
    }

    /// Formats the head dimensions as 128, or as 192/128 if V's differs.
    pub(crate) fn head_dims(&self) -> String {
        let Setting { head_dim, head_dim_v, .. } = self;
        if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}/{head_dim_v}") }
    }

    /// Formats mask and soft cap, as in `causal` or `causal, softcap 30`.
    pub(crate) fn scores(&self) -> String {
        let cap = self.softcap.map_or_else(String::new, |cap| format!(", softcap {cap}"));
        format!("{}{cap}", self.mask)
    }

    /// Formats the lengths as 1k, or as 1k x 4k if the numbers of rows and keys differ.
    pub(crate) fn lengths(&self) -> String {
        let [rows, keys] = [self.seqlen, self.seqlen_k].map(size_label);
        if rows == keys { rows } else { format!("{rows} x {keys}") }
    }
}

/// The given numbers, or `same` if none are given.
fn or_same(given: &[usize], same: usize) -> impl Iterator<Item = usize> {
    given.iter().copied().chain(given.is_empty().then_some(same))
}

/// Shows the sizes that differ between the rows of a table.
impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "head_dim {}, mask {}, seqlen {}", self.head_dims(), self.scores(), self.lengths())
    }
}

pub(crate) fn text<T: ToString, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
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

    /// §4.1: 16k tokens and a hidden size of 2048, which gives 32, 16 or 8 heads.
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
            heads_kv: 2,
            ..Setting::plain(Dtype::Bf16, 96, mask, (5, seqlen, 6))
        });
        assert_eq!(settings, expected);
        assert_eq!(self::settings("--tokens 10 --seqlen 12").unwrap()[0].batch, 1);
    }

    /// Lists of K and V, and of scores, must take effect.
    #[test]
    fn every_other_list_counts() {
        let options = "--head-dim 192 --head-dim-v 128,192 --causal --softcap 30,50 --seqlen 512 \
                       --seqlen-k 1k,4k --heads 2";
        let shown: Vec<String> = settings(options).unwrap().iter().map(Setting::to_string).collect();
        let expected = ["192/128", "192"].into_iter().flat_map(|dims| ["30", "50"].map(|cap| (dims, cap)));
        let expected = expected.flat_map(|(dims, cap)| {
            ["1k", "4k"]
                .map(|keys| format!("head_dim {dims}, mask causal, softcap {cap}, seqlen 512 x {keys}"))
        });
        assert_eq!(shown, expected.collect::<Vec<_>>());
        let setting = settings(options).unwrap()[0];
        let problem = setting.problem().unwrap();
        assert_eq!((problem.head_dim_v(), problem.k().shape.seqlen), (128, 1024));
        assert_eq!(problem.softcap().map(|cap| cap.bound()), Some(30.0));
    }

    #[test]
    fn settings_that_are_none() {
        let error = |options| settings(options).unwrap_err();
        assert_eq!(error("--head-dim 96"), GridError::Hidden { hidden: 2048, head_dim: 96 });
        assert_eq!(error("--head-dim 0"), GridError::Hidden { hidden: 2048, head_dim: 0 });
        let empty =
            "there is nothing to compute with batch 16384, heads 32, head_dim 64, mask none, seqlen 0";
        assert_eq!(error("--seqlen 0").to_string(), empty);
        assert!(error("--softcap -1 --heads 2").to_string().contains("softcap -1, seqlen 512: "));
        let heads = error("--head-dim 64 --causal --seqlen 1k --heads-kv 5").to_string();
        assert_eq!(heads, "head_dim 64, mask causal, seqlen 1k: heads_q 32 is not a multiple of heads_kv 5");
        for options in ["--batch 2 --tokens 4k", "--heads 2 --hidden 128", "--window 5", "--seqlen k"] {
            let words = std::iter::once("fa3").chain(options.split_whitespace());
            assert!(Command::try_parse_from(words).is_err(), "{options}");
        }
    }
}
