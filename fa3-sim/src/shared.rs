//! The shared memory of a CTA.

use crate::memory::POISON;
use crate::shadow::Shadow;

/// Where a CTA's dynamic shared memory begins in its shared window: the system keeps what is before.
pub(crate) const WINDOW: u32 = 1024;
/// Readers that 16 bytes remember: every warp of a CTA and its products, and some copies.
const READERS: usize = 96;
/// Bit where a mapped address has the rank of its CTA, plus one.
const RANK: u32 = 24;

pub(crate) struct Shared {
    pub(crate) bytes: Vec<u8>,
    pub(crate) valid: Vec<bool>,
    pub(crate) shadow: Shadow,
    /// Of each 8 bytes, whether an mbarrier lives there.
    pub(crate) mbarriers: Vec<bool>,
}

impl Shared {
    pub(crate) fn new(bytes: usize) -> Shared {
        Shared {
            bytes: vec![POISON; bytes],
            valid: vec![false; bytes],
            shadow: Shadow::new(bytes, READERS),
            mbarriers: vec![false; bytes.div_ceil(8)],
        }
    }

    pub(crate) fn contains(&self, offset: u32, bytes: u32) -> bool {
        offset as usize + bytes as usize <= self.bytes.len()
    }

    pub(crate) fn read(&self, offset: u32, bytes: u32) -> &[u8] {
        &self.bytes[offset as usize..offset as usize + bytes as usize]
    }

    /// Writes what is now initialised.
    pub(crate) fn write(&mut self, offset: u32, bytes: &[u8]) {
        let start = offset as usize;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        self.valid[start..start + bytes.len()].fill(true);
    }

    pub(crate) fn is_valid(&self, offset: u32, bytes: u32) -> bool {
        self.valid[offset as usize..offset as usize + bytes as usize].iter().all(|&valid| valid)
    }

    pub(crate) fn holds_mbarrier(&self, offset: u32, bytes: u32) -> bool {
        let (first, last) = (offset as usize / 8, (offset + bytes.max(1) - 1) as usize / 8);
        self.mbarriers.get(first..=last).is_some_and(|mbarriers| mbarriers.contains(&true))
    }
}

/// An address of the cluster's window: a rank, if it is a mapped one, and the offset in the CTA's dynamic shared
/// memory, if it is not before it.
pub(crate) fn split(address: u32) -> (Option<u32>, Option<u32>) {
    let rank = (address >> RANK).checked_sub(1);
    (rank, (address & ((1 << RANK) - 1)).checked_sub(WINDOW))
}

/// The address of the same place in the shared memory of a CTA of the cluster.
pub(crate) fn map(address: u32, rank: u32) -> u32 {
    (address & ((1 << RANK) - 1)) | (rank + 1) << RANK
}
