//! Positions of elements in lanes: `ldmatrix`, `stmatrix`, the fragments of wgmma.

use fa3_ir::WgmmaType;

/// Sources of the two elements of a lane's `register`, lower half first, for `ldmatrix` and `stmatrix`: the lane that
/// gives the address of the element's row, and the element's number among the 8 of that row.
///
/// Lane 8i + r gives the address of row r of matrix i, which is in register i. Lane l has elements 2 (l mod 4) and the
/// next of row l / 4; with `trans` rows and columns change places.
pub const fn matrix_source(lane: u32, register: u32, trans: bool) -> [(u32, u32); 2] {
    let (outer, inner) = (lane / 4, 2 * (lane % 4));
    let first_row = 8 * register;
    if trans {
        [(first_row + inner, outer), (first_row + inner + 1, outer)]
    } else {
        [(first_row + outer, inner), (first_row + outer, inner + 1)]
    }
}

/// The (row, column) of D that a lane's `register` of a wgmma's accumulators holds, within the 16 rows of its warp.
pub const fn d_position(lane: u32, register: u32) -> (u32, u32) {
    (lane / 4 + 8 * (register / 2 % 2), 8 * (register / 4) + 2 * (lane % 4) + register % 2)
}

/// The (row, k) of A that a part of a lane's `register` (0 to 3) holds, within the 16 rows of its warp. A part is an
/// element: one of two halves, or one of four bytes, lowest first.
pub const fn a_position(ty: WgmmaType, lane: u32, register: u32, part: u32) -> (u32, u32) {
    let (parts, half_of_k) = (ty.k() / 8, ty.k() / 2);
    (lane / 4 + 8 * (register % 2), parts * (lane % 4) + part + half_of_k * (register / 2))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Every element of a tile is in exactly one place.
    fn covers(positions: impl Iterator<Item = (u32, u32)>, rows: u32, columns: u32) {
        let positions: Vec<_> = positions.collect();
        assert_eq!(positions.len(), (rows * columns) as usize);
        let distinct: HashSet<_> = positions.iter().collect();
        assert_eq!(distinct.len(), positions.len());
        assert!(positions.iter().all(|&(row, column)| row < rows && column < columns));
    }

    fn lanes_and(registers: u32) -> impl Iterator<Item = (u32, u32)> {
        (0..32).flat_map(move |lane| (0..registers).map(move |register| (lane, register)))
    }

    #[test]
    fn fragments_are_bijections() {
        for n in [8, 64, 176, 256] {
            covers(lanes_and(n / 2).map(|(lane, v)| d_position(lane, v)), 16, n);
        }
        for ty in [WgmmaType::F16, WgmmaType::Bf16, WgmmaType::E4m3] {
            let parts = ty.k() / 8;
            let positions = lanes_and(4).flat_map(|(lane, register)| {
                (0..parts).map(move |part| a_position(ty, lane, register, part))
            });
            covers(positions, 16, ty.k());
        }
    }

    /// Entries of the PTX ISA's figures of the register fragments of wgmma: D, 16-bit A, 8-bit A.
    #[test]
    fn fragments_are_the_documented_figures() {
        assert_eq!([0, 1, 2, 3, 4].map(|v| d_position(0, v)), [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8)]);
        assert_eq!([0, 1, 2, 3].map(|v| d_position(31, v)), [(7, 6), (7, 7), (15, 6), (15, 7)]);
        let a16 = |lane, i, h| a_position(WgmmaType::F16, lane, i, h);
        assert_eq!(
            [a16(0, 0, 0), a16(0, 1, 1), a16(1, 2, 0), a16(31, 3, 1)],
            [(0, 0), (8, 1), (0, 10), (15, 15)]
        );
        let a8 = |lane, i, b| a_position(WgmmaType::E4m3, lane, i, b);
        assert_eq!(
            [a8(0, 0, 3), a8(1, 1, 0), a8(2, 2, 1), a8(31, 3, 3)],
            [(0, 3), (8, 4), (0, 25), (15, 31)]
        );
    }

    /// The accumulators of S, converted in pairs, are the A registers of the product with V:
    /// what Algorithm 1 relies on.
    #[test]
    fn accumulators_are_the_next_a_operand() {
        for (lane, register) in lanes_and(4) {
            for half in 0..2 {
                let (row, k) = a_position(WgmmaType::Bf16, lane, register, half);
                assert_eq!((row, 16 + k), d_position(lane, 8 + 2 * register + half));
            }
        }
    }

    #[test]
    fn matrices_are_bijections_and_trans_transposes() {
        for trans in [false, true] {
            covers(lanes_and(4).flat_map(|(lane, i)| matrix_source(lane, i, trans)), 32, 8);
        }
        for (lane, register) in lanes_and(4) {
            let plain = matrix_source(lane, register, false);
            let trans = matrix_source(lane, register, true);
            for ((row, column), (t_row, t_column)) in plain.into_iter().zip(trans) {
                assert_eq!((row - 8 * register, column), (t_column, t_row - 8 * register));
            }
        }
        // The figure of ldmatrix: lane 5 has elements 2 and 3 of row 1.
        assert_eq!(matrix_source(5, 0, false), [(1, 2), (1, 3)]);
        assert_eq!(matrix_source(31, 3, true), [(30, 7), (31, 7)]);
    }
}
