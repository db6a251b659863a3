//! How a problem finds its tile. The rows stand in `table.rs`.

use std::fmt;

use fa3_types::{Dtype, Mask, Problem};

use crate::table::TABLE;
use crate::{CtaTile, Inputs, PlanError};

/// Masks that share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskClass {
    /// [`Mask::None`].
    Dense,
    /// [`Mask::Causal`].
    Causal,
    /// [`Mask::Window`].
    Window,
}

impl fmt::Display for MaskClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MaskClass::Dense => "none",
            MaskClass::Causal => "causal",
            MaskClass::Window => "window",
        })
    }
}

impl From<Mask> for MaskClass {
    fn from(mask: Mask) -> MaskClass {
        match mask {
            Mask::None => MaskClass::Dense,
            Mask::Causal => MaskClass::Causal,
            Mask::Window { .. } => MaskClass::Window,
        }
    }
}

/// One row of the tile table: a tile, and the problems it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileRow {
    /// The tile.
    pub shape: CtaTile,
    /// The masks it serves.
    pub masks: &'static [MaskClass],
    /// The most query rows (packed rows, if query heads are packed) a head may have; `None` is any number.
    pub max_rows: Option<u32>,
    /// The fewest keys a sequence should have.
    pub min_seqlen_k: u32,
    /// Why this row is as it is.
    pub why: &'static str,
}

/// What a tile is looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileQuery {
    /// Element type of Q, K and V.
    pub dtype: Dtype,
    /// Head dimension of Q and K.
    pub head_dim: usize,
    /// Head dimension of V and O.
    pub head_dim_v: usize,
    /// The mask.
    pub mask: Mask,
    /// Query rows of the longest sequence; times the group size if query heads are packed.
    pub rows: usize,
    /// Keys of the longest sequence.
    pub seqlen_k: usize,
}

impl TileQuery {
    /// The query of `problem`, with query heads packed or not.
    pub fn new(problem: &Problem, packed: bool) -> TileQuery {
        let group = if packed { problem.heads().group_size() } else { 1 };
        TileQuery {
            dtype: problem.dtype(),
            head_dim: problem.head_dim(),
            head_dim_v: problem.head_dim_v(),
            mask: problem.mask(),
            rows: problem.seqs_q().max_len().saturating_mul(group),
            seqlen_k: problem.seqs_k().max_len(),
        }
    }
}

impl TileRow {
    /// Every row.
    pub fn table() -> &'static [TileRow] {
        TABLE
    }

    /// The row for `query`: of those that serve it, the one with the least padding of head dimensions, then
    /// the most particular one (fewest rows, most keys).
    ///
    /// # Errors
    /// [`PlanError::Dtype`] for f32, which only the CPU computes; [`PlanError::HeadDim`] where no tile fits.
    pub fn find(query: TileQuery) -> Result<&'static TileRow, PlanError> {
        let TileQuery { dtype, head_dim, head_dim_v, .. } = query;
        let inputs = Inputs::of(dtype).ok_or(PlanError::Dtype { dtype })?;
        TABLE
            .iter()
            .filter(|row| row.shape.inputs == inputs && row.serves(query))
            .min_by_key(|row| {
                let max_rows = row.max_rows.unwrap_or(u32::MAX);
                (row.shape.head_dim + row.shape.head_dim_v, max_rows, u32::MAX - row.min_seqlen_k)
            })
            .ok_or(PlanError::HeadDim { dtype, head_dim, head_dim_v })
    }

    fn serves(&self, query: TileQuery) -> bool {
        query.head_dim <= self.shape.head_dim as usize
            && query.head_dim_v <= self.shape.head_dim_v as usize
            && self.max_rows.is_none_or(|most| query.rows <= most as usize)
            && query.seqlen_k >= self.min_seqlen_k as usize
            && self.masks.contains(&query.mask.into())
    }

    /// Whether the row computes `query` at all, well or not.
    pub(crate) fn admits(&self, query: &TileQuery) -> Result<(), PlanError> {
        let TileQuery { dtype, head_dim, head_dim_v, .. } = *query;
        let CtaTile { inputs, head_dim: most, head_dim_v: most_v, .. } = self.shape;
        let fits = head_dim <= most as usize && head_dim_v <= most_v as usize;
        match Inputs::of(dtype) {
            None => Err(PlanError::Dtype { dtype }),
            Some(given) if given == inputs && fits => Ok(()),
            Some(_) => Err(PlanError::Row { inputs, most, most_v, dtype, head_dim, head_dim_v }),
        }
    }
}

impl fmt::Display for TileRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CtaTile { inputs, head_dim, head_dim_v, .. } = self.shape;
        let masks: Vec<String> = self.masks.iter().map(MaskClass::to_string).collect();
        write!(f, "{inputs} head_dim {head_dim}/{head_dim_v} mask {}", masks.join("/"))?;
        if let Some(rows) = self.max_rows {
            write!(f, " up to {rows} rows")?;
        }
        if self.min_seqlen_k > 0 {
            write!(f, " from {} keys", self.min_seqlen_k)?;
        }
        write!(f, ": {}", self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn find(dtype: Dtype, head_dim: usize, head_dim_v: usize, mask: Mask) -> Result<TileRow, PlanError> {
        TileRow::find(TileQuery { dtype, head_dim, head_dim_v, mask, rows: 4096, seqlen_k: 4096 }).copied()
    }

    const WINDOW: Mask = Mask::Window { left: Some(256), right: Some(0) };
    const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, WINDOW];

    #[test]
    fn every_head_dim_has_a_tile_and_rounds_up() {
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::E4m3] {
            for mask in MASKS {
                for head_dim in (1..=256).filter(|d| d % dtype.row_multiple() == 0) {
                    let row = find(dtype, head_dim, head_dim, mask).unwrap();
                    let expected = [64, 96, 128, 192, 256].into_iter().find(|&d| d >= head_dim).unwrap();
                    assert_eq!(
                        (row.shape.head_dim as usize, row.shape.head_dim_v as usize),
                        (expected, expected)
                    );
                }
            }
        }
        let dims = |d, dv| {
            find(Dtype::Bf16, d, dv, Mask::Causal).map(|row| (row.shape.head_dim, row.shape.head_dim_v))
        };
        assert_eq!(dims(192, 128), Ok((192, 128)));
        assert_eq!(dims(160, 120), Ok((192, 128)));
        assert_eq!(dims(64, 256), Ok((64, 256)));
        assert_eq!(dims(64, 128), Ok((128, 128)));
        assert_eq!(dims(64, 512), Ok((64, 512)));
        let latent = PlanError::HeadDim { dtype: Dtype::Bf16, head_dim: 576, head_dim_v: 512 };
        assert_eq!(dims(576, 512), Err(latent));
    }

    #[test]
    fn f32_has_no_tile() {
        let error = find(Dtype::F32, 64, 64, Mask::None).unwrap_err();
        assert_eq!(error, PlanError::Dtype { dtype: Dtype::F32 });
        assert_eq!(
            error.to_string(),
            "no kernel takes f32: Hopper's tensor cores multiply f16, bf16 and e4m3"
        );
    }

    #[test]
    fn lengths_choose_among_rows() {
        let query = |mask, rows, seqlen_k, head_dim| {
            let dtype = Dtype::Bf16;
            let query = TileQuery { dtype, head_dim, head_dim_v: head_dim, mask, rows, seqlen_k };
            TileRow::find(query).map(|row| (row.shape.tile_m, row.shape.tile_n)).unwrap()
        };
        assert_eq!(query(Mask::None, 1024, 1024, 64), (192, 128));
        assert_eq!(query(Mask::Causal, 1024, 1024, 64), (128, 128));
        assert_eq!(query(Mask::Causal, 2048, 2048, 64), (192, 128));
        assert_eq!(query(WINDOW, 2048, 2048, 64), (192, 112));
        assert_eq!(query(WINDOW, 16384, 16384, 256), (128, 64));
        assert_eq!(query(Mask::Causal, 64, 16384, 128), (64, 128));
        assert_eq!(query(Mask::Causal, 65, 4096, 128), (128, 128));
        for (dtype, head_dim, head_dim_v) in
            [(Dtype::Bf16, 192, 128), (Dtype::E4m3, 128, 128), (Dtype::E4m3, 256, 256)]
        {
            let query =
                TileQuery { dtype, head_dim, head_dim_v, mask: Mask::Causal, rows: 64, seqlen_k: 4096 };
            assert_eq!(TileRow::find(query).map(|row| row.shape.tile_m), Ok(64));
            let query = TileQuery { rows: 65, ..query };
            assert_eq!(TileRow::find(query).map(|row| row.shape.tile_m), Ok(128));
        }
    }

    #[test]
    fn a_row_names_what_it_serves() {
        let row = |query: &dyn Fn(&TileRow) -> bool| {
            TileRow::table().iter().find(|&row| query(row)).unwrap().to_string()
        };
        assert_eq!(
            row(&|row| row.min_seqlen_k == 1536),
            "f16 and bf16 head_dim 64/64 mask causal from 1536 keys: \
             192 x 128, 3 stages, P in registers, softmax under GEMM, rescale when needed, ping-pong"
        );
        assert_eq!(
            row(&|row| row.shape.inputs == Inputs::E4m3 && row.max_rows.is_some()),
            "e4m3 head_dim 64/64 mask none/causal/window up to 64 rows: \
             64 x 128, 2 stages, P in registers, softmax under GEMM, fp32 sums by 64 columns"
        );
    }

    /// No two rows serve the same problems equally well, and each row is found by some query.
    #[test]
    fn every_row_is_found() {
        let mut found = HashSet::new();
        for row in TileRow::table() {
            let dtype = if row.shape.inputs == Inputs::E4m3 { Dtype::E4m3 } else { Dtype::F16 };
            for mask in MASKS {
                for rows in [64, 128, 4096] {
                    let (head_dim, head_dim_v) = (row.shape.head_dim as usize, row.shape.head_dim_v as usize);
                    let seqlen_k = row.min_seqlen_k as usize;
                    let query = TileQuery { dtype, head_dim, head_dim_v, mask, rows, seqlen_k };
                    found.insert(TileRow::find(query).unwrap());
                }
            }
        }
        assert_eq!(found.len(), TileRow::table().len());
    }
}
