//! The arrays of a kernel before it runs, and the run.

use fa3_cuda::kernels::{Array, ArrayUse, Job};
use fa3_ir::Elem;
use fa3_quant::E4m3;
use fa3_sim::{Memory, Mode, Outcome, Policy, SimError, Simulation};
use half::{bf16, f16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Every byte of an array is followed by the simulator, so that this takes some GiB.
const MOST_BYTES: usize = 256 << 20;

/// Why there are no arrays.
#[derive(Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum ArrayError {
    #[error("{given} bytes of arrays are more than the {limit} that are simulated")]
    Bytes { given: usize, limit: usize },
    #[error("{array} is an array of {elem}, for which there are no random numbers")]
    Elem { array: &'static str, elem: Elem },
}

/// The bytes of every array: inputs standard normal, sums zero, outputs all ones, which is NaN in every type.
///
/// # Errors
/// See [`ArrayError`].
pub(crate) fn initial(job: &Job, seed: u64) -> Result<Vec<Vec<u8>>, ArrayError> {
    let given = job.arrays.iter().map(Array::bytes).fold(0, usize::saturating_add);
    if given > MOST_BYTES {
        return Err(ArrayError::Bytes { given, limit: MOST_BYTES });
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let bytes = |array: &Array| match array.used {
        ArrayUse::Input => random(array, &mut rng),
        ArrayUse::Output => Ok(vec![0xFF; array.bytes()]),
        ArrayUse::Sum => Ok(vec![0; array.bytes()]),
    };
    job.arrays.iter().map(bytes).collect()
}

fn random(array: &Array, rng: &mut ChaCha8Rng) -> Result<Vec<u8>, ArrayError> {
    let mut bytes = Vec::with_capacity(array.bytes());
    for _ in 0..array.len() {
        let x: f32 = StandardNormal.sample(rng);
        match array.elem {
            Elem::F32 => bytes.extend(x.to_le_bytes()),
            Elem::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
            Elem::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
            Elem::E4m3 => bytes.push(E4m3::from_f32(x).to_bits()),
            elem @ (Elem::U8 | Elem::U32 | Elem::U64) => {
                return Err(ArrayError::Elem { array: array.name, elem });
            }
        }
    }
    Ok(bytes)
}

/// Runs a job on arrays that begin as `initial`, traced if `trace`, and gives what they are then.
///
/// # Errors
/// If the simulator does not take the job, or does not come to its end.
pub(crate) fn simulate(
    job: &Job,
    initial: &[Vec<u8>],
    policy: Policy,
    mode: Mode,
    trace: bool,
) -> Result<(Vec<Vec<u8>>, Outcome), SimError> {
    let mut memory = Memory::new();
    let mut buffers = Vec::new();
    for (array, bytes) in job.arrays.iter().zip(initial) {
        buffers.push(match array.used {
            ArrayUse::Input | ArrayUse::Sum => memory.alloc_from(array.name, bytes),
            ArrayUse::Output => {
                let buffer = memory.alloc(array.name, array.bytes());
                memory.expect_written_once(buffer);
                buffer
            }
        });
    }
    let addresses: Vec<u64> = buffers.iter().map(|buffer| buffer.address()).collect();
    let simulation = Simulation::new(&job.kernel).grid(job.grid).args(job.bind(&addresses));
    let outcome = simulation.policy(policy).mode(mode).trace(trace).run(&mut memory)?;
    Ok((buffers.iter().map(|&buffer| memory.read(buffer)).collect(), outcome))
}

#[cfg(test)]
mod tests {
    use fa3_cuda::kernels::catalogue;

    use super::*;

    #[test]
    fn inputs_are_drawn_by_the_seed() {
        let job = catalogue::find("gemm_split_k").unwrap().job(&[]).unwrap();
        let [a, b, c]: [Vec<u8>; 3] = initial(&job, 3).unwrap().try_into().unwrap();
        assert_eq!(initial(&job, 3).unwrap(), [a.clone(), b.clone(), c.clone()]);
        assert!(a != initial(&job, 4).unwrap()[0] && a[..1000] != b[..1000]);
        let numbers = a.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f64());
        let (count, squares) = (numbers.len() as f64, numbers.map(|x| x * x).sum::<f64>());
        // Half a hundred thousand squares of variance 2.
        assert!((squares / count - 1.0).abs() < 0.05, "{squares} / {count}");
        assert!(c.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn arrays_that_are_too_much() {
        let job = catalogue::find("vector_add").unwrap().job(&[("n", (1 << 30).into())]).unwrap();
        assert_eq!(initial(&job, 1), Err(ArrayError::Bytes { given: 12 << 30, limit: MOST_BYTES }));
    }
}
