//! Parts of the report: commands of fa3 that find its numbers and draw its pictures.

use std::error::Error;
use std::fmt;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The names of the files in the commands.
const FILES: [&str; 2] = ["part.json", "part.svg"];

/// A command, with the numbers that it finds and the picture that it draws.
pub(super) struct Part {
    pub(super) id: &'static str,
    words: &'static str,
    /// The words that are added with `--quick`.
    quick: &'static str,
    needs: Needs,
    /// Estimated seconds of a core, with `--quick` and without it.
    seconds: [u32; 2],
    /// Whether the page shows the picture.
    pub(super) shows: bool,
    /// Whether it runs without `--quick` only.
    pub(super) is_long: bool,
}

/// The use that a part makes of a GPU.
enum Needs {
    /// Nothing.
    Cpu,
    /// It cannot run without one.
    Gpu,
    /// It uses one, if there is one, and then takes this many seconds.
    Any(u32),
}

const fn on_cpu(id: &'static str, words: &'static str, seconds: u32) -> Part {
    Part { id, words, quick: "", needs: Needs::Cpu, seconds: [seconds; 2], shows: false, is_long: false }
}

const fn shown(part: Part) -> Part {
    Part { shows: true, ..part }
}

const fn on_gpu(id: &'static str, words: &'static str, quick: &'static str, seconds: [u32; 2]) -> Part {
    Part { id, words, quick, needs: Needs::Gpu, seconds, shows: false, is_long: false }
}

/// A run in the simulator's model of an H100, of one tile with two consumer warpgroups, as the paper's kernel has.
macro_rules! modelled {
    ($id:literal, $options:literal) => {
        on_cpu(
            $id,
            concat!(
                "sim forward --heads 1 --dtype f16 --seqlen-q 128 ",
                $options,
                " --mode skeleton --policy eager --json part.json --svg part.svg"
            ),
            1,
        )
    };
}

/// Timelines are short enough that one can tell iterations apart.
pub(super) const PARTS: [Part; 23] = [
    shown(modelled!("figure-1", "--seqlen-k 512 --pipeline serial --ping-pong on")),
    shown(modelled!("figure-2", "--seqlen-k 512 --pipeline two-stage --ping-pong off")),
    shown(modelled!("figure-8", "--seqlen-k 448 --pipeline three-stage --ping-pong off")),
    on_cpu("algorithm-1", "sim forward --pipeline serial --seeds 5 --json part.json", 1),
    on_cpu("algorithm-2", "sim forward --pipeline two-stage --seeds 5 --json part.json", 1),
    on_cpu("algorithm-3", "sim backward --causal --seqlen 150 --head-dim 64 --json part.json", 1),
    on_cpu("algorithm-4", "sim forward --pipeline three-stage --seeds 5 --json part.json", 1),
    on_cpu("fp8", "sim forward --dtype e4m3 --json part.json", 1),
    modelled!("serial", "--seqlen-k 4096 --pipeline serial --ping-pong off"),
    modelled!("serial-ping-pong", "--seqlen-k 4096 --pipeline serial --ping-pong on"),
    modelled!("two-stage", "--seqlen-k 4096 --pipeline two-stage --ping-pong off"),
    modelled!("two-stage-ping-pong", "--seqlen-k 4096 --pipeline two-stage --ping-pong on"),
    modelled!("three-stage", "--seqlen-k 4096 --pipeline three-stage --ping-pong off"),
    on_cpu("sass", "sass forward --dtype f16 --seqlen 4096 --pipeline two-stage --json", 1),
    on_cpu("sass-three-stage", "sass forward --dtype f16 --seqlen 4096 --pipeline three-stage --json", 1),
    shown(on_cpu(
        "schedule",
        "plan --batch 4 --seqlen 4096 --heads 8 --head-dim 128 --causal --json part.json --svg part.svg",
        1,
    )),
    on_gpu(
        "figure-5",
        "bench --dtype f16 --json part.json",
        "--seqlen 1k,4k,16k --rounds 2 --slice-ms 8",
        [25, 120],
    ),
    on_gpu(
        "figure-6",
        "bench --backward --dtype f16 --head-dim 64,128 --no-mask --json part.json",
        "--seqlen 1k,4k,16k --rounds 2 --slice-ms 8",
        [22, 45],
    ),
    on_gpu(
        "figure-7",
        "bench --dtype e4m3 --head-dim 256 --json part.json",
        "--seqlen 1k,4k,16k --rounds 2 --slice-ms 8",
        [8, 25],
    ),
    on_gpu("table-2", "bench --ablation --json part.json", "--rounds 2 --slice-ms 8", [12, 30]),
    Part {
        id: "table-3",
        words: "accuracy --json part.json --svg part.svg",
        quick: "--quick",
        needs: Needs::Any(25),
        seconds: [8, 1100],
        shows: true,
        is_long: false,
    },
    errors_at("table-3-1k", "accuracy --quick --seqlen 1k --json part.json", [8, 6]),
    errors_at("table-3-4k", "accuracy --quick --seqlen 4k --json part.json", [75, 15]),
];

/// Table 3 at another length, which takes these seconds without a GPU and with one.
const fn errors_at(id: &'static str, words: &'static str, [cpu, gpu]: [u32; 2]) -> Part {
    Part { id, words, quick: "", needs: Needs::Any(gpu), seconds: [0, cpu], shows: false, is_long: true }
}

/// A part that ran, or did not.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ran {
    pub(super) id: String,
    /// The command's words, after `fa3`.
    pub(super) command: String,
    pub(super) seconds: f64,
    pub(super) outcome: Outcome,
}

/// The end of a part, with a result or without one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    Done {
        /// Whether all checks of the results passed.
        right: bool,
        /// The command's output, unless that is its data.
        text: String,
        data: Value,
        svg: Option<String>,
    },
    /// There is no result; the text says why.
    Skipped(String),
}

impl Part {
    /// Estimated seconds of a core.
    pub(super) fn estimate(&self, quick: bool, has_gpu: bool) -> u32 {
        match self.needs {
            Needs::Gpu if !has_gpu => 0,
            Needs::Any(seconds) if has_gpu && !quick => seconds,
            Needs::Cpu | Needs::Gpu | Needs::Any(_) => self.seconds[usize::from(!quick)],
        }
    }

    pub(super) fn command(&self, quick: bool, has_gpu: bool) -> String {
        let gpu = if has_gpu && matches!(self.needs, Needs::Any(_)) { "--gpu" } else { "" };
        let words = [self.words, if quick { self.quick } else { "" }, gpu];
        words.into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// Runs the command as a process of its own, so that it checks and fails as it does for a user. The error of `gpu`
    /// says why there is no GPU.
    pub(super) fn run(&self, quick: bool, gpu: Result<(), &String>) -> Result<Ran, Box<dyn Error>> {
        let (start, command) = (Instant::now(), self.command(quick, gpu.is_ok()));
        let outcome = match (&self.needs, gpu) {
            (Needs::Gpu, Err(why)) => Outcome::Skipped(why.to_owned()),
            (Needs::Cpu | Needs::Gpu | Needs::Any(_), _) => ran(&command, self.shows)?,
        };
        Ok(Ran { id: self.id.to_owned(), command, seconds: start.elapsed().as_secs_f64(), outcome })
    }
}

/// Runs a command of fa3 with its files in a temporary folder. Its picture is kept if the page `shows` it.
fn ran(command: &str, shows: bool) -> Result<Outcome, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let words = command.split(' ').map(|word| match FILES.contains(&word) {
        true => folder.path().join(word).into_os_string(),
        false => word.into(),
    });
    let output = Command::new(std::env::current_exe()?).args(words).stdin(Stdio::null()).output()?;
    let code = output.status.code().filter(|code| [0, 1].contains(code));
    let [text, error] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
    let Some(code) = code else {
        let why = error.strip_prefix("error: ").unwrap_or(&error);
        return Ok(Outcome::Skipped(if why.is_empty() { output.status.to_string() } else { why.to_owned() }));
    };
    let [data, svg] = FILES.map(|name| fs::read_to_string(folder.path().join(name)).ok());
    // Lines about files are about the temporary ones.
    let shown = text.lines().filter(|line| data.is_some() && !line.starts_with("wrote "));
    let shown = shown.collect::<Vec<_>>().join("\n").trim().to_owned();
    let data = serde_json::from_str(data.as_deref().unwrap_or(&text))?;
    Ok(Outcome::Done { right: code == 0, text: shown, data, svg: svg.filter(|_| shows) })
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ran { id, seconds, outcome, .. } = self;
        match outcome {
            Outcome::Done { right, .. } => {
                let result = if *right { "right" } else { "WRONG" };
                write!(f, "{id:20} {seconds:7.1} s  {result}")
            }
            Outcome::Skipped(why) => write!(f, "{id:20} {:>9}  skipped: {why}", "-"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_used_where_there_is_one() {
        let part = |id: &str| PARTS.iter().find(|part| part.id == id).unwrap();
        assert_eq!(part("table-3").command(false, true), "accuracy --json part.json --svg part.svg --gpu");
        assert_eq!(part("table-3").command(true, false), "accuracy --json part.json --svg part.svg --quick");
        let why = "no Hopper GPU: no driver".to_owned();
        let skipped = part("figure-5").run(true, Err(&why)).unwrap();
        assert!(matches!(&skipped.outcome, Outcome::Skipped(said) if said == "no Hopper GPU: no driver"));
        let total = |quick, gpu| PARTS.iter().map(|part| part.estimate(quick, gpu)).sum::<u32>();
        assert!(total(true, false) < 60 && total(false, true) < 300 && total(false, false) > 600);
    }
}
