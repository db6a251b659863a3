//! Kernel launches.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDim, CUlaunchConfig,
};
use fa3_ir::{ArgError, ArgValue, check_args, check_grid};

use super::context::Current;
use super::params::{ParamImage, pack};
use super::{Function, HostError, Stream, tensor_map};

/// A kernel and its launch configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchInfo {
    /// The kernel's name.
    pub kernel: Arc<str>,
    /// CTAs in each dimension.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub smem_bytes: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
}

impl fmt::Display for LaunchInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LaunchInfo { kernel, grid: [x, y, z], threads, smem_bytes, cluster } = self;
        write!(f, "{kernel}, {x} x {y} x {z} ctas of {threads} threads")?;
        if *smem_bytes > 0 {
            write!(f, ", {smem_bytes} bytes of shared memory")?;
        }
        if *cluster > 1 { write!(f, ", clusters of {cluster}") } else { Ok(()) }
    }
}

impl Function {
    /// Launches the kernel on `stream`, with one argument for each of its parameters. Returns at once.
    ///
    /// On a stream that is captured into a graph, the launch becomes a node of the graph.
    ///
    /// # Safety
    /// `args` hold plain addresses. The kernel must stay within memory that the GPU may access, that lives until the
    /// kernel has ended, and that nothing else uses meanwhile. In addition, the kernel's text must declare the
    /// parameters that its [`Ptx`](fa3_ir::Ptx) lists, as the text of [`fa3_ir::ptx::emit`] does.
    ///
    /// # Errors
    /// The arguments or the grid do not match the kernel's declaration, the stream belongs to another device, or the
    /// driver reports an error.
    pub unsafe fn launch(&self, stream: &Stream, grid: [u32; 3], args: &[ArgValue]) -> Result<(), HostError> {
        self.launch_after(stream, grid, args, false)
    }

    /// Launches the kernel as a programmatic dependent (PDL): it may start before the preceding work on the stream has
    /// ended. Everything else is as in [`Function::launch`].
    ///
    /// # Safety
    /// The conditions of [`Function::launch`]. In addition, the kernel must wait (`griddepcontrol.wait`) before it
    /// accesses memory that the preceding kernel writes.
    ///
    /// # Errors
    /// The errors of [`Function::launch`].
    pub unsafe fn launch_dependent(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        args: &[ArgValue],
    ) -> Result<(), HostError> {
        self.launch_after(stream, grid, args, true)
    }

    fn launch_after(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        args: &[ArgValue],
        dependent: bool,
    ) -> Result<(), HostError> {
        let ptx = self.ptx();
        let refuse = |error: ArgError| HostError::Args { kernel: ptx.entry.clone(), error: Box::new(error) };
        check_args(&ptx.params, args).map_err(refuse)?;
        check_grid(grid, ptx.cluster).map_err(refuse)?;

        let current = self.context().enter()?;
        let encode =
            |param: &str, shape: &_, view: &_| tensor_map::encode(&current, (&ptx.entry, param), shape, view);
        let mut images = pack(&ptx.params, args, encode)?;
        // SAFETY: the images belong to the arguments, which the callers guarantee.
        unsafe { self.launch_images(&current, stream, grid, &mut images, dependent) }
    }

    /// Launches the kernel with encoded arguments.
    ///
    /// # Safety
    /// The conditions of [`Function::launch`] or [`Function::launch_dependent`]. In addition, the images must belong to
    /// arguments that fit the kernel's parameters.
    ///
    /// # Errors
    /// A stream of another device, or an error of the driver.
    pub(super) unsafe fn launch_images(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        grid: [u32; 3],
        images: &mut [ParamImage],
        dependent: bool,
    ) -> Result<(), HostError> {
        stream.check_context(self.context())?;
        let ptx = self.ptx();
        let mut pointers: Vec<_> = images.iter_mut().map(|image| image.pointer()).collect();
        let mut attributes = attributes(ptx.cluster, dependent);
        let [grid_x, grid_y, grid_z] = grid;
        let config = CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: ptx.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: ptx.smem_bytes,
            hStream: stream.raw().0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: function and stream are alive; every pointer leads to an image that is at least as large as the
        // kernel's parameter at that index; the driver copies all images before it returns.
        let result = unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.raw().0, pointers.as_mut_ptr(), ptr::null_mut())
        };
        let launch = LaunchInfo {
            kernel: self.name(),
            grid,
            threads: ptx.threads,
            smem_bytes: ptx.smem_bytes,
            cluster: ptx.cluster,
        };
        let say = |error| HostError::Launch { launch: Box::new(launch.clone()), error };
        current.check_launch("cuLaunchKernelEx", result, stream.raw(), [launch.clone()], say)
    }
}

fn attributes(cluster: u32, dependent: bool) -> Vec<CUlaunchAttribute> {
    let mut attributes = Vec::new();
    if cluster > 1 {
        attributes.push(CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { clusterDim: ClusterDim { x: cluster, y: 1, z: 1 } },
        });
    }
    if dependent {
        attributes.push(CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        });
    }
    attributes
}
