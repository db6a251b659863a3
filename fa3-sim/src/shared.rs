//! The shared memory of a CTA.

use crate::memory::POISON;
use crate::shadow::{CELL, Shadow};

/// The start of a CTA's dynamic shared memory in its shared window: the system reserves the bytes before it.
pub(crate) const WINDOW: u32 = 1024;
/// Number of readers that are remembered for 16 bytes: every warp of a CTA and its products, and some copies.
const READERS: usize = 96;
/// The lowest of the bits in which a mapped address has the rank of its CTA, plus one.
const RANK: u32 = 24;

pub(crate) struct Shared {
    pub(crate) bytes: Vec<u8>,
    /// For each 16 bytes, a bit for each byte that is initialised.
    valid: Vec<u16>,
    pub(crate) shadow: Shadow,
    /// For each 8 bytes, whether they hold an mbarrier.
    pub(crate) mbarriers: Vec<bool>,
}

impl Shared {
    pub(crate) fn new(bytes: usize) -> Shared {
        Shared {
            bytes: vec![POISON; bytes],
            valid: vec![0; bytes.div_ceil(CELL)],
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

    /// Writes bytes, which are initialised from now on.
    pub(crate) fn write(&mut self, offset: u32, bytes: &[u8]) {
        let start = offset as usize;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        self.mark(offset, bytes.len() as u32, true);
    }

    /// Marks bytes as initialised, or as not initialised.
    pub(crate) fn mark(&mut self, offset: u32, bytes: u32, valid: bool) {
        for (cell, mask) in cells(offset, bytes) {
            if valid {
                self.valid[cell] |= mask;
            } else {
                self.valid[cell] &= !mask;
            }
        }
    }

    pub(crate) fn is_valid(&self, offset: u32, bytes: u32) -> bool {
        cells(offset, bytes).all(|(cell, mask)| self.valid[cell] & mask == mask)
    }

    pub(crate) fn holds_mbarrier(&self, offset: u32, bytes: u32) -> bool {
        let (first, last) = (offset as usize / 8, (offset + bytes.max(1) - 1) as usize / 8);
        self.mbarriers.get(first..=last).is_some_and(|mbarriers| mbarriers.contains(&true))
    }
}

/// The cells in which the bytes lie, each with the bytes within it.
fn cells(offset: u32, bytes: u32) -> impl Iterator<Item = (usize, u16)> {
    let (start, end) = (offset as usize, offset as usize + bytes as usize);
    (start / CELL..end.div_ceil(CELL)).map(move |cell| {
        let (first, last) = (start.max(cell * CELL), end.min((cell + 1) * CELL));
        let mask = ((1u32 << (last - first)) - 1) << (first % CELL);
        (cell, mask as u16)
    })
}

/// Splits an address of the cluster's window into a rank, if the address is mapped, and the offset in the CTA's dynamic
/// shared memory. There is no offset for an address before this memory.
pub(crate) fn split(address: u32) -> (Option<u32>, Option<u32>) {
    let rank = (address >> RANK).checked_sub(1);
    (rank, (address & ((1 << RANK) - 1)).checked_sub(WINDOW))
}

/// The address in CTA `rank` of the cluster that corresponds to `address`.
pub(crate) fn map(address: u32, rank: u32) -> u32 {
    (address & ((1 << RANK) - 1)) | (rank + 1) << RANK
}
