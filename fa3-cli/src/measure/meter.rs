//! What a GPU's board takes, by NVIDIA's management library (NVML), which comes with the driver.

use std::time::Instant;

use fa3::cuda::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;

/// Reads the energy counter and the clock of a GPU.
pub(crate) struct Meter {
    nvml: Nvml,
    pci_bus_id: String,
}

/// What it read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    time: Instant,
    /// What the board took since the driver was loaded.
    millijoules: u64,
    /// The SMs' clock.
    sm_mhz: u32,
}

impl Meter {
    /// # Errors
    /// If there is no NVML, or if it cannot read this GPU.
    pub(crate) fn open(device: &Device) -> Result<Meter, NvmlError> {
        let meter = Meter { nvml: Nvml::init()?, pci_bus_id: device.pci_bus_id().to_owned() };
        meter.read()?;
        Ok(meter)
    }

    /// # Errors
    /// NVML's.
    pub(super) fn read(&self) -> Result<Reading, NvmlError> {
        let gpu = self.nvml.device_by_pci_bus_id(self.pci_bus_id.as_str())?;
        let (millijoules, sm_mhz) = (gpu.total_energy_consumption()?, gpu.clock_info(Clock::SM)?);
        Ok(Reading { time: Instant::now(), millijoules, sm_mhz })
    }
}

/// Mean power in watts between the first and the last update of the energy counter, if there were two. The counter
/// stands still between updates, so that only readings just after one are of their time.
pub(super) fn watts(readings: &[Reading]) -> Option<f64> {
    let updates = || readings.windows(2).filter(|pair| pair[0].millijoules != pair[1].millijoules);
    let (first, last) = (updates().next()?[1], updates().next_back()?[1]);
    let seconds = last.time.duration_since(first.time).as_secs_f64();
    (seconds > 0.0).then(|| (last.millijoules - first.millijoules) as f64 / 1e3 / seconds)
}

/// The SMs' mean clock.
pub(super) fn sm_mhz(readings: &[Reading]) -> f64 {
    readings.iter().map(|reading| f64::from(reading.sm_mhz)).sum::<f64>() / readings.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// 500 W; the counter is updated every 100 ms and read every 30 ms.
    #[test]
    fn power_is_that_between_updates_of_the_counter() {
        let start = Instant::now();
        let reading = |millis: u64| Reading {
            time: start + Duration::from_millis(millis),
            millijoules: 7000 + 50_000 * (millis / 100),
            sm_mhz: 1500 + 10 * (millis / 30 % 2) as u32,
        };
        let readings: Vec<Reading> = (0..1000).step_by(30).map(reading).collect();
        let watts_of_all = watts(&readings).unwrap();
        assert!((475.0..525.0).contains(&watts_of_all), "{watts_of_all}");
        assert_eq!(sm_mhz(&readings), 1505.0);
        // One update, and none.
        assert_eq!(watts(&readings[..5]), None);
        assert_eq!(watts(&readings[..3]), None);
        assert_eq!(watts(&[]), None);
    }
}
