//! A GPU.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};
use fa3_ir::Ptx;
use fa3_sched::DeviceLimits;

use super::cache::Cache;
use super::context::Context;
use super::driver::{self, check};
use super::{CudaError, DeviceBuffer, Function, HostBuffer, HostError, Stream};
use crate::archive::Archive;

/// A Hopper GPU, with the kernels compiled for it. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<Context>,
    facts: Arc<Facts>,
    cache: Arc<Cache>,
    archive: Option<Arc<Archive>>,
}

#[derive(Debug)]
struct Facts {
    name: String,
    pci_bus_id: String,
    driver_version: (u32, u32),
    compute_capability: (u32, u32),
    sm_count: u32,
    l2_bytes: u32,
    smem_bytes: u32,
}

/// Device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that are not allocated.
    pub free: usize,
    /// Total bytes.
    pub total: usize,
}

impl Device {
    /// Number of GPUs of any kind that the driver has.
    ///
    /// # Errors
    /// An error if there is no driver, if it is older than CUDA 12.0, or if the driver reports an error.
    pub fn count() -> Result<u32, HostError> {
        match driver::init() {
            Err(HostError::Driver { error, .. })
                if error == CudaError::new(CUresult::CUDA_ERROR_NO_DEVICE) =>
            {
                Ok(0)
            }
            Err(error) => Err(error),
            Ok(_) => driver_count(),
        }
    }

    /// The GPU with this number, in the driver's order.
    ///
    /// # Errors
    /// An error if there is no driver, if it is older than CUDA 12.0, if there is no such device, or if it is not a
    /// Hopper GPU.
    pub fn open(ordinal: u32) -> Result<Device, HostError> {
        let driver_version = match driver::init() {
            Err(HostError::Driver { error, .. })
                if error == CudaError::new(CUresult::CUDA_ERROR_NO_DEVICE) =>
            {
                return Err(HostError::NoDevice { ordinal, count: 0 });
            }
            other => other?,
        };
        let device = find(ordinal)?;
        let facts = Facts::of(device, driver_version)?;
        if facts.compute_capability != (9, 0) {
            let (major, minor) = facts.compute_capability;
            return Err(HostError::NotHopper { name: facts.name, major, minor });
        }
        let context = Arc::new(Context::retain(device)?);
        Ok(Device { context, facts: Arc::new(facts), cache: Arc::default(), archive: None })
    }

    /// The device with an archive of compiled kernels: a kernel is first looked for there. If the archive lacks it, or
    /// if the driver refuses the machine code, the driver compiles the kernel.
    pub fn with_archive(mut self, archive: Archive) -> Device {
        self.archive = Some(Arc::new(archive));
        self
    }

    /// The archive of compiled kernels, if the device has an archive.
    pub fn archive(&self) -> Option<&Archive> {
        self.archive.as_deref()
    }

    /// The name, such as "NVIDIA H100 80GB HBM3".
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// The address on the PCI bus, such as "0000:3b:00.0". Other libraries number GPUs in another order.
    pub fn pci_bus_id(&self) -> &str {
        &self.facts.pci_bus_id
    }

    /// The newest CUDA that the driver supports: major, minor.
    pub fn driver_version(&self) -> (u32, u32) {
        self.facts.driver_version
    }

    /// Major and minor compute capability: (9, 0).
    pub fn compute_capability(&self) -> (u32, u32) {
        self.facts.compute_capability
    }

    /// Number of streaming multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.facts.sm_count
    }

    /// Bytes of the L2 cache.
    pub fn l2_bytes(&self) -> u32 {
        self.facts.l2_bytes
    }

    /// The most shared memory that a CTA can have, in bytes.
    pub fn smem_bytes(&self) -> u32 {
        self.facts.smem_bytes
    }

    /// The limits that plans depend on.
    pub fn limits(&self) -> DeviceLimits {
        // Every GPU has at least one SM.
        let sms = NonZeroU32::new(self.sm_count()).unwrap_or(NonZeroU32::MIN);
        DeviceLimits::h100_sxm().sms(sms).smem_bytes(self.smem_bytes())
    }

    /// Whether launches may overlap with preceding work (programmatic dependent launch). They may not if `sms` leaves
    /// SMs to other work, since waiting CTAs would fill those SMs, and with drivers before 12.3, which cannot capture
    /// such launches.
    pub(super) fn may_overlap(&self, sms: Option<NonZeroU32>) -> bool {
        sms.is_none_or(|sms| sms.get() >= self.sm_count()) && self.driver_version() >= (12, 3)
    }

    /// The memory at this moment.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn memory(&self) -> Result<Memory, HostError> {
        let current = self.context.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for the results.
        current.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(Memory { free, total })
    }

    /// Compiles a kernel, unless the [archive](Device::with_archive) has it. [`Device::kernel`] compiles each kernel of
    /// this library once.
    ///
    /// # Errors
    /// Errors of the driver's compiler, or a kernel that takes too much shared memory.
    pub fn compile(&self, ptx: &Ptx) -> Result<Function, HostError> {
        self.context.usable()?;
        Function::compile(self, ptx)
    }

    /// `bytes` of uninitialised device memory, aligned to 256.
    ///
    /// # Errors
    /// [`HostError::OutOfMemory`].
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, HostError> {
        DeviceBuffer::new(self, bytes)
    }

    /// `bytes` of page-locked host memory, zeroed, for asynchronous copies.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn alloc_host(&self, bytes: usize) -> Result<HostBuffer, HostError> {
        HostBuffer::new(self, bytes)
    }

    /// Device memory that holds `data` when this returns.
    ///
    /// # Errors
    /// [`HostError::OutOfMemory`], [`HostError::OtherDevice`] if the stream belongs to another device, or an error of
    /// the driver.
    pub fn upload<T: Pod>(&self, stream: &Stream, data: &[T]) -> Result<DeviceBuffer, HostError> {
        let mut buffer = self.alloc(size_of_val(data))?;
        buffer.upload(stream, data)?;
        Ok(buffer)
    }

    /// A new stream, which does not wait for the default stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn stream(&self) -> Result<Stream, HostError> {
        Stream::new(self)
    }

    /// The default stream.
    pub fn default_stream(&self) -> Stream {
        Stream::default_of(self)
    }

    /// Waits for all work on the device, including other libraries' work.
    ///
    /// # Errors
    /// Errors of the kernels in flight.
    pub fn synchronize(&self) -> Result<(), HostError> {
        let current = self.context.enter()?;
        // SAFETY: it has no arguments.
        current.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        self.context.synchronised(|_| true);
        Ok(())
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { name, driver_version: (major, minor), sm_count, .. } = &*self.facts;
        write!(f, "{name} ({sm_count} sms, cuda {major}.{minor})")
    }
}

/// Number of GPUs of an initialised driver.
fn driver_count() -> Result<u32, HostError> {
    let mut count = 0;
    // SAFETY: `count` is valid for the result.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count.unsigned_abs())
}

fn find(ordinal: u32) -> Result<CUdevice, HostError> {
    let (count, mut device) = (driver_count()?, 0);
    let Some(index) = i32::try_from(ordinal).ok().filter(|_| ordinal < count) else {
        return Err(HostError::NoDevice { ordinal, count });
    };
    // SAFETY: `device` is valid for the result.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
    Ok(device)
}

impl Facts {
    fn of(device: CUdevice, driver_version: (u32, u32)) -> Result<Facts, HostError> {
        use CUdevice_attribute as A;
        Ok(Facts {
            name: name(device)?,
            pci_bus_id: pci_bus_id(device)?,
            driver_version,
            compute_capability: (
                attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(device, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(device, A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            smem_bytes: attribute(device, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }
}

fn name(device: CUdevice) -> Result<String, HostError> {
    let mut text: [c_char; 256] = [0; 256];
    // SAFETY: `text` has room for the 256 bytes that are announced.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), 256, device) })?;
    // SAFETY: the driver wrote a string that ends with a zero.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

fn pci_bus_id(device: CUdevice) -> Result<String, HostError> {
    let domain = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
    let bus = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
    let slot = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
    Ok(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
}

fn attribute(device: CUdevice, which: CUdevice_attribute) -> Result<u32, HostError> {
    let mut value = 0;
    // SAFETY: `value` is valid for the result.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
    Ok(value.unsigned_abs())
}
