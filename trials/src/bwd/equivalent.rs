//! Equivalent mutants of the backward kernels, with the reasons.

use crate::mutate::{Equivalent, LAST_TURN, TURNS};

/// Equivalent mutants of the preprocess kernel (row statistics).
pub(super) const STATS: &[Equivalent] = &[
    ("bound: and gives the second", 4, "all lanes of a row have its sum, and store the same numbers"),
    ("bound: one less", 1, ONE_SECTION),
];

/// Further equivalent mutants of the preprocess kernel if it clears rows of dQ.
pub(super) const CLEARED: &[Equivalent] = &[(
    "bound: one more",
    1,
    "in the block after the rows that no tile visits, each row is compared with their number again",
)];

/// Equivalent mutants of the kernel that rounds the dQ accumulator.
pub(super) const ROUND: &[Equivalent] = &[("bound: one less", 1, ONE_SECTION)];

const ONE_SECTION: &str = "heads are in one section: there is none before the last";

/// Equivalent mutants of the dsink kernel.
pub(super) const SINK: &[Equivalent] = &[];

/// Equivalent mutants of the kernel that adds up sums of keys or of diagonals.
pub(super) const LINES: &[Equivalent] = &[];

/// Equivalent mutants of the kernel of the gradient of a table that is read by head.
pub(super) const TABLE_BY_HEAD: &[Equivalent] =
    &[("bound: one more", 1, FEW_GROUPS), ("bound: one less", 1, FEW_GROUPS)];

const FEW_GROUPS: &str = "a warp takes 32 groups of rows in a turn, of which the last are not there";

/// Equivalent mutants of the kernel of the gradient of a table that is read by query.
pub(super) const TABLE_BY_QUERY: &[Equivalent] = &[
    (
        "bound: one more",
        2,
        "rows behind the range read other elements, and rows behind the sequence have sums of 0",
    ),
    ("bound: one less", 1, "a range may begin with rows that do not read the element"),
];

/// Equivalent mutants of the kernel of the gradient of a table that is read by query and key.
pub(super) const BIAS: &[Equivalent] =
    &[("wgmma.fence", 2, "S and dP are in flight together: the fence of the first is for both")];

/// Equivalent mutants of the dQ kernel.
pub(super) const DQ: &[Equivalent] = &[
    ("wgmma.fence", 3, DQ_FENCES),
    (
        "wgmma.wait_group: after what it protects",
        1,
        "the stage of a tile's last K is loaded again after Q's, which is given back after that wait",
    ),
    (
        "empty wait: after the first load",
        1,
        "dO has been read when Q's stage, which was waited for before, is given back",
    ),
];

const DQ_FENCES: &str =
    "S and dP are in flight together: the fence of the first, or of dQ before it, is for both";

/// Equivalent mutants of dK/dV kernels whose consumers split over the gradients.
pub(super) const DIVIDED: &[Equivalent] = &[
    (
        "wgmma.wait_group: after what it protects",
        2,
        "between dP and its wait, only the stage of weights is given back, which dP does not read",
    ),
    ("wgmma.fence", 1, FENCES),
    ("bar.warp.sync", 2, NEXT_NUMBER),
];

/// Equivalent mutants of dK/dV kernels whose consumers split over the keys and leave dQ to the dQ kernel.
pub(super) const KEYS: &[Equivalent] = &[
    ("wgmma.fence", 2, FENCES),
    ("wgmma.commit_group: before the last product", 2, DV_WITH_DK),
    (
        "wgmma.wait_group: after what it protects",
        1,
        "the stage of a tile's last rows is loaded again after K's only one, which is given back after that wait",
    ),
    ("empty wait: after the first load", 1, V_AFTER_K),
    (
        "bar.warp.sync: after the arrival",
        1,
        "the stage of rows is loaded again after K's only one, which is given back behind that barrier",
    ),
];

/// Further equivalent mutants if sequences are varlen.
pub(super) const LISTED: &[Equivalent] = &[
    ("wgmma.fence", 3, FENCES),
    (
        "empty wait: after the first load",
        2,
        "a work tile is looked up when all consumers have released the tile two before it, whose K was in this stage",
    ),
];

/// Equivalent mutants of consumers that each compute dQ of every other block.
pub(super) const ADDING: &[Equivalent] = &[
    ("wgmma.fence", 5, FENCES),
    ("wgmma.commit_group: before the last product", 2, DV_WITH_DK),
    (
        "wgmma.wait_group: after what it protects",
        3,
        "dS of the next tile is stored when its K is there, whose stage is given back after that wait; and a turn \
                 orders when warpgroups compute, not what is in memory",
    ),
    ("barrier after products: before their wait", 2, TURNS),
    ("named barrier: the first warpgroup's", 1, LAST_TURN),
    ("full wait: after the first read", 2, DS_OF_THE_FIRST),
    ("empty wait: after the first load", 1, V_AFTER_K),
];

/// Equivalent mutants of consumers that each compute half of dQ of every block.
pub(super) const HALVES: &[Equivalent] = &[
    ("wgmma.commit_group", 2, DV_WITH_DQ),
    ("named barrier: the first warpgroup's", 1, LAST_TURN),
    ("full wait: after the first read", 2, DS_OF_THE_FIRST),
    ("empty arrive: deleted", 1, LAST_DS),
    (
        "empty wait: after the first load",
        2,
        "a tile's number is sent when all warps have the previous tile's: then writers have dQ of the last block \
                 of the tile before the previous one, and its K and V have been read",
    ),
    (
        "ldmatrix or stmatrix: transposes, or no longer",
        8,
        "what is stored before the first block is zeros, transposed or not",
    ),
];

/// Further equivalent mutants of consumers that compute half of dQ, if every KV tile is seen by some rows.
pub(super) const BUSY_HALVES: &[Equivalent] = &[
    ("wgmma.fence", 7, FENCES),
    (
        "wgmma.wait_group: after what it protects",
        3,
        "no warp stores dS again in the last block's stage; and a turn orders when warpgroups compute, not what is \
                 in memory",
    ),
    (
        "full wait: deleted",
        1,
        "the next tile's number is there when dQ of a tile's last block is: consumers have it then",
    ),
    ("empty wait: deleted", 1, "no warp has used the first stage of dS when zeros are stored there"),
    (
        "mbarrier: full for empty, or empty for full",
        2,
        "the first stage of dS is free, and no warp waits for the last one",
    ),
];

/// Further equivalent mutants of consumers that compute half of dQ, if some KV tiles are seen by no row.
pub(super) const IDLE_HALVES: &[Equivalent] = &[
    ("wgmma.fence", 8, FENCES),
    (
        "wgmma.wait_group: after what it protects",
        4,
        "the tile after an idle one has no number before writers have the dQ that is there after that wait, and \
                 dS is stored again in that tile; no warp stores it again in the last block's stage; and a turn orders \
                 when warpgroups compute, not what is in memory",
    ),
    ("mbarrier: full for empty, or empty for full", 1, LAST_DS),
];

/// Equivalent mutants of dQ additions in deterministic order.
pub(super) const IN_ORDER: &[Equivalent] = &[(
    "fence.proxy.async: deleted",
    2,
    "only copies write sums and read them, and to the simulator a copy's completion is a fence between proxies",
)];

/// Equivalent mutants of a tile scheduler pipeline with one stage, in one role.
pub(super) const NUMBERS: &[Equivalent] = &[("bar.warp.sync", 1, NEXT_NUMBER)];

pub(super) const FENCES: &str =
    "the fence of another product lies between what touched the registers and this product";
const DV_WITH_DK: &str = "the last product of dV is in the group of dK's, and both are waited for together";
const DV_WITH_DQ: &str = "products of dV that are in no group of their own are in dQ's group, which is waited for \
                          before anything relies on dV";
const LAST_DS: &str = "no warp waits for the stage of the last dS";
const DS_OF_THE_FIRST: &str = "the first product reads dS of the first consumer, which is a turn ahead";
pub(super) const NEXT_NUMBER: &str = "the next tile's number is stored after waits for stages that the warps gave back behind later \
                           barriers";
const V_AFTER_K: &str = "V has been read when K's stage, which was waited for before, is given back";
