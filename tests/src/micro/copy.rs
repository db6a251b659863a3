//! TMA copies: each test finds the source and the destination of every byte of a box.

use fa3_ir::lang::Coords;
use fa3_ir::{BoxShape, Elem, FenceInst, Launch, LoadOptions, Operand, Region, Swizzle};

use super::bench::{Bench, micro};
use super::values::Stream;
use super::{Micro, Rule};

pub(super) fn tests() -> Vec<Micro> {
    let mut tests = Vec::new();
    for copy in boxes() {
        tests.push(copy.load());
        // The documentation forbids stores at negative coordinates.
        if copy.at.iter().all(|&coord| coord >= 0) {
            tests.push(copy.store());
        }
    }
    tests.extend([16, 48, 2048].map(bulk));
    tests.push(multicast());
    tests
}

/// A box, a tensor, and the coordinates of the box in the tensor.
struct Copy {
    name: &'static str,
    shape: BoxShape,
    dims: Vec<u64>,
    at: Vec<i32>,
}

/// Prints coordinates as a list.
struct List<'a>(&'a [i32]);

impl Coords for List<'_> {
    fn operands(self) -> Vec<Operand> {
        self.0.iter().map(|coord| fa3_ir::lang::Arg::operand(*coord)).collect()
    }
}

/// Boxes to copy. The hardware faults if a box does not begin at a multiple of 16 bytes in the innermost dimension.
fn boxes() -> Vec<Copy> {
    let copy = |name, (elem, dims, swizzle): (Elem, &[u32], Swizzle), tensor: &[u64], at: &[i32]| Copy {
        name,
        shape: BoxShape::new(elem, dims, swizzle),
        dims: tensor.to_vec(),
        at: at.to_vec(),
    };
    use Elem::{Bf16, E4m3, F16, F32, U8, U32, U64};
    use Swizzle::{B32, B64, B128, None};
    vec![
        copy("swizzle none", (Bf16, &[64, 16], None), &[128, 40], &[32, 5]),
        copy("swizzle 32", (Bf16, &[16, 32], B32), &[64, 40], &[8, 3]),
        copy("swizzle 64", (Bf16, &[32, 16], B64), &[64, 40], &[8, 3]),
        copy("swizzle 128", (Bf16, &[64, 16], B128), &[128, 40], &[8, 3]),
        copy("swizzle 128 of bytes", (E4m3, &[128, 16], B128), &[256, 40], &[16, 1]),
        copy("swizzle 128 of words", (F32, &[32, 16], B128), &[64, 20], &[4, 1]),
        copy("swizzle 128 odd rows", (Bf16, &[64, 12], B128), &[64, 40], &[0, 3]),
        // These boxes begin before the tensor, or end beyond it.
        copy("below", (Bf16, &[64, 16], B128), &[128, 40], &[-8, -3]),
        copy("above", (Bf16, &[64, 16], B128), &[96, 40], &[56, 31]),
        copy("above by an odd number", (Bf16, &[64, 16], B128), &[104, 40], &[48, 33]),
        copy("above none", (Bf16, &[64, 8], None), &[88, 13], &[40, 7]),
        copy("outside", (Bf16, &[64, 8], B128), &[64, 16], &[64, 16]),
        copy("far below", (Bf16, &[64, 8], B128), &[64, 16], &[-64, -100]),
        copy("small tensor", (F32, &[32, 8], B128), &[8, 3], &[0, 0]),
        copy("both ends", (F16, &[64, 16], B128), &[24, 9], &[-16, -2]),
        // Other ranks and element types.
        copy("3d", (F32, &[8, 4, 4], None), &[16, 6, 5], &[4, 3, 2]),
        copy("3d below", (F32, &[8, 4, 4], None), &[16, 6, 5], &[-4, 3, -2]),
        copy("3d swizzle 128", (F16, &[64, 4, 4], B128), &[64, 6, 5], &[0, 3, 2]),
        copy("4d", (F16, &[16, 2, 4, 4], None), &[32, 3, 6, 5], &[8, 2, 1, 2]),
        copy("4d below", (F16, &[16, 2, 4, 4], None), &[32, 3, 6, 5], &[-8, -1, 4, 2]),
        copy("5d", (U8, &[32, 2, 4, 2, 2], None), &[48, 3, 5, 3, 2], &[16, 2, 1, 2, 1]),
        copy("5d below", (U8, &[32, 2, 4, 2, 2], None), &[48, 3, 5, 3, 2], &[-16, 2, -2, -1, -1]),
        copy("integers", (U32, &[8, 16], None), &[12, 18], &[8, 4]),
        copy("long integers", (U64, &[8, 8], None), &[12, 18], &[6, 14]),
    ]
}

impl Copy {
    fn tensor(&self) -> Vec<u8> {
        let elements: u64 = self.dims.iter().product();
        Stream::new(self.name).bytes(elements as usize * self.shape.elem.bytes() as usize)
    }

    /// Loads the box. The result is the box in the layout that it has in shared memory.
    fn load(&self) -> Micro {
        micro(&format!("load {}", self.name), Launch::threads(32), Rule::Bits, |bench| {
            let map = bench.input_tensor(self.shape, &self.dims, self.tensor());
            let (b, bytes) = (bench.b, self.shape.bytes());
            let (region, full) = (b.region("box", bytes, 1024), b.mbarriers("full", 1, 1));
            b.if_lanes(bench.first(), || {
                b.mbarrier_init(full, 1);
                b.fence(FenceInst::MbarrierInit);
                b.mbarrier_arrive_expect(full, bytes);
                b.tma_load(region, map, List(&self.at), full, LoadOptions::default());
            });
            b.sync_cta();
            b.mbarrier_wait(full, 0);
            let results = bench.output(bytes);
            bench.dump(region, results, bytes);
        })
    }

    /// Stores the box. The result is the whole tensor.
    fn store(&self) -> Micro {
        let rule = if self.tensor().len() > 4096 { Rule::Digests(128) } else { Rule::Bits };
        micro(&format!("store {}", self.name), Launch::threads(32), rule, |bench| {
            let map = bench.target_tensor(self.shape, &self.dims, self.tensor());
            let bytes = self.shape.bytes();
            let contents = Stream::new(&format!("{} box", self.name)).bytes(bytes as usize);
            let region = bench.filled(bytes, contents);
            bench.in_first(|| bench.b.tma_store(map, List(&self.at), region));
        })
    }
}

impl Bench<'_> {
    /// A region with `contents`, visible to the asynchronous proxy.
    pub(super) fn filled(&mut self, bytes: u32, contents: Vec<u8>) -> Region {
        let region = self.b.region("box", bytes, 1024);
        let from = self.input(contents);
        self.fill(region, from, bytes);
        self.b.fence(FenceInst::ProxyAsyncShared);
        self.b.sync_cta();
        region
    }

    /// Runs a bulk operation in thread 0 and waits for it.
    pub(super) fn in_first(&self, build: impl FnOnce()) {
        self.b.if_lanes(self.first(), || {
            build();
            self.b.bulk_commit();
            self.b.bulk_wait(0);
        });
    }
}

/// Copies bytes to shared memory and back. Bytes around the copies show writes beyond them.
fn bulk(bytes: u32) -> Micro {
    micro(&format!("bulk {bytes}"), Launch::threads(32), Rule::Bits, |bench| {
        let region = bench.b.region("flat", bytes, 16);
        let from = bench.input(Stream::new("bulk").bytes(bytes as usize + 32));
        let to = bench.target(vec![0xEE; bytes as usize + 48]);
        let (from, to) = (from + 16u64, to + 32u64);
        bench.bulk_fill(&[(region, from, bytes)]);
        bench.in_first(|| bench.b.bulk_store(to, region, bytes));
    })
}

/// Each of two CTAs loads half of the data and multicasts it to both.
fn multicast() -> Micro {
    let half = BoxShape::new(Elem::Bf16, &[64, 8], Swizzle::B128);
    micro("multicast", Launch::threads(32).cluster(2), Rule::Bits, |bench| {
        let map = bench.input_tensor(half, &[64, 20], Stream::new("multicast").bytes(64 * 20 * 2));
        let b = bench.b;
        let (region, full) = (b.region("box", 2048, 1024), b.mbarriers("full", 1, 1));
        let first = bench.first();
        let rank = b.cluster_cta_rank();
        b.if_lanes(first, || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, 2048);
        });
        b.cluster_sync();
        b.if_lanes(first, || {
            let to = rank.mad(1024, b.address(region));
            let row = rank.mad(8, 3);
            b.tma_load(to, map, (0, row), full, LoadOptions::multicast(3u16));
        });
        b.mbarrier_wait(full, 0);
        let results = bench.output(2 * 2048);
        bench.dump(region, rank.mad_wide(2048, results), 2048);
        // No CTA exits before the other's copy has arrived.
        b.cluster_sync();
    })
}
