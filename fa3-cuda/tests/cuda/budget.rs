//! The shared memory that the planner budgets for tiles, compared with the memory that kernels declare.

use fa3_cuda::kernels::KernelSpec;
use fa3_cuda::kernels::fwd::{FwdSpec, SequenceForm};
use fa3_ir::Elem;
use fa3_sched::forward::{Loads, Precision, SMEM_RESERVE, TileRow};
use fa3_sched::{Longest, Order, Scheduler};
use fa3_types::Mask;

/// The budget is enough for every row of the tile table under every scheduler, with either role loading. It exceeds the
/// memory that a kernel uses by at most its reserve.
#[test]
fn shared_memory_is_what_the_kernels_declare() {
    let schedulers = [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
    for TileRow { tile, .. } in TileRow::table() {
        for scheduler in schedulers {
            for loads in [Loads::Producer, Loads::Consumers] {
                let has_producer_only = tile.qv || tile.column_groups() > 1;
                if loads == Loads::Consumers
                    && (has_producer_only || scheduler == Scheduler::DynamicPersistent)
                {
                    continue;
                }
                // Rows are converted by kernels with a table.
                let converts_rows = tile.converts_rows();
                if converts_rows && scheduler != Scheduler::DynamicPersistent {
                    continue;
                }
                let mut tile = *tile;
                tile.loads = loads;
                let elem = match tile.precision {
                    Precision::Half => Elem::Bf16,
                    // Tiles of this precision always have a producer.
                    Precision::Fp8(_) | Precision::Converted { .. } if loads == Loads::Consumers => continue,
                    Precision::Fp8(_) => Elem::E4m3,
                    Precision::Converted { .. } if converts_rows => Elem::F16,
                    Precision::Converted { .. } => Elem::Bf16,
                };
                let order = Order::LongestFirst { section: 1, longest: Longest::Last };
                let spec = FwdSpec {
                    elem,
                    output: Elem::Bf16,
                    tile,
                    head_dim_v: tile.head_dim_v,
                    mask: Mask::Causal,
                    softcap: false,
                    score: None,
                    sink: false,
                    lse_without_sink: false,
                    max_logits: false,
                    stored_lse: false,
                    order,
                    scheduler,
                    cluster: 1,
                    sequences: if converts_rows { SequenceForm::Varlen } else { SequenceForm::Dense },
                    given_table: false,
                    shares: None,
                    merges: None,
                    per_sm: 1,
                    pack: 1,
                    page_block: None,
                    gathered_cols: converts_rows.then_some(tile.head_dim),
                    row_scales: false,
                    token_scales: None,
                    indexed: false,
                };
                let takes_listed = loads == Loads::Producer && scheduler == Scheduler::DynamicPersistent;
                let listed =
                    takes_listed.then(|| FwdSpec { sequences: SequenceForm::Varlen, ..spec.clone() });
                for spec in [spec].into_iter().chain(listed) {
                    let (needed, budget) = (spec.kernel().smem.bytes(), tile.smem().total());
                    assert!(needed <= budget, "{tile}, {scheduler}: {needed} bytes, not {budget}");
                    assert!(
                        budget - needed <= SMEM_RESERVE,
                        "{tile}, {scheduler}: {needed} bytes of {budget}"
                    );
                }
            }
        }
    }
}
