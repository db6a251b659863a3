//! Programs: buffers in global memory, and kernels that are launched on them one after the other.
//!
//! An operation lowers to a program, and everything runs the same program: the simulator, a GPU, a test, the command
//! line. `K` is what a step launches: the spec that a kernel is built from, the [`Kernel`] itself, or the compiled
//! kernel. [`Program::map`] converts one into the next.
//!
//! ```
//! use fa3_ir::{BufferId, BufferRole, Elem, Kernel, Launch, Passed, Program};
//! use fa3_ir::lang::B32;
//!
//! let mut program = Program::new();
//! let x = program.buffer("x", Elem::U32, &[32], BufferRole::InOut);
//! let kernel = Kernel::build("increment", Launch::threads(32), |b| {
//!     let at = b.tid().mad_wide(4, b.param_pointer("x", Elem::U32));
//!     b.store(at, b.load::<B32>(at) + b.param_u32("by"));
//! });
//! program.step(kernel, [1, 1, 1], [("by", Passed::U32(3)), ("x", Passed::Pointer(x))]);
//! assert_eq!(program.check(), Ok(()));
//! ```

use fa3_types::TensorDesc;

use crate::{
    ArgError, ArgValue, Elem, Inst, Kernel, MiscInst, Node, ParamInfo, TensorView, check_args, check_grid,
};

/// Buffers, and steps that run one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Program<K> {
    /// The buffers, by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// The launches, in order; empty if there is nothing to compute.
    pub steps: Vec<Step<K>>,
}

/// The number of a [`Buffer`] of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub usize);

/// An array in global memory, contiguous, outermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its name.
    pub name: &'static str,
    /// Its element type.
    pub elem: Elem,
    /// Elements in each dimension.
    pub shape: Vec<u64>,
    /// Its role in the program.
    pub role: BufferRole,
    /// Alignment of the address in bytes.
    pub align: u32,
    /// The layout of the elements, if other data may lie between them.
    pub tensor: Option<TensorDesc>,
}

/// Role of a buffer in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferRole {
    /// The program reads it.
    Input,
    /// An input that may be absent; its address is then 0.
    OptionalInput,
    /// The program writes every element once.
    Output,
    /// An output that may be absent; its address is then 0.
    OptionalOutput,
    /// The program changes it in place, adds to it, or writes parts of it.
    InOut,
    /// The program writes it and reads it again. Its contents before and after do not matter.
    Scratch,
    /// The program counts in it. It is 0 before and after.
    TileCounter,
}

impl BufferRole {
    /// Whether the caller provides such a buffer as part of the workspace.
    pub const fn is_workspace(self) -> bool {
        matches!(self, BufferRole::Scratch | BufferRole::TileCounter)
    }

    /// Whether the program works without such a buffer.
    pub const fn is_optional(self) -> bool {
        matches!(self, BufferRole::OptionalInput | BufferRole::OptionalOutput)
    }

    /// Whether the program writes such a buffer, so that nothing else may use its memory meanwhile.
    pub const fn is_written(self) -> bool {
        !matches!(self, BufferRole::Input | BufferRole::OptionalInput)
    }
}

/// One launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Step<K> {
    /// The kernel to launch.
    pub kernel: K,
    /// The grid, in CTAs.
    pub grid: [u32; 3],
    /// The arguments by the names of the parameters, in any order.
    pub args: Vec<(String, Passed)>,
}

/// An argument of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Passed {
    /// 32 bits.
    U32(u32),
    /// 64 bits.
    U64(u64),
    /// A binary32.
    F32(f32),
    /// The address of a buffer.
    Pointer(BufferId),
    /// A tensor over a buffer.
    Tensor {
        /// The buffer.
        buffer: BufferId,
        /// Elements in each dimension, innermost first.
        dims: Vec<u64>,
        /// Bytes from one element to the next in each dimension but the innermost.
        strides: Vec<u64>,
    },
}

impl Buffer {
    /// The alignment in bytes that tensor maps and vector loads need.
    pub const ALIGN: u32 = 16;

    /// Number of elements, at most `usize::MAX`.
    pub fn len(&self) -> usize {
        self.shape.iter().fold(1, |len: usize, &dim| len.saturating_mul(dim as usize))
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes, at most `usize::MAX`.
    pub fn bytes(&self) -> usize {
        self.len().saturating_mul(self.elem.bytes() as usize)
    }
}

impl<K> Default for Program<K> {
    fn default() -> Program<K> {
        Program { buffers: Vec::new(), steps: Vec::new() }
    }
}

impl<K> Program<K> {
    /// A program without buffers and steps.
    pub fn new() -> Program<K> {
        Program::default()
    }

    /// Adds a buffer.
    pub fn buffer(&mut self, name: &'static str, elem: Elem, shape: &[u32], role: BufferRole) -> BufferId {
        let shape = shape.iter().map(|&dim| dim.into()).collect();
        self.add(Buffer { name, elem, shape, role, align: Buffer::ALIGN, tensor: None })
    }

    /// Lowers a buffer's alignment to `bytes`, because its elements are read and written one by one.
    pub fn align(&mut self, BufferId(buffer): BufferId, bytes: u32) {
        if let Some(buffer) = self.buffers.get_mut(buffer) {
            buffer.align = bytes;
        }
    }

    /// Adds a buffer of any size.
    pub fn add(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() - 1)
    }

    /// Adds a launch after the others, with arguments by their names.
    pub fn step(
        &mut self,
        kernel: K,
        grid: [u32; 3],
        args: impl IntoIterator<Item = (impl Into<String>, Passed)>,
    ) {
        let args = args.into_iter().map(|(name, passed)| (name.into(), passed)).collect();
        self.steps.push(Step { kernel, grid, args });
    }

    /// The whole of a buffer as a tensor. If the buffer is not the program's, the tensor has no dimensions, which
    /// [`Program::check`] reports.
    pub fn tensor(&self, buffer: BufferId) -> Passed {
        let (mut dims, mut strides) = (Vec::new(), Vec::new());
        if let Some(Buffer { elem, shape, .. }) = self.buffers.get(buffer.0) {
            dims.extend(shape.iter().rev());
            TensorView { dims, strides, .. } = TensorView::contiguous(0, &dims, *elem);
        }
        Passed::Tensor { buffer, dims, strides }
    }

    /// The buffer of this name.
    pub fn find(&self, name: &str) -> Option<BufferId> {
        self.buffers.iter().position(|buffer| buffer.name == name).map(BufferId)
    }

    /// The last step that uses `buffer`, if it is an output.
    pub fn last_step_of_output(&self, buffer: BufferId) -> Option<usize> {
        let is_output = self
            .buffers
            .get(buffer.0)
            .is_some_and(|buffer| matches!(buffer.role, BufferRole::Output | BufferRole::OptionalOutput));
        let has = |step: &Step<K>| step.args.iter().any(|(_, passed)| passed.buffer() == Some(buffer));
        self.steps.iter().rposition(has).filter(|_| is_output)
    }

    /// Appends the steps of another program, and returns the numbers of its buffers in this one. `bind` maps the name
    /// of a buffer of `part` to a buffer of this program. Buffers that it does not map are added as workspace.
    pub fn append(&mut self, part: &Program<K>, bind: impl Fn(&str) -> Option<BufferId>) -> Vec<BufferId>
    where
        K: Clone,
    {
        let mut added = |buffer: &Buffer| {
            let role = if buffer.role.is_workspace() { buffer.role } else { BufferRole::Scratch };
            bind(buffer.name).unwrap_or_else(|| self.add(Buffer { role, ..buffer.clone() }))
        };
        let buffers: Vec<BufferId> = part.buffers.iter().map(&mut added).collect();
        let of = |BufferId(buffer): BufferId| buffers.get(buffer).copied().unwrap_or(BufferId(usize::MAX));
        for Step { kernel, grid, args } in &part.steps {
            let args = args.iter().map(|(name, passed)| (name.clone(), passed.with_buffer(of)));
            self.step(kernel.clone(), *grid, args);
        }
        buffers
    }

    /// This program with `f` of each kernel in the kernel's place.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map<'p, T, E>(&'p self, mut f: impl FnMut(&'p K) -> Result<T, E>) -> Result<Program<T>, E> {
        let step = |Step { kernel, grid, args }: &'p Step<K>| {
            Ok(Step { kernel: f(kernel)?, grid: *grid, args: args.clone() })
        };
        let steps = self.steps.iter().map(step).collect::<Result<_, E>>()?;
        Ok(Program { buffers: self.buffers.clone(), steps })
    }

    /// This program with `f` of each kernel in the kernel's place.
    pub fn map<'p, T>(&'p self, mut f: impl FnMut(&'p K) -> T) -> Program<T> {
        let Ok(program) = self.try_map(|kernel| Ok::<T, std::convert::Infallible>(f(kernel)));
        program
    }
}

/// A description from which a kernel is built.
pub trait BuildKernel {
    /// Builds the kernel.
    fn build(&self) -> Kernel;
}

impl<K: BuildKernel> Program<K> {
    /// This program with its kernels built, for a simulation or a device.
    pub fn kernels(&self) -> Program<Kernel> {
        self.map(K::build)
    }
}

impl Program<Kernel> {
    /// Checks arguments and grids of every step.
    ///
    /// # Errors
    /// The first grid or argument that does not fit.
    pub fn check(&self) -> Result<(), ArgError> {
        // Aligned as the driver aligns buffers, and without overlap as long as no buffer has more than 2^40 bytes.
        let addresses: Vec<u64> = (1..=self.buffers.len() as u64).map(|index| index << 40).collect();
        self.steps.iter().try_for_each(|step| {
            check_grid(step.grid, step.kernel.launch.cluster)?;
            step.bind(&step.kernel.params, &addresses).map(|_| ())
        })
    }
}

impl<K> Step<K> {
    /// The arguments in the order of the parameters, with buffer i at `addresses[i]`.
    ///
    /// # Errors
    /// Parameters of the same name, a parameter without an argument, an argument without a parameter, an argument of
    /// another kind, or a tensor that its tensor map cannot describe.
    pub fn bind(&self, params: &[ParamInfo], addresses: &[u64]) -> Result<Vec<ArgValue>, ArgError> {
        if let Some((name, _)) =
            self.args.iter().find(|(name, _)| params.iter().all(|param| param.name != *name))
        {
            return Err(ArgError::Unknown { name: name.clone() });
        }
        if let Some((_, twice)) = params
            .iter()
            .enumerate()
            .find(|(index, param)| params[..*index].iter().any(|other| other.name == param.name))
        {
            return Err(ArgError::Twice { param: twice.name.clone() });
        }
        let argument = |param: &ParamInfo| {
            let passed = self.args.iter().find(|(name, _)| *name == param.name);
            let (_, passed) = passed.ok_or_else(|| ArgError::Missing { param: param.name.clone() })?;
            passed.bind(addresses)
        };
        let args: Vec<ArgValue> = params.iter().map(argument).collect::<Result<_, _>>()?;
        check_args(params, &args)?;
        Ok(args)
    }
}

impl Passed {
    /// The buffer that the argument refers to, if any.
    pub fn buffer(&self) -> Option<BufferId> {
        match self {
            Passed::U32(_) | Passed::U64(_) | Passed::F32(_) => None,
            Passed::Pointer(buffer) | Passed::Tensor { buffer, .. } => Some(*buffer),
        }
    }

    /// The argument with its buffer b replaced by `of(b)`.
    #[must_use]
    pub fn with_buffer(&self, of: impl Fn(BufferId) -> BufferId) -> Passed {
        match self {
            Passed::U32(_) | Passed::U64(_) | Passed::F32(_) => self.clone(),
            Passed::Pointer(buffer) => Passed::Pointer(of(*buffer)),
            Passed::Tensor { buffer, dims, strides } => {
                Passed::Tensor { buffer: of(*buffer), dims: dims.clone(), strides: strides.clone() }
            }
        }
    }

    /// The argument, with buffer i at `addresses[i]`.
    ///
    /// # Errors
    /// [`ArgError::Buffer`] if there is no such buffer.
    pub fn bind(&self, addresses: &[u64]) -> Result<ArgValue, ArgError> {
        let address = |BufferId(index): BufferId| {
            addresses.get(index).copied().ok_or(ArgError::Buffer { index, count: addresses.len() })
        };
        Ok(match self {
            Passed::U32(value) => ArgValue::U32(*value),
            Passed::U64(value) => ArgValue::U64(*value),
            Passed::F32(value) => ArgValue::F32(*value),
            Passed::Pointer(buffer) => ArgValue::Pointer(address(*buffer)?),
            Passed::Tensor { buffer, dims, strides } => ArgValue::Tensor(TensorView {
                address: address(*buffer)?,
                dims: dims.clone(),
                strides: strides.clone(),
            }),
        })
    }
}

impl Kernel {
    /// Whether every thread waits for the previous grid (`griddepcontrol.wait`) in the prologue. Such a kernel may be
    /// launched before that grid has ended (programmatic dependent launch, PDL). The simulator checks that it reads and
    /// writes nothing before the wait.
    pub fn waits_for_grid(&self) -> bool {
        self.prologue.iter().any(|stmt| {
            matches!(stmt.node, Node::Inst { guard: None, inst: Inst::Misc(MiscInst::GridDependencyWait) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lang::B32;
    use crate::{BoxShape, Launch, Swizzle};

    fn program(args: Vec<(String, Passed)>) -> Program<Kernel> {
        let mut program = Program::new();
        program.buffer("x", Elem::U32, &[32], BufferRole::InOut);
        let kernel = Kernel::build("increment", Launch::threads(32), |b| {
            let (x, by) = (b.param_pointer("x", Elem::U32), b.param_u32("by"));
            let at = b.tid().mad_wide(4, x);
            b.store(at, b.load::<B32>(at) + by);
        });
        program.step(kernel, [1, 1, 1], args);
        program
    }

    /// Buffer x becomes a buffer of the outer program, which has another name for it. Other buffers become workspace.
    #[test]
    fn programs_are_appended() {
        let x = ("x".to_owned(), Passed::Pointer(BufferId(0)));
        let part = program(vec![x, ("by".to_owned(), Passed::U32(3))]);
        let mut whole = Program::new();
        let y = whole.buffer("y", Elem::U32, &[32], BufferRole::InOut);
        assert_eq!(whole.append(&part, |name| (name == "x").then_some(y)), [y]);
        assert_eq!(whole.append(&part, |_| None), [BufferId(1)]);
        let buffers: Vec<_> = whole.buffers.iter().map(|buffer| (buffer.name, buffer.role)).collect();
        assert_eq!(buffers, [("y", BufferRole::InOut), ("x", BufferRole::Scratch)]);
        let of_step = |step: usize| whole.steps[step].args[0].1.buffer();
        assert_eq!([of_step(0), of_step(1)], [Some(y), Some(BufferId(1))]);
        assert_eq!(whole.check(), Ok(()));
    }

    #[test]
    fn arguments_are_passed_by_name() {
        let x = ("x".to_owned(), Passed::Pointer(BufferId(0)));
        let by = ("by".to_owned(), Passed::U32(3));
        let good = program(vec![by.clone(), x.clone()]);
        let step = &good.steps[0];
        let bound = step.bind(&step.kernel.params, &[256]).unwrap();
        assert_eq!(bound, [ArgValue::Pointer(256), ArgValue::U32(3)]);
        assert_eq!(good.check(), Ok(()));

        let refused = |args: Vec<(String, Passed)>| program(args).check().unwrap_err();
        assert_eq!(refused(vec![x.clone()]), ArgError::Missing { param: "by".to_owned() });
        let other = ("bye".to_owned(), Passed::U32(3));
        assert_eq!(refused(vec![x.clone(), by.clone(), other]), ArgError::Unknown { name: "bye".to_owned() });
        let elsewhere = ("x".to_owned(), Passed::Pointer(BufferId(1)));
        assert_eq!(refused(vec![elsewhere, by]), ArgError::Buffer { index: 1, count: 1 });
        let kind = ArgError::Kind { param: "by".to_owned(), expected: "u32", given: "f32" };
        assert_eq!(refused(vec![x, ("by".to_owned(), Passed::F32(3.0))]), kind);
    }

    #[test]
    fn a_tensor_over_a_buffer_of_another_program_is_refused() {
        let mut program = Program::new();
        let kernel = Kernel::build("k", Launch::threads(32), |b| {
            _ = b.param_tensor_map("x", BoxShape::new(Elem::F16, &[64, 8], Swizzle::B128));
        });
        let tensor = program.tensor(BufferId(3));
        program.step(kernel, [1, 1, 1], vec![("x".to_owned(), tensor)]);
        assert_eq!(program.check(), Err(ArgError::Buffer { index: 3, count: 0 }));
    }

    #[test]
    fn a_tensor_of_any_size_is_refused_and_not_computed_wrongly() {
        let mut program = Program::new();
        let kernel = Kernel::build("k", Launch::threads(32), |b| {
            _ = b.param_tensor_map("x", BoxShape::new(Elem::F16, &[64, 1, 1, 1], Swizzle::B128));
        });
        let most = [u32::MAX; 4];
        let x = program.buffer("x", Elem::F16, &most, BufferRole::Input);
        assert_eq!((program.buffers[0].len(), program.buffers[0].bytes()), (usize::MAX, usize::MAX));
        let tensor = program.tensor(x);
        program.step(kernel, [1, 1, 1], vec![("x".to_owned(), tensor)]);
        assert!(matches!(program.check(), Err(ArgError::Tensor { .. })));
    }

    /// A name must identify one parameter.
    #[test]
    fn parameters_of_the_same_name_are_refused() {
        let kernel = Kernel::build("twice", Launch::threads(32), |b| {
            _ = (b.param_u32("n"), b.param_u32("n"));
        });
        let step = Step { kernel: (), grid: [1; 3], args: vec![("n".to_owned(), Passed::U32(1))] };
        let error = step.bind(&kernel.params, &[]).unwrap_err();
        assert_eq!(error, ArgError::Twice { param: "n".to_owned() });
    }

    #[test]
    fn only_a_wait_of_all_threads_counts() {
        let kernel = |build: fn(&crate::lang::Builder)| Kernel::build("k", Launch::threads(32), build);
        assert!(kernel(|b| b.grid_dependency_wait()).waits_for_grid());
        assert!(!kernel(|b| b.if_lanes(b.elect(), || b.grid_dependency_wait())).waits_for_grid());
        assert!(!kernel(|b| b.launch_dependents()).waits_for_grid());
    }
}
