//! Backward kernels to hunt, each on small problems with several tiles for a CTA and more blocks than there are stages.

use fa3_sched::backward::{AddOrder, Division};
use fa3_sim::Rule;
use fa3_types::Mask;

use super::trials::tiny;
use crate::family::Trial;
use crate::fwd::device;
use crate::mutate::{Argued, Prey};

/// The kernel of the statistics, with what it clears, the one that rounds sums, the dQ kernel, and the dK/dV kernel.
///
/// # Panics
/// If one cannot be built.
pub(super) fn preys() -> Vec<Prey> {
    let on_sms = |sms, division, mask, lengths, heads| -> Trial {
        let (case, options) = tiny(division, [2, 2, 1], mask, lengths, heads);
        case.trial(&device(sms), &options)
    };
    let trial = |division, mask, lengths| on_sms(1, division, mask, lengths, (2, 1));
    let apart = |lengths| trial((64, Division::Keys, None), Mask::Causal, lengths);
    let adding =
        |lengths| trial((128, Division::Keys, Some((64, AddOrder::LastKeysFirst))), Mask::None, lengths);
    let halves = |(lengths, heads, sms)| {
        let division = (128, Division::Keys, Some((128, AddOrder::LastKeysFirst)));
        on_sms(sms, division, Mask::None, lengths, (heads, 1))
    };
    let divided = |lengths| trial((64, Division::Gradients, None), Mask::None, lengths);
    // No tile visits the first 128 rows.
    let unvisited =
        |lengths| trial((128, Division::Keys, Some((64, AddOrder::LastKeysFirst))), Mask::Causal, lengths);
    let sums = [(70, 130), (1, 20)]
        .map(|lengths| trial((128, Division::Keys, Some((64, AddOrder::Any))), Mask::None, lengths));
    vec![
        Prey::of_step("bwd stats", &[(200, 60), (1, 20)].map(unvisited), 0, &[]),
        Prey::of_step("bwd stats, sums", &sums, 0, &[]),
        Prey::of_step("bwd round", &sums, 2, &[]),
        Prey::of_step("bwd dq", &[(90, 60), (70, 110), (20, 10)].map(apart), 2, DQ),
        // Rows see up to three tiles of keys: the sum of two parts of dQ does not depend on their order.
        Prey::of_step(
            "bwd dkv, adding",
            &[(188, 300), (128, 256), (250, 140), (70, 100)].map(adding),
            1,
            ADDING,
        )
        .also_noticed(TURNS_AND_EMPTY_SLOTS),
        Prey::of_step(
            "bwd dkv, halves",
            // On two SMs a CTA ends with a tile after which another one adds.
            &[
                ((300, 300), 1, 2),
                ((128, 512), 1, 1),
                ((400, 140), 2, 1),
                ((100, 600), 1, 1),
                ((130, 100), 1, 1),
            ]
            .map(halves),
            1,
            HALVES,
        )
        .also_noticed(TURNS_AND_EMPTY_SLOTS),
        Prey::of_step("bwd dkv, divided", &[(44, 120), (30, 130)].map(divided), 1, DIVIDED),
    ]
}

const DIVIDED: &[Argued] = &[
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 2,
        reason: "between dP and its wait, only the slot of weights is given back, which dP does not read",
    },
    Argued { operator: "wgmma.fence: deleted", most: 1, reason: ADDING_FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 1, reason: ADDING_FENCES },
];

const DQ: &[Argued] = &[
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

/// Mbarriers notice who does not wait for a slot without tiles, or of which nobody reads the tile. Named barriers
/// notice who does not wait for a turn. Memory does not.
const TURNS_AND_EMPTY_SLOTS: &[(&str, &[Rule])] = &[
    ("full wait: deleted", &[Rule::M4, Rule::Deadlock]),
    ("full wait: after the first read", &[Rule::M4, Rule::Deadlock]),
    ("barrier after products: deleted", &[Rule::B2, Rule::Deadlock]),
];

const ADDING: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 5, reason: ADDING_FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 5, reason: ADDING_FENCES },
    Argued {
        operator: "wgmma.commit_group: before the last product",
        most: 2,
        reason: "the last product of dV goes with those of dK, and both are waited for together",
    },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 3,
        reason: "dS of the next tile is stored when its K is there, whose slot is given back after that wait; and a turn \
                 orders when warpgroups compute, not what is in memory",
    },
    Argued { operator: "barrier after products: before their wait", most: 2, reason: TURNS },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
    Argued { operator: "fence.proxy.async: deleted", most: 2, reason: COPIES },
    Argued { operator: "bulk wait_group: deleted", most: 2, reason: REDUCTIONS },
    Argued { operator: "bulk wait_group: + 1", most: 2, reason: REDUCTIONS },
    Argued { operator: "full wait: after the first read", most: 2, reason: DS_OF_THE_FIRST },
    Argued { operator: "empty wait: after the first load", most: 1, reason: V_AFTER_K },
];

const HALVES: &[Argued] = &[
    Argued { operator: "wgmma.fence: deleted", most: 7, reason: ADDING_FENCES },
    Argued { operator: "wgmma.fence: after the first product", most: 7, reason: ADDING_FENCES },
    Argued { operator: "wgmma.commit_group: deleted", most: 2, reason: DV_WITH_DQ },
    Argued { operator: "wgmma.commit_group: before the last product", most: 2, reason: DV_WITH_DQ },
    Argued { operator: "wgmma.commit_group: after the wait", most: 2, reason: DV_WITH_DQ },
    Argued {
        operator: "wgmma.wait_group: after what it protects",
        most: 5,
        reason: "dS is stored there again by warps that have waited for the dS after it, which is whole when all have \
                 given their parts, after that wait; and a turn orders when warpgroups compute, not what is in memory",
    },
    Argued { operator: "named barrier: that of the first warpgroup", most: 1, reason: LAST_TURN },
    Argued { operator: "fence.proxy.async: deleted", most: 2, reason: COPIES },
    Argued { operator: "bulk wait_group: deleted", most: 1, reason: REDUCTIONS },
    Argued { operator: "bulk wait_group: + 1", most: 1, reason: REDUCTIONS },
    Argued { operator: "full wait: after the first read", most: 2, reason: DS_OF_THE_FIRST },
    Argued {
        operator: "full wait: deleted",
        most: 1,
        reason: "the next tile's number is there when dQ of a tile's last block is: consumers have it then",
    },
    Argued { operator: "empty wait: deleted", most: 1, reason: ZEROS },
    Argued { operator: "mbarrier: full for empty, or empty for full", most: 2, reason: ENDS },
    Argued { operator: "empty arrive: deleted", most: 1, reason: ENDS },
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

const ADDING_FENCES: &str =
    "the fence of another product lies between what touched the registers and this product";
const DV_WITH_DQ: &str = "products of dV that are in no group of their own are in that of dQ, which is waited for \
                          before anything relies on dV";
const TURNS: &str = "a turn orders when warpgroups compute, not what is in memory";
const LAST_TURN: &str = "the turn that is taken back at the end is the first warpgroup's";
const REDUCTIONS: &str =
    "reductions never race, and the simulator performs one when it reads its source, which is waited for";
const ZEROS: &str = "nobody has used the first slot of dS when zeros are stored there";
const ENDS: &str = "the first slot of dS is free, and nobody waits for the last one";
const COPIES: &str =
    "only copies write sums and read them, and they see what copies before them have written";
const DS_OF_THE_FIRST: &str = "the first product reads dS of the first consumer, which is a turn ahead";
const V_AFTER_K: &str = "V has been read when K's slot, which was waited for before, is given back";
