//! `fa3 reproduce --quick`, without a GPU.

use fa3_cuda::host::is_driver_present;

use crate::files::Folder;

/// The page that is drawn from its data is equal to the first one.
#[test]
fn a_page_is_made_and_drawn_again() {
    if is_driver_present() {
        println!("skipped: there is a driver");
        return;
    }
    let folder = Folder::new();
    let stdout = folder.fa3("reproduce --quick -o report/ --json a.json").succeeded();
    assert_eq!(stdout.matches("skipped: no Hopper GPU, no nvidia driver").count(), 4, "{stdout}");
    let page = folder.text("report/index.html");
    let said = |verdict: &str| page.matches(&format!("<td class=\"{verdict}\">")).count();
    // Claims stand in the table of all, and in their sections. What needs ptxas may be missing.
    let claims = folder.json("a.json")["claims"].as_array().unwrap().len();
    assert_eq!(said("agrees") + said("differs") + said("not"), 2 * claims);
    assert!(said("agrees") >= 2 * 11, "{stdout}");
    for picture in
        ["model, not measurement", "FlashAttention-3 (paper)", "here, 1024 keys", "planned: 142 blocks"]
    {
        assert!(page.contains(picture), "{picture}");
    }
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    folder.fa3("reproduce --from a.json -o again").succeeded();
    assert!(folder.text("again/index.html") == page, "the page differs");
}

#[test]
fn files_that_cannot_be_used_are_refused() {
    let folder = Folder::new();
    folder.write("a.json", "{}");
    folder.fa3("reproduce --from a.json").refused("a.json has no data of a page: missing field `machine`");
    folder.fa3("reproduce --from b.json").refused("cannot read b.json: No such file");
    folder.fa3("reproduce --from a.json --json a.json").refused("cannot write a.json: it is an input");
    folder.fa3("reproduce --quick -o a.json").refused("cannot write a.json: ");
}
