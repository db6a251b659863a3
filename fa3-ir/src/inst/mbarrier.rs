//! mbarriers: arrivals and bytes that complete a phase.

use crate::inst::Access;
use crate::lang::{Arg, B32, Builder, Pred, Reg, V};
use crate::names::Names;
use crate::{Inst, Operand, SharedAddr, Ty, Value};

/// The most arrivals, and the most bytes, of one phase.
const LIMIT: u32 = (1 << 20) - 1;

/// mbarrier operations. A phase is complete when no arrivals and no bytes are pending. The parities of phases alternate
/// from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum MbarrierInst {
    /// `mbarrier.init`: begins phase 0. `arrivals` arrivals complete each phase.
    Init { addr: SharedAddr, arrivals: u32 },
    /// `mbarrier.inval`: frees the mbarrier's memory for other data.
    Invalidate { addr: SharedAddr },
    /// `mbarrier.arrive`: one arrival. Earlier accesses are visible to threads that wait for the phase.
    Arrive { addr: SharedAddr },
    /// `mbarrier.arrive.expect_tx`: adds `bytes` to the phase's pending bytes, then arrives once.
    ArriveExpect { addr: SharedAddr, bytes: Operand },
    /// `mbarrier.expect_tx`: adds `bytes` to the phase's pending bytes.
    Expect { addr: SharedAddr, bytes: Operand },
    /// `mbarrier.arrive` at a computed address of the cluster; its release has the CTA's scope only.
    ArriveRemote { addr: Value },
    /// `cp.async.mbarrier.arrive.noinc`: one arrival as soon as all earlier cp.async of this thread are complete.
    ArriveCopied { addr: SharedAddr },
    /// A loop around `mbarrier.try_wait.parity`: waits until the phase of this parity is complete.
    Wait { addr: SharedAddr, parity: Operand },
    /// `mbarrier.try_wait.parity`: whether the phase is complete, after waiting for a time that the hardware limits.
    TryWait { dst: Value, addr: SharedAddr, parity: Operand },
    /// `mbarrier.test_wait.parity`: whether the phase is complete now.
    TestWait { dst: Value, addr: SharedAddr, parity: Operand },
}

impl MbarrierInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        let barrier = |addr: SharedAddr, arrivals, see: &mut dyn FnMut(Access)| {
            addr.visit_base(see);
            see(Access::Mbarrier { addr, arrivals });
        };
        match *self {
            MbarrierInst::Init { addr, arrivals } => {
                barrier(addr, Some(arrivals), see);
                let what = "mbarrier arrivals";
                see(Access::Limit { what, given: arrivals, min: 1, max: LIMIT, multiple: 1 });
            }
            MbarrierInst::Invalidate { addr }
            | MbarrierInst::Arrive { addr }
            | MbarrierInst::ArriveCopied { addr } => barrier(addr, None, see),
            MbarrierInst::ArriveExpect { addr, bytes } | MbarrierInst::Expect { addr, bytes } => {
                barrier(addr, None, see);
                see(Access::Read(bytes, Ty::B32));
                if let Some(given) = bytes.constant() {
                    see(Access::Limit { what: "expected bytes", given, min: 0, max: LIMIT, multiple: 1 });
                }
            }
            MbarrierInst::ArriveRemote { addr } => see(Access::Read(Operand::Value(addr), Ty::B32)),
            MbarrierInst::Wait { addr, parity } => {
                barrier(addr, None, see);
                visit_parity(parity, see);
            }
            MbarrierInst::TryWait { dst, addr, parity } | MbarrierInst::TestWait { dst, addr, parity } => {
                barrier(addr, None, see);
                visit_parity(parity, see);
                see(Access::Write(dst, Ty::Pred));
            }
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        match *self {
            MbarrierInst::Init { addr, arrivals } => {
                format!("mbarrier.init.shared::cta.b64 {}, {arrivals}", names.shared(addr))
            }
            MbarrierInst::Invalidate { addr } => {
                format!("mbarrier.inval.shared::cta.b64 {}", names.shared(addr))
            }
            MbarrierInst::Arrive { addr } => {
                format!("mbarrier.arrive.shared::cta.b64 _, {}", names.shared(addr))
            }
            MbarrierInst::ArriveExpect { addr, bytes } => {
                let (addr, bytes) = (names.shared(addr), names.operand(bytes));
                format!("mbarrier.arrive.expect_tx.shared::cta.b64 _, {addr}, {bytes}")
            }
            MbarrierInst::Expect { addr, bytes } => {
                let (addr, bytes) = (names.shared(addr), names.operand(bytes));
                format!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {addr}, {bytes}")
            }
            MbarrierInst::ArriveRemote { addr } => {
                format!("mbarrier.arrive.shared::cluster.b64 _, [{}]", names.value(addr))
            }
            MbarrierInst::ArriveCopied { addr } => {
                format!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 {}", names.shared(addr))
            }
            MbarrierInst::Wait { addr, parity } => {
                names.wait_loop("mbarrier.try_wait.parity.shared::cta.b64", addr, parity)
            }
            MbarrierInst::TryWait { dst, addr, parity } => {
                let (dst, addr, parity) = (names.value(dst), names.shared(addr), names.operand(parity));
                format!("mbarrier.try_wait.parity.shared::cta.b64 {dst}, {addr}, {parity}")
            }
            MbarrierInst::TestWait { dst, addr, parity } => {
                let (dst, addr, parity) = (names.value(dst), names.shared(addr), names.operand(parity));
                format!("mbarrier.test_wait.parity.shared::cta.b64 {dst}, {addr}, {parity}")
            }
        }
    }
}

fn visit_parity(parity: Operand, see: &mut dyn FnMut(Access)) {
    see(Access::Read(parity, Ty::B32));
    if let Some(given) = parity.constant() {
        see(Access::Limit { what: "parity", given, min: 0, max: 1, multiple: 1 });
    }
}

/// mbarriers.
impl Builder {
    /// Initialises an mbarrier for `arrivals` arrivals per phase.
    #[track_caller]
    pub fn mbarrier_init(&self, addr: impl Into<SharedAddr>, arrivals: u32) {
        self.push(Inst::Mbarrier(MbarrierInst::Init { addr: addr.into(), arrivals }));
    }

    /// Invalidates an mbarrier, so that its memory may hold other data.
    #[track_caller]
    pub fn mbarrier_invalidate(&self, addr: impl Into<SharedAddr>) {
        self.push(Inst::Mbarrier(MbarrierInst::Invalidate { addr: addr.into() }));
    }

    /// Arrives once. Earlier accesses of this thread are visible to threads that wait for the phase.
    #[track_caller]
    pub fn mbarrier_arrive(&self, addr: impl Into<SharedAddr>) {
        self.push(Inst::Mbarrier(MbarrierInst::Arrive { addr: addr.into() }));
    }

    /// Adds `bytes` to the phase's pending bytes, and arrives once.
    #[track_caller]
    pub fn mbarrier_arrive_expect(&self, addr: impl Into<SharedAddr>, bytes: impl Arg<Ty = B32>) {
        let (addr, bytes) = (addr.into(), bytes.operand());
        self.push(Inst::Mbarrier(MbarrierInst::ArriveExpect { addr, bytes }));
    }

    /// Adds `bytes` to the phase's pending bytes.
    #[track_caller]
    pub fn mbarrier_expect(&self, addr: impl Into<SharedAddr>, bytes: impl Arg<Ty = B32>) {
        self.push(Inst::Mbarrier(MbarrierInst::Expect { addr: addr.into(), bytes: bytes.operand() }));
    }

    /// Arrives once at the mbarrier of another CTA of the cluster ([`Builder::map_address`]), to signal that this CTA
    /// is done with data that the other CTA refills. This thread's writes are not visible in the other CTA, because the
    /// arrival releases in this CTA's scope only.
    #[track_caller]
    pub fn mbarrier_arrive_remote(&self, addr: impl Reg<Ty = B32>) {
        self.push(Inst::Mbarrier(MbarrierInst::ArriveRemote { addr: addr.register() }));
    }

    /// Arrives once, as soon as all earlier [`Builder::copy_async`] of this thread are complete.
    #[track_caller]
    pub fn mbarrier_arrive_copied(&self, addr: impl Into<SharedAddr>) {
        self.push(Inst::Mbarrier(MbarrierInst::ArriveCopied { addr: addr.into() }));
    }

    /// Waits until the phase of `parity` is complete, so that the current phase has the other parity.
    #[track_caller]
    pub fn mbarrier_wait(&self, addr: impl Into<SharedAddr>, parity: impl Arg<Ty = B32>) {
        self.push(Inst::Mbarrier(MbarrierInst::Wait { addr: addr.into(), parity: parity.operand() }));
    }

    /// Whether the phase of `parity` is complete. If it is not, waits a little first.
    #[track_caller]
    pub fn mbarrier_try_wait(&self, addr: impl Into<SharedAddr>, parity: impl Arg<Ty = B32>) -> V<'_, Pred> {
        let (addr, parity) = (addr.into(), parity.operand());
        self.result(|dst| Inst::Mbarrier(MbarrierInst::TryWait { dst, addr, parity }))
    }

    /// Whether the phase of `parity` is complete now.
    #[track_caller]
    pub fn mbarrier_test_wait(&self, addr: impl Into<SharedAddr>, parity: impl Arg<Ty = B32>) -> V<'_, Pred> {
        let (addr, parity) = (addr.into(), parity.operand());
        self.result(|dst| Inst::Mbarrier(MbarrierInst::TestWait { dst, addr, parity }))
    }
}
