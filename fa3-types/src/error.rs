//! The reasons why a problem is rejected, with the numbers.

use std::num::NonZeroU32;

use crate::names::names;
use crate::score::Number;
use crate::{Dtype, Feature, Granularity, Mask, Shape};

names! {
    /// A tensor of the attention call, as errors name it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum TensorName {
        /// Queries.
        Q = "q",
        /// Keys.
        K = "k",
        /// Values.
        V = "v",
        /// The part of the queries that is multiplied by V (latent attention).
        Qv = "qv",
        /// Output.
        O = "o",
        /// Log-sum-exp.
        Lse = "lse",
        /// The gradient of the output.
        DOut = "dout",
        /// The gradient of the log-sum-exp.
        DLse = "dlse",
        /// The gradient of the queries.
        DQ = "dq",
        /// The gradient of the keys.
        DK = "dk",
        /// The gradient of the values.
        DV = "dv",
        /// The attention sinks: a logit for each query head, in the softmax's denominator.
        Sink = "sink",
        /// The gradient of the sinks.
        DSink = "dsink",
        /// The tensor to quantize.
        X = "x",
        /// Its e4m3 codes.
        Codes = "codes",
        /// Cosines of rotary embedding.
        Cos = "cos",
        /// Partial results of O.
        OutPartial = "out_partial",
        /// Partial results of LSE.
        LsePartial = "lse_partial",
        /// New keys, for a cache.
        KNew = "k_new",
        /// New values, for a cache.
        VNew = "v_new",
        /// The keys of a cache.
        KCache = "k_cache",
        /// The values of a cache.
        VCache = "v_cache",
        /// The keys of a second cache.
        ExtraK = "extra_k",
        /// The values of a second cache.
        ExtraV = "extra_v",
        /// Scales of the rows of K.
        KScales = "k_scales",
        /// Scales of the rows of V.
        VScales = "v_scales",
    }
}

names! {
    /// A dimension of a tensor, as errors name it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Dim {
        /// Splits of the keys.
        Splits = "num_splits",
        /// The batch.
        Batch = "batch",
        /// Rows: sequence positions, or all rows of a packed tensor.
        Seqlen = "seqlen",
        /// Heads.
        Heads = "heads",
        /// The head dimension.
        HeadDim = "head_dim",
    }
}

/// Everything that [`crate::Problem::new`] and the constructors of its parts reject. One sentence each, with the
/// offending numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum ProblemError {
    #[error("{tensor} has {dim} 0")]
    ZeroDim { tensor: TensorName, dim: Dim },
    #[error("{tensor} has {dim} {given}, more than {limit}")]
    DimTooLarge { tensor: TensorName, dim: Dim, given: usize, limit: usize },
    #[error("{tensor} has {dim} {given}, expected {expected}")]
    DimMismatch { tensor: TensorName, dim: Dim, given: usize, expected: usize },
    #[error("{tensor} is {given}, expected {expected} like q")]
    DtypeMismatch { tensor: TensorName, given: Dtype, expected: Dtype },
    #[error("k is {k} and v is {v}, expected both of one type, or v of e4m3 beside q and k of bf16")]
    KeysAndValues { k: Dtype, v: Dtype },
    #[error("o cannot be {given} when q is {input}")]
    OutputDtype { given: Dtype, input: Dtype },
    #[error("qv takes f32, f16 or bf16, not {given}")]
    LatentDtype { given: Dtype },
    #[error("q has head_dim {head_dim} and qv {head_dim_v}, together more than {limit}")]
    LatentHeadDim { head_dim: usize, head_dim_v: usize, limit: usize },
    #[error("there are no gradients of attention with {feature}")]
    NoGradients { feature: Feature },
    #[error("transposed v is e4m3 in dense batches, not {dtype}{}", if *packed { " of packed sequences" } else { "" })]
    TransposedV { dtype: Dtype, packed: bool },
    #[error(
        "transposed v has stride {given} in {dim}, expected {expected}: its strides are those of a contiguous tensor"
    )]
    TransposedStride { dim: Dim, given: i64, expected: i64 },
    #[error(
        "block scales take e4m3, dense or packed, and channel scales e4m3, dense, not {dtype}{}{}",
        if *packed { ", packed" } else { "" }, if *cache { ", in a cache" } else { "" }
    )]
    FineScales { dtype: Dtype, packed: bool, cache: bool },
    #[error(
        "scales belong to heads, or to 64 or 128 rows of q and 128 of k and v, with channels for v alone; not to a \
         {q}, a {k} and a {v}"
    )]
    Granularity { q: Granularity, k: Granularity, v: Granularity },
    #[error("{tensor} of shape {shape} has 2^32 or more blocks of {rows} rows with scales")]
    TooManyScales { tensor: TensorName, shape: Shape, rows: usize },
    #[error("heads_q {heads_q} is not a multiple of heads_kv {heads_kv}")]
    HeadsNotDivisible { heads_q: usize, heads_kv: usize },
    #[error("{tensor} has head_dim {given}, not a multiple of {multiple} as {dtype} needs (16-byte rows)")]
    HeadDimMultiple { tensor: TensorName, given: usize, multiple: usize, dtype: Dtype },
    #[error("{tensor} has stride {given} in head_dim, expected 1")]
    HeadDimStride { tensor: TensorName, given: i64 },
    #[error("{tensor} has stride {given} in {dim}, which is negative")]
    NegativeStride { tensor: TensorName, dim: Dim, given: i64 },
    #[error("{tensor} has stride {given} in {dim}, not a multiple of {multiple} elements (16 bytes)")]
    StrideMultiple { tensor: TensorName, dim: Dim, given: i64, multiple: usize },
    #[error("{tensor} has stride {given} in {dim}, not below {limit} elements (2^40 bytes)")]
    StrideTooLarge { tensor: TensorName, dim: Dim, given: i64, limit: i64 },
    #[error("output {tensor} has stride {given} in {dim}, where {needed} or more keeps its rows apart")]
    OutputOverlapsItself { tensor: TensorName, dim: Dim, given: i64, needed: i64 },
    #[error("{tensor} of shape {shape} spans 2^63 bytes or more")]
    TooLarge { tensor: TensorName, shape: Shape },
    #[error("{tensor} of {splits} parts of shape {shape} spans 2^63 bytes or more")]
    TooManyParts { tensor: TensorName, splits: usize, shape: Shape },
    #[error("the number of sequences is {q} in q and {k} in k")]
    SequenceCount { q: usize, k: usize },
    #[error("the rows belong to other sequences than {tensor}'s")]
    OtherSequences { tensor: TensorName },
    #[error("the lengths of {tensor}'s sequences are data, in cu_seqlens, seqused, leftpad or page_table")]
    UnknownLengths { tensor: TensorName },
    #[error("q has pages or leftpad, which only k and v may have")]
    CachedQueries,
    #[error("k is packed, and packed sequences have no leftpad")]
    PackedLeftpad,
    #[error("a sequence of {pages} pages of {rows} rows is longer than {limit} rows")]
    PagesTooMany { pages: usize, rows: usize, limit: usize },
    #[error("the page table has {entries} entries from its first to its last, expected up to {limit}")]
    TableTooLarge { entries: usize, limit: usize },
    #[error("cu_seqlens is empty; it needs batch + 1 entries")]
    CuSeqlensEmpty,
    #[error("cu_seqlens starts at {given}, not at 0")]
    CuSeqlensStart { given: i32 },
    #[error("cu_seqlens falls from {from} to {to} at entry {index}")]
    CuSeqlensFalls { index: usize, from: i32, to: i32 },
    #[error("cu_seqlens ends at {given}, past the {rows} rows of {tensor}")]
    CuSeqlensEnd { tensor: TensorName, given: usize, rows: usize },
    #[error("seqused has {given} entries for {sequences} sequences")]
    SequsedCount { given: usize, sequences: usize },
    #[error("seqused is {given} for sequence {index}, outside 0 to {capacity}")]
    SequsedRange { index: usize, given: i32, capacity: usize },
    #[error("window size {given} is outside -1 to 2^32 - 1")]
    WindowSize { given: i64 },
    #[error("attention_chunk {given} is outside 0 to 2^32 - 1")]
    AttentionChunk { given: i64 },
    #[error("chunks of {one} keys and of {other} keys cannot be combined")]
    Chunks { one: NonZeroU32, other: NonZeroU32 },
    #[error("intervals have shape {given:?}, expected ({batch} or 1, {heads} or 1, {rows}, 2 or 4)")]
    IntervalsShape { given: [usize; 4], batch: usize, heads: usize, rows: usize },
    #[error("causal has {given} numbers, expected one for each of {sequences} sequences")]
    CausalCount { given: usize, sequences: usize },
    #[error("there are {given} bounds of intervals, expected {expected}")]
    IntervalsCount { given: usize, expected: usize },
    #[error("the bounds of intervals are data")]
    UnknownIntervals,
    #[error("the numbers and tables of a function of scores are data")]
    UnknownScore,
    #[error("bounds of intervals are given beside the mask {mask}, which has none")]
    NoIntervals { mask: Mask },
    #[error("two masks of intervals are given, whose intersection is no mask")]
    IntervalsTwice,
    #[error("intervals take f32, f16 or bf16, not {given}")]
    IntervalsDtype { given: Dtype },
    #[error("blocks of keys are listed for dense sequences, and not for packed ones")]
    BlocksPacked,
    #[error("intervals and qv exclude each other")]
    IntervalsLatent,
    #[error(
        "a list of {tensor} has {entries} entries, or that many from a list to the next, expected up to {limit}"
    )]
    ListTooLong { tensor: TensorName, entries: usize, limit: usize },
    #[error("lists name rows of {tensor} by 31 bits, and it has {rows}")]
    ListedRows { tensor: TensorName, rows: usize },
    #[error("lists of keys exclude masks, and the mask {mask} is given")]
    ListsAndMask { mask: Mask },
    #[error(
        "scales of tokens and heads belong to k and v of e4m3 or int8 beside q of 16 bits, not to k of {k} beside q of {q}{}{}",
        if *qv { " with qv" } else { "" }, if *lists { " in lists of keys" } else { "" }
    )]
    TokenScales { q: Dtype, k: Dtype, qv: bool, lists: bool },
    #[error(
        "only k and v may be int8, both of them beside q of 16 bits and with scales of tokens and heads: q is {q}, k {k} \
         and v {v}, {} such scales", if *token_scales { "with" } else { "without" }
    )]
    Int8 { q: Dtype, k: Dtype, v: Dtype, token_scales: bool },
    #[error("{tensor} is {given}, expected f32")]
    ScaleDtype { tensor: TensorName, given: Dtype },
    #[error("{tensor} is {given}, expected {expected} like the first cache")]
    ExtraDtype { tensor: TensorName, given: Dtype, expected: Dtype },
    #[error(
        "two caches take lists for each sequence, of {given} sequences in the second and {expected} in the first"
    )]
    ExtraLists { given: usize, expected: usize },
    #[error("softmax scale {} is outside 1e-18 to 1e18", Number(*given))]
    SoftmaxScale { given: f64 },
    #[error("soft cap {} is outside 1e-18 to 1e18", Number(*given))]
    SoftCap { given: f64 },
}
