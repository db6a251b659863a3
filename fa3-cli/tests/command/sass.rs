//! `fa3 sass` as a command.

use serde_json::{Value, json};

use crate::files::Folder;
use crate::{Ran, fa3, fa3_with};

#[test]
fn tools_that_are_not_there() {
    let variables = [("PTXAS", "/no/such/ptxas"), ("NVDISASM", "/no/such/nvdisasm")];
    fa3_with("sass gemm", &variables).refused("no ptxas: there is no /no/such/ptxas");
}

/// A loop in which a barrier interrupts a product, which half of the exponentials overlap.
const LISTING: &str = "\
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   BAR.ARV R8, 0x100 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   MUFU.EX2 R2, R2 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R3, R24 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
";

/// Fake tools with fixed output.
#[cfg(unix)]
mod fake {
    use super::*;

    /// Runs `fa3 sass gemm` with a ptxas that writes a listing and prints `says`, and an nvdisasm that runs
    /// `disassemble`.
    fn sass(listing: &str, says: &str, disassemble: &str, options: &str) -> Ran {
        let folder = Folder::new();
        let assemble = format!("cat > \"$4\" <<'END'\n{listing}END\ncat >&2 <<'END'\n{says}\nEND");
        let [ptxas, nvdisasm] = [("ptxas", assemble.as_str()), ("nvdisasm", disassemble)]
            .map(|(name, body)| folder.tool(name, body));
        let words = format!("sass gemm {options}");
        let ran = fa3_with(&words, &[("PTXAS", &ptxas), ("NVDISASM", &nvdisasm)]);
        let shown = |text: String| text.replace(folder.path("").to_str().unwrap(), "FOLDER/");
        Ran { code: ran.code, stdout: shown(ran.stdout), stderr: shown(ran.stderr) }
    }

    const USED: &str = "ptxas info    : Used 77 registers, used 0 barriers";
    const SHOW: &str = "cat \"$2\"";

    #[test]
    fn for_readers() {
        let expected = "\
gemm: 77 registers
ptxas 9.9.1 (FOLDER/ptxas)
nvdisasm 9.9.1 (FOLDER/nvdisasm)

loop at 0x0010: 7 instructions a round
  products 2, waits 1, barriers 1, exponentials 2, other 1

  HGMMA BAR.ARV HGMMA MUFU.EX2 DEPBAR(0) MUFU.EX2

  2 HGMMA of 64 columns, a new sum, stopped 1×, awaited at 0x0050; under it 1 of 2 exponentials
";
        assert_eq!(sass(LISTING, USED, SHOW, "").succeeded(), expected);
        let straight = sass("        /*0000*/   EXIT ;\n", USED, SHOW, "").succeeded();
        assert!(straight.ends_with("\n\nno loop has tensor-core products\n"), "{straight}");
    }

    #[test]
    fn as_json() {
        let mut found = sass(LISTING, USED, SHOW, "--json").json();
        assert_eq!(found["loops"][0]["counts"]["exponentials"].take(), 2);
        found["loops"][0]["counts"].take();
        let expected = json!({
            "kernel": "gemm",
            "tools": { "ptxas": "9.9.1 (FOLDER/ptxas)", "nvdisasm": "9.9.1 (FOLDER/nvdisasm)" },
            "registers": 77,
            "spill_bytes": 0,
            "warnings": [],
            "loops": [{
                "address": 0x10,
                "instructions": 7,
                "counts": null,
                "order": ["HGMMA", "BAR.ARV", "HGMMA", "MUFU.EX2", "DEPBAR(0)", "MUFU.EX2"],
                "products": [{
                    "instruction": "HGMMA",
                    "count": 2,
                    "columns": 64,
                    "fresh": true,
                    "interruptions": 1,
                    "wait": 0x50,
                    "under": { "exponentials": 1, "conversions": 0, "float": 0 },
                }],
            }],
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn verdicts() {
        let warned = format!("ptxas info    : (C7510) Potential loss\n{USED}");
        let warned = sass(LISTING, &warned, SHOW, "");
        assert_eq!((warned.code, warned.stderr.as_str()), (Some(1), ""));
        assert!(warned.stdout.starts_with("gemm: 77 registers, C7510: Potential loss\n"), "{warned:?}");
        let spilled = LISTING.replace("MUFU.EX2 R3, R24", "LDL R3, [R1]");
        assert_eq!(sass(&spilled, USED, SHOW, "").code, Some(1));

        sass(LISTING, USED, "echo 'nvdisasm fatal   : no' >&2; exit 255", "")
            .refused("nvdisasm rejects kernel gemm: nvdisasm fatal   : no");
        sass(LISTING, USED, "echo nothing", "")
            .refused("nvdisasm's listing of kernel gemm: there is no instruction in it");
    }

    #[test]
    fn no_disassembler() {
        let folder = Folder::new();
        let ptxas = folder.tool("ptxas", "exit 1");
        fa3_with("sass gemm", &[("PTXAS", &ptxas), ("NVDISASM", "/no/such/nvdisasm")])
            .refused("no nvdisasm: there is no /no/such/nvdisasm");
    }
}

/// Runs the installed tools on the paper's main loop of head dimension 128.
#[test]
fn a_forward_kernel() {
    let ran = fa3("sass forward --json");
    if ran.stderr.contains("no ptxas") || ran.stderr.contains("no nvdisasm") {
        println!("skipped: {}", ran.stderr);
        return;
    }
    let found = ran.json();
    let products = |of: &Value| -> Vec<(u64, bool)> {
        let products = of["products"].as_array().unwrap().iter();
        products.map(|p| (p["count"].as_u64().unwrap(), p["fresh"].as_bool().unwrap())).collect()
    };
    let loops = found["loops"].as_array().unwrap();
    // 128 columns of Q and K take eight steps of 16.
    assert!(!loops.is_empty() && loops.iter().all(|of| products(of)[0] == (8, true)), "{found}");
}
