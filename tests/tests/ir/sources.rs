//! Each statement records the kernel's source line that it serves.

use fa3_ir::lang::*;
use fa3_ir::*;

/// The sources of all statements of the prologue and of the roles, inner statements first.
fn sources(kernel: &Kernel) -> Vec<Source> {
    fn of(block: &Block, found: &mut Vec<Source>) {
        for stmt in block {
            match &stmt.node {
                Node::If { then, otherwise, .. } => {
                    [then, otherwise].into_iter().for_each(|block| of(block, found));
                }
                Node::Loop { body } => of(body, found),
                Node::Inst { .. } | Node::Break { .. } => {}
            }
            found.push(stmt.source);
        }
    }
    let mut found = Vec::new();
    let blocks = [&kernel.prologue].into_iter().chain(kernel.roles.iter().map(|role| &role.block));
    blocks.for_each(|block| of(block, &mut found));
    found
}

/// The lines of all statements, sorted and without repetition. All lines are of this file.
fn lines(kernel: &Kernel) -> Vec<u32> {
    let sources = sources(kernel);
    assert!(sources.iter().all(|source| source.file() == file!()), "{kernel}");
    let mut lines: Vec<u32> = sources.into_iter().map(|source| source.line()).collect();
    lines.dedup();
    lines
}

fn kernel(build: impl FnOnce(&Builder)) -> Kernel {
    Kernel::build("k", Launch::threads(128), build)
}

/// A method call has the line of the method's name. An operator has the line on which its expression begins, which is
/// the location that Rust reports. The comments at line ends give the lines of statements, counted from `first`.
#[test]
fn expressions_have_the_lines_of_their_operations() {
    let first = line!() + 2;
    let methods = kernel(|b| {
        _ = b // A comment keeps a line from joining the next.
            .tid() // 1
            .mad(
                4,           // 2, after its operands
                b.lane_id(), // 4
            )
            .named("at")
            .lt(7) // 7
            .select(
                b.value(1.0) // 8, after its operands
                    .fma(2.0, 3.0), // 10
                0.0,
            );
    });
    assert_eq!(lines(&methods), [1, 4, 2, 7, 10, 8].map(|line| first + line), "{methods}");
    let first = line!() + 2;
    let operators = kernel(|b| {
        let sum = b.tid() // 0, and both additions come after their operands
            + (b.lane_id() // 1, and the `&`
                & 31)
            + 1;
        _ = -sum; // 4
    });
    assert_eq!(lines(&operators), [0, 1, 0, 4].map(|line| first + line), "{operators}");
}

/// The upper layer of the language builds instructions that have the line of the layer's caller, even if the layer uses
/// operators itself. An instruction in a closure of the kernel has its own line.
#[test]
fn floors_serve_their_callers() {
    let shape = TileShape::new(Elem::Bf16, 64, 64);
    let first = line!() + 2;
    let kernel = kernel(|b| {
        let (pipeline, map) = (b.pipeline("kv", 2, 4, [("k", shape)]), b.tile_map("k", shape));
        let (q, out) = (b.tile("q", shape), b.staging_buffers("out", shape, 1));
        b.init_mbarriers(); // 2
        let mut producer = pipeline.producer(); // 3
        b.once_per_role(|| {
            let mut stage = producer.acquire(); // 5
            stage.load(0, &map, (0, b.cta_x())); // 6
            stage.commit(); // 7
        }); // 4
        let mut consumer = pipeline.consumer(); // 9
        let kept = b.rows_var("max", 0.0); // 10
        let stage = consumer.wait(); // 11
        let s = gemm(q, stage.tile().t(), Fresh); // 12
        let mut s = s.wait(); // 13
        stage.release(); // 14
        kept.set(
            s.row_max() // 16
                .max(kept.get()), // 17, 17
        ); // 15
        s.map_in_place(|x, at| {
            (x // the element is copied, and set, on line 19
                - kept.get()[at]) // 21
                .ex2() // 22
        });
        let staging_buffer = out.of(0); // 24
        let staged = staging_buffer.acquire(); // 25
        s.store(staged.tile()); // 26
        staged.store(&map, (0, 0)); // 27
    });
    let mut found = lines(&kernel);
    // For each of a thread's 32 elements there are six statements: a copy, two row operations, a difference, an
    // exponential, and an assignment.
    let element = [19, 21, 20, 22].map(|line| first + line);
    let map = found.iter().position(|&line| line == element[0]).unwrap();
    let elements = found.splice(map..map + 4 * 32 + 1, []).collect::<Vec<u32>>();
    assert!(elements.chunks_exact(4).all(|lines| lines == element), "{kernel}");
    let expected = [2, 3, 4, 5, 6, 7, 4, 9, 10, 11, 12, 13, 14, 16, 17, 15, 24, 25, 26, 27];
    assert_eq!(found, expected.map(|line| first + line), "{kernel}");
}
