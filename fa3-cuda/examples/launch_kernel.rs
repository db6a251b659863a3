//! Writes a kernel, has the driver compile it, and launches it:
//! `cargo run --release -p fa3-cuda --example launch_kernel`.

use fa3_cuda::host::{Device, HostError};
use fa3_ir::lang::F32;
use fa3_ir::{ArgValue, Elem, Kernel, Launch, ptx};

fn main() -> Result<(), HostError> {
    let ptx = ptx::emit(&double()).expect("the kernel is sound");
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let (stream, function) = (device.stream()?, device.compile(&ptx)?);
    println!("on {device}: {} registers, compiled in {:.1?}", function.registers(), function.compile_time());

    let numbers: Vec<f32> = (0..1024_u16).map(f32::from).collect();
    let x = device.upload(&stream, &numbers)?;
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    // SAFETY: each of the 8 x 128 threads accesses one element of x, and x lives until it is downloaded.
    unsafe { function.launch(&stream, [8, 1, 1], &[ArgValue::Pointer(x.address())]) }?;
    let doubled: Vec<f32> = x.download(&stream)?;
    println!("2 * {} = {}", numbers[1000], doubled[1000]);
    Ok(())
}

/// x = 2 x, one element for each thread.
fn double() -> Kernel {
    Kernel::build("double", Launch::threads(128), |b| {
        let x = b.param_pointer("x", Elem::F32);
        let at = b.cta_x().mad(128, b.tid()).mad_wide(4, x);
        b.store(at, b.load::<F32>(at) * 2.0);
    })
}
