//! Clusters: their barrier, and addresses in other CTAs.

use fa3_ir::{ClusterInst, Operand};

use super::Flow;
use super::shared::SharedPlace;
use crate::copies::{AsyncEvent, RemoteStore, Target};
use crate::lanes::Lane;
use crate::machine::{At, Machine};
use crate::memory::POISON;
use crate::rule::Rule;
use crate::shadow::{Access, Kind, Origin};
use crate::shared::map;
use crate::trace::{Action, Gate};
use crate::warp::{State, Warp, each};

impl Machine<'_> {
    pub(super) fn cluster(&mut self, at: At, inst: &ClusterInst, active: u32) -> Flow {
        match inst {
            ClusterInst::Arrive { relaxed } => self.cluster_arrive(at, *relaxed),
            ClusterInst::Wait => return self.cluster_wait(at),
            ClusterInst::MapAddress { dst, addr, cta } => {
                let (addresses, ctas) = (self.shared_addresses(at, *addr), self.operand(at, *cta));
                let size = self.program.kernel.launch.cluster;
                let mut mapped = [0; 32];
                for lane in each(active) {
                    if ctas[lane] >= size {
                        self.find(Rule::Bounds, at, format!("cta {} of a cluster of {size}", ctas[lane]));
                    }
                    mapped[lane] = map(addresses[lane], ctas[lane] & 0xFF).into();
                }
                self.assign(at, *dst, &mapped, active);
            }
            ClusterInst::StoreAsync { src, addr, mbarrier } => {
                let bits = self.operand(at, *src);
                let [to, signals] = [*addr, *mbarrier].map(|held| self.operand(at, Operand::Value(held)));
                for lane in each(active) {
                    self.store_async(at, lane, bits[lane], to[lane], signals[lane]);
                }
            }
        }
        Flow::Next
    }

    /// Begins a st.async of a lane. It is an access of the generic proxy, not of the async proxy.
    fn store_async(&mut self, at: At, lane: usize, bits: u32, to: u32, mbarrier: u32) {
        let Some(place) = self.resolve_in_cluster(at, to, 4, 4, Rule::Bounds) else { return };
        let Some(signal) = self.resolve_in_cluster(at, mbarrier, 8, 8, Rule::M1) else { return };
        if signal.cta != place.cta {
            return self.find(Rule::Bounds, at, "a store signals an mbarrier of another cta");
        }
        if !self.use_mbarrier(at, signal, true) {
            return;
        }
        let (event, issuer) = (self.event(at), (self.warp(at).component, Lane::of(lane)));
        let released = self.released(at);
        let Some(known) = self.clusters[at.cluster].mbarrier(signal) else { return };
        let (phase, component) = (known.issue(issuer.0, 4), known.component);
        let access = self.load_access(at.cluster, (component, phase), event, Kind::Write, issuer);
        self.access_shared(at, place, 4, Access { origin: Origin::StoreAsync, ..access });
        self.clusters[at.cluster].ctas[place.cta].shared.write(place.offset, &[POISON; 4]);
        let target = Target { cta: place.cta, offset: place.offset, mbarrier: signal.offset, phase };
        self.trace_load(at, 4, &[target]);
        let store = RemoteStore { bits, target, released, event };
        if self.schedule.loads_at_once() {
            self.stored(at.cluster, store);
        } else {
            self.clusters[at.cluster].events.push(AsyncEvent::Store(store));
        }
        self.warp(at).tick();
    }

    /// Completes a st.async: stores the number and signals the mbarrier. This releases the store, and the thread's
    /// events before it.
    pub(super) fn stored(&mut self, cluster: usize, store: RemoteStore) {
        let RemoteStore { bits, target: Target { cta, offset, mbarrier, phase }, released, event } = store;
        self.clusters[cluster].ctas[cta].shared.write(offset, &bits.to_le_bytes());
        if let Some(signalled) = self.clusters[cluster].ctas[cta].mbarrier(mbarrier) {
            signalled.collected.join(&released);
        }
        self.signal(cluster, SharedPlace { cta, offset: mbarrier }, 4, phase, event);
    }

    fn cluster_arrive(&mut self, at: At, relaxed: bool) {
        self.counters.barriers += 1;
        self.progress += 1;
        let generation = self.clusters[at.cluster].barrier.generation;
        if self.warp(at).cluster_arrival.replace(generation) == Some(generation) {
            self.find(Rule::B2, at, "a warp arrives at the cluster's barrier again without waiting");
            return;
        }
        self.trace(at, Action::Signal { gate: Gate::Cluster { generation }, count: 1 });
        let now = self.moment(at);
        let warp = self.warp(at);
        warp.cluster_release = if relaxed { warp.fence_release } else { Some(now) };
        let bundle = if relaxed {
            // A relaxed arrival releases what fences before it have released: all events, or initialisations of
            // mbarriers.
            let mut bundle = warp.fenced_on_gpu.clone().unwrap_or_default();
            warp.introduced.drain(..).for_each(|component| bundle.generic.raise(component, 1));
            bundle
        } else {
            warp.bundle.clone()
        };
        warp.tick();
        let barrier = &mut self.clusters[at.cluster].barrier;
        barrier.arrived += 1;
        barrier.collected.join(&bundle);
        self.complete_cluster_barrier(at.cluster);
    }

    /// Completes the generation if all warps that have not exited have arrived.
    pub(super) fn complete_cluster_barrier(&mut self, cluster: usize) {
        let cluster = &mut self.clusters[cluster];
        let generation = cluster.barrier.generation;
        let misses = |warp: &Warp| warp.state != State::Exited && warp.cluster_arrival != Some(generation);
        if cluster.warps().any(misses) || cluster.barrier.arrived == 0 {
            return;
        }
        let barrier = &mut cluster.barrier;
        barrier.generation += 1;
        barrier.arrived = 0;
        barrier.complete = barrier.collected.clone();
        for warp in cluster.warps_mut() {
            if warp.state == State::Cluster {
                warp.state = State::Ready;
            }
        }
    }

    fn cluster_wait(&mut self, at: At) -> Flow {
        let Some(arrival) = self.warp(at).cluster_arrival else {
            self.find(Rule::B1, at, "a warp waits at the cluster's barrier without having arrived");
            return Flow::Next;
        };
        if self.clusters[at.cluster].barrier.generation <= arrival {
            self.warp(at).state = State::Cluster;
            return Flow::Stay;
        }
        self.trace(at, Action::Await(Gate::Cluster { generation: arrival }));
        let complete = self.clusters[at.cluster].barrier.complete.clone();
        let warp = self.warp(at);
        warp.bundle.join(&complete);
        if let Some(release) = warp.cluster_release.take() {
            warp.sync(release);
        }
        Flow::Next
    }
}
