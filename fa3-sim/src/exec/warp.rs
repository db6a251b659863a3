//! Exchange between the lanes of a warp.

use fa3_ir::{ShflMode, VoteMode, WarpInst};

use super::mem::MemPlace;
use super::shared::SharedPlace;
use crate::data::matrix::matrix_source;
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::shadow::{Access, Kind};
use crate::warp::ALL;

impl Machine<'_> {
    pub(super) fn exchange(&mut self, at: At, inst: &WarpInst) {
        let code = &self.program.codes[self.warp(at).code];
        match inst {
            WarpInst::Shfl { mode, ty: _, dst, src, lane } => {
                let (src, lane) = (*self.warp(at).value(code, *src), self.operand(at, *lane));
                let result = std::array::from_fn(|own| src[shuffle(*mode, own, lane[own])]);
                self.assign(at, *dst, &result, ALL);
            }
            WarpInst::Vote { mode, dst, src } => {
                let ones = self.warp(at).value(code, *src).iter().filter(|&&bit| bit & 1 == 1).count();
                let holds = match mode {
                    VoteMode::All => ones == 32,
                    VoteMode::Any => ones > 0,
                    VoteMode::Uniform => ones == 0 || ones == 32,
                };
                self.assign(at, *dst, &[holds.into(); 32], ALL);
            }
            WarpInst::Ballot { dst, src } => {
                let lanes = self.warp(at).value(code, *src).iter().enumerate();
                let bits = lanes.fold(0, |bits, (lane, &bit)| bits | (bit & 1) << lane);
                self.assign(at, *dst, &[bits; 32], ALL);
            }
            WarpInst::Elect { dst } => {
                let leader = self.warp(at).leader as usize;
                let elected = std::array::from_fn(|lane| (lane == leader).into());
                self.assign(at, *dst, &elected, ALL);
            }
            WarpInst::Sync => self.sync_lanes(at),
            WarpInst::Ldmatrix { dst, addr, trans } => {
                let rows = self.rows(at, *addr, (dst.len(), *trans), Kind::Read);
                for (register, &dst) in dst.iter().enumerate() {
                    let mut lanes = [0; 32];
                    for (lane, bits) in lanes.iter_mut().enumerate() {
                        for (half, (row, element)) in
                            matrix_source(lane as u32, register as u32, *trans).into_iter().enumerate()
                        {
                            let Some(place) = rows[row as usize] else { continue };
                            let bytes = self.clusters[at.cluster].ctas[place.cta]
                                .shared
                                .read(place.offset + 2 * element, 2);
                            *bits |= u64::from(u16::from_le_bytes([bytes[0], bytes[1]])) << (16 * half);
                        }
                    }
                    self.assign(at, dst, &lanes, ALL);
                }
            }
            WarpInst::Stmatrix { src, addr, trans } => {
                let rows = self.rows(at, *addr, (src.len(), *trans), Kind::Write);
                let mut data = [[0; 16]; 32];
                for (register, &src) in src.iter().enumerate() {
                    let lanes = *self.warp(at).value(code, src);
                    for (lane, bits) in lanes.iter().enumerate() {
                        for (half, (row, element)) in
                            matrix_source(lane as u32, register as u32, *trans).into_iter().enumerate()
                        {
                            let bytes = ((bits >> (16 * half)) as u16).to_le_bytes();
                            data[row as usize][2 * element as usize..][..2].copy_from_slice(&bytes);
                        }
                    }
                }
                self.same_place(at, &rows.map(|row| row.map(MemPlace::Shared)), &data, 16);
                for (place, bytes) in rows.iter().zip(&data) {
                    if let Some(SharedPlace { cta, offset }) = *place {
                        self.clusters[at.cluster].ctas[cta].shared.write(offset, bytes);
                    }
                }
                self.progress += 1;
            }
        }
    }

    /// The 16-byte rows of 8 x 8 matrices, whose addresses the lanes give.
    fn rows(
        &mut self,
        at: At,
        addr: fa3_ir::SharedAddr,
        (matrices, trans): (usize, bool),
        kind: Kind,
    ) -> [Option<SharedPlace>; 32] {
        let addresses = self.shared_addresses(at, addr);
        let lanes = 8 * matrices.min(4);
        let active = if lanes == 32 { ALL } else { (1 << lanes) - 1 };
        self.count_wavefronts(at, &addresses, active, 16);
        let access = self.generic(at, kind);
        let mut rows = [None; 32];
        for lane in 0..lanes {
            let Some(place) = self.resolve(at, addresses[lane], 16, 16, Rule::L1) else { continue };
            if kind == Kind::Read {
                self.need_shared(at, place, 16);
            }
            self.access_shared(at, place, 16, Access { lane: Lane::of_row(lane, trans), ..access });
            rows[lane] = Some(place);
        }
        rows
    }
}

/// The lane whose register lane `own` reads: `own` itself if the other lane is outside of the warp.
fn shuffle(mode: ShflMode, own: usize, given: u32) -> usize {
    let given = given as usize & 31;
    match mode {
        ShflMode::Idx => given,
        ShflMode::Bfly => own ^ given,
        ShflMode::Up => own.checked_sub(given).unwrap_or(own),
        ShflMode::Down if own + given < 32 => own + given,
        ShflMode::Down => own,
    }
}
