//! Clusters: their barrier, and the shared memory of their other CTAs.

use crate::inst::Access;
use crate::lang::{Arg, B32, Builder, F32, Reg, V};
use crate::names::Names;
use crate::{Inst, Operand, SharedAddr, Ty, Value};

/// Instructions for clusters of CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum ClusterInst {
    /// `barrier.cluster.arrive`, which releases earlier accesses unless `relaxed`.
    Arrive { relaxed: bool },
    /// `barrier.cluster.wait`, which acquires.
    Wait,
    /// `mapa`: the address in CTA `cta` of the cluster that corresponds to `addr`.
    MapAddress { dst: Value, addr: SharedAddr, cta: Operand },
    /// `st.async`: stores a binary32 to a computed address of the cluster, then completes 4 bytes of a phase of the
    /// mbarrier at another address in the same CTA.
    StoreAsync { src: Operand, addr: Value, mbarrier: Value },
}

impl ClusterInst {
    /// Whether the instruction is `.aligned`.
    pub(crate) fn is_collective(&self) -> bool {
        matches!(self, ClusterInst::Arrive { .. } | ClusterInst::Wait)
    }

    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            ClusterInst::Arrive { .. } | ClusterInst::Wait => {}
            ClusterInst::MapAddress { dst, addr, cta } => {
                addr.visit(0, 1, see);
                see(Access::Read(*cta, Ty::B32));
                see(Access::Write(*dst, Ty::B32));
            }
            ClusterInst::StoreAsync { src, addr, mbarrier } => {
                see(Access::Read(*src, Ty::F32));
                [addr, mbarrier].into_iter().for_each(|&at| see(Access::Read(Operand::Value(at), Ty::B32)));
            }
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        match self {
            ClusterInst::Arrive { relaxed: false } => "barrier.cluster.arrive.release.aligned".to_owned(),
            ClusterInst::Arrive { relaxed: true } => "barrier.cluster.arrive.relaxed.aligned".to_owned(),
            ClusterInst::Wait => "barrier.cluster.wait.acquire.aligned".to_owned(),
            ClusterInst::MapAddress { dst, addr, cta } => {
                let (addr, cta) = (names.shared_plain(*addr), names.operand(*cta));
                format!("mapa.shared::cluster.u32 {}, {addr}, {cta}", names.value(*dst))
            }
            ClusterInst::StoreAsync { src, addr, mbarrier } => {
                let (src, addr) = (names.operand(*src), names.value(*addr));
                let (form, mbarrier) = ("mbarrier::complete_tx::bytes", names.value(*mbarrier));
                format!("st.async.weak.shared::cluster.{form}.f32 [{addr}], {src}, [{mbarrier}]")
            }
        }
    }
}

/// Clusters.
impl Builder {
    /// Arrives at the cluster's barrier. Earlier accesses are visible to threads that wait for it.
    #[track_caller]
    pub fn cluster_arrive(&self) {
        self.push(Inst::Cluster(ClusterInst::Arrive { relaxed: false }));
    }

    /// Arrives at the cluster's barrier without ordering accesses.
    #[track_caller]
    pub fn cluster_arrive_relaxed(&self) {
        self.push(Inst::Cluster(ClusterInst::Arrive { relaxed: true }));
    }

    /// Waits until all threads of the cluster have arrived.
    #[track_caller]
    pub fn cluster_wait(&self) {
        self.push(Inst::Cluster(ClusterInst::Wait));
    }

    /// The address in CTA `cta` of the cluster that corresponds to `addr`.
    #[track_caller]
    pub fn map_address(&self, addr: impl Into<SharedAddr>, cta: impl Arg<Ty = B32>) -> V<'_, B32> {
        let (addr, cta) = (addr.into(), cta.operand());
        self.result(|dst| Inst::Cluster(ClusterInst::MapAddress { dst, addr, cta }))
    }

    /// Begins to store `x` to shared memory of a CTA of the cluster. The store then completes 4 bytes of a phase of
    /// `mbarrier`, which lies in the same CTA; threads that wait for the phase see `x`. Both addresses are results of
    /// [`Builder::map_address`].
    #[track_caller]
    pub fn store_async(&self, addr: impl Reg<Ty = B32>, x: impl Arg<Ty = F32>, mbarrier: impl Reg<Ty = B32>) {
        let (src, addr, mbarrier) = (x.operand(), addr.register(), mbarrier.register());
        self.push(Inst::Cluster(ClusterInst::StoreAsync { src, addr, mbarrier }));
    }
}
