//! The tile of a forward kernel: all that its code depends on. What it takes of an SM stands in `budget.rs`.

use std::fmt;

use fa3_types::Dtype;

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
    pub(crate) fn of(dtype: Dtype) -> Option<Inputs> {
        match dtype {
            Dtype::F32 => None,
            Dtype::F16 | Dtype::Bf16 => Some(Inputs::Bits16),
            Dtype::E4m3 => Some(Inputs::E4m3),
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
    /// The softmax of one block under the QKᵀ of the next and the PV of the block before (Algorithm 4): two S and P live
    /// together.
    ThreeStage,
}

/// Who loads Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// A warpgroup of its own (§3.1 of the paper), which takes few registers and waits for nothing but free slots.
    Producer,
    /// One thread of the consumers, besides computing: a block as soon as all of them have read the one that lies in its slot.
    Consumers,
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

/// When the softmax computes row maxima, to which exponentials are relative, and rescales O to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rescale {
    /// For every block of keys, as in the paper: O is multiplied in every block.
    EveryBlock,
    /// For the first block, and where exponentials relative to an older maximum have become large. The others save the
    /// comparisons and the multiplication of O, and round P under another power of 2 at most.
    Lazy,
}

/// The tile of a forward kernel. Tiles that are equal have the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CtaTile {
    /// The input types it serves.
    pub inputs: Inputs,
    /// The largest head dimension of Q and K it serves. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O it serves.
    pub head_dim_v: u32,
    /// Query rows a tile, M.
    pub tile_m: u32,
    /// Keys a block, N.
    pub tile_n: u32,
    /// K and V blocks in flight.
    pub stages: u32,
    /// Consumer warpgroups. More than tile_m / 64 of them share the columns of O.
    pub consumers: u32,
    /// Who loads what they compute with.
    pub loads: Loads,
    /// Softmax under GEMM within a warpgroup.
    pub overlap: Overlap,
    /// When O is rescaled.
    pub rescale: Rescale,
    /// Where P lies.
    pub p_place: PPlace,
    /// Warpgroups take turns on the tensor cores (§3.1 of the paper), each one's softmax under the other's
    /// GEMMs.
    pub ping_pong: bool,
    /// Columns of O that are accumulated at a time in registers of their own and then added to O in fp32; 0
    /// if the tensor core accumulates O itself. The 8-bit tensor core keeps about 13 fraction bits of a sum,
    /// which loses whole percents of O over a few thousand keys.
    pub promoted_columns: u32,
}

impl fmt::Display for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Inputs::Bits16 => "f16 and bf16",
            Inputs::E4m3 => "e4m3",
        })
    }
}

impl fmt::Display for PPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PPlace::Registers => "P in registers",
            PPlace::Smem => "P in shared memory",
            PPlace::Both => "P in registers and shared memory",
        })
    }
}

impl fmt::Display for CtaTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {} stages, {}", self.tile_m, self.tile_n, self.stages, self.p_place)?;
        match self.overlap {
            Overlap::None => {}
            Overlap::TwoStage => write!(f, ", softmax under GEMM")?,
            Overlap::ThreeStage => write!(f, ", softmax under two GEMMs")?,
        }
        if self.rescale == Rescale::Lazy {
            write!(f, ", lazy rescaling")?;
        }
        if self.loads == Loads::Consumers {
            write!(f, ", no producer")?;
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
