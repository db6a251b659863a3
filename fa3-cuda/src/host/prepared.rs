//! A kernel ready to be launched on other addresses again and again.

use std::sync::{Arc, Mutex, PoisonError};

use fa3_ir::{ArgError, ArgValue, BoxShape, BufferId, ParamInfo, ParamKind, Step, TensorView, check_grid};

use super::params::{ParamImage, pack};
use super::{Function, HostError, Stream, tensor_map};

/// A function with all arguments of its launches but the addresses.
#[derive(Debug)]
pub(super) struct Prepared {
    function: Arc<Function>,
    grid: [u32; 3],
    early: bool,
    arguments: Mutex<Arguments>,
}

/// Arguments as the driver reads them. Of those that depend on addresses, they are of the last launch.
#[derive(Debug)]
struct Arguments {
    images: Vec<ParamImage>,
    pointers: Vec<Pointer>,
    maps: Vec<Map>,
}

/// Parameter `param` is the address of a buffer.
#[derive(Clone, Copy, Debug)]
struct Pointer {
    param: usize,
    buffer: BufferId,
}

/// Parameter `param` is a tensor map over a buffer.
#[derive(Debug)]
struct Map {
    param: usize,
    buffer: BufferId,
    name: String,
    shape: BoxShape,
    /// At the address for which the image was encoded; 0 if it was not.
    view: TensorView,
}

impl Prepared {
    /// Launches of `function` as `step` says, in a program of so many buffers. `early` ones are programmatic dependent
    /// launches: the kernel executes `griddepcontrol.wait` itself.
    ///
    /// # Errors
    /// A grid or arguments that are not what the kernel declares.
    pub(super) fn new<K>(
        function: Arc<Function>,
        step: &Step<K>,
        buffers: usize,
        early: bool,
    ) -> Result<Prepared, HostError> {
        let ptx = function.ptx();
        let refuse = |error| HostError::Args { kernel: ptx.entry.clone(), error: Box::new(error) };
        check_grid(step.grid, ptx.cluster).map_err(refuse)?;
        let arguments = Arguments::new(&ptx.params, step, buffers).map_err(refuse)?;
        Ok(Prepared { function, grid: step.grid, early, arguments: Mutex::new(arguments) })
    }

    pub(super) fn function(&self) -> &Function {
        &self.function
    }

    /// Puts the kernel on `stream`, with buffer i at `addresses[i]`.
    ///
    /// # Safety
    /// That of [`Function::launch_dependent`].
    ///
    /// # Errors
    /// What the driver says.
    pub(super) unsafe fn launch(&self, stream: &Stream, addresses: &[u64]) -> Result<(), HostError> {
        let current = self.function.context().enter()?;
        let mut arguments = self.arguments.lock().unwrap_or_else(PoisonError::into_inner);
        arguments.place(addresses, |map| {
            let kernel = &self.function.ptx().entry;
            tensor_map::encode(&current, (kernel, &map.name), &map.shape, &map.view)
        })?;
        // SAFETY: the arguments were checked against the kernel's parameters, and the caller vouches for the addresses.
        unsafe { self.function.launch_images(&current, stream, self.grid, &mut arguments.images, self.early) }
    }
}

impl Arguments {
    /// The arguments of a step for a kernel with `params`, with nothing placed yet.
    ///
    /// # Errors
    /// The first argument that does not fit, at whatever multiple of 16 bytes its buffer lies.
    fn new<K>(params: &[ParamInfo], step: &Step<K>, buffers: usize) -> Result<Arguments, ArgError> {
        let values = step.bind(params, &vec![0; buffers])?;
        let images = pack(params, &values, |_, _, _| Ok(ParamImage::scalar([])))?;
        let (mut pointers, mut maps) = (Vec::new(), Vec::new());
        for (param, (info, value)) in params.iter().zip(values).enumerate() {
            let passed = step.args.iter().find(|(name, _)| *name == info.name);
            let Some(buffer) = passed.and_then(|(_, passed)| passed.buffer()) else { continue };
            match (info.kind, value) {
                (ParamKind::TensorMap(shape), ArgValue::Tensor(view)) => {
                    maps.push(Map { param, buffer, name: info.name.clone(), shape, view });
                }
                _ => pointers.push(Pointer { param, buffer }),
            }
        }
        Ok(Arguments { images, pointers, maps })
    }

    /// Makes the images those for buffers at `addresses`; `encode` makes those of tensor maps, and only of those whose
    /// address is another than before.
    ///
    /// # Errors
    /// Those of `encode`.
    fn place<E>(
        &mut self,
        addresses: &[u64],
        encode: impl Fn(&Map) -> Result<ParamImage, E>,
    ) -> Result<(), E> {
        for Pointer { param, buffer } in &self.pointers {
            self.images[*param] = ParamImage::scalar(addresses[buffer.0].to_ne_bytes());
        }
        for map in &mut self.maps {
            let address = addresses[map.buffer.0];
            if map.view.address != address {
                map.view.address = address;
                self.images[map.param] = encode(map).inspect_err(|_| map.view.address = 0)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use fa3_ir::{Elem, Passed, Swizzle};

    use super::*;

    /// Tensor maps over buffers 0 and 1, a number, and the addresses of buffers 1 and 2.
    fn signature() -> (Vec<ParamInfo>, Step<()>) {
        let map = ParamKind::TensorMap(BoxShape::new(Elem::Bf16, &[64, 8], Swizzle::B128));
        let pointer = ParamKind::Pointer(Elem::F32);
        let kinds = [("q", map), ("k", map), ("n", ParamKind::U32), ("o", pointer), ("lse", pointer)];
        let params = kinds.map(|(name, kind)| ParamInfo { name: name.to_owned(), kind }).to_vec();
        let tensor =
            |buffer| Passed::Tensor { buffer: BufferId(buffer), dims: vec![64, 100], strides: vec![128] };
        let pointer = |buffer| Passed::Pointer(BufferId(buffer));
        let args = [
            ("lse", pointer(2)),
            ("q", tensor(0)),
            ("k", tensor(1)),
            ("n", Passed::U32(7)),
            ("o", pointer(1)),
        ];
        let args = args.map(|(name, passed)| (name.to_owned(), passed)).to_vec();
        (params, Step { kernel: (), grid: [1; 3], args })
    }

    /// Stands for the map of a tensor at this address.
    fn encoded(address: u64) -> ParamImage {
        ParamImage::words([address; 16])
    }

    /// Places the buffers and gives the addresses for which maps were encoded.
    fn place(arguments: &mut Arguments, addresses: [u64; 3]) -> Vec<u64> {
        let asked = RefCell::new(Vec::new());
        let encode = |map: &Map| {
            asked.borrow_mut().push(map.view.address);
            Ok::<_, ()>(encoded(map.view.address))
        };
        arguments.place(&addresses, encode).unwrap();
        asked.into_inner()
    }

    #[test]
    fn addresses_are_placed_and_maps_encoded_when_they_change() {
        let (params, step) = signature();
        let mut arguments = Arguments::new(&params, &step, 3).unwrap();
        let number = ParamImage::scalar(7_u32.to_ne_bytes());
        for (addresses, asked) in [
            ([0x100, 0x200, 0x300], vec![0x100, 0x200]),
            ([0x100, 0x200, 0x300], vec![]),
            ([0x100, 0x400, 0x500], vec![0x400]),
            ([0x200, 0x400, 0x300], vec![0x200]),
        ] {
            assert_eq!(place(&mut arguments, addresses), asked);
            let [q, k, o] = addresses;
            let address = |at: u64| ParamImage::scalar(at.to_ne_bytes());
            let images = [encoded(q), encoded(k), number, address(k), address(o)];
            assert_eq!(arguments.images, images);
        }
    }

    #[test]
    fn a_map_that_was_not_encoded_is_encoded_the_next_time() {
        let (params, step) = signature();
        let mut arguments = Arguments::new(&params, &step, 3).unwrap();
        place(&mut arguments, [0x100, 0x200, 0x300]);
        let refused = arguments.place(&[0x100, 0x600, 0x300], |map| Err::<ParamImage, _>(map.name.clone()));
        assert_eq!(refused, Err("k".to_owned()));
        assert_eq!(place(&mut arguments, [0x100, 0x600, 0x300]), [0x600]);
        assert_eq!(arguments.images[1], encoded(0x600));
    }

    #[test]
    fn arguments_that_do_not_fit_are_refused_before_any_launch() {
        let (params, mut step) = signature();
        let error = ArgError::Unknown { name: "q".to_owned() };
        assert_eq!(Arguments::new(&params[1..], &step, 3).unwrap_err(), error);
        assert_eq!(Arguments::new(&params, &step, 2).unwrap_err(), ArgError::Buffer { index: 2, count: 2 });
        step.args[3].1 = Passed::F32(7.0);
        let error = ArgError::Kind { param: "n".to_owned(), expected: "u32", given: "f32" };
        assert_eq!(Arguments::new(&params, &step, 3).unwrap_err(), error);
    }
}
