//! Loads, stores, atomics, and asynchronous copies of 16 bytes (cp.async).

use fa3_ir::lang::{B16, B32, B64, Builder, F32, Stored, V};
use fa3_ir::{Address, FenceInst, Launch};

use super::bench::{Bench, micro};
use super::values::{FLOATS, INTEGERS, Stream, words};
use super::{Micro, Rule};

/// Threads of a CTA.
const THREADS: u32 = 256;

pub(super) fn tests() -> Vec<Micro> {
    let mut tests = vec![copy_async(), copy_async_arrive()];
    tests.extend([
        vectors::<B16, 1>("b16"),
        vectors::<B16, 2>("b16 v2"),
        vectors::<B16, 4>("b16 v4"),
        vectors::<B32, 4>("b32 v4"),
        vectors::<B64, 1>("b64"),
        vectors::<B64, 2>("b64 v2"),
        vectors::<F32, 2>("f32 v2"),
    ]);
    let atomics: [(&str, Atomic, &[u64]); 7] = [
        ("add u32", |b, at, x| b.atomic_add_u32(at, x), &INTEGERS),
        ("max u32", |b, at, x| b.atomic_max_u32(at, x), &INTEGERS),
        ("inc u32", |b, at, x| b.atomic_inc_u32(at, x), &INTEGERS),
        ("exchange", |b, at, x| b.atomic_exchange(at, x), &INTEGERS),
        ("add f32", |b, at, x| b.atomic_add_f32(at, x.as_f32()).as_bits(), &FLOATS),
        ("red u32", |b, at, x| red(b, at, x, |b, at, x| b.reduce_add_u32(at, x)), &INTEGERS),
        ("red f32", |b, at, x| red(b, at, x, |b, at, x| b.reduce_add_f32(at, x.as_f32())), &FLOATS),
    ];
    for (name, atomic, special) in atomics {
        tests.push(in_global(name, atomic, special));
        tests.push(in_shared(name, atomic, special));
    }
    tests.push(contended());
    tests
}

/// An atomic operation with its result.
type Atomic = for<'k> fn(&'k Builder, Address, V<'k, B32>) -> V<'k, B32>;

/// A reduction, which has no result.
fn red<'k>(
    b: &'k Builder,
    at: Address,
    x: V<'k, B32>,
    reduce: fn(&Builder, Address, V<'_, B32>),
) -> V<'k, B32> {
    reduce(b, at, x);
    x
}

/// Initial contents of memory and addends, one per thread: special values and random values.
fn operands(name: &str, special: &[u64]) -> [Vec<u8>; 2] {
    ["memory", "operand"].map(|which| {
        let stream = Stream::new(&format!("{name} {which}"));
        let value = |index: u64| {
            if index.is_multiple_of(5) { stream.bits(2 * index + 1) } else { stream.pick(2 * index, special) }
        };
        words((0..u64::from(THREADS)).map(|index| value(index) as u32))
    })
}

impl<'k> Bench<'k> {
    fn operand(&mut self, operands: Vec<u8>) -> V<'k, B32> {
        let array = self.input(operands);
        self.b.load(self.mine(array, 4))
    }

    fn result(&mut self, value: V<'k, B32>) {
        let array = self.output(4 * THREADS);
        self.b.store(self.mine(array, 4), value);
    }
}

fn in_global(name: &str, atomic: Atomic, special: &[u64]) -> Micro {
    let [memory, operand] = operands(name, special);
    micro(&format!("{name} in global memory"), Launch::threads(THREADS), Rule::Bits, |bench| {
        let memory = bench.target(memory);
        let x = bench.operand(operand);
        let at = bench.mine(memory, 4);
        let before = atomic(bench.b, at.into(), x);
        bench.result(before);
    })
}

fn in_shared(name: &str, atomic: Atomic, special: &[u64]) -> Micro {
    let [memory, operand] = operands(name, special);
    micro(&format!("{name} in shared memory"), Launch::threads(THREADS), Rule::Bits, |bench| {
        let b = bench.b;
        let region = b.region("words", 4 * THREADS, 16);
        let memory = bench.input(memory);
        bench.fill(region, memory, 4 * THREADS);
        let x = bench.operand(operand);
        b.sync_cta();
        let at = bench.tid.mad(4, b.address(region));
        let before = atomic(b, at.into(), x);
        bench.result(before);
        b.sync_cta();
        let after = bench.output(4 * THREADS);
        bench.dump(region, after, 4 * THREADS);
    })
}

/// Atomics of many threads on one word: sums and maxima do not depend on the order.
fn contended() -> Micro {
    micro("contended", Launch::threads(THREADS), Rule::Bits, |bench| {
        bench.grid(4);
        let memory = bench.target(words([5, 0, 0, 0]));
        let b = bench.b;
        let thread = b.cta_x().mad(THREADS, bench.tid);
        b.atomic_add_u32(memory, thread);
        b.atomic_max_u32(memory.at(4), thread);
        // There are 1024 threads: the counter wraps to 0 once, after 1001 increments.
        b.atomic_inc_u32(memory.at(8), 1000);
        b.reduce_add_u32(memory.at(12), 3);
    })
}

/// Loads from global memory with stores to shared memory, and the reverse.
fn vectors<T: Stored, const N: usize>(name: &str) -> Micro {
    let bytes = T::TY.bytes() * N as u32;
    micro(&format!("vectors {name}"), Launch::threads(32), Rule::Bits, |bench| {
        let b = bench.b;
        let region = b.region("vectors", 32 * bytes, 16);
        let from = bench.input(Stream::new(name).bytes(32 * bytes as usize));
        let to = bench.output(64 * bytes);
        let (from, to) = (bench.mine(from, bytes), bench.mine(to, bytes));
        let read_only = b.load_read_only::<T, N>(from);
        let start = b.address(region);
        b.store_vector(bench.tid.mad(bytes, start), read_only);
        b.warp_sync();
        let neighbour = bench.tid ^ 1;
        let values = b.load_vector::<T, N>(neighbour.mad(bytes, start));
        b.store_vector(to, values);
        let values = b.load_vector::<T, N>(from);
        b.store_vector(to.at((32 * bytes).cast_signed()), values);
    })
}

/// Every number of source bytes from 0 to 16. The remaining bytes are zero-filled.
fn copy_async() -> Micro {
    micro("cp.async", Launch::threads(32), Rule::Bits, |bench| {
        let b = bench.b;
        let region = b.region("chunks", 32 * 16, 16);
        let dirt = bench.input(vec![0xEE; 32 * 16]);
        bench.fill(region, dirt, 32 * 16);
        b.warp_sync();
        let from = bench.input(Stream::new("cp.async").bytes(32 * 16));
        let from = bench.mine(from, 16);
        let to = bench.tid.mad(16, b.address(region));
        b.copy_async(to, from, bench.tid.min(16));
        b.copy_async_commit();
        b.copy_async_wait(0);
        b.warp_sync();
        let results = bench.output(32 * 16);
        bench.dump(region, results, 32 * 16);
    })
}

/// Threads copy by cp.async, and their copies complete a phase of an mbarrier.
fn copy_async_arrive() -> Micro {
    micro("cp.async arrive", Launch::threads(64), Rule::Bits, |bench| {
        let b = bench.b;
        let (region, full) = (b.region("chunks", 64 * 16, 16), b.mbarriers("full", 1, 64));
        let from = bench.input(Stream::new("cp.async arrive").bytes(64 * 16));
        let from = bench.mine(from, 16);
        b.guarded(bench.first(), || b.mbarrier_init(full, 64));
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        let to = bench.tid.mad(16, b.address(region));
        b.copy_async(to, from, 16);
        b.mbarrier_arrive_copied(full);
        b.mbarrier_wait(full, 0);
        let results = bench.output(64 * 16);
        bench.dump(region, results, 64 * 16);
    })
}
