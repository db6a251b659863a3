//! What micro-kernels are built with: a builder, and the arrays that its parameters are bound to.

use fa3_cuda::kernels::{Array, ArrayUse, Job, JobArg};
use fa3_ir::{
    B32, B64, BoxShape, Builder, Elem, FenceInst, Kernel, Launch, LoadOptions, Pred, Region, TensorMap, V,
};

use super::{Micro, Rule};

/// What arrays of results hold before.
const UNTOUCHED: u8 = 0xA5;

/// A micro-kernel under construction.
pub(super) struct Bench {
    pub(super) b: Builder,
    /// The thread in its CTA.
    pub(super) tid: V<B32>,
    name: String,
    grid: u32,
    arrays: Vec<Array>,
    contents: Vec<Vec<u8>>,
    args: Vec<JobArg>,
}

impl Bench {
    pub(super) fn new(name: &str, launch: Launch) -> Bench {
        let mut b = Builder::new(&name.replace(|c: char| !c.is_ascii_alphanumeric(), "_"), launch);
        let tid = b.tid();
        let (arrays, contents, args) = Default::default();
        Bench { b, tid, name: name.to_owned(), grid: launch.cluster, arrays, contents, args }
    }

    pub(super) fn grid(self, grid: u32) -> Bench {
        Bench { grid, ..self }
    }

    /// How many threads run it.
    fn threads(&self) -> u32 {
        self.b.launch().threads
    }

    fn array(&mut self, elem: Elem, contents: Vec<u8>, used: ArrayUse) -> usize {
        const NAMES: [&str; 8] = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"];
        let index = self.arrays.len();
        let shape = vec![contents.len() as u32 / elem.bytes()];
        self.arrays.push(Array { name: NAMES[index], elem, shape, used });
        self.contents.push(contents);
        index
    }

    fn pointer(&mut self, elem: Elem, contents: Vec<u8>, used: ArrayUse) -> V<B64> {
        let array = self.array(elem, contents, used);
        self.args.push(JobArg::Pointer(array));
        self.b.param_pointer(self.arrays[array].name, elem)
    }

    /// An array that is read.
    pub(super) fn input(&mut self, contents: Vec<u8>) -> V<B64> {
        self.pointer(Elem::U8, contents, ArrayUse::Input)
    }

    /// An array of results, every byte of which is written.
    pub(super) fn output(&mut self, bytes: u32) -> V<B64> {
        self.pointer(Elem::U8, vec![UNTOUCHED; bytes as usize], ArrayUse::Output)
    }

    /// An array of results that is not written everywhere.
    pub(super) fn target(&mut self, contents: Vec<u8>) -> V<B64> {
        self.pointer(Elem::U8, contents, ArrayUse::Sum)
    }

    fn tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>, used: ArrayUse) -> TensorMap {
        let array = self.array(shape.elem, contents, used);
        let dense = fa3_ir::TensorView::contiguous(0, dims, shape.elem);
        self.args.push(JobArg::Tensor { array, dims: dense.dims, strides: dense.strides });
        self.b.param_tensor_map(self.arrays[array].name, shape)
    }

    /// A tensor that is read.
    pub(super) fn input_tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>) -> TensorMap {
        self.tensor(shape, dims, contents, ArrayUse::Input)
    }

    /// A tensor of results.
    pub(super) fn target_tensor(&mut self, shape: BoxShape, dims: &[u64], contents: Vec<u8>) -> TensorMap {
        self.tensor(shape, dims, contents, ArrayUse::Sum)
    }

    /// `bytes` for each thread of the CTA, in order.
    pub(super) fn mine(&mut self, array: V<B64>, bytes: u32) -> V<B64> {
        self.b.mad_wide_u32(self.tid, bytes, array)
    }

    /// Whether this is thread 0.
    pub(super) fn first(&mut self) -> V<Pred> {
        self.b.eq_b32(self.tid, 0)
    }

    /// All threads copy `bytes` of global memory to a region, by generic accesses. Wait before reading others'.
    pub(super) fn fill(&mut self, region: Region, from: V<B64>, bytes: u32) {
        let from = self.mine(from, 4);
        let start = self.b.address(region);
        let to = self.b.mad_u32(self.tid, 4, start);
        self.each_word(bytes, |b, offset| {
            let word = b.load::<B32>(from.at(offset));
            b.store(to.at(offset), word);
        });
    }

    /// All threads copy a region to global memory, by generic accesses.
    pub(super) fn dump(&mut self, region: Region, to: V<B64>, bytes: u32) {
        let to = self.mine(to, 4);
        let start = self.b.address(region);
        let from = self.b.mad_u32(self.tid, 4, start);
        self.each_word(bytes, |b, offset| {
            let word = b.load::<B32>(from.at(offset));
            b.store(to.at(offset), word);
        });
    }

    fn each_word(&mut self, bytes: u32, mut copy: impl FnMut(&mut Builder, i32)) {
        let step = 4 * self.threads();
        assert!(bytes.is_multiple_of(step), "{}: {bytes} bytes by steps of {step}", self.name);
        for offset in (0..bytes).step_by(step as usize) {
            copy(&mut self.b, offset as i32);
        }
    }

    /// Thread 0 begins to copy `bytes` of global memory to a region; all wait until they are there.
    pub(super) fn bulk_fill(&mut self, loads: &[(Region, V<B64>, u32)]) {
        let full = self.b.mbarriers("full", 1, 1);
        let first = self.first();
        let bytes: u32 = loads.iter().map(|(.., bytes)| bytes).sum();
        self.b.if_lanes(first, |b| {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, bytes);
            for &(region, from, bytes) in loads {
                b.bulk_load(region, from, bytes, full, LoadOptions::default());
            }
        });
        self.b.sync_cta();
        self.b.mbarrier_wait(full, 0);
    }

    pub(super) fn finish(self, rule: Rule) -> Micro {
        self.finish_with(rule, |_| ())
    }

    /// The same, with statements that the builder has no methods for.
    pub(super) fn finish_with(self, rule: Rule, append: impl FnOnce(&mut Kernel)) -> Micro {
        let Bench { b, name, grid, arrays, contents, args, .. } = self;
        let mut kernel = b.finish();
        append(&mut kernel);
        Micro { name, job: Job { kernel, grid: [grid, 1, 1], arrays, args }, contents, rule }
    }
}
