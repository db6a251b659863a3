//! The layout of tensor-core fragments in registers, and the permutation with which P goes from one FP8 matrix product
//! into the next without leaving its thread (§3.3 "layout transformations", Figures 3 and 4; PTX ISA, register
//! fragments of `wgmma.m64nNk16` and `.m64nNk32`).
//!
//! Threads count from 0 to 127 in their warpgroup. Registers count from 0 in their thread; a register of an
//! operand holds two 16-bit or four 8-bit elements. A tile has 64 rows.
//!
//! In 16 bits the rounded accumulator of S = Q·Kᵀ is the operand P without a rearrangement. In 8 bits a rearrangement
//! is needed: a thread holds columns 0 1 8 9 of a row where the operand wants 0 1 2 3. Instead of exchanging elements
//! between threads, each thread reorders its own registers ([`P_ORDER`]), which permutes the columns of P. V is stored
//! with its rows permuted likewise ([`key_of_slot`]): the sum over keys does not depend on their order.

/// Order in which the accumulator registers d0 to d7 of S fill 8 bytes of the 8-bit operand P: {d0 d1 d4 d5 d2 d3 d6
/// d7}, then likewise for d8 to d15, and so on.
pub const P_ORDER: [usize; 8] = [0, 1, 4, 5, 2, 3, 6, 7];

/// The coordinates of an element in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ElementCoord {
    /// Row, 0 to 63.
    pub row: usize,
    /// Column: the column of S or O for an accumulator, the index k that is summed over for an operand.
    pub column: usize,
}

/// The thread, the register and the part of the register that hold an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder {
    /// Thread, 0 to 127.
    pub thread: usize,
    /// Register.
    pub register: usize,
    /// Element within the register: 0 in an accumulator, up to 1 in a 16-bit and up to 3 in an 8-bit operand.
    pub part: usize,
}

/// The coordinates of register `register` of the float accumulator (64, N), which has N / 2 registers a thread (Figure
/// 3).
pub fn accumulator(thread: usize, register: usize) -> ElementCoord {
    let (warp, lane) = (thread / 32, thread % 32);
    ElementCoord {
        row: 16 * warp + lane / 4 + 8 * (register / 2 % 2),
        column: 8 * (register / 4) + 2 * (lane % 4) + register % 2,
    }
}

/// The holder of an element of the float accumulator: the inverse of [`accumulator`].
pub fn accumulator_holder(place: ElementCoord) -> Holder {
    let ElementCoord { row, column } = place;
    Holder {
        thread: thread(row, column / 2 % 4),
        register: 4 * (column / 8) + 2 * (row / 8 % 2) + column % 2,
        part: 0,
    }
}

/// The coordinates of element `part` of register `register` of the 16-bit left operand (64, k), which has four
/// registers for each 16 columns.
pub fn operand_16bit(holder: Holder) -> ElementCoord {
    let Holder { thread, register, part } = holder;
    let (warp, lane) = (thread / 32, thread % 32);
    ElementCoord {
        row: 16 * warp + lane / 4 + 8 * (register % 2),
        column: 8 * (register / 2) + 2 * (lane % 4) + part,
    }
}

/// The holder of an element of the 16-bit left operand: the inverse of [`operand_16bit`].
pub fn operand_16bit_holder(place: ElementCoord) -> Holder {
    let ElementCoord { row, column } = place;
    Holder { thread: thread(row, column / 2 % 4), register: 2 * (column / 8) + row / 8 % 2, part: column % 2 }
}

/// The coordinates of byte `part` of register `register` of the 8-bit left operand (64, k), which has four registers
/// for each 32 columns (Figure 4).
pub fn operand_8bit(holder: Holder) -> ElementCoord {
    let Holder { thread, register, part } = holder;
    let (warp, lane) = (thread / 32, thread % 32);
    ElementCoord {
        row: 16 * warp + lane / 4 + 8 * (register % 2),
        column: 16 * (register / 2) + 4 * (lane % 4) + part,
    }
}

/// The holder of an element of the 8-bit left operand: the inverse of [`operand_8bit`].
pub fn operand_8bit_holder(place: ElementCoord) -> Holder {
    let ElementCoord { row, column } = place;
    Holder {
        thread: thread(row, column / 4 % 4),
        register: 2 * (column / 16) + row / 8 % 2,
        part: column % 4,
    }
}

/// The accumulator register of S whose value becomes byte `part` of register `register` of the operand P, in every
/// thread: [`P_ORDER`].
pub fn accumulator_of_operand(register: usize, part: usize) -> usize {
    let byte = 4 * register + part;
    byte / 8 * 8 + P_ORDER[byte % 8]
}

/// The key whose row of V must be stored at row `slot`, so that it meets its column of P. Each 16 rows have the keys 0
/// 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
pub fn key_of_slot(slot: usize) -> usize {
    let (base, quad, byte) = (slot / 16 * 16, slot / 4 % 4, slot % 4);
    base + 8 * (byte / 2) + 2 * quad + byte % 2
}

/// The row at which the row of V of key `key` is stored: the inverse of [`key_of_slot`].
pub fn slot_of_key(key: usize) -> usize {
    let (base, half, quad) = (key / 16 * 16, key / 8 % 2, key / 2 % 4);
    base + 4 * quad + 2 * half + key % 2
}

/// The thread at index `quad` of the four that share a row.
fn thread(row: usize, quad: usize) -> usize {
    32 * (row / 16) + 4 * (row % 8) + quad
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: usize = 128;

    fn holders(registers: usize, parts: usize) -> impl Iterator<Item = Holder> {
        let in_thread = move |thread| {
            let of = move |register| (0..parts).map(move |part| Holder { thread, register, part });
            (0..registers).flat_map(of)
        };
        (0..THREADS).flat_map(in_thread)
    }

    /// Every element of (64, columns) has exactly one holder, and the inverse finds it.
    fn is_one_to_one(
        columns: usize,
        registers: usize,
        parts: usize,
        place: impl Fn(Holder) -> ElementCoord,
        holder: impl Fn(ElementCoord) -> Holder,
    ) {
        let mut seen = vec![false; 64 * columns];
        for of in holders(registers, parts) {
            let at = place(of);
            assert!(at.row < 64 && at.column < columns, "{of:?} {at:?}");
            assert!(!std::mem::replace(&mut seen[at.row * columns + at.column], true), "{at:?} twice");
            assert_eq!(holder(at), of);
        }
        assert!(seen.into_iter().all(|seen| seen));
    }

    #[test]
    fn every_element_has_one_holder() {
        for n in (32..=256).step_by(32) {
            is_one_to_one(n, n / 2, 1, |of| accumulator(of.thread, of.register), accumulator_holder);
            is_one_to_one(n, n / 4, 2, operand_16bit, operand_16bit_holder);
            is_one_to_one(n, n / 8, 4, operand_8bit, operand_8bit_holder);
        }
    }

    #[test]
    fn the_first_row_of_figures_3_and_4() {
        // Figure 3: T0 {d0, d1} T1 {d0, d1} T2 .. T3 .. T0 {d4, d5} ..; eight rows below, T0 {d2, d3} ..
        let held = |row, column| accumulator_holder(ElementCoord { row, column });
        for column in 0..16 {
            let (thread, register) = (column / 2 % 4, column % 2 + column / 8 * 4);
            assert_eq!(held(0, column), Holder { thread, register, part: 0 });
            assert_eq!(held(8, column), Holder { thread, register: register + 2, part: 0 });
        }
        // Figure 4: T0 {a0, a1} T0 {a2, a3} T1 {a0, a1} ..; eight rows below, T0 {a4, a5} T0 {a6, a7} ..
        for column in 0..16 {
            let (thread, part) = (column / 4, column % 4);
            let of = |register| Holder { thread, register, part };
            assert_eq!(operand_8bit_holder(ElementCoord { row: 0, column }), of(0));
            assert_eq!(operand_8bit_holder(ElementCoord { row: 8, column }), of(1));
        }
    }

    #[test]
    fn in_16_bits_the_accumulator_is_the_operand() {
        for of in holders(256 / 4, 2) {
            assert_eq!(operand_16bit(of), accumulator(of.thread, 2 * of.register + of.part));
        }
    }

    #[test]
    fn in_8_bits_it_is_not() {
        let differs = |of: Holder| operand_8bit(of) != accumulator(of.thread, 4 * of.register + of.part);
        assert!(holders(4, 4).any(differs));
    }

    #[test]
    fn the_key_order_is_the_published_one() {
        let order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
        for slot in 0..256 {
            assert_eq!(key_of_slot(slot), slot / 16 * 16 + order[slot % 16]);
            assert_eq!(slot_of_key(key_of_slot(slot)), slot);
        }
    }

    #[test]
    fn reordered_registers_hold_the_row_of_p_at_the_slots_of_its_keys() {
        // Byte by byte: the operand register of P[row, slot] is the accumulator register of S[row, key(slot)].
        for n in (32..=256).step_by(32) {
            let mut used = vec![false; n / 2];
            for of in holders(n / 8, 4) {
                let register = accumulator_of_operand(of.register, of.part);
                used[register] = true;
                let (wanted, held) = (operand_8bit(of), accumulator(of.thread, register));
                assert_eq!(held, ElementCoord { column: key_of_slot(wanted.column), ..wanted });
            }
            assert!(used.into_iter().all(|used| used), "every register of S is used");
        }
    }

    #[test]
    fn the_product_is_unchanged() {
        for n in (32..=256).step_by(32) {
            let p = |row: usize, key: usize| (row * 31 + key * 17) as i64 % 101 - 50;
            let v = |key: usize| (key * 29) as i64 % 97 - 48;
            let mut product = [0i64; 64];
            for of in holders(n / 8, 4) {
                let at = operand_8bit(of);
                let held = accumulator(of.thread, accumulator_of_operand(of.register, of.part));
                product[at.row] += p(held.row, held.column) * v(key_of_slot(at.column));
            }
            for (row, product) in product.into_iter().enumerate() {
                assert_eq!(product, (0..n).map(|key| p(row, key) * v(key)).sum::<i64>());
            }
        }
    }
}
