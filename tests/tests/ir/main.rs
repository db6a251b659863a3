//! Tests of the kernel language through its public interface: every instruction form in ptxas, every rule of the
//! verifier, whole kernels.

mod forms;
mod kernels;
mod lane;
mod observations;
mod one_product;
mod operators;
mod programs;
mod ptxas;
mod rules;
mod sources;
mod stored_pipeline;
mod tiles;

/// Compares `text` with the file `name` of this folder, or writes the file if `FA3_UPDATE` is set.
fn snapshot(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ir").join(name);
    if std::env::var_os("FA3_UPDATE").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{name}; set FA3_UPDATE to accept");
}
