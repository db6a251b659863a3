//! Mutants of backward kernels that do what the kernel does, and why.

use crate::mutate::{Argued, LAST_TURN, TURNS};

/// Mutants of the kernel of the statistics.
pub(super) const STATS: &[Argued] = &[
    Argued {
        operator: "bound: and gives the second",
        most: 4,
        reason: "all lanes of a row have its sum, and store the same numbers",
    },
    Argued { operator: "bound: one less", most: 1, reason: ONE_SECTION },
];

/// Mutants of this one if it clears rows of dQ.
pub(super) const CLEARED: &[Argued] = &[Argued {
    operator: "bound: one more",
    most: 1,
    reason: "in the block after the rows that no tile visits, each row is compared with their number again",
}];

/// Mutants of the kernel that rounds sums.
pub(super) const ROUND: &[Argued] = &[Argued { operator: "bound: one less", most: 1, reason: ONE_SECTION }];

const ONE_SECTION: &str = "heads are in one section: there is none before the last";

/// Mutants of the kernel of dsink.
pub(super) const SINK: &[Argued] = &[];

/// Mutants of the dQ kernel.
pub(super) const DQ: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 3, reason: DQ_FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 3, reason: DQ_FENCES },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 1,
        reason: "the slot of a tile's last K is loaded again after Q's, which is given back after that wait",
    },
    Argued {
        operator: "empty wait: after the first load",
        most: 1,
        reason: "dO has been read when Q's slot, which was waited for before, is given back",
    },
];

const DQ_FENCES: &str =
    "S and dP are in flight together: the fence of the first, or of dQ before it, is for both";

/// Mutants of consumers that share out the gradients.
pub(super) const DIVIDED: &[Argued] = &[
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 2,
        reason: "between dP and its wait, only the slot of weights is given back, which dP does not read",
    },
    Argued { operator: "wgmma.fence: deleted", most: 1, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 1, reason: FENCES },
    Argued { operator: "bar.warp.sync: deleted", most: 2, reason: NEXT_NUMBER },
    Argued { operator: "bar.warp.sync: after the arrival", most: 2, reason: NEXT_NUMBER },
];

/// Mutants of consumers that share out the keys, beside a dQ kernel.
pub(super) const KEYS: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 2, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 2, reason: FENCES },
    Argued { operator: "wgmma.commit_group: before the last product", most: 2, reason: DV_WITH_DK },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 1,
        reason: "the slot of a tile's last rows is loaded again after K's only one, which is given back after that wait",
    },
    Argued { operator: "empty wait: after the first load", most: 1, reason: V_AFTER_K },
    Argued {
        operator: "bar.warp.sync: after the arrival",
        most: 1,
        reason: "the slot of rows is loaded again after K's only one, which is given back behind that barrier",
    },
];

/// More mutants of these if sequences are listed.
pub(super) const LISTED: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 3, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 3, reason: FENCES },
    Argued {
        operator: "empty wait: after the first load",
        most: 2,
        reason: "a work is looked up when all consumers have given back that of two tiles before, whose K was in this slot",
    },
];

/// Mutants of consumers that multiply dQ of every other block.
pub(super) const ADDING: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 5, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 5, reason: FENCES },
    Argued { operator: "wgmma.commit_group: before the last product", most: 2, reason: DV_WITH_DK },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 3,
        reason: "dS of the next tile is stored when its K is there, whose slot is given back after that wait; and a turn \
                 orders when warpgroups compute, not what is in memory",
    },
    Argued { operator: "barrier after products: before their wait", most: 2, reason: TURNS },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
    Argued { operator: "full wait: after the first read", most: 2, reason: DS_OF_THE_FIRST },
    Argued { operator: "empty wait: after the first load", most: 1, reason: V_AFTER_K },
];

/// Mutants of consumers that multiply dQ of half of every block.
pub(super) const HALVES: &[Argued] = &[
    Argued { operator: "wgmma.commit_group: deleted", most: 2, reason: DV_WITH_DQ },
    Argued { operator: "wgmma.commit_group: before the last product", most: 2, reason: DV_WITH_DQ },
    Argued { operator: "wgmma.commit_group: after the wait", most: 2, reason: DV_WITH_DQ },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
    Argued { operator: "full wait: after the first read", most: 2, reason: DS_OF_THE_FIRST },
    Argued { operator: "empty arrive: deleted", most: 1, reason: LAST_DS },
    Argued {
        operator: "empty wait: after the first load",
        most: 2,
        reason: "a tile's number is sent when all warps have that of the tile before: then writers have dQ of the last \
                 block of the tile before that, and its K and V have been read",
    },
    Argued {
        operator: "ldmatrix or stmatrix: transposes, or no longer",
        most: 8,
        reason: "what is stored before the first block is zeros, transposed or not",
    },
];

/// Mutants of these if every tile sees some rows.
pub(super) const BUSY_HALVES: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 7, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 7, reason: FENCES },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 3,
        reason: "nobody stores dS again where that of the last block is; and a turn orders when warpgroups compute, not \
                 what is in memory",
    },
    Argued {
        operator: "full wait: deleted",
        most: 1,
        reason: "the next tile's number is there when dQ of a tile's last block is: consumers have it then",
    },
    Argued {
        operator: "empty wait: deleted",
        most: 1,
        reason: "nobody has used the first slot of dS when zeros are stored there",
    },
    Argued {
        operator: "mbarrier: full for empty, or empty for full",
        most: 2,
        reason: "the first slot of dS is free, and nobody waits for the last one",
    },
];

/// Mutants of these if some tiles see none.
pub(super) const IDLE_HALVES: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 8, reason: FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 8, reason: FENCES },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 4,
        reason: "the tile after an idle one has no number before writers have the dQ that is there after that wait, and \
                 dS is stored again in that tile; nobody stores it again where that of the last block is; and a turn \
                 orders when warpgroups compute, not what is in memory",
    },
    Argued { operator: "mbarrier: full for empty, or empty for full", most: 1, reason: LAST_DS },
];

/// Mutants of additions in order.
pub(super) const IN_ORDER: &[Argued] = &[Argued {
    operator: "fence.proxy.async: deleted",
    most: 2,
    reason: "only copies write sums and read them, and to the simulator a copy's completion is a fence between proxies",
}];

/// Mutants of the only slot of tiles' numbers, in one role.
pub(super) const NUMBERS: &[Argued] = &[
    Argued { operator: "bar.warp.sync: deleted", most: 1, reason: NEXT_NUMBER },
    Argued { operator: "bar.warp.sync: after the arrival", most: 1, reason: NEXT_NUMBER },
];

const FENCES: &str = "the fence of another product lies between what touched the registers and this product";
const DV_WITH_DK: &str = "the last product of dV goes with those of dK, and both are waited for together";
const DV_WITH_DQ: &str = "products of dV that are in no group of their own are in that of dQ, which is waited for \
                          before anything relies on dV";
const LAST_DS: &str = "nobody waits for the slot of the last dS";
const DS_OF_THE_FIRST: &str = "the first product reads dS of the first consumer, which is a turn ahead";
const NEXT_NUMBER: &str = "the next tile's number is stored after waits for slots that the warps gave back behind later \
                           barriers";
const V_AFTER_K: &str = "V has been read when K's slot, which was waited for before, is given back";
