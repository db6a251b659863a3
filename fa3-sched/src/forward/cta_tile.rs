//! The tile of a forward kernel: how a CTA computes. What it takes of an SM stands in `budget.rs`.

use std::fmt;

/// Whether a warpgroup's softmax runs under its own GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overlap {
    /// QKᵀ, softmax and PV one after the other (Algorithm 1).
    None,
    /// The softmax of one block under the PV of the block before (Algorithm 2): S and P live together.
    TwoStage,
    /// The softmax of one block under the QKᵀ of the next and the PV of the block before (Algorithm 4): two S and P
    /// live together.
    ThreeStage,
}

/// Who loads Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// A warpgroup of its own (§3.1 of the paper), which takes few registers and waits for nothing but free slots.
    Producer,
    /// One thread of the consumers, besides computing: a block as soon as all of them have read the one that lies in
    /// its slot.
    Consumers,
}

/// Where PV finds its left operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PPlace {
    /// In the registers that the softmax wrote.
    Registers,
    /// In shared memory, where registers are short.
    Smem,
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

/// The tile of a forward kernel, for f16 and bf16. [`CtaTile::check`] says whether a kernel can have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CtaTile {
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
    /// Consumer warpgroups: one for 64 rows.
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
}

impl fmt::Display for PPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PPlace::Registers => "P in registers",
            PPlace::Smem => "P in shared memory",
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
        Ok(())
    }
}
