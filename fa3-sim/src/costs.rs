//! The constants of the cycle model, each with its source.

macro_rules! costs {
    ($($name:ident = $value:literal, $unit:literal, $what:literal, $source:literal;)+) => {
        /// Rates and durations of the model. [`Costs::HOPPER`] is an H100 SXM5; other values answer questions like
        /// "what if copies were slower?".
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Costs {
            $(#[doc = concat!($what, ", in ", $unit, ". Source: ", $source, ".")]
            pub $name: u64,)+
        }

        impl Costs {
            /// An H100 SXM5: 132 SMs at 1.83 GHz.
            pub const HOPPER: Costs = Costs { $($name: $value,)+ };

            /// The constants of [`Costs::HOPPER`], one by one.
            pub const TABLE: &'static [Constant] = &[$(Constant {
                name: stringify!($name),
                value: $value,
                unit: $unit,
                what: $what,
                source: $source,
            },)+];
        }
    };
}

/// A row of [`Costs::TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// The field's name.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// Its unit.
    pub unit: &'static str,
    /// Its meaning.
    pub what: &'static str,
    /// Where the value comes from.
    pub source: &'static str,
}

costs! {
    tensor_flops = 4096, "flop/cycle", "Multiplications and additions of 16-bit products in an SM; 8-bit products do twice as many",
        "H100 white paper: 989.4 TFLOP/s of 132 SMs at 1.83 GHz";
    product_bytes = 128, "B/cycle", "Operands that products read from shared memory",
        "the width of shared memory, 32 banks of 4 bytes: CUDA C++ Programming Guide, compute capability 9.0";
    product_latency = 16, "cycles", "From the end of a product to the first use of its sums", "assumed";
    float_cycles = 1, "cycles", "A warp's floating-point instruction in a partition",
        "128 results/cycle/SM: CUDA C++ Programming Guide, throughput of native arithmetic instructions, 9.0";
    integer_cycles = 2, "cycles", "A warp's integer, logic, comparison, minimum or maximum instruction in a partition",
        "64 results/cycle/SM: the same table";
    convert_cycles = 2, "cycles", "A warp's conversion in a partition", "64 results/cycle/SM: the same table";
    special_cycles = 8, "cycles", "A warp's exponential, reciprocal and the like in a partition",
        "16 results/cycle/SM: the same table; FlashAttention-3, arXiv 2407.08608, section 3.1 (3.9 TFLOP/s)";
    shared_latency = 30, "cycles", "From a load from shared memory, or a shuffle, to its result",
        "assumed; published microbenchmarks of Hopper report about 30";
    global_latency = 480, "cycles", "From a load from global memory to its result",
        "assumed, between L2 and device memory";
    load_latency = 700, "cycles", "From a tensor or bulk load to the signal that its data are there, without the transfer",
        "assumed";
    store_latency = 700, "cycles", "From the last byte that a tensor or bulk store reads to its being in global memory",
        "assumed";
    load_bytes = 50, "B/cycle", "What an SM gets from L2 when all do",
        "FlashAttention-3, arXiv 2407.08608, table 1: 12 TB/s of L2, shared by 132 SMs at 1.83 GHz";
    store_bytes = 50, "B/cycle", "What an SM gives to L2 when all do", "assumed to be as fast as the other way";
    gate_latency = 20, "cycles", "From the last arrival at a barrier or mbarrier to the next instruction of who waits",
        "assumed";
}
