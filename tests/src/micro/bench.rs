//! A builder of micro-kernels, with the buffers that are bound to their parameters.

use fa3_ir::lang::{B32, B64, Builder, Pred, V};
use fa3_ir::{
    BoxShape, BufferId, BufferRole, Elem, FenceInst, Kernel, Launch, LoadOptions, Passed, Program, Region,
    TensorMap,
};

use super::{Micro, Rule};

/// Initial byte of result arrays.
const UNTOUCHED: u8 = 0xA5;

/// A micro-kernel under construction.
pub(super) struct Bench<'k> {
    pub(super) b: &'k Builder,
    /// The thread's index in its CTA.
    pub(super) tid: V<'k, B32>,
    bound: &'k mut Bound,
}

/// The arrays and arguments bound to the parameters, and the number of CTAs.
struct Bound {
    grid: u32,
    program: Program<Kernel>,
    contents: Vec<Vec<u8>>,
    args: Vec<(String, Passed)>,
}

/// The micro-kernel that `build` builds.
pub(super) fn micro(name: &str, launch: Launch, rule: Rule, build: impl FnOnce(&mut Bench<'_>)) -> Micro {
    let (program, contents, args) = Default::default();
    let mut bound = Bound { grid: launch.cluster, program, contents, args };
    let entry = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let kernel = Kernel::build(&entry, launch, |b| {
        build(&mut Bench { b, tid: b.tid(), bound: &mut bound });
    });
    let Bound { grid, mut program, contents, args } = bound;
    program.step(kernel, [grid, 1, 1], args);
    Micro { name: name.to_owned(), program, contents, rule }
}

impl<'k> Bench<'k> {
    /// Sets the number of CTAs. The default is one cluster.
    pub(super) fn grid(&mut self, grid: u32) {
        self.bound.grid = grid;
    }

    /// Number of threads.
    fn threads(&self) -> u32 {
        self.b.launch().threads
    }

    /// Adds a buffer. Returns its index, and the name of its parameter.
    fn buffer(&mut self, elem: Elem, contents: Vec<u8>, role: BufferRole) -> (BufferId, &'static str) {
        const NAMES: [&str; 8] = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"];
        let name = NAMES[self.bound.program.buffers.len()];
        let buffer = self.bound.program.buffer(name, elem, &[contents.len() as u32 / elem.bytes()], role);
        self.bound.contents.push(contents);
        (buffer, name)
    }

    fn pointer(&mut self, elem: Elem, contents: Vec<u8>, role: BufferRole) -> V<'k, B64> {
        let (buffer, name) = self.buffer(elem, contents, role);
        self.bound.args.push((name.to_owned(), Passed::Pointer(buffer)));
        self.b.param_pointer(name, elem)
    }

    /// Adds an input array.
    pub(super) fn input(&mut self, contents: Vec<u8>) -> V<'k, B64> {
        self.pointer(Elem::U8, contents, BufferRole::Input)
    }

    /// Adds a result array that the kernel writes completely.
    pub(super) fn output(&mut self, bytes: u32) -> V<'k, B64> {
        self.pointer(Elem::U8, vec![UNTOUCHED; bytes as usize], BufferRole::Output)
    }

    /// Adds a result array that the kernel writes in part.
    pub(super) fn target(&mut self, contents: Vec<u8>) -> V<'k, B64> {
        self.pointer(Elem::U8, contents, BufferRole::InOut)
    }

    fn tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>, role: BufferRole) -> TensorMap {
        let (buffer, name) = self.buffer(shape.elem, contents, role);
        let fa3_ir::TensorView { dims, strides, .. } = fa3_ir::TensorView::contiguous(0, dims, shape.elem);
        self.bound.args.push((name.to_owned(), Passed::Tensor { buffer, dims, strides }));
        self.b.param_tensor_map(name, shape)
    }

    /// Adds an input tensor.
    pub(super) fn input_tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>) -> TensorMap {
        self.tensor(shape, dims, contents, BufferRole::Input)
    }

    /// Adds a result tensor.
    pub(super) fn target_tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>) -> TensorMap {
        self.tensor(shape, dims, contents, BufferRole::InOut)
    }

    /// Address of the `bytes` bytes that belong to this thread in an array.
    pub(super) fn mine(&self, array: V<'k, B64>, bytes: u32) -> V<'k, B64> {
        self.tid.mad_wide(bytes, array)
    }

    /// Whether this is thread 0.
    pub(super) fn first(&self) -> V<'k, Pred> {
        self.tid.eq(0)
    }

    /// Copies `bytes` of global memory to a region with all threads, by generic accesses. A barrier must precede reads
    /// of other threads' bytes.
    #[track_caller]
    pub(super) fn fill(&self, region: Region, from: V<'k, B64>, bytes: u32) {
        let from = self.mine(from, 4);
        let to = self.tid.mad(4, self.b.address(region));
        self.each_word(bytes, |offset| self.b.store(to.at(offset), self.b.load::<B32>(from.at(offset))));
    }

    /// Copies a region to global memory with all threads, by generic accesses.
    #[track_caller]
    pub(super) fn dump(&self, region: Region, to: V<'k, B64>, bytes: u32) {
        let to = self.mine(to, 4);
        let from = self.tid.mad(4, self.b.address(region));
        self.each_word(bytes, |offset| self.b.store(to.at(offset), self.b.load::<B32>(from.at(offset))));
    }

    #[track_caller]
    fn each_word(&self, bytes: u32, copy: impl Fn(i32)) {
        let step = 4 * self.threads();
        assert!(bytes.is_multiple_of(step), "{bytes} bytes by steps of {step}");
        for offset in (0..bytes).step_by(step as usize) {
            copy(offset as i32);
        }
    }

    /// Starts a bulk copy of `bytes` of global memory to each region in thread 0. All threads wait until the copies are
    /// complete.
    pub(super) fn bulk_fill(&self, loads: &[(Region, V<'k, B64>, u32)]) {
        let b = self.b;
        let full = b.mbarriers("full", 1, 1);
        let bytes: u32 = loads.iter().map(|(.., bytes)| bytes).sum();
        b.if_lanes(self.first(), || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, bytes);
            for &(region, from, bytes) in loads {
                b.bulk_load(region, from, bytes, full, LoadOptions::default());
            }
        });
        b.sync_cta();
        b.mbarrier_wait(full, 0);
    }
}
