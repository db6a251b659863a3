//! Prints the plan of a problem on an H100: `cargo run --release -p fa3-sched --example print_plan`.

use std::error::Error;

use fa3_sched::DeviceLimits;
use fa3_sched::forward::{Plan, Work};
use fa3_types::{Dtype, ProblemSpec, Shape};

fn main() -> Result<(), Box<dyn Error>> {
    // Four query heads share a key/value head.
    let q = Shape { batch: 2, seqlen: 4096, heads: 16, head_dim: 128 };
    let kv = Shape { heads: 4, ..q };
    let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?;

    let plan = Plan::new(&problem, &DeviceLimits::h100_sxm())?;
    println!("{plan}\n");
    let tiles = plan.dense().ok_or("the batch is dense")?;
    for Work { tile, kv } in tiles.works().take(5) {
        let (first, end) = (kv.first, kv.end);
        println!("row block {:2} of head {:2}: key blocks {first} to {end}", tile.m_block, tile.head);
    }

    // The schedule of these tiles in a model of the SMs.
    let schedule = tiles.simulate();
    println!("...\n{} SMs are busy for {:.1} % of the time", schedule.ctas(), 100.0 * schedule.utilisation());
    Ok(())
}
