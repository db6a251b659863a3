//! The same bits as the crate `fa3`, in every type: nothing is converted or lost on the way.

use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use fa3::half::{bf16, f16};
use fa3::ndarray::{Array3, Array4};
use fa3::{OutputGradients, Scalar};
use fa3_candle::{Attention, Packed};

const Q: (usize, usize, usize, usize) = (2, 33, 4, 24);
const K: (usize, usize, usize, usize) = (2, 45, 2, 24);

fn wave<T: Scalar>(dims: (usize, usize, usize, usize), step: f32) -> Array4<T> {
    Array4::from_shape_fn(dims, |(b, s, h, d)| {
        T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
    })
}

/// The array's elements in its order.
fn tensor<T: WithDType>(array: &Array4<T>, packed: bool, device: &Device) -> Result<Var> {
    let (batch, seqlen, heads, head_dim) = array.dim();
    let elements = array.iter().copied().collect::<Vec<T>>();
    let x = Tensor::from_vec(elements, (batch, seqlen, heads, head_dim), device)?;
    Var::from_tensor(&if packed { x.squeeze(0)? } else { x })
}

fn elements<T: WithDType>(x: &Tensor) -> Result<Vec<T>> {
    x.flatten_all()?.to_vec1()
}

/// Compares a call of dense tensors and one of two packed sequences, both on the same device.
pub(crate) fn check<T: Scalar<Output = T> + WithDType>(device: &Device, same: &fa3::Device) -> Result<()> {
    check_call::<T>(false, device, same)?;
    check_call::<T>(true, device, same)
}

fn check_call<T: Scalar<Output = T> + WithDType>(
    packed: bool,
    device: &Device,
    same: &fa3::Device,
) -> Result<()> {
    let single = |(batch, rows, heads, head_dim)| {
        if packed { (1, batch * rows, heads, head_dim) } else { (batch, rows, heads, head_dim) }
    };
    let [q, k, v] = [wave::<T>(single(Q), 0.3), wave(single(K), 0.5), wave(single(K), 0.7)];
    let (dout, of_q, of_k) = (wave::<T>(single(Q), 0.9), [0, 20, 60], [0, 50, 90]);
    let (batch, rows, heads, _) = single(Q);
    let dlse = Array3::from_shape_fn((batch, heads, rows), |(b, h, s)| ((5 * b + 3 * h + s) as f32).cos());

    let call = fa3::Attention::new(&q, &k, &v).causal().softmax_scale(0.25).softcap(2.).deterministic();
    let call = if packed { call.packed(&of_q, &of_k) } else { call };
    let computed = call.forward(same).expect("the call makes sense");
    // Of O, of LSE, and of both in one backward pass: those of two passes would be rounded before they are added.
    let zeros = Array4::from_elem(dout.dim(), T::default());
    let backward = |gradients: OutputGradients<'_, T>| {
        call.backward(same, &computed, gradients).expect("the output is of this call")
    };
    let expected = [
        backward((&dout).into()),
        backward(OutputGradients::new(&zeros).dlse(&dlse)),
        backward(OutputGradients::new(&dout).dlse(&dlse)),
    ];

    let [q, k, v] = [tensor(&q, packed, device)?, tensor(&k, packed, device)?, tensor(&v, packed, device)?];
    let attention = Attention::new(0.25).causal().softcap(2.).deterministic();
    let (o, lse) = if packed {
        let list = |of: [i32; 3]| Tensor::new(&of, device);
        attention.forward_varlen_with_lse(&q, &k, &v, &Packed::new(&list(of_q)?, &list(of_k)?, 40, 50)?)?
    } else {
        attention.forward_with_lse(&q, &k, &v)?
    };
    assert!(elements::<T>(&o)? == computed.o.into_raw_vec_and_offset().0);
    assert!(elements::<f32>(&lse)? == computed.lse.into_raw_vec_and_offset().0);
    let dout = tensor(&dout, packed, device)?;
    let dlse = Tensor::from_vec(dlse.into_raw_vec_and_offset().0, lse.shape(), device)?;
    let of_o = (&o * dout.as_tensor())?.sum_all()?.to_dtype(DType::F32)?;
    let of_lse = (&lse * &dlse)?.sum_all()?;
    let both = (&of_o + &of_lse)?;
    for (phi, expected) in [of_o, of_lse, both].into_iter().zip(expected) {
        let gradients = phi.backward()?;
        for (x, expected) in [&q, &k, &v].into_iter().zip([expected.dq, expected.dk, expected.dv]) {
            let given = elements::<T>(gradients.get(x).expect("it has a gradient"))?;
            // Candle adds them to zeros: -0 becomes 0, which is equal.
            assert!(given == expected.into_raw_vec_and_offset().0);
        }
    }
    Ok(())
}

#[test]
fn of_f16() -> Result<()> {
    check::<f16>(&Device::Cpu, &fa3::Device::Cpu)
}

#[test]
fn of_bf16() -> Result<()> {
    check::<bf16>(&Device::Cpu, &fa3::Device::Cpu)
}

#[test]
fn of_f32() -> Result<()> {
    check::<f32>(&Device::Cpu, &fa3::Device::Cpu)
}
