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
    /// K and V of the heads that are walked together under [`crate::Order::LongestFirst`], in bytes.
    pub section_bytes: u64,
}

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
}
