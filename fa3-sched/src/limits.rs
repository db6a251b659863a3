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
    /// Measured on this device under a causal mask at head_dim 128 and 256 and seqlen 4096 to 16384: 16 and
    /// 32 MiB are 2 to 12 % slower (each section has a tail), 128 MiB is up to 12 % slower (L2 misses) and at
    /// best 1 % faster.
    pub const fn h100_sxm() -> Limits {
        Limits { sms: H100_SMS, smem_bytes: 227 << 10, l2_bytes: 50 << 20, section_bytes: 64 << 20 }
    }
}
