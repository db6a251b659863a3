//! A kernel that is prepared for repeated launches at different addresses.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use fa3_ir::{ArgError, ArgValue, BoxShape, BufferId, ParamInfo, ParamKind, Step, TensorView, check_grid};

use super::params::{ParamImage, pack};
use super::{Function, HostError, Stream, tensor_map};

/// A function with all arguments of its launches except the addresses.
#[derive(Debug)]
pub(super) struct Prepared {
    function: Arc<Function>,
    grid: [u32; 3],
    early: bool,
    arguments: Arguments,
}

/// Arguments as the driver reads them, with zeros for arguments that depend on addresses.
#[derive(Debug)]
struct Arguments {
    images: Vec<ParamImage>,
    pointers: Vec<Pointer>,
    maps: Vec<Map>,
}

/// The parameter number `param`, which is the address of a buffer.
#[derive(Clone, Copy, Debug)]
struct Pointer {
    param: usize,
    buffer: BufferId,
}

/// The parameter number `param`, which is a tensor map over a buffer.
#[derive(Debug)]
struct Map {
    param: usize,
    buffer: BufferId,
    name: String,
    shape: BoxShape,
    /// The view at address 0.
    view: TensorView,
    recent: Mutex<Recent>,
}

/// The most recently encoded tensor maps, with their addresses. There are several, because the layers of a model share
/// a plan, and their tensors alternate.
#[derive(Debug, Default)]
struct Recent {
    encoded: VecDeque<(u64, ParamImage)>,
}

/// Number of tensor maps that are cached for a parameter.
const KEPT: usize = 8;

impl Prepared {
    /// Prepares launches of `function` for `step`, in a program of `buffers` buffers. With `early` the launches are
    /// programmatic dependent launches: the kernel executes `griddepcontrol.wait` itself.
    ///
    /// # Errors
    /// The grid or the arguments do not match the kernel's declaration.
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
        Ok(Prepared { function, grid: step.grid, early, arguments })
    }

    pub(super) fn function(&self) -> &Function {
        &self.function
    }

    /// Puts the kernel on `stream`, with buffer i at `addresses[i]`.
    ///
    /// # Safety
    /// The conditions of [`Function::launch_dependent`].
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) unsafe fn launch(&self, stream: &Stream, addresses: &[u64]) -> Result<(), HostError> {
        let current = self.function.context().enter()?;
        let kernel = &self.function.ptx().entry;
        let encode =
            |name: &str, shape: &_, view: &_| tensor_map::encode(&current, (kernel, name), shape, view);
        let mut images = self.arguments.place(addresses, encode)?;
        // SAFETY: the arguments were checked against the kernel's parameters, and the caller guarantees the addresses.
        unsafe { self.function.launch_images(&current, stream, self.grid, &mut images, self.early) }
    }
}

impl Arguments {
    /// The arguments of a step for a kernel with `params`, without addresses yet.
    ///
    /// # Errors
    /// The first argument that does not fit, for buffers at any multiple of 16 bytes.
    fn new<K>(params: &[ParamInfo], step: &Step<K>, buffers: usize) -> Result<Arguments, ArgError> {
        let values = step.bind(params, &vec![0; buffers])?;
        let images = pack(params, &values, |_, _, _| Ok(ParamImage::scalar([])))?;
        let (mut pointers, mut maps) = (Vec::new(), Vec::new());
        for (param, (info, value)) in params.iter().zip(values).enumerate() {
            let passed = step.args.iter().find(|(name, _)| *name == info.name);
            let Some(buffer) = passed.and_then(|(_, passed)| passed.buffer()) else { continue };
            match (info.kind, value) {
                (ParamKind::TensorMap(shape), ArgValue::Tensor(view)) => {
                    let (name, recent) = (info.name.clone(), Mutex::default());
                    maps.push(Map { param, buffer, name, shape, view, recent });
                }
                _ => pointers.push(Pointer { param, buffer }),
            }
        }
        Ok(Arguments { images, pointers, maps })
    }

    /// The images of the arguments for buffers at `addresses`. `encode` makes the tensor maps that are not cached; a
    /// buffer at address 0 has no map.
    ///
    /// # Errors
    /// Errors of `encode`.
    fn place<E>(
        &self,
        addresses: &[u64],
        encode: impl Fn(&str, &BoxShape, &TensorView) -> Result<ParamImage, E>,
    ) -> Result<Vec<ParamImage>, E> {
        let mut images = self.images.clone();
        for Pointer { param, buffer } in &self.pointers {
            images[*param] = ParamImage::scalar(addresses[buffer.0].to_ne_bytes());
        }
        for map in &self.maps {
            let address = addresses[map.buffer.0];
            if address != 0 {
                images[map.param] = map.at(address, &encode)?;
            }
        }
        Ok(images)
    }
}

impl Map {
    /// The image for the buffer at `address`. No lock is held while `encode` runs.
    fn at<E>(
        &self,
        address: u64,
        encode: impl Fn(&str, &BoxShape, &TensorView) -> Result<ParamImage, E>,
    ) -> Result<ParamImage, E> {
        let recent = || self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = recent().get(address) {
            return Ok(image);
        }
        let view = TensorView { address, ..self.view.clone() };
        let image = encode(&self.name, &self.shape, &view)?;
        recent().insert(address, image);
        Ok(image)
    }
}

impl Recent {
    fn get(&self, address: u64) -> Option<ParamImage> {
        self.encoded.iter().find(|(of, _)| *of == address).map(|(_, image)| *image)
    }

    /// Caches the image. A full cache first drops its oldest image.
    fn insert(&mut self, address: u64, image: ParamImage) {
        if self.encoded.len() == KEPT {
            self.encoded.pop_front();
        }
        self.encoded.push_back((address, image));
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

    /// A stand-in for the map of a tensor at this address.
    fn encoded(address: u64) -> ParamImage {
        ParamImage::words([address; 16])
    }

    /// Places the buffers. Returns the images, and the addresses for which maps were encoded.
    fn place(arguments: &Arguments, addresses: [u64; 3]) -> (Vec<ParamImage>, Vec<u64>) {
        let asked = RefCell::new(Vec::new());
        let encode = |_: &str, _: &BoxShape, view: &TensorView| {
            asked.borrow_mut().push(view.address);
            Ok::<_, ()>(encoded(view.address))
        };
        let images = arguments.place(&addresses, encode).unwrap();
        (images, asked.into_inner())
    }

    #[test]
    fn addresses_are_placed_and_maps_encoded_once() {
        let (params, step) = signature();
        let arguments = Arguments::new(&params, &step, 3).unwrap();
        let number = ParamImage::scalar(7_u32.to_ne_bytes());
        for (addresses, asked) in [
            ([0x100, 0x200, 0x300], vec![0x100, 0x200]),
            ([0x100, 0x200, 0x300], vec![]),
            ([0x100, 0x400, 0x500], vec![0x400]),
            ([0x600, 0x400, 0x300], vec![0x600]),
            ([0x100, 0x200, 0x300], vec![]),
        ] {
            let [q, k, o] = addresses;
            let address = |at: u64| ParamImage::scalar(at.to_ne_bytes());
            let images = vec![encoded(q), encoded(k), number, address(k), address(o)];
            assert_eq!(place(&arguments, addresses), (images, asked));
        }
    }

    #[test]
    fn the_oldest_map_makes_room() {
        let (params, step) = signature();
        let arguments = Arguments::new(&params, &step, 3).unwrap();
        let asked = |q: u64| place(&arguments, [q << 8, 0x200, 0x300]).1.contains(&(q << 8));
        let kept = KEPT as u64;
        assert!((1..=kept).all(asked));
        assert!(!(1..=kept).any(asked));
        assert!(asked(kept + 1) && asked(1) && !asked(3));
    }

    #[test]
    fn a_buffer_without_memory_has_no_map() {
        let (params, step) = signature();
        let arguments = Arguments::new(&params, &step, 3).unwrap();
        let (images, asked) = place(&arguments, [0, 0x200, 0x300]);
        assert_eq!((images[0], asked), (ParamImage::scalar([]), vec![0x200]));
    }

    #[test]
    fn a_map_that_was_not_encoded_is_encoded_the_next_time() {
        let (params, step) = signature();
        let arguments = Arguments::new(&params, &step, 3).unwrap();
        place(&arguments, [0x100, 0x200, 0x300]);
        let refused =
            arguments.place(&[0x100, 0x600, 0x300], |name, _, _| Err::<ParamImage, _>(name.to_owned()));
        assert_eq!(refused, Err("k".to_owned()));
        assert_eq!(place(&arguments, [0x100, 0x600, 0x300]).1, [0x600]);
    }

    /// Two threads encode maps of one plan at the same time: each waits for the other within `encode`.
    #[test]
    fn launches_of_several_threads_do_not_wait_for_each_other() {
        let (params, step) = signature();
        let arguments = Arguments::new(&params, &step, 3).unwrap();
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for q in [0x100, 0x400] {
                let (arguments, both) = (&arguments, &both);
                scope.spawn(move || {
                    let encode = |name: &str, _: &BoxShape, view: &TensorView| {
                        if name == "q" {
                            both.wait();
                        }
                        Ok::<_, ()>(encoded(view.address))
                    };
                    assert_eq!(arguments.place(&[q, 0x200, 0x300], encode).unwrap()[0], encoded(q));
                });
            }
        });
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
