//! A kernel's loops: natural loops over basic blocks.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Class, Listing, Round};

/// Basic blocks and their successors.
struct Flow {
    /// The first instruction of each block, and at the end the number of instructions.
    starts: Vec<usize>,
    /// The successors of each block: first the target of its branch, then the next block.
    next: Vec<Vec<usize>>,
}

/// A natural loop: the blocks between its head and a branch back to the head. It can only be entered through the head.
struct Natural {
    head: usize,
    blocks: BTreeSet<usize>,
}

/// One iteration of each innermost loop with products: loops by address, instructions in the order of control flow.
///
/// The compiler puts the retries of a wait behind the kernel's end, and jumps there and back. These blocks are left
/// out. Conditional code is included.
pub fn product_loops(listing: &Listing) -> Vec<Round<'_>> {
    let flow = Flow::of(listing);
    let is_product = |index: usize| listing.instructions[index].class() == Class::Product;
    let multiplies =
        |natural: &Natural| natural.blocks.iter().any(|&block| flow.instructions(block).any(is_product));
    let (with_products, others): (Vec<_>, Vec<_>) = flow.loops().into_iter().partition(multiplies);
    let contains =
        |outer: &Natural, inner: &Natural| outer.head != inner.head && inner.blocks.is_subset(&outer.blocks);
    let innermost = |outer: &&Natural| !with_products.iter().any(|inner| contains(outer, inner));
    let retries: BTreeSet<usize> = others.iter().filter_map(|natural| flow.retry(natural)).collect();
    let is_jump = |block: usize| {
        let mut instructions = flow.instructions(block).map(|index| &listing.instructions[index]);
        instructions.len() == 1 && instructions.all(|only| !only.falls_through())
    };
    let round = |natural: &Natural| {
        let blocks = flow.order(natural).into_iter();
        let blocks = blocks.filter(|&block| !retries.contains(&block) && !is_jump(block));
        blocks.flat_map(|block| flow.instructions(block)).map(|index| &listing.instructions[index]).collect()
    };
    with_products.iter().filter(innermost).map(|natural| Round { instructions: round(natural) }).collect()
}

impl Flow {
    fn of(listing: &Listing) -> Flow {
        let count = listing.instructions.len();
        let mut starts = BTreeSet::from([0, count]);
        for (index, instruction) in listing.instructions.iter().enumerate() {
            let target = listing.target(instruction);
            starts.extend(target);
            if target.is_some() || !instruction.falls_through() {
                starts.insert(index + 1);
            }
        }
        let starts: Vec<usize> = starts.into_iter().collect();
        let block_at = |index: usize| starts.binary_search(&index).ok().filter(|_| index < count);
        let next = starts.windows(2).map(|ends| {
            let last = &listing.instructions[ends[1] - 1];
            let target = listing.target(last).and_then(block_at);
            let neighbour = last.falls_through().then(|| block_at(ends[1])).flatten();
            target.into_iter().chain(neighbour).collect()
        });
        Flow { next: next.collect(), starts }
    }

    /// The instructions of a block.
    fn instructions(&self, block: usize) -> Range<usize> {
        self.starts[block]..self.starts[block + 1]
    }

    /// The block of a loop that only retries a wait. Such a loop is one block, into which no block falls through.
    fn retry(&self, natural: &Natural) -> Option<usize> {
        let in_line =
            natural.head.checked_sub(1).is_some_and(|before| self.next[before].contains(&natural.head));
        (natural.blocks.len() == 1 && !in_line).then_some(natural.head)
    }

    /// Every natural loop; loops with one head are merged.
    fn loops(&self) -> Vec<Natural> {
        let mut found: Vec<Natural> = Vec::new();
        let reachable = reach(&self.next, 0, None);
        let mut before = vec![Vec::new(); self.next.len()];
        for &from in &reachable {
            self.next[from].iter().for_each(|&to| before[to].push(from));
        }
        for &head in &reachable {
            // The head dominates all blocks that the start cannot reach without passing the head.
            let without = if head == 0 { BTreeSet::new() } else { reach(&self.next, 0, Some(head)) };
            let back = |&from: &usize| self.next[from].contains(&head) && !without.contains(&from);
            let ends: Vec<usize> = reachable.iter().copied().filter(back).collect();
            if ends.is_empty() {
                continue;
            }
            let mut blocks = BTreeSet::from([head]);
            for end in ends.into_iter().filter(|&end| end != head) {
                blocks.extend(reach(&before, end, Some(head)));
            }
            found.push(Natural { head, blocks });
        }
        found
    }

    /// The blocks of a loop, each after its predecessors in an iteration, and next to the block that it follows in
    /// memory if possible: reverse postorder.
    fn order(&self, natural: &Natural) -> Vec<usize> {
        // A block, and the number of its successors that have been visited.
        let (mut order, mut seen) = (Vec::new(), BTreeSet::from([natural.head]));
        let mut path = vec![(natural.head, 0)];
        while let Some((block, visited)) = path.last_mut() {
            match self.next[*block].get(*visited) {
                Some(&next) => {
                    *visited += 1;
                    if natural.blocks.contains(&next) && seen.insert(next) {
                        path.push((next, 0));
                    }
                }
                None => {
                    order.push(*block);
                    path.pop();
                }
            }
        }
        order.reverse();
        order
    }
}

/// The blocks that can be reached from a block along `edges`, itself included, without passing `barred`.
fn reach(edges: &[Vec<usize>], from: usize, barred: Option<usize>) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::from([from]), vec![from]);
    while let Some(block) = open.pop() {
        let fresh = edges[block].iter().filter(|&&to| Some(to) != barred && found.insert(to));
        open.extend(fresh.copied().collect::<Vec<_>>());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses of the instructions of every loop.
    fn rounds(text: &str) -> Vec<Vec<u32>> {
        let listing = Listing::parse(text).unwrap();
        let rounds = product_loops(&listing);
        rounds.iter().map(|round| round.instructions.iter().map(|i| i.address).collect()).collect()
    }

    /// An outer loop has two inner loops. The retries of their waits, and a conditional block of the second inner loop,
    /// are behind the kernel's end. Jumps back from there do not make larger loops.
    #[test]
    fn retries_and_blocks_out_of_line() {
        let found = rounds(
            "
 /*0000*/ S2R R0, SR_TID.X ;
.L_x_outer:
 /*0010*/ MOV R1, R0 ;
.L_x_first:
 /*0020*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*0030*/ @!P0 BRA `(.L_x_retry_0) ;
.L_x_go_0:
 /*0040*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0 ;
 /*0050*/ @P1 BRA `(.L_x_first) ;
.L_x_second:
 /*0060*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*0070*/ @!P0 BRA `(.L_x_retry_1) ;
.L_x_go_1:
 /*0080*/ @P2 BRA `(.L_x_rare) ;
.L_x_after:
 /*0090*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0 ;
 /*00a0*/ @P1 BRA `(.L_x_second) ;
 /*00b0*/ @P3 BRA `(.L_x_outer) ;
 /*00c0*/ EXIT ;
.L_x_retry_0:
 /*00d0*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*00e0*/ @!P0 BRA `(.L_x_retry_0) ;
 /*00f0*/ BRA `(.L_x_go_0) ;
.L_x_retry_1:
 /*0100*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*0110*/ @!P0 BRA `(.L_x_retry_1) ;
 /*0120*/ BRA `(.L_x_go_1) ;
.L_x_rare:
 /*0130*/ FMUL R1, R1, R2 ;
 /*0140*/ BRA `(.L_x_after) ;
.L_x_end:
 /*0150*/ BRA `(.L_x_end);",
        );
        let first = vec![0x20, 0x30, 0x40, 0x50];
        let second = vec![0x60, 0x70, 0x80, 0x130, 0x140, 0x90, 0xa0];
        assert_eq!(found, [first, second]);
    }

    /// A wait with its retry in line is a part of the loop.
    #[test]
    fn a_retry_in_line() {
        let found = rounds(
            "
.L_x_0:
 /*0000*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0 ;
.L_x_1:
 /*0010*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*0020*/ @!P0 BRA `(.L_x_1) ;
 /*0030*/ @P1 BRA `(.L_x_0) ;
 /*0040*/ EXIT ;",
        );
        assert_eq!(found, [[0, 0x10, 0x20, 0x30]]);
    }

    /// A branch back makes no loop if control can reach the branch without passing the branch's target.
    #[test]
    fn a_head_must_be_passed() {
        let found = rounds(
            "
 /*0000*/ @P0 BRA `(.L_x_1) ;
.L_x_0:
 /*0010*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0 ;
.L_x_1:
 /*0020*/ MOV R0, R1 ;
 /*0030*/ @P1 BRA `(.L_x_0) ;
 /*0040*/ EXIT ;",
        );
        assert_eq!(found, [[0_u32; 0]; 0]);
    }

    #[test]
    fn no_products_no_loops() {
        assert_eq!(rounds(".L_x_0:\n /*0000*/ @P0 BRA `(.L_x_0) ;\n /*0010*/ EXIT ;"), [[0_u32; 0]; 0]);
    }
}
