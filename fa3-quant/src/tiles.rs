//! Results, and the loop over sequences, heads and rows that computes them.

use std::ops::Range;

use fa3_types::{Dim, Feature, Known, KnownProblem, Lengths, SequenceRows, TensorDesc, TensorName};
use ndarray::{Array3, Array4};
use rayon::prelude::*;

use crate::head::{head, head_mut};
use crate::{QuantError, Quantized, Row};

/// Results of FP8 attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Output (batch, seqlen_q, heads_q, head_dim_v). It is 0 for a row with no visible key and for rows outside every
    /// sequence.
    pub o: Array4<f32>,
    /// Natural log-sum-exp (batch, heads_q, seqlen_q), batch 1 for packed sequences. It is -inf for a row with no
    /// visible key and for rows outside every sequence.
    pub lse: Array3<f32>,
}

/// Number of query rows that share a pass over the keys, so that a block of keys is read from memory once for all of
/// them.
const TILE_ROWS: usize = 32;

/// Some query rows of one head.
pub(crate) struct QueryTile {
    pub(crate) sequence: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) len: Lengths,
}

impl QueryTile {
    /// The codes of query row `row` and their scale.
    pub(crate) fn query(&self, q: &Quantized, row: usize) -> (Row, f32) {
        let (batch, first) = q.sequences().start(self.sequence);
        let rows = head(q.codes().view(), batch, self.head);
        (Row::new(rows.row(first + row).iter().copied()), q.scale(self.sequence, self.head, row))
    }
}

/// Results of a tile: O and LSE of each row.
pub(crate) struct TileOutput {
    pub(crate) o: Vec<Vec<f32>>,
    pub(crate) lse: Vec<f32>,
}

/// Prepares the keys and values of every key/value head, runs `tile` for all query rows that read them and stores the
/// results.
pub(crate) fn forward_tiles<G: Sync>(
    problem: &KnownProblem,
    prepare: impl Fn(usize, usize) -> G,
    tile: impl Fn(&G, &QueryTile) -> TileOutput + Sync,
) -> Output {
    let heads = problem.heads();
    let mut o = Array4::zeros(problem.o().shape.dims());
    let mut lse = Array3::from_elem(problem.lse_shape(), f32::NEG_INFINITY);
    for (sequence, head_kv) in (0..problem.batch()).flat_map(|i| (0..heads.kv()).map(move |head| (i, head))) {
        let prepared = prepare(sequence, head_kv);
        let tiles = tiles(problem, sequence, head_kv);
        let outputs: Vec<TileOutput> = tiles.par_iter().map(|t| tile(&prepared, t)).collect();
        let (batch, first) = problem.rows_q().start(sequence);
        for (tile, output) in tiles.iter().zip(outputs) {
            let mut target = head_mut(o.view_mut(), batch, tile.head);
            for ((row, o), row_lse) in tile.rows.clone().zip(output.o).zip(output.lse) {
                target.row_mut(first + row).iter_mut().zip(o).for_each(|(to, from)| *to = from);
                lse[[batch, tile.head, first + row]] = row_lse;
            }
        }
    }
    Output { o, lse }
}

/// All query rows that read key/value head `head_kv` of a sequence.
fn tiles(problem: &KnownProblem, sequence: usize, head_kv: usize) -> Vec<QueryTile> {
    let len = problem.lengths(sequence);
    let group = problem.heads().group_size();
    let heads = head_kv * group..(head_kv + 1) * group;
    let firsts = |head| (0..len.q).step_by(TILE_ROWS).map(move |first| (head, first));
    let tile = |(head, first): (usize, usize)| QueryTile {
        sequence,
        head,
        rows: first..len.q.min(first + TILE_ROWS),
        len,
    };
    heads.flat_map(firsts).map(tile).collect()
}

/// The features that emulated kernels compute. Sinks are added to their results.
const KNOWN: Known = Known::new(
    "the emulation of 8 bits",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::SoftCap,
        Feature::Sinks,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::BlockScales,
        Feature::VChannels,
        Feature::TransposedV,
        Feature::Packed,
        Feature::Used,
    ],
);

/// Checks that Q, K and V are the tensors of the problem. Dtypes and strides of the problem do not apply to them.
pub(crate) fn check(
    problem: &KnownProblem,
    q: &Quantized,
    k: &Quantized,
    v: &Quantized,
) -> Result<(), QuantError> {
    let expect = |tensor: TensorName, given: &Quantized, desc: &TensorDesc, seqs: &SequenceRows| {
        let (batch, seqlen, heads, head_dim) = given.codes().dim();
        let extents = [batch, seqlen, heads, head_dim].into_iter().zip(desc.shape.dims());
        for (dim, (given, expected)) in
            [Dim::Batch, Dim::Seqlen, Dim::Heads, Dim::HeadDim].into_iter().zip(extents)
        {
            if given != expected {
                return Err(QuantError::DimMismatch { tensor, dim, given, expected });
            }
        }
        let rows = |seqs: &SequenceRows, index| (seqs.start(index), seqs.len(index));
        let same = |index| rows(given.sequences(), index) == rows(seqs, index);
        let agree = given.sequences().count() == seqs.count() && (0..seqs.count()).all(same);
        if agree { Ok(()) } else { Err(QuantError::Sequences { tensor }) }
    };
    KNOWN.check(problem)?;
    expect(TensorName::Q, q, problem.q(), problem.rows_q())?;
    expect(TensorName::K, k, problem.k(), problem.rows_k())?;
    expect(TensorName::V, v, problem.v(), problem.rows_k())
}
