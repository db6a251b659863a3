#![allow(unsafe_code, missing_docs, clippy::all)]
use fa3_cuda::host::{Device, DeviceBuffer, Forward, Workspace};
use fa3_sched::forward::{CtaTile, PlanOptions, Way};
use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape};
struct Cell {
    name: String,
    b: usize,
    q: usize,
    h: usize,
    hk: usize,
    d: usize,
    lens: Vec<usize>,
    page: usize,
}
fn main() {
    let device = Device::open(0).unwrap();
    let only = std::env::var("ONLY").unwrap_or_default();
    let mut cells = vec![];
    for (b, s) in [(1, 1024), (1, 8192), (16, 4096), (64, 2048), (128, 1024)] {
        for page in [16, 64] {
            cells.push(Cell {
                name: format!("gqa 32/8 b{b} {s} page {page}"),
                b,
                q: 1,
                h: 32,
                hk: 8,
                d: 128,
                lens: vec![s; b],
                page,
            });
        }
    }
    cells.push(Cell {
        name: "gqa 32/8 b1 1024 q8 page 64".into(),
        b: 1,
        q: 8,
        h: 32,
        hk: 8,
        d: 128,
        lens: vec![1024],
        page: 64,
    });
    let mut skew = vec![32768];
    skew.extend([1024; 16]);
    skew.extend([64; 15]);
    cells.push(Cell { name: "skew page 64".into(), b: 32, q: 1, h: 32, hk: 8, d: 128, lens: skew, page: 64 });
    for s in [1024, 4096, 16384, 65536] {
        cells.push(Cell {
            name: format!("mqa 16 q4 b1 {s}"),
            b: 1,
            q: 4,
            h: 16,
            hk: 1,
            d: 128,
            lens: vec![s],
            page: 64,
        });
    }
    cells.push(Cell {
        name: "d64 64/8 b16 4096 page 64".into(),
        b: 16,
        q: 1,
        h: 64,
        hk: 8,
        d: 64,
        lens: vec![4096; 16],
        page: 64,
    });
    cells.push(Cell {
        name: "d256 16/4 b16 4096 page 64".into(),
        b: 16,
        q: 1,
        h: 16,
        hk: 4,
        d: 256,
        lens: vec![4096; 16],
        page: 64,
    });
    cells.push(Cell {
        name: "mha d128 16/16 b16 2048 page 64".into(),
        b: 16,
        q: 1,
        h: 16,
        hk: 16,
        d: 128,
        lens: vec![2048; 16],
        page: 64,
    });
    for page in [0, 16, 64, 128, 256] {
        cells.push(Cell {
            name: format!("prefill b4 4k on 4k page {page}"),
            b: 4,
            q: 4096,
            h: 32,
            hk: 8,
            d: 128,
            lens: vec![8192; 4],
            page,
        });
        cells.push(Cell {
            name: format!("prefill b4 512 on 8k page {page}"),
            b: 4,
            q: 512,
            h: 32,
            hk: 8,
            d: 128,
            lens: vec![8192 + 512; 4],
            page,
        });
    }
    for cell in cells.iter().filter(|c| c.name.contains(&only)) {
        run(&device, cell);
    }
}
fn run(device: &Device, cell: &Cell) {
    let stream = device.stream().unwrap();
    let longest = *cell.lens.iter().max().unwrap();
    let dense = cell.page == 0;
    let page = if dense { longest } else { cell.page };
    let per = longest.div_ceil(page);
    let used: Vec<usize> = cell.lens.iter().map(|l| l.div_ceil(page)).collect();
    let total: usize = used.iter().sum();
    let bytes = 2 * 2 * cell.lens.iter().sum::<usize>() * cell.hk * cell.d;
    let copies = (300_000_000 / bytes).clamp(1, 16);
    let entries = total * copies;
    let q = Shape { batch: cell.b, seqlen: cell.q, heads: cell.h, head_dim: cell.d };
    let kv =
        Shape { batch: if dense { cell.b } else { entries }, seqlen: page, heads: cell.hk, head_dim: cell.d };
    let seqs = if dense {
        Sequences::dense(cell.b, longest)
    } else {
        Sequences::paged(cell.b, per).longest(longest)
    };
    let problem =
        ProblemSpec::dense(Dtype::Bf16, q, kv).seqs_k(seqs.used()).mask(Mask::Causal).validate().unwrap();
    let mut options = PlanOptions::default().split_keys();
    if let Ok(sms) = std::env::var("SMS") {
        options = options.sms(std::num::NonZeroU32::new(sms.parse().unwrap()).unwrap());
    }
    let forward = match Forward::with(device, &problem, &options) {
        Ok(f) => f,
        Err(e) => {
            println!("{:36} {e}", cell.name);
            return;
        }
    };
    let alloc = |n: usize, byte: u8| {
        let mut x = device.alloc(n).unwrap();
        x.fill(&stream, byte).unwrap();
        x
    };
    let kv_bytes = kv.batch * page * cell.hk * cell.d * 2;
    let (kb, vb) = (alloc(kv_bytes, 0x3b), alloc(kv_bytes, 0x3b));
    let (qb, ob, lse) = (
        alloc(cell.b * cell.q * cell.h * cell.d * 2, 0x3b),
        alloc(cell.b * cell.q * cell.h * cell.d * 2, 0),
        alloc(cell.b * cell.q * cell.h * 4, 0),
    );
    let lens: Vec<i32> = cell.lens.iter().map(|&l| l as i32).collect();
    let mut lensb = device.alloc(4 * cell.b).unwrap();
    lensb.upload(&stream, &lens).unwrap();
    // pages shuffled
    let mut order: Vec<i32> = (0..entries as i32).collect();
    let mut x: u64 = 12345;
    for i in (1..order.len()).rev() {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(i, (x >> 33) as usize % (i + 1));
    }
    let mut at = 0;
    let tables: Vec<DeviceBuffer> = (0..copies)
        .map(|_| {
            let mut t = vec![-1i32; cell.b * per];
            for (i, &u) in used.iter().enumerate() {
                for p in 0..u {
                    t[i * per + p] = order[at];
                    at += 1;
                }
            }
            let mut b = device.alloc(4 * t.len()).unwrap();
            b.upload(&stream, &t).unwrap();
            b
        })
        .collect();
    let workspaces: Workspace = Workspace::new(device, &stream, forward.workspace_bytes()).unwrap();
    drop(workspaces);
    let ws = alloc(forward.workspace_bytes().max(256), 0);
    let launch = |i: usize| {
        let mut at = vec![
            ("q", Some(qb.address())),
            ("k", Some(kb.address())),
            ("v", Some(vb.address())),
            ("o", Some(ob.address())),
            ("lse", Some(lse.address())),
            ("seqused_k", Some(lensb.address())),
        ];
        if !dense {
            at.push(("page_table", Some(tables[i % copies].address())));
        }
        unsafe { forward.launch(&stream, &at, ws.address()).unwrap() };
    };
    launch(0);
    stream.synchronize().unwrap();
    let n = copies.max(8) * 4;
    stream.begin_capture().unwrap();
    for i in 0..n {
        launch(i);
    }
    let graph = stream.end_capture().unwrap();
    let mut best = vec![];
    for _ in 0..9 {
        let a = stream.record().unwrap();
        unsafe { graph.launch(&stream).unwrap() };
        let b = stream.record().unwrap();
        best.push(b.millis_since(&a).unwrap() / n as f32 * 1e3);
    }
    best.sort_by(|a, b| a.total_cmp(b));
    let us = best[best.len() / 2];
    let flops: f64 = cell
        .lens
        .iter()
        .map(|&l| {
            4.0 * cell.h as f64
                * cell.d as f64
                * (cell.q as f64 * l as f64 - (cell.q * (cell.q - 1)) as f64 / 2.0)
        })
        .sum();
    let way = match forward.plan().way() {
        Way::Shared(s) => format!("shared {}", s.ctas()),
        Way::Listed(_) => "listed".into(),
        Way::Numbered(_) => "numbered".into(),
    };
    println!(
        "{:36} {us:8.2} us  {:5.2} TB/s  {:6.1} TFLOP/s  {way} {}",
        cell.name,
        bytes as f64 / us as f64 / 1e6,
        flops / us as f64 / 1e6,
        forward.plan().tile()
    );
}
