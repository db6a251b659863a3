//! What a device offers.

use std::num::NonZeroU32;

const H100_SMS: NonZeroU32 = NonZeroU32::new(132).unwrap();

/// The numbers of a device that plans depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Streaming multiprocessors; each holds one CTA of an attention kernel.
    pub sms: NonZeroU32,
    /// Shared memory that one CTA may use, in bytes.
    pub smem_bytes: u32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
    /// K and V of the heads that are walked together under [`crate::Order::LongestFirst`], in bytes, where sequences are
    /// long: see [`Limits::section_bytes`].
    pub section_bytes: u64,
}

/// Sequences of at most as many keys are short.
const SHORT: u32 = 1024;

impl Limits {
    /// H100 SXM5: 132 SMs, 227 KiB of shared memory a CTA, 50 MiB of L2.
    ///
    /// Sections of 64 MiB, although L2 is smaller: only a section's first tiles read its whole K and V.
    /// Measured on this device under a causal mask, in TFLOP/s:
    ///
    /// ```text
    /// head_dim  seqlen   16 MiB   32-48   64   128
    ///      128    4096      611     600  622   550
    ///      128   16384      641     657  669   671
    ///      256   16384      642     690  727   731
    /// ```
    ///
    /// Smaller sections lose by the tail of the last one, larger ones by L2 misses, more where sequences are
    /// short. (At head_dim 256 and seqlen 8192, 32 to 48 MiB reached 653 and 128 MiB 711; 64 was not measured.)
    pub const fn h100_sxm() -> Limits {
        Limits { sms: H100_SMS, smem_bytes: 227 << 10, l2_bytes: 50 << 20, section_bytes: 64 << 20 }
    }

    /// K and V of the heads that are walked together, for sequences of at most `keys` keys: a quarter where they are short.
    /// Each section then has hundreds of tiles all the same, and its K and V stay in L2 beside Q and O. Measured on an H100
    /// under a causal mask, the forward kernel's time as that of FlashAttention-3's divided by it:
    ///
    /// ```text
    /// head_dim  seqlen   8 MiB    16    32    64
    ///      128     512    1.23  1.21  1.04  0.84
    ///      128    1024    1.06  1.06  0.95  0.76
    ///      128    2048    0.89  0.90  0.92  0.96
    ///      256    1024    0.88  0.94  0.93  0.88
    ///      256    4096    0.80  0.82  0.93  1.02
    /// ```
    pub fn section_bytes(&self, keys: u32) -> u64 {
        if keys <= SHORT { self.section_bytes / 4 } else { self.section_bytes }
    }
}
