//! The products of an iteration, and the instructions that run while they are in flight.

use super::{Class, Instruction, Round};

/// A product: the HGMMAs up to the one that closes a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Columns of the result.
    pub n: u32,
    /// Number of HGMMAs.
    pub parts: usize,
    /// Whether the product overwrites its accumulators (Q Kᵀ) instead of adding to them (O += P V).
    pub fresh: bool,
    /// Number of waits and barriers between its HGMMAs: each may stop the tensor cores.
    pub interruptions: usize,
    /// The index of its first HGMMA in the iteration.
    pub first: usize,
    /// The index of its last instruction.
    pub last: usize,
    /// The index of the first wait that completes it. If a later iteration waits, the index counts on from this
    /// iteration's instructions. `None` if no wait completes it.
    pub wait: Option<usize>,
}

impl Round<'_> {
    /// The products, in the order in which they begin.
    pub fn products(&self) -> Vec<Product> {
        let is_part = |&index: &usize| self.instructions[index].class() == Class::Product;
        let parts: Vec<usize> = (0..self.instructions.len()).filter(is_part).collect();
        let closes = |&index: &usize| self.instructions[index].operands.ends_with("gsb0");
        let ends: Vec<usize> = parts.iter().copied().filter(closes).collect();
        let groups = parts.split_inclusive(closes).filter_map(|parts| self.product(parts, &ends));
        groups.collect()
    }

    fn product(&self, parts: &[usize], ends: &[usize]) -> Option<Product> {
        let (&first, &last) = (parts.first()?, parts.last()?);
        let stops = |index: &usize| matches!(self.instructions[*index].class(), Class::Wait | Class::Barrier);
        Some(Product {
            n: columns(self.instructions[first]).unwrap_or(0),
            parts: parts.len(),
            fresh: self.instructions[first].operands.split(", ").any(|operand| operand == "RZ"),
            interruptions: (first..last).filter(stops).count(),
            first,
            last,
            wait: self.wait(last, ends),
        })
    }

    /// The index of the wait for the product that ends at `last`, in this iteration or the next two. `ends` are the
    /// ends of all products.
    fn wait(&self, last: usize, ends: &[usize]) -> Option<usize> {
        let length = self.instructions.len();
        let mut younger = 0;
        (last + 1..last + 2 * length).find(|&index| {
            let index = index % length;
            younger += usize::from(ends.contains(&index));
            self.instructions[index].leaves_in_flight().is_some_and(|left| left <= younger)
        })
    }

    /// Number of instructions of a kind between a product's first HGMMA and its wait. The tensor cores may hide these
    /// instructions.
    pub fn under(&self, product: &Product, class: Class) -> usize {
        let length = self.instructions.len();
        let round = product.first + length;
        let end = product.wait.map_or(round, |wait| wait.min(round));
        (product.first..end).filter(|index| self.instructions[index % length].class() == class).count()
    }
}

/// N of `HGMMA.64x176x16.F32.BF16`.
fn columns(instruction: &Instruction) -> Option<u32> {
    instruction.opcode.split('.').nth(1)?.split('x').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::{Listing, product_loops};
    use super::*;

    /// Two stages, shortened: Q Kᵀ, P V of the previous block, softmax, the wait for P V.
    const TWO_STAGES: &str = "
.L_x_0:
 /*0000*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR22], R10 ;
 /*0010*/ HGMMA.64x176x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
 /*0020*/ UIADD3 UR20, UR18, 0x2, URZ ;
 /*0030*/ HGMMA.64x176x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
 /*0040*/ HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR16].tnspB, R112 ;
 /*0050*/ BAR.ARV R18, 0x100 ;
 /*0060*/ HGMMA.64x128x16.F32.BF16 R112, R180, gdesc[UR16].tnspB, R112, gsb0 ;
 /*0070*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 /*0080*/ MUFU.EX2 R36, R36 ;
 /*0090*/ MUFU.EX2 R37, R37 ;
 /*00a0*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*00b0*/ MUFU.EX2 R38, R38 ;
 /*00c0*/ @!P0 BRA `(.L_x_0) ;
 /*00d0*/ EXIT ;";

    fn products(text: &str) -> (Vec<Product>, Vec<usize>) {
        let listing = Listing::parse(text).unwrap();
        let rounds = product_loops(&listing);
        let [round] = &rounds[..] else { panic!("{} loops", rounds.len()) };
        let products = round.products();
        let under = products.iter().map(|product| round.under(product, Class::Exp)).collect();
        (products, under)
    }

    #[test]
    fn two_stages() {
        let (products, under) = products(TWO_STAGES);
        let scores =
            Product { n: 176, parts: 2, fresh: true, interruptions: 0, first: 1, last: 3, wait: Some(7) };
        let sums =
            Product { n: 128, parts: 2, fresh: false, interruptions: 1, first: 4, last: 6, wait: Some(10) };
        assert_eq!((products, under), (vec![scores, sums], vec![0, 2]));
    }

    /// The next iteration waits for the product, after its own first product has begun.
    #[test]
    fn a_wait_in_the_next_round() {
        let (products, under) = products(
            "
.L_x_0:
 /*0000*/ MUFU.EX2 R36, R36 ;
 /*0010*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0 ;
 /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 /*0030*/ MUFU.EX2 R37, R37 ;
 /*0040*/ @!P0 BRA `(.L_x_0) ;
 /*0050*/ EXIT ;",
        );
        let waits: Vec<Option<usize>> = products.iter().map(|product| product.wait).collect();
        // The wait, at index 2 of the next iteration, comes after that iteration's product at index 1: 5 + 2.
        assert_eq!((waits, under), (vec![Some(7)], vec![2]));
    }

    #[test]
    fn no_wait_at_all() {
        let (products, under) = products(
            ".L_x_0:
 /*0000*/ MUFU.EX2 R36, R36 ;
 /*0010*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;
 /*0020*/ @!P0 BRA `(.L_x_0) ;
 /*0030*/ EXIT ;",
        );
        assert_eq!((products[0].wait, under), (None, vec![1]));
        assert!(!products[0].fresh);
    }
}
