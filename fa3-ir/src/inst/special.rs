//! Special registers.

use crate::lang::{B32, B64, Builder, Class, V};
use crate::{Inst, Ty};

macro_rules! specials {
    ($($(#[doc = $doc:literal])+ $register:ident: fn $name:ident() -> $class:ident = $ptx:literal;)+) => {
        /// A read-only register of the hardware.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Special {
            $($(#[doc = $doc])+ $register,)+
        }

        impl Special {
            /// Every special register.
            pub const ALL: &[Special] = &[$(Special::$register),+];

            /// The register's class.
            pub const fn ty(self) -> Ty {
                match self { $(Special::$register => $class::TY,)+ }
            }

            /// The register's name in PTX.
            pub const fn ptx(self) -> &'static str {
                match self { $(Special::$register => $ptx,)+ }
            }
        }

        /// Special registers.
        impl Builder {
            $(
                $(#[doc = $doc])+
                #[track_caller]
                pub fn $name(&self) -> V<'_, $class> {
                    self.result(|dst| Inst::Special { dst, register: Special::$register })
                }
            )+
        }
    };
}

specials! {
    /// The index of the thread in its CTA.
    Tid: fn tid() -> B32 = "%tid.x";
    /// The index of the lane in its warp.
    Lane: fn lane_id() -> B32 = "%laneid";
    /// The x index of the CTA in its grid.
    CtaX: fn cta_x() -> B32 = "%ctaid.x";
    /// The y index of the CTA in its grid.
    CtaY: fn cta_y() -> B32 = "%ctaid.y";
    /// The z index of the CTA in its grid.
    CtaZ: fn cta_z() -> B32 = "%ctaid.z";
    /// The grid's extent in CTAs, x.
    GridX: fn grid_x() -> B32 = "%nctaid.x";
    /// The grid's extent in CTAs, y.
    GridY: fn grid_y() -> B32 = "%nctaid.y";
    /// The grid's extent in CTAs, z.
    GridZ: fn grid_z() -> B32 = "%nctaid.z";
    /// The x index of the CTA in its cluster.
    ClusterCtaX: fn cluster_cta_x() -> B32 = "%cluster_ctaid.x";
    /// The rank of the CTA in its cluster.
    ClusterCtaRank: fn cluster_cta_rank() -> B32 = "%cluster_ctarank";
    /// Number of CTAs of the cluster.
    ClusterSize: fn cluster_size() -> B32 = "%cluster_nctarank";
    /// The number of the streaming multiprocessor, for profiling.
    SmId: fn sm_id() -> B32 = "%smid";
    /// The time in nanoseconds, common to all SMs, for profiling.
    GlobalTimer: fn global_timer() -> B64 = "%globaltimer";
    /// Cycles of this SM, for profiling.
    Clock: fn clock() -> B64 = "%clock64";
}
