//! Positions of elements in lanes: `ldmatrix`, `stmatrix`, the fragments of wgmma.

use fa3_ir::WgmmaType;

/// Sources of the two elements of a lane's `register`, lower half first, for `ldmatrix` and `stmatrix`: the lane that
/// gives the address of the element's row, and the element's index among the 8 elements of that row.
///
/// Lane 8i + r gives the address of row r of matrix i, which is in register i. Lane l has elements 2 (l mod 4) and 2 (l
/// mod 4) + 1 of row l / 4. With `trans`, rows and columns change places.
pub const fn matrix_source(lane: u32, register: u32, trans: bool) -> [(u32, u32); 2] {
    let (outer, inner) = (lane / 4, 2 * (lane % 4));
    let first_row = 8 * register;
    if trans {
        [(first_row + inner, outer), (first_row + inner + 1, outer)]
    } else {
        [(first_row + outer, inner), (first_row + outer, inner + 1)]
    }
}

/// The (row, column) of D in a lane's `register` of a wgmma's accumulators, within the 16 rows of its warp.
pub const fn d_position(lane: u32, register: u32) -> (u32, u32) {
    (lane / 4 + 8 * (register / 2 % 2), 8 * (register / 4) + 2 * (lane % 4) + register % 2)
}

/// The (row, k) of A in a part of a lane's `register` (0 to 3), within the 16 rows of its warp. A part is one element:
/// one of two halves, or one of four bytes, lowest first.
pub const fn a_position(ty: WgmmaType, lane: u32, register: u32, part: u32) -> (u32, u32) {
    let (parts, half_of_k) = (ty.k() / 8, ty.k() / 2);
    (lane / 4 + 8 * (register % 2), parts * (lane % 4) + part + half_of_k * (register / 2))
}
