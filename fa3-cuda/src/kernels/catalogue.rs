//! All kernels by name, with the options that each takes: for whatever lists kernels, or runs one that somebody names.
//!
//! A new kernel is one more [`Entry`] of [`ALL`].
//!
//! ```
//! use fa3_cuda::kernels::catalogue;
//!
//! let gemm = catalogue::find("gemm")?;
//! let program = gemm.program(&[("m", 256.into()), gemm.option("dtype")?.parse("f16")?])?;
//! assert_eq!(program.buffers[0].shape, [256, 392]); // k as the entry has it
//!
//! let error = gemm.program(&[("n", 12.into())]).unwrap_err();
//! assert_eq!(error.to_string(), "n is 12, not a multiple of 8 from 8 to 1048576");
//! # Ok::<(), catalogue::CatalogueError>(())
//! ```

mod attention;
mod option;

use fa3_ir::{Elem, Program, Swizzle};
use fa3_sched::forward::PlanError;
use fa3_types::ProblemError;

use super::Spec;
use super::ladder::{
    GemmSize, gemm, gemm_cluster, gemm_fp8, gemm_ring, gemm_simple, gemm_split_k, row_softmax, tile_copy,
    transpose, vector_add,
};
use option::{Options, listed};

pub use option::{Chosen, Domain, OptionInfo, Value};

/// The largest dimension of a matrix. What kernels compute in 32 bits, such as numbers of tiles, is far from overflow.
const MOST: u32 = 1 << 20;

const M: OptionInfo = number("m", "Rows of A and C", 136, 1);
const DTYPE: OptionInfo = dtype(&[Value::Dtype(Elem::Bf16), Value::Dtype(Elem::F16)]);
const SPLITS: OptionInfo = number("splits", "Parts of K, no more than it has tiles", 2, 1);
const ELEMENTS: OptionInfo = OptionInfo {
    name: "n",
    about: n(1).about,
    domain: Domain::Number { default: 1000, multiple_of: 1, at_most: 1 << 31 },
};
const SWIZZLE: OptionInfo = OptionInfo {
    name: "swizzle",
    about: "Bytes of a row of the swizzle in shared memory",
    domain: Domain::OneOf(&[
        Value::Swizzle(Swizzle::B128),
        Value::Swizzle(Swizzle::B64),
        Value::Swizzle(Swizzle::B32),
        Value::Swizzle(Swizzle::None),
    ]),
};

/// Every kernel. Default sizes are small, with remainders in every dimension.
pub static ALL: &[Entry] = &[
    Entry {
        name: "vector_add",
        about: "z = x + y, one element a thread",
        options: &[ELEMENTS],
        build: |options| Ok(vector_add::program(options.number("n"))),
    },
    Entry {
        name: "row_softmax",
        about: "y = softmax(x) of each row, one row a warp",
        options: &[rows(1), cols(1)],
        build: |options| {
            let [rows, cols] = ["rows", "cols"].map(|name| options.number(name));
            let elements = u64::from(rows) * u64::from(cols);
            let limit = u32::MAX.into();
            if elements > limit {
                return Err(CatalogueError::Elements { rows, cols, limit });
            }
            Ok(row_softmax::program(rows, cols))
        },
    },
    Entry {
        name: "tile_copy",
        about: "y = x by tensor copies, one tile of 64 x 64 a CTA",
        options: &[rows(1), cols(8), SWIZZLE],
        build: |options| {
            Ok(tile_copy::program(options.swizzle(), options.number("rows"), options.number("cols")))
        },
    },
    Entry {
        name: "transpose",
        about: "y = x transposed, one tile of 64 x 64 a CTA",
        options: &[rows(8), cols(8)],
        build: |options| Ok(transpose::program(options.number("rows"), options.number("cols"))),
    },
    Entry {
        name: "gemm_simple",
        about: "C = A B^T by one warpgroup a tile, in turn",
        options: &[M, n(2), k(392, 8), DTYPE],
        build: |options| Ok(gemm_simple::program(options.dtype(), size(options))),
    },
    Entry {
        name: "gemm_ring",
        about: "C = A B^T by one warpgroup a tile, loads ahead of products",
        options: &[M, n(2), k(392, 8), DTYPE],
        build: |options| Ok(gemm_ring::program(options.dtype(), size(options))),
    },
    Entry {
        name: "gemm",
        about: "C = A B^T by a producer and two consumers, persistent",
        options: &[M, n(8), k(392, 8), DTYPE, ctas(1)],
        build: |options| Ok(gemm::program(options.dtype(), size(options), options.number("ctas"))),
    },
    Entry {
        name: "gemm_cluster",
        about: "The same by clusters of two CTAs, which load for each other",
        options: &[M, n(8), k(392, 8), DTYPE, ctas(2)],
        build: |options| Ok(gemm_cluster::program(options.dtype(), size(options), options.number("ctas"))),
    },
    Entry {
        name: "gemm_split_k",
        about: "C = C + A B^T, parts of K added by copies",
        options: &[M, n(4), k(392, 8), DTYPE, SPLITS],
        build: |options| Ok(gemm_split_k::program(options.dtype(), size(options), options.number("splits"))),
    },
    Entry {
        name: "gemm_fp8",
        about: "C = A B^T of e4m3, summed in two levels",
        options: &[M, n(8), k(784, 16), dtype(&[Value::Dtype(Elem::E4m3)]), ctas(1)],
        build: |options| Ok(gemm_fp8::program(size(options), options.number("ctas"))),
    },
    Entry {
        name: "fwd",
        about: "O = softmax(Q K^T) V, the forward pass of attention",
        options: attention::FORWARD,
        build: attention::forward,
    },
];

/// A kernel and the problems that it takes.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name, that of [`fa3_ir::Kernel`].
    pub name: &'static str,
    /// What it computes.
    pub about: &'static str,
    /// What can be chosen.
    pub options: &'static [OptionInfo],
    build: fn(&Options) -> Result<Program<Spec>, CatalogueError>,
}

/// Why there is no such program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum CatalogueError {
    #[error("there is no kernel {given}, but {}", listed(ALL.iter().map(|entry| entry.name)))]
    Kernel { given: String },
    #[error("kernel {kernel} has no option {given}, but {}", listed(options.iter().map(|option| option.name)))]
    Option { kernel: &'static str, given: String, options: &'static [OptionInfo] },
    #[error("{option} is {given}, not {domain}")]
    Value { option: &'static str, given: String, domain: Domain },
    #[error("{rows} x {cols} elements are more than {limit}")]
    Elements { rows: u32, cols: u32, limit: u64 },
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The kernel of this name.
///
/// # Errors
/// [`CatalogueError::Kernel`].
pub fn find(name: &str) -> Result<&'static Entry, CatalogueError> {
    let entry = ALL.iter().find(|entry| entry.name == name);
    entry.ok_or_else(|| CatalogueError::Kernel { given: name.to_owned() })
}

impl Entry {
    /// Its option of this name.
    ///
    /// # Errors
    /// [`CatalogueError::Option`].
    pub fn option(&'static self, name: &str) -> Result<&'static OptionInfo, CatalogueError> {
        let option = self.options.iter().find(|option| option.name == name);
        option.ok_or_else(|| {
            let Entry { name: kernel, options, .. } = *self;
            CatalogueError::Option { kernel, given: name.to_owned(), options }
        })
    }

    /// The kernel for `chosen` options, and defaults for all others. Of an option that is chosen twice the last counts.
    ///
    /// # Errors
    /// An option or a value that it does not take.
    pub fn program(&'static self, chosen: &[(&str, Value)]) -> Result<Program<Spec>, CatalogueError> {
        let mut options =
            Options(self.options.iter().map(|option| (option.name, option.default())).collect());
        for &(name, value) in chosen {
            let chosen = self.option(name)?.check(value)?;
            options.0.push(chosen);
        }
        (self.build)(&options)
    }

    /// The kernel with its default sizes for every dtype it takes.
    ///
    /// # Errors
    /// None, if the entry makes sense.
    pub fn programs(&'static self) -> Result<Vec<Program<Spec>>, CatalogueError> {
        let dtype = self.options.iter().find(|option| option.name == "dtype");
        match dtype.map(|option| option.domain) {
            Some(Domain::OneOf(values)) => {
                values.iter().map(|&value| self.program(&[("dtype", value)])).collect()
            }
            _ => Ok(vec![self.program(&[])?]),
        }
    }
}

fn size(options: &Options) -> GemmSize {
    GemmSize { m: options.number("m"), n: options.number("n"), k: options.number("k") }
}

const fn number(name: &'static str, about: &'static str, default: u32, multiple_of: u32) -> OptionInfo {
    OptionInfo { name, about, domain: Domain::Number { default, multiple_of, at_most: MOST } }
}

const fn n(multiple_of: u32) -> OptionInfo {
    number("n", "Columns of C, or elements of a vector", 264, multiple_of)
}

const fn k(default: u32, multiple_of: u32) -> OptionInfo {
    number("k", "Columns of A and B", default, multiple_of)
}

const fn rows(multiple_of: u32) -> OptionInfo {
    number("rows", "Rows of X", 72, multiple_of)
}

const fn cols(multiple_of: u32) -> OptionInfo {
    number("cols", "Columns of X", 136, multiple_of)
}

const fn ctas(multiple_of: u32) -> OptionInfo {
    number("ctas", "CTAs that walk over the tiles of C, no more than it has", 132, multiple_of)
}

const fn dtype(values: &'static [Value]) -> OptionInfo {
    OptionInfo { name: "dtype", about: "Elements of A and B", domain: Domain::OneOf(values) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Whether arguments and grid are such as the kernel takes.
    fn fits(program: &Program<Spec>) -> bool {
        program.map(Spec::kernel).check().is_ok()
    }

    /// The least, the default and the greatest value of an option, or all its words.
    fn extremes(option: &OptionInfo) -> Vec<Value> {
        match option.domain {
            Domain::Number { default, multiple_of, at_most } => {
                [multiple_of, default, at_most / multiple_of * multiple_of].map(Value::Number).to_vec()
            }
            Domain::OneOf(values) => values.to_vec(),
            Domain::Word(words) => words.iter().map(|&word| Value::Word(word)).collect(),
        }
    }

    /// Every combination of extremes of any two options.
    fn pairs(entry: &'static Entry) -> Vec<[Chosen; 2]> {
        let chosen = |option: &'static OptionInfo| {
            extremes(option).into_iter().map(|value| (option.name, value)).collect::<Vec<Chosen>>()
        };
        let mut all = Vec::new();
        for (index, first) in entry.options.iter().enumerate() {
            for second in &entry.options[index..] {
                let first = chosen(first);
                all.extend(first.into_iter().flat_map(|x| chosen(second).into_iter().map(move |y| [x, y])));
            }
        }
        all
    }

    #[test]
    fn kernels_are_called_as_their_entries() {
        let names: BTreeSet<&str> = ALL.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), ALL.len());
        for entry in ALL {
            let program = entry.program(&[]).unwrap();
            assert_eq!(program.steps[0].kernel.kernel().name, entry.name);
            assert_eq!(find(entry.name).unwrap().about, entry.about);
        }
    }

    #[test]
    fn every_option_is_used_up_to_its_limits() {
        for entry in ALL {
            for chosen in pairs(entry) {
                match entry.program(&chosen) {
                    Ok(program) => assert!(fits(&program), "{} {chosen:?}", entry.name),
                    Err(
                        CatalogueError::Elements { .. }
                        | CatalogueError::Problem(_)
                        | CatalogueError::Plan(_),
                    ) => {}
                    Err(error) => panic!("{} {chosen:?}: {error}", entry.name),
                }
            }
            for option in entry.options {
                let changes = |value: &Value| {
                    let (with, without) = (entry.program(&[(option.name, *value)]), entry.program(&[]));
                    format!("{:?}", with.unwrap()) != format!("{:?}", without.unwrap())
                };
                let others = match option.domain {
                    Domain::Number { default, multiple_of, .. } if default == multiple_of => {
                        vec![Value::Number(2 * multiple_of)]
                    }
                    Domain::Number { multiple_of, .. } => vec![Value::Number(multiple_of)],
                    Domain::OneOf(_) | Domain::Word(_) => extremes(option)[1..].to_vec(),
                };
                let changed = others.iter().filter(|other| changes(other)).count();
                // A word may say what is so anyway.
                let enough = if matches!(option.domain, Domain::Word(_)) { 1 } else { others.len() };
                assert!(changed >= enough, "{} of {} changes nothing", option.name, entry.name);
            }
        }
    }

    #[test]
    fn options_that_are_none() {
        let said = |kernel: &str, option: &str, text: &str| {
            let program = || find(kernel)?.program(&[find(kernel)?.option(option)?.parse(text)?]);
            program().unwrap_err().to_string()
        };
        assert!(said("gem", "n", "8").starts_with("there is no kernel gem, but vector_add, row_softmax, "));
        assert_eq!(said("vector_add", "m", "8"), "kernel vector_add has no option m, but n");
        assert_eq!(said("gemm", "n", "12"), "n is 12, not a multiple of 8 from 8 to 1048576");
        assert_eq!(said("gemm", "k", "0"), "k is 0, not a multiple of 8 from 8 to 1048576");
        assert_eq!(said("gemm", "m", "1048577"), "m is 1048577, not a whole number from 1 to 1048576");
        assert_eq!(
            said("gemm", "m", "99999999999"),
            "m is 99999999999, not a whole number from 1 to 1048576"
        );
        assert_eq!(said("gemm", "dtype", "e4m3"), "dtype is e4m3, not bf16 or f16");
        assert_eq!(said("tile_copy", "swizzle", "16"), "swizzle is 16, not 128, 64, 32 or none");
        let chosen = [("rows", 1_000_000.into()), ("cols", 5000.into())];
        let error = find("row_softmax").unwrap().program(&chosen).unwrap_err();
        assert_eq!(error.to_string(), "1000000 x 5000 elements are more than 4294967295");
        let error = find("gemm").unwrap().program(&[("dtype", 8.into())]).unwrap_err();
        assert_eq!(error.to_string(), "dtype is 8, not bf16 or f16");
    }
}
