//! Tensor copies that the documentation forbids or does not mention. After a fault the process cannot use the device
//! any more, so each copy runs in a process of its own.

use std::env;
use std::process::Command;

use fa3_cuda::host::Device;
use fa3_ir::lang::{B32, Coords};
use fa3_ir::{
    BoxShape, BufferRole, Elem, FenceInst, Kernel, Launch, LoadOptions, Operand, Passed, Program, Swizzle,
};
use fa3_tests::gpu;

use super::{Said, words};

/// A box of words, its coordinates in a tensor of 64 x 40, and its offset in bytes from an aligned address.
struct Copy {
    name: &'static str,
    row: u32,
    swizzle: Swizzle,
    at: (i32, i32),
    offset: i32,
    stores: bool,
}

fn copies() -> Vec<Copy> {
    use Swizzle::{B32, B64, B128, None};
    let load = |name, row, swizzle, at, offset| Copy { name, row, swizzle, at, offset, stores: false };
    let store = |name, at| Copy { name, row: 8, swizzle: None, at, offset: 0, stores: true };
    vec![
        load("column 1", 8, None, (1, 0), 0),
        load("column 2", 8, None, (2, 0), 0),
        load("column 4", 8, None, (4, 0), 0),
        load("column -2", 8, None, (-2, 0), 0),
        load("column -4", 8, None, (-4, 0), 0),
        load("rows of 64 bytes in a swizzle of 128", 16, B128, (0, 0), 0),
        load("rows of 64 bytes in a swizzle of 128, column 4", 16, B128, (4, 0), 0),
        load("rows of 64 bytes in a swizzle of 128, column 16", 16, B128, (16, 0), 0),
        load("rows of 32 bytes in a swizzle of 128", 8, B128, (0, 0), 0),
        load("rows of 32 bytes in a swizzle of 64", 8, B64, (0, 0), 0),
        load("rows of 16 bytes in a swizzle of 32", 4, B32, (0, 0), 0),
        load("swizzle of 128 at an address of 128", 32, B128, (0, 0), 128),
        load("swizzle of 64 at an address of 128", 16, B64, (0, 0), 128),
        load("swizzle of 32 at an address of 128", 8, B32, (0, 0), 128),
        store("column 1", (1, 0)),
        store("column 4", (4, 0)),
        store("column -4", (-4, 0)),
        store("row -2", (0, -2)),
        store("column 60 of 64", (60, 0)),
        store("row 38 of 40", (0, 38)),
    ]
}

struct Pair((i32, i32));

impl Coords for Pair {
    fn operands(self) -> Vec<Operand> {
        (self.0.0, self.0.1).operands()
    }
}

pub(super) fn rules(_: &Device) -> Said {
    let mut said = Vec::new();
    for copy in copies() {
        let which = if copy.stores { "store" } else { "load" };
        let output =
            Command::new(env::current_exe()?).args(["probe", &format!("{which} {}", copy.name)]).output()?;
        said.push(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Ok(said.join("\n"))
}

pub(super) fn one(device: &Device, name: &str) -> Option<Said> {
    let copy = copies().into_iter().find(|copy| {
        let which = if copy.stores { "store" } else { "load" };
        name == format!("{which} {}", copy.name)
    })?;
    Some(if copy.stores { copy.store(device) } else { copy.load(device) })
}

impl Copy {
    /// Loads a box. Word i of the tensor is i + 1. Returns the words that were written.
    fn load(&self, device: &Device) -> Said {
        let shape = BoxShape::new(Elem::U32, &[self.row, 8], self.swizzle);
        let kernel = Kernel::build("load", Launch::threads(32), |b| {
            let map = b.param_tensor_map("from", shape);
            let out = b.param_pointer("out", Elem::U32);
            let (tile, full) = (b.region("tile", 4096, 1024), b.mbarriers("full", 1, 1));
            let tid = b.tid();
            let mine = tid.mad(4, b.address(tile));
            for offset in (0..4096).step_by(128) {
                b.store(mine.at(offset), 0u32);
            }
            b.fence(FenceInst::ProxyAsyncShared);
            b.sync_cta();
            b.if_lanes(tid.eq(0), || {
                b.mbarrier_init(full, 1);
                b.fence(FenceInst::MbarrierInit);
                b.mbarrier_arrive_expect(full, shape.bytes());
                b.tma_load(tile.at(self.offset), map, Pair(self.at), full, LoadOptions::default());
            });
            b.sync_cta();
            b.mbarrier_wait(full, 0);
            let to = tid.mad_wide(4, out);
            for offset in (0..4096).step_by(128) {
                b.store(to.at(offset), b.load::<B32>(mine.at(offset)));
            }
        });
        let mut program = Program::new();
        let from = program.buffer("from", Elem::U32, &[40, 64], BufferRole::Input);
        let out = program.buffer("out", Elem::U32, &[1024], BufferRole::Output);
        let args = [("from", program.tensor(from)), ("out", Passed::Pointer(out))];
        program.step(kernel, [1, 1, 1], args.map(|(name, passed)| (name.to_owned(), passed)).to_vec());
        let numbers = (1..=64 * 40u32).flat_map(u32::to_le_bytes).collect();
        let result = words(&gpu::run(device, &program, &[numbers, vec![0; 4096]])?[1]);
        let expected = |pitch: u32| {
            let mut all = vec![0; 1024];
            for (r, c) in (0..8).flat_map(|r| (0..self.row).map(move |c| (r, c))) {
                let linear = self.offset.cast_unsigned() + r * pitch + 4 * c;
                let (x, y) = (self.at.0 + c.cast_signed(), self.at.1 + r.cast_signed());
                let inside = x >= 0 && y >= 0;
                all[self.swizzle.apply(linear) as usize / 4] =
                    if inside { (y * 64 + x + 1).cast_unsigned() } else { 0 };
            }
            all
        };
        let (dense, spread) = (4 * self.row, self.swizzle.row_bytes().max(4 * self.row));
        Ok(match &result {
            result if *result == expected(dense) => "dense rows, permuted by address".to_owned(),
            result if *result == expected(spread) => {
                "rows as far apart as the swizzle's, permuted by address".to_owned()
            }
            result => {
                let rows: Vec<String> = result[..256].chunks(16).map(|row| format!("{row:4?}")).collect();
                format!("something else:\n{}", rows.join("\n"))
            }
        })
    }

    fn store(&self, device: &Device) -> Said {
        let shape = BoxShape::new(Elem::U32, &[self.row, 8], self.swizzle);
        let kernel = Kernel::build("store", Launch::threads(32), |b| {
            let map = b.param_tensor_map("to", shape);
            let tile = b.region("tile", 256, 128);
            let tid = b.tid();
            let mine = tid.mad(8, b.address(tile));
            b.store_vector(mine, [tid.mad(2, 1000), tid.mad(2, 1001)]);
            b.fence(FenceInst::ProxyAsyncShared);
            b.sync_cta();
            b.if_lanes(tid.eq(0), || {
                b.tma_store(map, Pair(self.at), tile);
                b.bulk_commit();
                b.bulk_wait(0);
            });
        });
        let mut program = Program::new();
        let to = program.buffer("to", Elem::U32, &[40, 64], BufferRole::InOut);
        let args = vec![("to".to_owned(), program.tensor(to))];
        program.step(kernel, [1, 1, 1], args);
        let written = gpu::run(device, &program, &[vec![0; 4 * 64 * 40]])?;
        let clipped = words(&written[0]).iter().zip(0i32..).all(|(&word, index)| {
            let (c, r) = (index % 64 - self.at.0, index / 64 - self.at.1);
            let inside = (0..8).contains(&c) && (0..8).contains(&r);
            word == if inside { (1000 + 8 * r + c).cast_unsigned() } else { 0 }
        });
        Ok(if clipped { "clipped".to_owned() } else { "something else".to_owned() })
    }
}
