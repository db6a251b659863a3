//! The shared-memory plan: every byte that a kernel uses, declared in one place.

/// A region of the plan: an index into [`SmemPlan::regions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region(pub u32);

/// Contents of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionKind {
    /// Plain bytes.
    Bytes,
    /// mbarriers of 8 bytes each, all initialised for `arrivals` per phase.
    Mbarriers {
        /// The arrivals that complete a phase.
        arrivals: u32,
    },
}

/// A named range of shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Its name.
    pub name: String,
    /// The offset of its first byte.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
    /// Alignment of `offset`.
    pub align: u32,
    /// Its contents.
    pub kind: RegionKind,
    /// Regions that it may share bytes with, because they are never in use at the same time.
    pub overlays: Vec<Region>,
}

impl RegionInfo {
    /// The offset behind the region's last byte.
    pub fn end(&self) -> u32 {
        self.offset.saturating_add(self.bytes)
    }
}

/// The regions of a kernel's dynamic shared memory, which is aligned to [`SmemPlan::ALIGN`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SmemPlan {
    /// The regions in order of declaration.
    pub regions: Vec<RegionInfo>,
}

impl SmemPlan {
    /// Alignment of the plan's first byte: the pattern of the 128-byte swizzle repeats after 1024 bytes.
    pub const ALIGN: u32 = 1024;
    /// The most shared memory that a CTA can have on sm_90: 227 KiB.
    pub const LIMIT: u32 = 227 * 1024;

    /// Dynamic shared memory that the kernel must be launched with.
    pub fn bytes(&self) -> u32 {
        self.regions.iter().map(RegionInfo::end).max().unwrap_or(0)
    }

    /// The region, if the plan has it.
    pub fn get(&self, region: Region) -> Option<&RegionInfo> {
        self.regions.get(region.0 as usize)
    }

    /// Places a region in the first gap that holds it, or after all others.
    pub(crate) fn append(&mut self, name: &str, bytes: u32, align: u32, kind: RegionKind) -> Region {
        let aligned = |start: u32| start.checked_next_multiple_of(align.max(1)).unwrap_or(u32::MAX);
        let free = |&start: &u32| {
            let end = start.saturating_add(bytes);
            self.regions.iter().all(|other| other.end() <= start || end <= other.offset)
        };
        let starts = self.regions.iter().map(RegionInfo::end).chain([0]).map(aligned);
        let offset = starts.filter(free).min().unwrap_or(u32::MAX);
        self.push(RegionInfo { name: name.to_owned(), offset, bytes, align, kind, overlays: Vec::new() })
    }

    /// Places a region of plain bytes where the first of `over` begins.
    pub(crate) fn overlay(&mut self, name: &str, over: &[Region], bytes: u32, align: u32) -> Region {
        let offset = over.iter().filter_map(|&region| self.get(region)).map(|info| info.offset).min();
        self.push(RegionInfo {
            name: name.to_owned(),
            offset: offset.unwrap_or(0),
            bytes,
            align,
            kind: RegionKind::Bytes,
            overlays: over.to_vec(),
        })
    }

    fn push(&mut self, info: RegionInfo) -> Region {
        self.regions.push(info);
        Region(self.regions.len() as u32 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_each_other_aligned() {
        let mut plan = SmemPlan::default();
        let full = plan.append("full", 16, 8, RegionKind::Mbarriers { arrivals: 1 });
        let q = plan.append("q", 16384, 1024, RegionKind::Bytes);
        let o = plan.overlay("o", &[q], 8192, 128);
        let offsets = [full, q, o].map(|region| plan.get(region).unwrap().offset);
        assert_eq!(offsets, [0, 1024, 1024]);
        assert_eq!(plan.bytes(), 1024 + 16384);
    }

    #[test]
    fn small_regions_fill_the_gaps_that_alignment_leaves() {
        let mut plan = SmemPlan::default();
        let appended = [(8, 8), (2048, 1024), (16, 8), (1000, 8), (1000, 8)]
            .map(|(bytes, align)| plan.append("x", bytes, align, RegionKind::Bytes));
        let offsets = appended.map(|region| plan.get(region).unwrap().offset);
        assert_eq!(offsets, [0, 1024, 8, 24, 3072]);
    }
}
