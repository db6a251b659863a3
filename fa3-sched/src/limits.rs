//! The resources of a device.

use std::num::NonZeroU32;

const H100_SMS: NonZeroU32 = NonZeroU32::new(132).unwrap();

/// The numbers of a device that plans depend on.
///
/// ```
/// use fa3_sched::DeviceLimits;
///
/// let half = DeviceLimits::h100_sxm().sms(66.try_into()?);
/// assert_eq!((half.sms.get(), half.smem_bytes), (66, 227 * 1024));
/// # Ok::<(), std::num::TryFromIntError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLimits {
    /// Streaming multiprocessors; each holds one CTA of an attention kernel.
    pub sms: NonZeroU32,
    /// Shared memory that one CTA may use, in bytes.
    pub smem_bytes: u32,
}

impl DeviceLimits {
    /// H100 SXM5: 132 SMs, 227 KiB of shared memory for each CTA.
    pub const fn h100_sxm() -> DeviceLimits {
        DeviceLimits { sms: H100_SMS, smem_bytes: 227 << 10 }
    }

    /// The same device with this many streaming multiprocessors.
    #[must_use]
    pub const fn sms(self, sms: NonZeroU32) -> DeviceLimits {
        DeviceLimits { sms, ..self }
    }

    /// The same device with this number of bytes of shared memory for each CTA.
    #[must_use]
    pub const fn smem_bytes(self, smem_bytes: u32) -> DeviceLimits {
        DeviceLimits { smem_bytes, ..self }
    }
}
