//! The tile of a forward kernel, and how it is looked up. What it takes of an SM stands in `budget.rs`, the
//! rows in `table.rs`.

use std::fmt;

use fa3_types::{Dtype, Mask, Problem};

use crate::PlanError;
use crate::table::TABLE;

/// Input types that share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Inputs {
    /// f16 and bf16.
    Bits16,
    /// e4m3. V is transposed in shared memory, because 8-bit tensor cores read it K-major only.
    E4m3,
}

impl Inputs {
    /// `None` for f32, which only the CPU computes.
    fn of(dtype: Dtype) -> Option<Inputs> {
        match dtype {
            Dtype::F32 => None,
            Dtype::F16 | Dtype::Bf16 => Some(Inputs::Bits16),
            Dtype::E4m3 => Some(Inputs::E4m3),
        }
    }
}

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

impl From<Mask> for MaskClass {
    fn from(mask: Mask) -> MaskClass {
        match mask {
            Mask::None => MaskClass::Dense,
            Mask::Causal => MaskClass::Causal,
            Mask::Window { .. } => MaskClass::Window,
        }
    }
}

/// Whether a warpgroup's softmax runs under its own GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overlap {
    /// QKᵀ, softmax and PV one after the other (Algorithm 1).
    None,
    /// The softmax of one block under the PV of the block before (Algorithm 2): S and P live together.
    TwoStage,
}

/// Where PV finds its left operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PPlace {
    /// In the registers that the softmax wrote.
    Registers,
    /// In shared memory, where registers are short.
    Smem,
    /// In registers of the warpgroup that computed it and in shared memory for the one that did not.
    Both,
}

/// One row of the tile table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileRow {
    /// The input types it serves.
    pub inputs: Inputs,
    /// The largest head dimension of Q and K it serves. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O it serves.
    pub head_dim_v: u32,
    /// The masks it serves.
    pub masks: &'static [MaskClass],
    /// The most query rows (packed rows, if query heads are packed) a head may have; `None` is any number.
    pub max_rows: Option<u32>,
    /// The fewest keys a sequence should have.
    pub min_seqlen_k: u32,
    /// Query rows a tile, M.
    pub tile_m: u32,
    /// Keys a block, N.
    pub tile_n: u32,
    /// K and V blocks in flight.
    pub stages: u32,
    /// Consumer warpgroups. More than tile_m / 64 of them share the columns of O.
    pub consumers: u32,
    /// Softmax under GEMM within a warpgroup.
    pub overlap: Overlap,
    /// Where P lies.
    pub p_place: PPlace,
    /// Warpgroups take turns on the tensor cores (§3.1 of the paper), each one's softmax under the other's
    /// GEMMs.
    pub ping_pong: bool,
    /// Columns of O that are accumulated at a time in registers of their own and then added to O in fp32; 0
    /// if the tensor core accumulates O itself. The 8-bit tensor core keeps about 13 fraction bits of a sum,
    /// which loses whole percents of O over a few thousand keys.
    pub promoted_columns: u32,
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
            .filter(|row| row.inputs == inputs && row.serves(query))
            .min_by_key(|row| {
                let max_rows = row.max_rows.unwrap_or(u32::MAX);
                (row.head_dim + row.head_dim_v, max_rows, u32::MAX - row.min_seqlen_k)
            })
            .ok_or(PlanError::HeadDim { dtype, head_dim, head_dim_v })
    }

    fn serves(&self, query: TileQuery) -> bool {
        query.head_dim <= self.head_dim as usize
            && query.head_dim_v <= self.head_dim_v as usize
            && self.max_rows.is_none_or(|most| query.rows <= most as usize)
            && query.seqlen_k >= self.min_seqlen_k as usize
            && self.masks.contains(&query.mask.into())
    }

    /// Whether the row computes `query` at all, well or not.
    pub(crate) fn admits(&self, query: &TileQuery) -> Result<(), PlanError> {
        let TileQuery { dtype, head_dim, head_dim_v, .. } = *query;
        let fits = head_dim <= self.head_dim as usize && head_dim_v <= self.head_dim_v as usize;
        match Inputs::of(dtype) {
            None => Err(PlanError::Dtype { dtype }),
            Some(inputs) if inputs == self.inputs && fits => Ok(()),
            Some(_) => Err(PlanError::HeadDim { dtype, head_dim, head_dim_v }),
        }
    }
}

impl fmt::Display for TileRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p_place = match self.p_place {
            PPlace::Registers => "P in registers",
            PPlace::Smem => "P in shared memory",
            PPlace::Both => "P in registers and shared memory",
        };
        write!(f, "{} x {}, {} stages, {p_place}", self.tile_m, self.tile_n, self.stages)?;
        if self.overlap == Overlap::TwoStage {
            write!(f, ", softmax under GEMM")?;
        }
        if self.ping_pong {
            write!(f, ", ping-pong")?;
        }
        match self.promoted_columns {
            0 => Ok(()),
            columns => write!(f, ", fp32 sums by {columns} columns"),
        }
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
                    assert_eq!((row.head_dim as usize, row.head_dim_v as usize), (expected, expected));
                }
            }
        }
        let dims = |d, dv| find(Dtype::Bf16, d, dv, Mask::Causal).map(|row| (row.head_dim, row.head_dim_v));
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
            TileRow::find(query).map(|row| (row.tile_m, row.tile_n)).unwrap()
        };
        assert_eq!(query(Mask::None, 4096, 4096, 128), (128, 176));
        assert_eq!(query(Mask::Causal, 4096, 4096, 128), (128, 128));
        assert_eq!(query(Mask::Causal, 8192, 8192, 128), (128, 176));
        assert_eq!(query(Mask::Causal, 1024, 1024, 256), (128, 64));
        assert_eq!(query(Mask::Causal, 2048, 2048, 256), (128, 80));
        assert_eq!(query(WINDOW, 16384, 16384, 256), (128, 64));
        assert_eq!(query(Mask::Causal, 64, 16384, 128), (64, 128));
        assert_eq!(query(Mask::Causal, 65, 4096, 128), (128, 128));
    }

    /// No two rows serve the same problems equally well, and each row is found by some query.
    #[test]
    fn every_row_is_found() {
        let mut found = HashSet::new();
        for row in TileRow::table() {
            let dtype = if row.inputs == Inputs::E4m3 { Dtype::E4m3 } else { Dtype::F16 };
            for mask in MASKS {
                for rows in [64, 4096] {
                    let (head_dim, head_dim_v) = (row.head_dim as usize, row.head_dim_v as usize);
                    let seqlen_k = row.min_seqlen_k as usize;
                    let query = TileQuery { dtype, head_dim, head_dim_v, mask, rows, seqlen_k };
                    found.insert(TileRow::find(query).unwrap());
                }
            }
        }
        assert_eq!(found.len(), TileRow::table().len());
    }
}
