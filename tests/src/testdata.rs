//! The chosen cases: `testdata/*.toml`.

use fa3_types::{Dtype, KnownProblem, Mask, ProblemError, ProblemSpec, SequenceRows, Shape, TensorDesc};
use serde::Deserialize;

use crate::fwd::with_qv;
use crate::reshape::extent;
use crate::{Case, Dist, Poison};

/// Environment variable that selects one chosen case by name.
pub const FILTER: &str = "FA3_CASE";

/// A `[[case]]` of a file. The head of `forward.toml` explains the fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    dtype: String,
    #[serde(default = "one")]
    batch: usize,
    seqlen_q: Option<usize>,
    seqlen_k: Option<usize>,
    cu_seqlens_q: Option<Vec<i32>>,
    cu_seqlens_k: Option<Vec<i32>>,
    #[serde(default)]
    spare_rows: usize,
    seqused_q: Option<Vec<i32>>,
    seqused_k: Option<Vec<i32>>,
    #[serde(default = "one")]
    heads: usize,
    heads_kv: Option<usize>,
    head_dim: usize,
    head_dim_v: Option<usize>,
    #[serde(default)]
    qv: bool,
    #[serde(default)]
    causal: bool,
    window: Option<[i64; 2]>,
    #[serde(default)]
    chunk: i64,
    scale: Option<f64>,
    softcap: Option<f64>,
    #[serde(default)]
    sink: bool,
    #[serde(default = "normal")]
    values: Dist,
    #[serde(default)]
    poison: Poison,
    #[serde(default = "first_seed")]
    seed: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    case: Vec<Entry>,
}

fn one() -> usize {
    1
}

fn normal() -> Dist {
    Dist::Normal
}

fn first_seed() -> u64 {
    1
}

/// Loads the cases of a file in `testdata`, followed by the cases of `regressions.toml`.
///
/// # Panics
/// If a file cannot be read or parsed, or a case is not a valid problem. The message names it.
pub fn load(file: &str) -> Vec<Case> {
    [file, "regressions.toml"].into_iter().flat_map(read).collect()
}

/// Loads cases as [`load`] does. If the environment variable [`FILTER`] is set, loads only the case that it names.
///
/// # Panics
/// See [`load`].
pub fn chosen(file: &str) -> Vec<Case> {
    let cases = filter(load(file), std::env::var(FILTER).ok().as_deref());
    assert!(!cases.is_empty(), "no case of {file} has the name that {FILTER} gives");
    cases
}

fn filter(cases: Vec<Case>, name: Option<&str>) -> Vec<Case> {
    cases.into_iter().filter(|case| name.is_none_or(|name| case.name == name)).collect()
}

fn read(file: &str) -> Vec<Case> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Case>, toml::de::Error> {
    let file: File = toml::from_str(text)?;
    let case = |entry: Entry| {
        let problem = entry.problem().unwrap_or_else(|e| panic!("case {}: {e}", entry.name));
        let Entry { name, values, poison, seed, .. } = entry;
        Case { name, problem, dist: values, poison, seed }
    };
    Ok(file.case.into_iter().map(case).collect())
}

impl Entry {
    fn problem(&self) -> Result<KnownProblem, ProblemError> {
        let rows_q = self.sequences(self.seqlen_q, &self.cu_seqlens_q, &self.seqused_q)?;
        let rows_k = self.sequences(self.seqlen_k.or(self.seqlen_q), &self.cu_seqlens_k, &self.seqused_k)?;
        let heads_kv = self.heads_kv.unwrap_or(self.heads);
        let head_dim_v = self.head_dim_v.unwrap_or(self.head_dim);
        let dtype = self.dtype();
        let tensor = |dtype, sequences: &SequenceRows, heads, head_dim| {
            let (batch, rows) = extent(sequences);
            let seqlen = rows + if sequences.is_packed() { self.spare_rows } else { 0 };
            TensorDesc::contiguous(dtype, Shape { batch, seqlen, heads, head_dim })
        };
        let mut spec = ProblemSpec::new(
            tensor(dtype, &rows_q, self.heads, self.head_dim),
            tensor(dtype, &rows_k, heads_kv, self.head_dim),
            tensor(dtype, &rows_k, heads_kv, head_dim_v),
            tensor(dtype.default_output(), &rows_q, self.heads, head_dim_v),
        );
        spec = if self.qv { with_qv(spec) } else { spec };
        spec = spec.mask(self.mask()?);
        (spec.softmax_scale, spec.softcap, spec.sink) = (self.scale, self.softcap, self.sink);
        spec.with_rows(rows_q, rows_k)
    }

    fn sequences(
        &self,
        seqlen: Option<usize>,
        cu_seqlens: &Option<Vec<i32>>,
        used: &Option<Vec<i32>>,
    ) -> Result<SequenceRows, ProblemError> {
        let sequences = match (cu_seqlens, seqlen) {
            (Some(cu_seqlens), _) => SequenceRows::packed(cu_seqlens)?,
            (None, Some(seqlen)) => SequenceRows::dense(self.batch, seqlen),
            (None, None) => panic!("case {} has neither seqlen nor cu_seqlens", self.name),
        };
        used.as_ref().map_or(Ok(sequences.clone()), |used| sequences.with_used(used))
    }

    fn mask(&self) -> Result<Mask, ProblemError> {
        let window = match (self.causal, self.window) {
            (false, None) => Mask::None,
            (true, None) => Mask::Causal,
            (false, Some([left, right])) => Mask::from_window(left, right)?,
            (true, Some(_)) => panic!("case {} has both causal and window", self.name),
        };
        window.and(Mask::from_chunk(self.chunk)?)
    }

    fn dtype(&self) -> Dtype {
        self.dtype
            .parse()
            .unwrap_or_else(|error| panic!("case {} has dtype {:?}: {error}", self.name, self.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_fit_a_shell() {
        for file in ["forward.toml", "backward.toml", "facade.toml"] {
            let mut seen = HashSet::new();
            for Case { name, .. } in load(file) {
                assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'), "{name:?}");
                assert!(seen.insert(name.clone()), "{file} has two cases {name}");
            }
        }
    }

    #[test]
    fn a_filter_leaves_one_case() {
        let names = |filter_by| filter(load("forward.toml"), filter_by).into_iter().map(|case| case.name);
        assert_eq!(names(Some("one-query")).collect::<Vec<_>>(), ["one-query"]);
        assert!(names(None).len() > 50 && names(Some("no such case")).len() == 0);
    }

    #[test]
    fn a_misspelt_field_is_an_error() {
        let text = "[[case]]\nname = 'x'\ndtype = 'f16'\nseqlen_q = 4\nhead_dim = 8\ncasual = true\n";
        assert!(parse(text).unwrap_err().to_string().contains("casual"));
    }

    #[test]
    fn every_field_arrives() {
        let text = "[[case]]\nname = 'x'\ndtype = 'bf16'\ncu_seqlens_q = [0, 4, 9]\nseqlen_k = 7\nbatch = 2
            spare_rows = 3\nseqused_k = [7, 2]\nheads = 4\nheads_kv = 2\nhead_dim = 8\nhead_dim_v = 16\nqv = true
            window = [3, 0]\nchunk = 6\nscale = 0.5\nsoftcap = 2.0\nvalues = 'one_hot'\npoison = { key_row = 1 }\nseed = 9";
        let case = parse(text).unwrap().pop().unwrap();
        let problem = &case.problem;
        assert_eq!(problem.q().shape, Shape { batch: 1, seqlen: 12, heads: 4, head_dim: 8 });
        assert_eq!(problem.v().shape, Shape { batch: 2, seqlen: 7, heads: 2, head_dim: 16 });
        assert_eq!(problem.lengths(1), fa3_types::Lengths { q: 5, k: 2 });
        assert_eq!(problem.qv().map(|qv| qv.shape), Some(problem.o().shape));
        assert_eq!(problem.mask().to_string(), "window(3,0) chunks(6)");
        assert_eq!(problem.softmax_scale().natural(), 0.5);
        assert_eq!(problem.softcap().map(|cap| cap.bound()), Some(2.0));
        assert_eq!(
            (problem.dtype(), case.dist, case.poison, case.seed),
            (Dtype::Bf16, Dist::OneHot, Poison::KeyRow(1), 9)
        );
    }
}
