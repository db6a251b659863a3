//! The choice of a problem's tile. `table.rs` has the rows.

use fa3_types::{BlockSide, Intervals, Lengths, Mask, Problem};

use super::table::TABLE;
use super::{CtaTile, Loads, Pipeline, PlanError, Precision};

/// Masks that share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskClass {
    /// [`Mask::None`].
    Dense,
    /// [`Mask::Causal`].
    Causal,
    /// [`Mask::Window`], [`Mask::Chunk`] and [`Mask::Intervals`].
    Window,
}

impl From<Mask> for MaskClass {
    fn from(mask: Mask) -> MaskClass {
        match mask {
            Mask::None => MaskClass::Dense,
            Mask::Causal => MaskClass::Causal,
            Mask::Window { .. } | Mask::Chunk { .. } | Mask::Intervals { .. } => MaskClass::Window,
        }
    }
}

/// One row of the tile table: a tile, and the problems that it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TileRow {
    /// The tile.
    pub tile: CtaTile,
    /// The masks it serves. Lists of blocks are served by any row whose tile has their blocks.
    pub masks: &'static [MaskClass],
    /// Largest number of query rows of a sequence; `None` is any number.
    pub max_rows: Option<u32>,
    /// Smallest number of keys that a sequence should have.
    pub min_seqlen_k: u32,
    /// The reason for this row.
    pub why: &'static str,
}

impl TileRow {
    /// Every row.
    pub fn table() -> &'static [TileRow] {
        TABLE
    }

    /// The table's row for `problem`: among the rows that serve it, the row whose tile pads head dimensions least.
    /// Among equal rows, the row with the smallest `max_rows`, then with the largest `min_seqlen_k`.
    ///
    /// # Errors
    /// If no tile fits, [`PlanError::Latent`] with `qv`, otherwise [`PlanError::HeadDim`].
    pub fn find(problem: &Problem) -> Result<TileRow, PlanError> {
        TABLE
            .iter()
            .map(|row| row.for_inputs(problem))
            .filter(|row| row.serves(problem))
            .min_by_key(|row| {
                let max_rows = row.max_rows.unwrap_or(u32::MAX);
                (row.tile.head_dim + row.tile.head_dim_v, max_rows, u32::MAX - row.min_seqlen_k)
            })
            .ok_or_else(|| TileRow::none(problem))
    }

    /// The error of a problem whose head dimensions are too large.
    pub(super) fn none(problem: &Problem) -> PlanError {
        let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
        if block_side(problem).is_some() {
            return PlanError::BlocksTile { head_dim, head_dim_v };
        }
        let precision = Precision::of(problem);
        let has_qv = problem.qv().is_some();
        let tiles = || TABLE.iter().map(|row| row.for_inputs(problem).tile);
        let takes = |tile: &CtaTile| tile.precision == precision && tile.qv == has_qv;
        let largest = |dim: fn(CtaTile) -> u32| tiles().filter(takes).map(dim).max().unwrap_or(0);
        let (most, most_v) = (largest(|tile| tile.head_dim), largest(|tile| tile.head_dim_v));
        if has_qv {
            return PlanError::Latent { head_dim, head_dim_v, most, most_v };
        }
        PlanError::HeadDim { head_dim, head_dim_v, precision, most, most_v }
    }

    /// This row for the inputs of a problem. All kinds of e4m3 inputs share the table's e4m3 tiles. Problems with
    /// dequantized K and V share other tiles, whether Q is e4m3 or not.
    fn for_inputs(&self, problem: &Problem) -> TileRow {
        match (self.tile.precision, Precision::of(problem)) {
            (Precision::Fp8(_), Precision::Fp8(inputs)) => {
                TileRow { tile: self.tile.of_inputs(inputs), ..*self }
            }
            (Precision::Converted { .. }, Precision::Converted { q: true }) if !self.tile.converts_rows() => {
                TileRow { tile: self.tile.of_converted_queries(), ..*self }
            }
            _ => *self,
        }
    }

    fn serves(&self, problem: &Problem) -> bool {
        let Lengths { q: rows, k: keys } = problem.longest();
        self.tile.takes(problem)
            && self.max_rows.is_none_or(|most| rows <= most as usize)
            && keys >= self.min_seqlen_k as usize
            && match block_side(problem) {
                Some(side) => divides_blocks(&self.tile, side),
                None => self.masks.contains(&problem.mask().into()),
            }
    }
}

/// The side of a block, if bits say which blocks of keys a block of rows sees.
pub(super) fn block_side(problem: &Problem) -> Option<BlockSide> {
    problem.mask().intervals().and_then(Intervals::block_side)
}

/// Whether a tile's blocks of keys are the listed ones, and all rows of the tile are in one block of rows, or each
/// warpgroup has a block of rows and passes over the blocks of keys that others see. It can where it holds no block
/// while it waits for the next one.
pub(super) fn divides_blocks(tile: &CtaTile, side: BlockSide) -> bool {
    let passes_over = tile.pipeline == Pipeline::Serial && !tile.ping_pong && side == BlockSide::Of64;
    let rows = side.rows() as u32;
    let divides = rows.is_multiple_of(tile.tile_m) || passes_over;
    tile.tile_n == rows && divides && tile.column_groups() == 1 && tile.loads == Loads::Producer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::Fp8Inputs;
    use fa3_types::{Dtype, Intervals, IntervalsOfRow, ProblemSpec, Shape, ValueLayout};
    use std::collections::HashSet;

    /// A problem of one head with these head dimensions and these numbers of rows of Q and of K.
    fn spec(dtype: Dtype, dims: (usize, usize), mask: Mask, rows: (usize, usize)) -> ProblemSpec {
        let q = Shape { batch: 1, seqlen: rows.0, heads: 1, head_dim: dims.0 };
        ProblemSpec::dense(dtype, q, Shape { seqlen: rows.1, ..q }).head_dim_v(dims.1).mask(mask)
    }

    fn find(spec: ProblemSpec) -> Result<TileRow, PlanError> {
        TileRow::find(&spec.validate().unwrap())
    }

    fn half(dims: (usize, usize), mask: Mask, rows: (usize, usize)) -> CtaTile {
        find(spec(Dtype::Bf16, dims, mask, rows)).unwrap().tile
    }

    /// Blocks of keys that this number of words lists for each block of rows.
    fn listed(words: usize) -> Mask {
        let of_row = IntervalsOfRow::Blocks { words, side: BlockSide::of_words(words).unwrap() };
        Mask::of_intervals(Intervals { of_row, per_sequence: false, per_head: false })
    }

    const WINDOW: Mask = Mask::Window { left: Some(256), right: Some(0) };
    const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, WINDOW];

    #[test]
    fn every_head_dim_has_a_tile_and_rounds_up() {
        for (mask, head_dim) in
            MASKS.into_iter().flat_map(|mask| (8..=512).step_by(8).map(move |d| (mask, d)))
        {
            let tile = half((head_dim, head_dim), mask, (4096, 4096));
            let expected = [64, 96, 128, 192, 256, 512].into_iter().find(|&d| d >= head_dim).unwrap();
            assert_eq!((tile.head_dim as usize, tile.head_dim_v as usize), (expected, expected));
        }
        for (given, expected) in [
            ((192, 128), (192, 128)),
            ((160, 120), (192, 128)),
            ((64, 256), (64, 256)),
            ((64, 128), (128, 128)),
            ((64, 512), (512, 512)),
            ((264, 64), (512, 512)),
            ((576, 512), (576, 512)),
        ] {
            let tile = half(given, Mask::Causal, (4096, 4096));
            assert_eq!((tile.head_dim, tile.head_dim_v), expected, "{given:?}");
        }
    }

    #[test]
    fn lengths_choose_among_rows() {
        for (mask, rows, dims, expected) in [
            (Mask::None, (1024, 1024), (64, 64), (192, 128)),
            (Mask::Causal, (1024, 1024), (64, 64), (128, 128)),
            (Mask::Causal, (2048, 2048), (64, 64), (192, 128)),
            (WINDOW, (2048, 2048), (64, 64), (192, 112)),
            (WINDOW, (16384, 16384), (256, 256), (128, 64)),
            (Mask::Causal, (64, 16384), (128, 128), (64, 128)),
            (Mask::Causal, (65, 4096), (128, 128), (128, 128)),
        ] {
            let tile = half(dims, mask, rows);
            assert_eq!((tile.tile_m, tile.tile_n), expected, "{rows:?} of {dims:?}");
        }
        assert_eq!([64, 65].map(|rows| half((192, 128), Mask::Causal, (rows, 4096)).tile_m), [64, 128]);
    }

    /// No two rows serve the same problems equally well, and some problem selects each row.
    #[test]
    fn every_row_is_found() {
        let mut found = HashSet::new();
        for TileRow { tile, min_seqlen_k, masks, .. } in TileRow::table() {
            let (head_dim, head_dim_v) = (tile.head_dim as usize, tile.head_dim_v as usize);
            let masks = MASKS.into_iter().chain(masks.is_empty().then(|| listed(6)));
            for (mask, rows) in masks.flat_map(|mask| [64, 128, 4096].map(|rows| (mask, rows))) {
                // There are more keys than the window, which would otherwise count as causal.
                let seqlen_k = (*min_seqlen_k).max(512) as usize;
                let of = |dtype| spec(dtype, (head_dim, head_dim_v), mask, (rows, seqlen_k));
                let spec = match tile.precision {
                    Precision::Half => of(Dtype::Bf16),
                    Precision::Converted { .. } => of(Dtype::Bf16).e4m3_keys(),
                    Precision::Fp8(_) => of(Dtype::E4m3),
                };
                let latent = spec.clone().qv(spec.o);
                let spec = if tile.qv { latent } else { spec };
                found.insert(find(spec).unwrap());
            }
        }
        let missing: Vec<_> = TileRow::table().iter().filter(|row| !found.contains(*row)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// The e4m3 inputs come from the problem in every row, and KV blocks are multiples of the scales' blocks.
    #[test]
    fn inputs_of_e4m3_share_rows() {
        for (mask, head_dim) in MASKS.into_iter().flat_map(|mask| [64, 128, 256].map(|dim| (mask, dim))) {
            let spec = || spec(Dtype::E4m3, (head_dim, head_dim), mask, (4096, 4096));
            let find = |spec: ProblemSpec| find(spec).unwrap().tile;
            let (plain, blocks) = (find(spec()), find(spec().transposed_v().block_scales(64)));
            let inputs =
                Fp8Inputs { v_layout: ValueLayout::Transposed, block_scales: true, v_channels: false };
            assert_eq!(blocks.precision, Precision::Fp8(inputs));
            assert_eq!(blocks.tile_n, if plain.tile_n == 96 { 64 } else { plain.tile_n });
            assert_eq!(find(spec().transposed_v()).tile_n, plain.tile_n);
            assert_eq!(find(spec().v_channels()).tile_n, plain.tile_n);
        }
    }

    /// e4m3 problems get the table's e4m3 tiles, at the smallest sufficient width, and other problems get none of the
    /// e4m3 tiles.
    #[test]
    fn rows_have_their_precision() {
        let dims = (16..=256)
            .step_by(16)
            .flat_map(|head_dim| [(head_dim, head_dim), (head_dim, 16), (16, head_dim)]);
        for ((head_dim, head_dim_v), mask) in dims.flat_map(|dims| MASKS.map(|mask| (dims, mask))) {
            for seqlens in [(1, 16384), (64, 1), (128, 300), (4096, 4096)] {
                let tile = |dtype| find(spec(dtype, (head_dim, head_dim_v), mask, seqlens)).unwrap().tile;
                let fp8 = tile(Dtype::E4m3);
                let wide = [64, 128, 256].into_iter().find(|&d| d >= head_dim.max(head_dim_v)).unwrap();
                assert!(fp8.precision.transposes_v());
                assert_eq!([fp8.head_dim, fp8.head_dim_v], [wide as u32; 2], "{head_dim}, {head_dim_v}");
                for dtype in [Dtype::F16, Dtype::Bf16] {
                    assert_eq!(tile(dtype).precision, Precision::Half);
                }
            }
        }
        let wider = find(spec(Dtype::E4m3, (272, 64), Mask::None, (64, 64)));
        let Err(PlanError::HeadDim { head_dim, head_dim_v, most, most_v, .. }) = wider else {
            panic!("only its head dimensions are wrong")
        };
        assert_eq!((head_dim, head_dim_v, most, most_v), (272, 64, 256, 256));
    }

    #[test]
    fn blocks_of_tiles_are_the_listed_ones() {
        let find = |words, (dims, rows): ((usize, usize), usize)| {
            find(spec(Dtype::Bf16, dims, listed(words), (rows, 4096)))
        };
        for given in [((64, 64), 1), ((64, 64), 4096), ((96, 96), 4096), ((40, 72), 100), ((192, 128), 4096)]
        {
            let tile = find(3, given).unwrap().tile;
            assert!(tile.tile_n == 128 && 128 % tile.tile_m == 0, "{given:?}: {tile}");
        }
        for (dims, head_dim) in [((64, 64), 64), ((40, 64), 64), ((96, 96), 128), ((128, 128), 128)] {
            let tile = find(6, (dims, 4096)).unwrap().tile;
            assert_eq!((tile.tile_m, tile.tile_n, tile.head_dim), (192, 64, head_dim));
            // Each warpgroup passes over the blocks of others.
            assert!(tile.pipeline == Pipeline::Serial && !tile.ping_pong && tile.stages > 1);
        }
        let wide = [(192, 192), (256, 256), (64, 256), (512, 512)];
        for (words, dims) in wide.map(|dims| (3, dims)).into_iter().chain(wide.map(|dims| (6, dims))) {
            let error = PlanError::BlocksTile { head_dim: dims.0, head_dim_v: dims.1 };
            assert_eq!(find(words, (dims, 4096)), Err(error));
        }
    }

    /// Masks of data have the bits of the mask that they say where blocks have as many keys and sums are rescaled
    /// alike: docs/masks.md lists these problems.
    #[test]
    fn masks_of_data_have_the_blocks_of_windows_and_of_some_causal_masks() {
        let form = Intervals { of_row: IntervalsOfRow::One, per_sequence: false, per_head: false };
        let blocks = |dims, mask, keys: usize, rows: usize| {
            let tile = half(dims, mask, (rows, keys));
            (tile.tile_n, tile.pipeline)
        };
        let of_data = Mask::of_intervals(form);
        for (dim, keys) in
            [64, 96, 128, 192, 256, 512].into_iter().flat_map(|dim| [1000, 9000].map(|keys| (dim, keys)))
        {
            for rows in [1, 100, 9000] {
                assert_eq!(blocks((dim, dim), of_data, keys, rows), blocks((dim, dim), WINDOW, keys, rows));
            }
            if dim <= 128 {
                assert_eq!(
                    blocks((dim, dim), of_data, keys, 128),
                    blocks((dim, dim), Mask::Causal, keys, 128)
                );
            }
        }
        let others = [(96, 1536), (96, 9000), (128, 6143), (192, 9000), (256, 768), (256, 9000), (512, 1)];
        for (dim, keys) in others {
            let [data, causal] = [of_data, Mask::Causal].map(|mask| blocks((dim, dim), mask, keys, 9000));
            assert_eq!(data, causal, "head_dim {dim}, {keys} keys");
        }
        assert_ne!(blocks((128, 128), of_data, 6144, 9000), blocks((128, 128), Mask::Causal, 6144, 9000));
    }
}
