//! The table of packed sequences, in the simulator.

use fa3_cuda::kernels;
use fa3_cuda::kernels::packed::program;
use fa3_sched::packed::{LengthArrays, Plan, Side};
use fa3_sim::{Mode, ProgramSimulation};
use fa3_types::Mask;
use proptest::collection::vec;
use proptest::prelude::*;

/// The first `words` words of the table that the kernel writes from these arrays of lengths.
fn in_a_kernel(plan: &Plan, arrays: &[&[i32]], words: usize) -> Vec<u32> {
    let program = program(plan, false).map(kernels::Spec::kernel);
    let bytes = |array: &&[i32]| array.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut before: Vec<Vec<u8>> = arrays.iter().map(bytes).collect();
    before.push(vec![0xFF; 4 * plan.words() as usize]);
    let outcome = ProgramSimulation::new(&program).mode(Mode::Fast).run(&before).unwrap();
    let table = outcome.buffers.last().unwrap().as_chunks().0.iter().copied().map(u32::from_le_bytes);
    table.take(words).collect()
}

fn side(is_packed: bool, is_used: bool, rows: usize) -> Side {
    let side = if is_packed { Side::packed(rows) } else { Side::dense(rows) };
    if is_used { side.with_used() } else { side }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// Most entries of the arrays of lengths are valid.
    #[test]
    fn kernels_write_the_table_of_the_host(
        entries in vec([(); 4].map(|()| prop_oneof![9 => 0..900, 1 => any::<i32>()]), 0..70),
        kinds in any::<[bool; 4]>(), rows in [0_usize..900, 0_usize..900],
        (left, right) in (proptest::option::of(0_u32..130), proptest::option::of(0_u32..130)),
    ) {
        let [q_packed, q_used, k_packed, k_used] = kinds;
        let sides = [side(q_packed, q_used, rows[0]), side(k_packed, k_used, rows[1])];
        let plan = Plan::new(entries.len(), sides, [64, 32], Mask::window(left, right)).unwrap();
        let column = |is_there: bool, index: usize| -> Vec<i32> {
            if is_there { entries.iter().map(|row| row[index]).collect() } else { Vec::new() }
        };
        // Entries are in ascending order, except for invalid ones.
        let ends = |is_there: bool, index: usize| -> Vec<i32> {
            let mut ends = column(is_there, index);
            ends.extend(is_there.then_some(rows[index / 2] as i32));
            ends.sort_by_key(|&end| if (0..900).contains(&end) { end } else { 400 });
            ends
        };
        let (cu_seqlens_q, cu_seqlens_k) = (&ends(q_packed, 0)[..], &ends(k_packed, 2)[..]);
        let (seqused_q, seqused_k) = (&column(q_used, 1)[..], &column(k_used, 3)[..]);
        let values = LengthArrays { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, ..LengthArrays::default() };
        let table = plan.table(&values).unwrap();
        let arrays = [(q_packed, cu_seqlens_q), (k_packed, cu_seqlens_k), (q_used, seqused_q), (k_used, seqused_k)];
        let arrays: Vec<&[i32]> = arrays.into_iter().filter(|(is_there, _)| *is_there).map(|(_, x)| x).collect();
        prop_assert_eq!(in_a_kernel(&plan, &arrays, table.len()), table);
    }
}
