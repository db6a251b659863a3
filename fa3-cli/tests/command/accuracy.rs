//! `fa3 accuracy --quick`, with and without a GPU.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use fa3_cuda::host::Device;
use serde_json::Value;

use crate::files::Folder;
use crate::{command, fa3};

/// The rows of a report.
fn rows(report: &Value) -> &[Value] {
    report["table"].as_array().unwrap()
}

/// The median of the row whose `key` is `value`.
fn median(report: &Value, key: &str, value: &str) -> f64 {
    let row = rows(report).iter().find(|row| row[key] == value);
    row.unwrap_or_else(|| panic!("{value} in {report}"))["median"].as_f64().unwrap()
}

#[test]
fn tables_are_printed_and_written() {
    let folder = Folder::new();
    let stdout = folder.fa3("accuracy --quick --json a.json --svg a.svg").succeeded();

    let report = folder.json("a.json");
    assert!(rows(&report).iter().all(|row| row["rmse"].as_array().unwrap().len() == 3), "one for each seed");
    // Expected at 1024 keys: rounding in FP8 is about 70 times coarser than in FP16, flash attention rounds less than
    // standard attention, and incoherent processing helps.
    let median = |name: &str| median(&report, "name", name);
    assert!(median("fp16, FlashAttention-3") < 0.8 * median("fp16, standard attention"));
    assert!(median("fp8, FlashAttention-3") > 20.0 * median("fp16, FlashAttention-3"));
    assert!(median("fp8, no incoherent processing") > 1.3 * median("fp8, FlashAttention-3"));

    // The tensor core's accumulator alone loses 1.5 % at 1024 keys and 7.1 % at 4096, as measured on an H100.
    let biases = |levels: &str| -> Vec<f64> {
        report["drift"].as_array().unwrap().iter().map(|row| row[levels]["bias"].as_f64().unwrap()).collect()
    };
    let [at_1024, at_4096] = biases("one_level").try_into().unwrap();
    assert!((-0.018..-0.012).contains(&at_1024) && (-0.08..-0.062).contains(&at_4096), "{at_1024} {at_4096}");
    assert!(biases("two_level").iter().all(|bias| bias.abs() < 0.004));

    assert_eq!(report["gpu"], Value::Null);
    assert!(rows(&report).iter().all(|row| row["place"] == "cpu"), "{report}");
    assert!(stdout.ends_with("\n\nwrote a.json\nwrote a.svg\n"), "{stdout}");
    assert!(stdout.contains("open medians lie within"), "the paper's length was not measured: {stdout}");
    // The axes have titles and the numbers of keys. The paper's numbers do not apply.
    let svg = folder.text("a.svg");
    let labels = [("RMSE / 1e-5", 1), ("RMSE / 1e-4", 1), ("here, 1024 keys", 2), ("1k", 1), ("4k", 1)];
    for (label, count) in labels.into_iter().chain([("the paper, at no stated length", 0)]) {
        assert_eq!(svg.lines().filter(|line| *line == label).count(), count, "{label}");
    }
}

/// The file has Q, K and V of a model, and O that another program computed in f64.
#[test]
fn activations_are_read() {
    let folder = Folder::new();
    let measured =
        concat!("accuracy --input ", env!("CARGO_MANIFEST_DIR"), "/../data/minilm_layer5.safetensors");
    let stdout = folder.fa3(&format!("{measured} --json a.json")).succeeded();
    assert!(stdout.contains("K and V (1, 512, 3, 32)\nthe root mean square of O is 2.748e-1\n"), "{stdout}");
    let report = folder.json("a.json");
    assert!(rows(&report).iter().all(|row| row["paper"] == Value::Null));
    let median = |method| median(&report, "method", method);
    // The errors are about 3 % and 0.02 % of O.
    assert!((4e-3..1e-2).contains(&median("Flash3Fp8")) && (3e-5..1e-4).contains(&median("Flash3Fp16")));
    assert!(median("VChannels") < median("StandardFp8"));
    fa3(&format!("{measured} --prefix layer0.")).refused("has no tensor layer0.q; it holds k, ");
    fa3("accuracy --input /no/such/file").refused("cannot read /no/such/file: No such file");
}

/// An interrupted run keeps the measured rows.
#[test]
fn rows_are_printed_as_they_are_measured() {
    let mut child = command("accuracy --quick").stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let row = lines.map(Result::unwrap).find(|line| line.starts_with("fp16 standard attention"));
    let is_running = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(row.is_some() && is_running, "{row:?}");
}

#[test]
fn lengths_that_are_none_are_refused() {
    fa3("accuracy --seqlen 0").misused("expected a whole number from 1 to 131072");
    fa3("accuracy --seqlen 256k").misused("expected a whole number from 1 to 131072");
    fa3("accuracy --seqlen 1k --input a.safetensors").misused("cannot be used with");
}

#[test]
fn a_place_that_cannot_be_written_is_refused_at_once() {
    fa3("accuracy --json /no/such/folder/a.json").refused("there is no folder /no/such/folder");
    fa3("accuracy --json x --svg ./x").refused("outputs x and ./x are the same file");
}

/// Results of kernels are marked, and agree with the emulator's results, apart from the bias that only the emulator
/// has.
#[test]
fn kernels_compute_their_rows() {
    let name = match Device::open(0) {
        Ok(device) => device.name().to_owned(),
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let folder = Folder::new();
    let [cpu, gpu] = ["", "--gpu"].map(|option| {
        folder.fa3(&format!("accuracy --quick --json a.json {option}")).succeeded();
        folder.json("a.json")
    });
    assert_eq!(gpu["gpu"], name.as_str());
    let mut on_gpu = Vec::new();
    for (cpu, gpu) in rows(&cpu).iter().zip(rows(&gpu)) {
        let [emulated, found] = [cpu, gpu].map(|row| row["median"].as_f64().unwrap());
        if gpu["place"] == "cpu" {
            assert_eq!(found, emulated, "{gpu}");
        } else {
            assert!((0.9..1.1).contains(&(found / emulated)), "{gpu} {emulated}");
            on_gpu.push(gpu["method"].as_str().unwrap());
        }
    }
    let kernels = ["Flash3Fp16", "Flash3Fp8", "NoBlockQuantization", "NoIncoherentProcessing", "VChannels"];
    assert_eq!(on_gpu, kernels);
    for row in gpu["drift"].as_array().unwrap() {
        let two_level = &row["two_level"];
        assert!(two_level["place"] == "gpu" && two_level["bias"].as_f64().unwrap().abs() < 0.001, "{row}");
    }
}
