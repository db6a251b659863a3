//! The host layer on machines without a GPU.

use fa3_cuda::host::{
    Device, DeviceBuffer, Event, Forward, Function, Graph, HostError, OperationError, Stream,
    is_driver_present,
};

/// Opening a device without a driver returns an error, without a panic.
#[test]
fn a_missing_driver_is_an_error() {
    if is_driver_present() {
        println!("skipped: this machine has a driver");
        return;
    }
    for ordinal in [0, 7, u32::MAX] {
        assert_eq!(Device::open(ordinal).err(), Some(HostError::NoDriver));
    }
    assert_eq!(HostError::NoDriver.to_string(), "no nvidia driver: libcuda cannot be loaded");
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    if !is_driver_present() {
        println!("skipped: this machine has no driver");
        return;
    }
    let error = Device::open(1000).err();
    assert!(matches!(error, Some(HostError::NoDevice { ordinal: 1000, .. })), "{error:?}");
}

/// Any thread may use any handle.
#[test]
fn handles_are_send_and_sync() {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<(Device, Function, Stream, Event, DeviceBuffer, HostError)>();
    any_thread::<(Forward, Graph, OperationError)>();
}
