//! Exchange between the lanes of a warp: shuffles, votes, matrices of 8 x 8. All 32 lanes take part.

use crate::inst::Access;
use crate::lang::{Arg, B32, Builder, Class, Pred, Reg, V, Word};
use crate::names::Names;
use crate::{Inst, Operand, SharedAddr, Ty, Value};

/// The lane that a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShflMode {
    /// The lane with the given number.
    Idx,
    /// The lane whose number is this lane's number ⊕ the given number.
    Bfly,
    /// This lane's number − the given number; this lane itself if there is no such lane.
    Up,
    /// This lane's number + the given number; this lane itself if there is no such lane.
    Down,
}

impl ShflMode {
    const fn ptx(self) -> &'static str {
        match self {
            ShflMode::Idx => "idx",
            ShflMode::Bfly => "bfly",
            ShflMode::Up => "up",
            ShflMode::Down => "down",
        }
    }

    /// The operand c that makes the whole warp one segment.
    const fn clamp(self) -> u32 {
        match self {
            ShflMode::Up => 0,
            ShflMode::Idx | ShflMode::Bfly | ShflMode::Down => 31,
        }
    }
}

/// Question of a vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VoteMode {
    /// Is the predicate true in all lanes?
    All,
    /// Is the predicate true in any lane?
    Any,
    /// Is the predicate the same in all lanes?
    Uniform,
}

/// Exchange between lanes. Masks of lanes are always full.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum WarpInst {
    /// `shfl.sync`.
    Shfl { mode: ShflMode, ty: Ty, dst: Value, src: Value, lane: Operand },
    /// `vote.sync.{all,any,uni}.pred`.
    Vote { mode: VoteMode, dst: Value, src: Value },
    /// `vote.sync.ballot.b32`: bit i is lane i's predicate.
    Ballot { dst: Value, src: Value },
    /// `elect.sync`: true in one lane, always the same one.
    Elect { dst: Value },
    /// `bar.warp.sync`.
    Sync,
    /// `ldmatrix`, of 1, 2 or 4 matrices.
    Ldmatrix { dst: Vec<Value>, addr: SharedAddr, trans: bool },
    /// `stmatrix`, of 1, 2 or 4 matrices.
    Stmatrix { src: Vec<Value>, addr: SharedAddr, trans: bool },
}

impl WarpInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            WarpInst::Shfl { mode: _, ty, dst, src, lane } => {
                see(Access::Read(Operand::Value(*src), *ty));
                see(Access::Read(*lane, Ty::B32));
                if let Some(given) = lane.constant() {
                    see(Access::Limit { what: "shuffle lane", given, min: 0, max: 31, multiple: 1 });
                }
                see(Access::Write(*dst, *ty));
            }
            WarpInst::Vote { mode: _, dst, src } => {
                see(Access::Read(Operand::Value(*src), Ty::Pred));
                see(Access::Write(*dst, Ty::Pred));
            }
            WarpInst::Ballot { dst, src } => {
                see(Access::Read(Operand::Value(*src), Ty::Pred));
                see(Access::Write(*dst, Ty::B32));
            }
            WarpInst::Elect { dst } => see(Access::Write(*dst, Ty::Pred)),
            WarpInst::Sync => {}
            WarpInst::Ldmatrix { dst, addr, trans: _ } => {
                see(Access::Vector { width: dst.len(), ty: Ty::B32 });
                addr.visit(16, 16, see);
                dst.iter().for_each(|&value| see(Access::Write(value, Ty::B32)));
            }
            WarpInst::Stmatrix { src, addr, trans: _ } => {
                see(Access::Vector { width: src.len(), ty: Ty::B32 });
                addr.visit(16, 16, see);
                src.iter().for_each(|&value| see(Access::Read(Operand::Value(value), Ty::B32)));
            }
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        let trans = |trans: bool| if trans { ".trans" } else { "" };
        match self {
            WarpInst::Shfl { mode, ty: _, dst, src, lane } => format!(
                "shfl.sync.{}.b32 {}, {}, {}, {}, -1",
                mode.ptx(),
                names.value(*dst),
                names.value(*src),
                names.operand(*lane),
                mode.clamp()
            ),
            WarpInst::Vote { mode, dst, src } => {
                let mode = match mode {
                    VoteMode::All => "all",
                    VoteMode::Any => "any",
                    VoteMode::Uniform => "uni",
                };
                format!("vote.sync.{mode}.pred {}, {}, -1", names.value(*dst), names.value(*src))
            }
            WarpInst::Ballot { dst, src } => {
                format!("vote.sync.ballot.b32 {}, {}, -1", names.value(*dst), names.value(*src))
            }
            WarpInst::Elect { dst } => format!("elect.sync _|{}, -1", names.value(*dst)),
            WarpInst::Sync => "bar.warp.sync -1".to_owned(),
            WarpInst::Ldmatrix { dst, addr, trans: t } => {
                let (count, t) = (dst.len(), trans(*t));
                let (dst, addr) = (names.list(dst), names.shared(*addr));
                format!("ldmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 {dst}, {addr}")
            }
            WarpInst::Stmatrix { src, addr, trans: t } => {
                let (count, t) = (src.len(), trans(*t));
                let (src, addr) = (names.list(src), names.shared(*addr));
                format!("stmatrix.sync.aligned.m8n8.x{count}{t}.shared.b16 {addr}, {src}")
            }
        }
    }
}

/// Shuffles. All 32 lanes of a warp must take part.
impl<'k, T: Word> V<'k, T> {
    #[track_caller]
    fn shfl(self, mode: ShflMode, lane: impl Arg<Ty = B32>) -> V<'k, T> {
        let (src, lane) = (self.register(), lane.operand());
        self.builder().result(|dst| Inst::Warp(WarpInst::Shfl { mode, ty: T::TY, dst, src, lane }))
    }

    /// The value in `lane`.
    #[track_caller]
    pub fn shfl_idx(self, lane: impl Arg<Ty = B32>) -> V<'k, T> {
        self.shfl(ShflMode::Idx, lane)
    }

    /// The value in lane l ⊕ `mask`, where l is this lane's number.
    #[track_caller]
    pub fn shfl_bfly(self, mask: impl Arg<Ty = B32>) -> V<'k, T> {
        self.shfl(ShflMode::Bfly, mask)
    }

    /// The value in the lane `delta` below this lane; this lane's own value if there is no such lane.
    #[track_caller]
    pub fn shfl_up(self, delta: impl Arg<Ty = B32>) -> V<'k, T> {
        self.shfl(ShflMode::Up, delta)
    }

    /// The value in the lane `delta` above this lane; this lane's own value if there is no such lane.
    #[track_caller]
    pub fn shfl_down(self, delta: impl Arg<Ty = B32>) -> V<'k, T> {
        self.shfl(ShflMode::Down, delta)
    }
}

/// Votes. All 32 lanes of a warp must take part.
impl<'k> V<'k, Pred> {
    #[track_caller]
    fn vote(self, mode: VoteMode) -> V<'k, Pred> {
        let src = self.register();
        self.builder().result(|dst| Inst::Warp(WarpInst::Vote { mode, dst, src }))
    }

    /// Whether the predicate is true in all lanes.
    #[track_caller]
    pub fn vote_all(self) -> V<'k, Pred> {
        self.vote(VoteMode::All)
    }

    /// Whether the predicate is true in any lane.
    #[track_caller]
    pub fn vote_any(self) -> V<'k, Pred> {
        self.vote(VoteMode::Any)
    }

    /// Whether the predicate is the same in all lanes.
    #[track_caller]
    pub fn vote_uniform(self) -> V<'k, Pred> {
        self.vote(VoteMode::Uniform)
    }

    /// A word whose bit i is the predicate in lane i.
    #[track_caller]
    pub fn ballot(self) -> V<'k, B32> {
        let src = self.register();
        self.builder().result(|dst| Inst::Warp(WarpInst::Ballot { dst, src }))
    }
}

/// Operations of a whole warp. All 32 lanes must take part.
impl Builder {
    /// A predicate that is true in one lane, always the same lane of a warp.
    #[track_caller]
    pub fn elect(&self) -> V<'_, Pred> {
        self.result(|dst| Inst::Warp(WarpInst::Elect { dst }))
    }

    /// Waits for the warp's other lanes. Each lane then sees the memory accesses that the others made before the call.
    #[track_caller]
    pub fn warp_sync(&self) {
        self.push(Inst::Warp(WarpInst::Sync));
    }

    /// Loads `N` (1, 2 or 4) 8 x 8 matrices of 16-bit elements. Lane 8i + r gives the address of row r of matrix i.
    /// Lane l gets elements 2 (l mod 4) and 2 (l mod 4) + 1 of row l / 4, of the transposes if `trans`.
    #[track_caller]
    pub fn ldmatrix<const N: usize>(&self, addr: impl Into<SharedAddr>, trans: bool) -> [V<'_, B32>; N] {
        let dst = [(); N].map(|()| self.define(B32::TY));
        self.push(Inst::Warp(WarpInst::Ldmatrix { dst: dst.to_vec(), addr: addr.into(), trans }));
        dst.map(|value| V::new(self, value))
    }

    /// The inverse of [`Builder::ldmatrix`].
    #[track_caller]
    pub fn stmatrix<const N: usize>(
        &self,
        addr: impl Into<SharedAddr>,
        src: [impl Reg<Ty = B32>; N],
        trans: bool,
    ) {
        let src = src.map(Reg::register).to_vec();
        self.push(Inst::Warp(WarpInst::Stmatrix { src, addr: addr.into(), trans }));
    }
}
