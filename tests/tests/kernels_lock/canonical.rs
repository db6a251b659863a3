//! The canonical form of PTX ignores names and keeps the code.

use fa3_tests::canonical::canonical;

const KERNEL: &str = "\
.extern .shared .align 1024 .b8 smem[];

.visible .entry fwd(
    .param .u64 param_x,
    .param .align 64 .b8 param_map[128]
)
.maxntid 128, 1, 1
{
    .reg .b32 %r<40>;
    .reg .f32 %f<40>;
    .reg .b64 %map_x;
    mov.b64 %map_x, param_map;
    // role producer: warps 0 to 3
    mov.u32 %r7, %tid.x;
loop_3:
    add.u32 %r9, %r7, 1;
    ld.shared.f32 %f9, [smem+1024];
    @!%r9 bra.uni loop_3;
    { .reg .pred done; again: mbarrier.try_wait done, [%r7], 0; @!done bra again; }
    fma.rn.f32 %f9, %f9, 0f3F800000, %f9;
}
";

#[test]
fn the_form() {
    let expected = "\
.extern .shared .align 1024 .b8 smem[];
.visible .entry
.param .u64 param_0,
.param .align 64 .b8 param_1[128]
)
.maxntid 128, 1, 1
{
mov.b64 %b64_0, param_1;
mov.u32 %b32_0, %tid.x;
label_0:
add.u32 %b32_1, %b32_0, 1;
ld.shared.f32 %f32_0, [smem+1024];
@!%b32_1 bra.uni label_0;
{  label_1: mbarrier.try_wait %pred_0, [%b32_0], 0; @!%pred_0 bra label_1; }
fma.rn.f32 %f32_0, %f32_0, 0f3F800000, %f32_0;
}
";
    assert_eq!(canonical(KERNEL), expected);
}

/// The canonical form of the kernel after these replacements.
fn edited(edits: &[(&str, &str)]) -> String {
    let edited = edits.iter().fold(KERNEL.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "no {from}");
        text.replace(from, to)
    });
    canonical(&edited)
}

#[test]
fn names_do_not_count() {
    let names = [
        [("%r7", "%r8"), ("<40>", "<99>")],
        [("%r7", "%r17"), ("%r9", "%r1")],
        [("%f9", "%f3"), ("loop_3", "again_and_again")],
        [("_map", "_q"), ("_x", "_k")],
        [("fwd", "forward"), ("producer", "loader")],
        [("done", "ready"), ("again", "once_more")],
    ];
    for edits in names {
        assert_eq!(edited(&edits), canonical(KERNEL), "{edits:?}");
    }
}

#[test]
fn code_counts() {
    let changes = [
        ("%r9, %r7, 1", "%r7, %r9, 1"),
        ("%r9, %r7, 1", "%r9, %r9, 1"),
        ("add.u32 %r9, %r7, 1", "add.u32 %r9, %r7, 2"),
        ("smem+1024", "smem+2048"),
        ("align 1024", "align 128"),
        ("@!%r9", "@%r9"),
        ("0f3F800000", "0f40000000"),
        ("%tid.x", "%tid.y"),
        ("maxntid 128", "maxntid 256"),
        (".u64 param_x", ".u32 param_x"),
        ("param_map;", "param_x;"),
        (".reg .f32 %f", ".reg .b32 %f"),
        ("[%r7], 0", "[%r9], 0"),
    ];
    for change in changes {
        assert_ne!(edited(&[change]), canonical(KERNEL), "{change:?}");
    }
}

/// A kernel in which two instructions change places is another kernel.
#[test]
fn order_counts() {
    let lines: Vec<&str> = KERNEL.lines().collect();
    let add = lines.iter().position(|line| line.contains("add.u32")).expect("the kernel adds");
    let mut exchanged = lines.clone();
    exchanged.swap(add, add + 1);
    assert_ne!(canonical(&exchanged.join("\n")), canonical(KERNEL));
}
