//! New keys and values for a cache, with rotary embedding of the new keys and of queries: the problem, validated.

use std::fmt;

use crate::problem::check_sequences;
use crate::rotary::ROTARY_MULTIPLE;
use crate::{Dtype, Mask, ProblemError, RopeStyle, Sequences, Shape, TensorDesc, TensorName, setters};

/// New rows of keys and values, and the cache that they are appended to.
///
/// `seqused_k` has the rows that each sequence of the cache holds before, left padding included. New row t of sequence
/// i becomes row `seqused_k[i]` + t of the sequence's memory. Rows without a place there are dropped: beyond the
/// sequence's capacity, on a page that the cache does not have, or in a sequence with a negative length.
#[derive(Clone, Copy, Debug)]
pub struct AppendedRows {
    /// New keys (batch, seqlen_new, heads_kv, head_dim): f16 or bf16; e4m3 if the cache is e4m3; f32 on the CPU.
    pub k_new: TensorDesc,
    /// New values (batch, seqlen_new, heads_kv, head_dim_v).
    pub v_new: TensorDesc,
    /// The sequences of new rows: dense, or packed by `cu_seqlens_k_new`.
    pub new: Sequences,
    /// Keys of the cache (entries, rows, heads_kv, head_dim): of the type of the new rows, or e4m3 (see
    /// [`AppendProblem::quantizes`]). No two elements overlap.
    pub k_cache: TensorDesc,
    /// Values of the cache (entries, rows, heads_kv, head_dim_v).
    pub v_cache: TensorDesc,
    /// The sequences of the cache: dense or in pages, with `seqused`. Left padding does not matter here.
    pub cache: Sequences,
}

/// Queries, and the tensor of rotated queries, which is contiguous and has the same shape.
#[derive(Clone, Copy, Debug)]
pub struct RotatedQueries {
    /// Queries (batch, seqlen_q, heads_q, head_dim), f16 or bf16, or f32 on the CPU.
    pub q: TensorDesc,
    /// The sequences of the queries: dense, or packed by `cu_seqlens_q`. Rows beyond `seqused_q` are rotated as well;
    /// rows of a packed tensor behind its last sequence are copied without rotation.
    pub sequences: Sequences,
    /// The positions of a sequence's rows.
    pub positions: QueryPositions,
}

/// The positions of a sequence's queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueryPositions {
    /// Row t is at the first row's position plus t.
    Each,
    /// All rows are at the first row's position.
    First,
}

impl QueryPositions {
    /// The positions for a mask: one for all queries if the mask depends on no position.
    pub fn under(mask: Mask) -> QueryPositions {
        let is_none = mask.reach() == (None, None) && mask.intervals().is_none();
        if is_none { QueryPositions::First } else { QueryPositions::Each }
    }
}

/// The position of the first new row and of the first query of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SequenceBase {
    /// The number of rows that the sequence has before the append: `seqused_k`, left padding included.
    Used,
    /// An entry of the i32 array `rotary_seqlens` (sequences).
    Listed,
}

/// A rotation of the pairs of the leading `rotary_dim` entries of new keys and of queries, by cosines and sines from
/// two tables.
///
/// Positions are clamped to the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AppendRotary {
    /// The pairing of entries.
    pub style: RopeStyle,
    /// The number of leading entries of a row that rotate: a positive multiple of 16, at most head_dim.
    pub rotary_dim: usize,
    /// Type of the tables: f32, or the type of the tensors.
    pub table: Dtype,
    /// Rows of the tables (table_rows, rotary_dim / 2), contiguous. Row p is position p.
    pub table_rows: usize,
    /// The position of each sequence's first row.
    pub base: SequenceBase,
}

/// A caller's request, not yet checked: plain data that [`AppendProblem::new`] takes.
///
/// ```text
/// k_cache[i][seqused_k[i] + t] = rotate(k_new[i][t], base[i] + t)        v_cache[i][seqused_k[i] + t] = v_new[i][t]
/// q_rotated[i][t] = rotate(q[i][t], base[i] + t)                         or, for all rows, at base[i]
/// ```
///
/// `base[i]` is the position of sequence i's first new row and first query ([`SequenceBase`]). An element of an e4m3
/// cache is the code nearest to the 16-bit element divided by its head's scale, ties to even, saturating at ±448.
///
/// ```
/// use fa3_types::{AppendSpec, AppendedRows, Dtype, Sequences, Shape, TensorDesc};
///
/// // One new row for each of 4 sequences, of up to 8 pages of 16 rows each.
/// let new = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 4, seqlen: 1, heads: 2, head_dim: 128 });
/// let cache = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 100, seqlen: 16, heads: 2, head_dim: 128 });
/// let rows = AppendedRows {
///     k_new: new,
///     v_new: new,
///     new: Sequences::dense(4, 1),
///     k_cache: cache,
///     v_cache: cache,
///     cache: Sequences::paged(4, 8).used(),
/// };
/// let problem = AppendSpec::new(rows).validate()?;
/// assert_eq!((problem.count(), problem.capacity()), (4, 128));
/// # Ok::<(), fa3_types::AppendProblemError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct AppendSpec {
    /// New keys and values, if any.
    pub rows: Option<AppendedRows>,
    /// Queries to rotate, if any.
    pub queries: Option<RotatedQueries>,
    /// The rotation, if any.
    pub rotary: Option<AppendRotary>,
}

impl AppendSpec {
    /// Appends new keys and values without a rotation.
    pub fn new(rows: AppendedRows) -> AppendSpec {
        AppendSpec { rows: Some(rows), queries: None, rotary: None }
    }

    /// Rotates queries alone.
    pub fn of_queries(queries: RotatedQueries, rotary: AppendRotary) -> AppendSpec {
        AppendSpec { rows: None, queries: Some(queries), rotary: Some(rotary) }
    }

    setters! {
        /// Rotates the new keys.
        rotary(rotary: AppendRotary) { rotary: Some(rotary) }

        /// Rotates these queries, too.
        queries(queries: RotatedQueries) { queries: Some(queries) }
    }

    /// Calls [`AppendProblem::new`].
    ///
    /// # Errors
    /// [`AppendProblemError`].
    pub fn validate(self) -> Result<AppendProblem, AppendProblemError> {
        AppendProblem::new(self)
    }
}

/// Everything that [`AppendProblem::new`] rejects. One sentence each, with the offending numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum AppendProblemError {
    #[error(transparent)]
    Tensor(#[from] ProblemError),
    #[error("there are neither new rows nor queries")]
    Nothing,
    #[error("{tensor} is {given} beside a cache of e4m3, expected f16, bf16 or e4m3")]
    Dtype { tensor: TensorName, given: Dtype },
    #[error("{tensor} is {given}, expected {expected}: all tensors except a cache of e4m3 have one type")]
    DtypeMismatch { tensor: TensorName, given: Dtype, expected: Dtype },
    #[error("k_new and v_new have seqused, pages or leftpad, expected whole sequences, dense or packed")]
    NewRows,
    #[error("the cache is packed; it is dense or in pages")]
    PackedCache,
    #[error("the rows of the cache are listed, and rows are appended behind rows in use")]
    ListedCache,
    #[error(
        "no rows are appended to a cache with scales of tokens and heads: write the rows and their scales before"
    )]
    TokenScales,
    #[error("seqused_k must say how many rows of the cache are in use, to which others are appended")]
    Unused,
    #[error("{tensor} has {given} sequences, the cache has {expected}")]
    Count { tensor: TensorName, given: usize, expected: usize },
    #[error("queries are given without a rotation")]
    QueriesWithoutRotary,
    #[error("rows of {given} cannot be rotated, expected f16, bf16 or f32")]
    RotatedDtype { given: Dtype },
    #[error("rotary_dim {given} is not a positive multiple of {ROTARY_MULTIPLE} up to head_dim {head_dim}")]
    RotaryDim { given: usize, head_dim: usize },
    #[error("cosines and sines are {given}, expected f32 or {expected}")]
    TableDtype { given: Dtype, expected: Dtype },
    #[error("the tables of cosines and sines have {given} rows, expected 1 to {limit}")]
    TableRows { given: usize, limit: usize },
}

/// An append that can be computed: shapes agree, strides are usable. Later layers check none of this again. Lengths and
/// pages are data, and may have any values.
#[derive(Clone, Copy, Debug)]
pub struct AppendProblem {
    spec: AppendSpec,
    dtype: Dtype,
    count: usize,
}

impl AppendProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: see [`AppendProblemError`].
    pub fn new(spec: AppendSpec) -> Result<AppendProblem, AppendProblemError> {
        let AppendSpec { rows, queries, rotary } = spec;
        if let Some(rows) = &rows {
            rows.check()?;
        }
        let rotated = rows.map(|rows| rows.k_new).or(queries.map(|queries| queries.q));
        if let (Some(_), Some(TensorDesc { dtype: given @ (Dtype::E4m3 | Dtype::Int8), .. })) =
            (&rotary, rotated)
        {
            return Err(AppendProblemError::RotatedDtype { given });
        }
        if let Some(queries) = &queries {
            queries.check(rows.as_ref())?;
        }
        let keys = rows.map(|rows| (rows.k_new, rows.cache));
        let Some((rotated, sequences)) = keys.or(queries.map(|queries| (queries.q, queries.sequences)))
        else {
            return Err(AppendProblemError::Nothing);
        };
        match (&rotary, &queries) {
            (Some(rotary), _) => rotary.check(&rotated)?,
            (None, Some(_)) => return Err(AppendProblemError::QueriesWithoutRotary),
            (None, None) => {}
        }
        let rows = rows.map(AppendedRows::canonical);
        let queries = queries.map(|queries| RotatedQueries { q: queries.q.canonical(), ..queries });
        let (dtype, count) = (rotated.dtype, sequences.count());
        Ok(AppendProblem { spec: AppendSpec { rows, queries, rotary }, dtype, count })
    }

    /// New keys and values, and the cache.
    pub fn rows(&self) -> Option<&AppendedRows> {
        self.spec.rows.as_ref()
    }

    /// Queries to rotate.
    pub fn queries(&self) -> Option<&RotatedQueries> {
        self.spec.queries.as_ref()
    }

    /// The rotated queries: contiguous, of the shape of the queries.
    pub fn q_rotated(&self) -> Option<TensorDesc> {
        self.queries().map(|queries| TensorDesc::contiguous(queries.q.dtype, queries.q.shape))
    }

    /// The rotation, if any.
    pub fn rotary(&self) -> Option<AppendRotary> {
        self.spec.rotary
    }

    /// Whether new rows of 16 bits go to a cache of e4m3.
    pub fn quantizes(&self) -> bool {
        self.rows().is_some_and(|rows| rows.k_cache.dtype != rows.k_new.dtype)
    }

    /// Shape of the scales of keys, and of values, where new rows are quantized: (sequences, heads_kv).
    pub fn descale_shape(&self) -> Option<[usize; 2]> {
        self.rows().filter(|_| self.quantizes()).map(|rows| [self.count, rows.k_cache.shape.heads])
    }

    /// Element type of all tensors except the tables and a cache that [`AppendProblem::quantizes`].
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of sequences.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number of rows that a sequence of the cache can have; 0 without a cache.
    pub fn capacity(&self) -> usize {
        self.rows().map_or(0, |rows| rows.cache.capacity(rows.k_cache.shape.seqlen))
    }

    /// Whether `seqused_k` is read.
    pub fn reads_used(&self) -> bool {
        self.rows().is_some() || self.rotary().is_some_and(|rotary| rotary.base == SequenceBase::Used)
    }
}

impl AppendedRows {
    /// The tensors by their names, keys before values.
    fn tensors(&self) -> [(TensorName, &TensorDesc); 4] {
        [
            (TensorName::KNew, &self.k_new),
            (TensorName::VNew, &self.v_new),
            (TensorName::KCache, &self.k_cache),
            (TensorName::VCache, &self.v_cache),
        ]
    }

    fn check(&self) -> Result<(), AppendProblemError> {
        let of_new = self.k_new.dtype;
        if of_new == Dtype::Int8 || of_new == Dtype::F32 && self.k_cache.dtype == Dtype::E4m3 {
            return Err(AppendProblemError::Dtype { tensor: TensorName::KNew, given: of_new });
        }
        let of_cache = if self.k_cache.dtype == Dtype::E4m3 { Dtype::E4m3 } else { of_new };
        let expected = [of_new, of_new, of_cache, of_cache];
        for ((tensor, desc), expected) in self.tensors().into_iter().zip(expected) {
            check_tensor(tensor, desc, expected)?;
        }
        let [new, cache] = [self.k_new.shape, self.k_cache.shape];
        let of_v = self.v_new.shape.head_dim;
        self.v_new.shape.check(TensorName::VNew, Shape { head_dim: of_v, ..new })?;
        cache.check(TensorName::KCache, Shape { batch: cache.batch, seqlen: cache.seqlen, ..new })?;
        let expected = Shape { head_dim: of_v, heads: new.heads, ..cache };
        self.v_cache.shape.check(TensorName::VCache, expected)?;
        if self.new.has_used() || self.new.is_cache() {
            return Err(AppendProblemError::NewRows);
        }
        check_sequences(TensorName::KNew, &self.k_new, self.new)?;
        if self.cache.is_packed() {
            return Err(AppendProblemError::PackedCache);
        }
        if self.cache.list().is_some() {
            return Err(AppendProblemError::ListedCache);
        }
        if !self.cache.has_used() {
            return Err(AppendProblemError::Unused);
        }
        check_sequences(TensorName::KCache, &self.k_cache, self.cache)?;
        check_count(TensorName::KNew, self.new, self.cache)?;
        self.k_cache.check_distinct(TensorName::KCache)?;
        Ok(self.v_cache.check_distinct(TensorName::VCache)?)
    }

    fn canonical(self) -> AppendedRows {
        let [k_new, v_new, k_cache, v_cache] =
            [self.k_new, self.v_new, self.k_cache, self.v_cache].map(TensorDesc::canonical);
        AppendedRows { k_new, v_new, k_cache, v_cache, ..self }
    }
}

impl RotatedQueries {
    fn check(&self, rows: Option<&AppendedRows>) -> Result<(), AppendProblemError> {
        let (tensor, shape) = (TensorName::Q, self.q.shape);
        check_tensor(tensor, &self.q, rows.map_or(self.q.dtype, |rows| rows.k_new.dtype))?;
        check_sequences(tensor, &self.q, self.sequences)?;
        if let Some(rows) = rows {
            shape.check(tensor, Shape { head_dim: rows.k_new.shape.head_dim, ..shape })?;
            check_count(tensor, self.sequences, rows.cache)?;
        }
        Ok(())
    }
}

impl AppendRotary {
    fn check(&self, rotated: &TensorDesc) -> Result<(), AppendProblemError> {
        let (given, head_dim) = (self.rotary_dim, rotated.shape.head_dim);
        if given == 0 || !given.is_multiple_of(ROTARY_MULTIPLE) || given > head_dim {
            return Err(AppendProblemError::RotaryDim { given, head_dim });
        }
        let (given, expected) = (self.table, rotated.dtype);
        if given != Dtype::F32 && given != expected {
            return Err(AppendProblemError::TableDtype { given, expected });
        }
        let (given, limit) = (self.table_rows, i32::MAX as usize);
        if given == 0 || given > limit {
            return Err(AppendProblemError::TableRows { given, limit });
        }
        Ok(())
    }
}

/// Checks that a tensor has elements of type `expected` and rows of whole 16 bytes.
fn check_tensor(tensor: TensorName, desc: &TensorDesc, expected: Dtype) -> Result<(), AppendProblemError> {
    let given = desc.dtype;
    if given != expected {
        return Err(AppendProblemError::DtypeMismatch { tensor, given, expected });
    }
    desc.check(tensor)?;
    Ok(desc.check_rows(tensor)?)
}

fn check_count(tensor: TensorName, given: Sequences, cache: Sequences) -> Result<(), AppendProblemError> {
    match (given.count(), cache.count()) {
        (given, expected) if given != expected => Err(AppendProblemError::Count { tensor, given, expected }),
        _ => Ok(()),
    }
}

impl fmt::Display for AppendProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = |sequences: Sequences| if sequences.is_packed() { "packed " } else { "" };
        let mut parts = Vec::new();
        if let Some(AppendedRows { k_new, v_new, new, k_cache, v_cache: _, cache }) = self.rows() {
            let (shape, rows) = (k_new.shape, k_cache.shape.seqlen);
            let values = match v_new.shape.head_dim {
                head_dim if head_dim == shape.head_dim => String::new(),
                head_dim => format!(" and {head_dim}"),
            };
            let pages = match cache.pages() {
                Some(pages) if cache.has_index() => format!("{pages} pages of {rows} rows, indexed"),
                Some(pages) => format!("{pages} pages of {rows} rows"),
                None => format!("{rows} rows"),
            };
            let of_cache = if self.quantizes() { " of e4m3" } else { "" };
            parts.push(format!("{}{shape}{values} to sequences of {pages}{of_cache}", form(*new)));
        }
        if let Some(RotatedQueries { q, sequences, positions }) = self.queries() {
            let at = match positions {
                QueryPositions::Each => "",
                QueryPositions::First => " at one position",
            };
            parts.push(format!("q {}{}{at}", form(*sequences), q.shape));
        }
        if let Some(AppendRotary { style, rotary_dim, table, table_rows: _, base: _ }) = self.rotary() {
            parts.push(format!("{style} rotary embedding of {rotary_dim} by {table}"));
        }
        write!(f, "{} {}", self.dtype(), parts.join(", "))
    }
}

#[cfg(test)]
mod tests;
