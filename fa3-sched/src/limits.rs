//! What a device offers.

use std::num::NonZeroU32;

const H100_SMS: NonZeroU32 = NonZeroU32::new(132).unwrap();

/// The numbers of a device that plans depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Streaming multiprocessors; each holds one CTA of an attention kernel.
    pub sms: NonZeroU32,
    /// Shared memory that one CTA may use, in bytes.
    pub smem_bytes: u32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
}

impl DeviceLimits {
    /// H100 SXM5: 132 SMs, 227 KiB of shared memory a CTA, 50 MiB of L2.
    pub const fn h100_sxm() -> DeviceLimits {
        DeviceLimits { sms: H100_SMS, smem_bytes: 227 << 10, l2_bytes: 50 << 20 }
    }
}
