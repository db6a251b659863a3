//! Attention of tensors that are views of parts of other tensors.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use fa3_candle::{Attention, Packed};

use crate::{bits, random};

const DIMS: (usize, usize, usize, usize) = (2, 130, 2, 16);

/// Checks that contiguous copies of views have equal results, and that gradients reach the viewed tensors.
fn check(wholes: [&Var; 3], part: impl Fn(&Tensor, usize) -> Result<Tensor>) -> Result<()> {
    let attention = Attention::new(0.25).causal().deterministic();
    let [q, k, v] = [part(wholes[0], 0)?, part(wholes[1], 1)?, part(wholes[2], 2)?];
    assert!(!q.is_contiguous());
    let o = attention.forward(&q, &k, &v)?;
    let copies = attention.forward(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?)?;
    assert!(bits(&o)? == bits(&copies)?);
    let [given, expected] = [o, copies].map(|o| o.sqr()?.sum_all()?.backward());
    let (given, expected) = (given?, expected?);
    for whole in wholes {
        let [given, expected] = [&given, &expected].map(|all| all.get(whole).expect("it has a gradient"));
        assert_eq!(given.dims(), whole.dims());
        assert!(bits(given)? == bits(expected)?);
    }
    Ok(())
}

/// Checks views that kernels read in place, and views that are copied for them.
pub(crate) fn check_all(device: &Device) -> Result<()> {
    fn wholes(dims: impl Into<Shape> + Copy, device: &Device) -> Result<[Var; 3]> {
        let whole = || Var::from_tensor(&random(dims, DType::F16, device)?);
        Ok([whole()?, whole()?, whole()?])
    }
    let (batch, rows, heads, head_dim) = DIMS;
    let [one, ..] = wholes((batch, rows, 3, heads, head_dim), device)?;
    check([&one; 3], |whole, index| whole.narrow(2, index, 1)?.squeeze(2))?;
    let outside = wholes((batch, heads, rows, head_dim), device)?;
    check(outside.each_ref(), |whole, _| whole.transpose(1, 2))?;
    let late = |whole: &Tensor, _| whole.narrow(1, 5, rows)?.broadcast_as((batch, rows, heads, head_dim));
    check(wholes((1, rows + 5, 1, head_dim), device)?.each_ref(), late)?;
    let wide = wholes((batch, rows, heads, head_dim + 8), device)?;
    [8, 3]
        .into_iter()
        .try_for_each(|column| check(wide.each_ref(), |whole, _| whole.narrow(3, column, head_dim)))
}

#[test]
fn views_are_as_good_as_copies() -> Result<()> {
    check_all(&Device::Cpu)
}

/// The gradient of a sum has strides of 0. In the gradient of a transposed result, heads lie outside of rows.
#[test]
fn gradients_of_any_strides() -> Result<()> {
    let x = Var::from_tensor(&random(DIMS, DType::F16, &Device::Cpu)?)?;
    let o = Attention::new(0.25).forward(&x, &x, &x)?;
    let ones = o.ones_like()?;
    let all = [
        o.sum_all()?,
        (&o * &ones)?.sum_all()?,
        (o.transpose(1, 2)? * ones.transpose(1, 2)?.contiguous()?)?.sum_all()?,
    ];
    let gradients = all.map(|phi| bits(phi.backward()?.get(&x).expect("it has a gradient")));
    let [sum, product, transposed] = gradients;
    let sum = sum?;
    assert!(sum == product? && sum == transposed?);
    assert!(sum.iter().any(|&x| x != 0.));
    Ok(())
}

#[test]
fn tensors_without_elements() -> Result<()> {
    for (batch, rows_q, rows_k) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
        let tensor = |rows| Var::zeros((batch, rows, 2, 8), DType::F32, &Device::Cpu);
        let (q, k) = (tensor(rows_q)?, tensor(rows_k)?);
        let (o, lse) = Attention::new(0.25).forward_with_lse(&q, &k, &k)?;
        assert_eq!((o.dims4()?, lse.dims3()?), ((batch, rows_q, 2, 8), (batch, 2, rows_q)));
        assert!(bits(&o)?.iter().all(|&x| x == 0.));
        let gradients = o.sum_all()?.backward()?;
        assert_eq!(gradients.get(&k).expect("it has a gradient").dims(), k.dims());
    }
    // These rows belong to no sequence.
    let x = Tensor::ones((5, 2, 8), DType::F32, &Device::Cpu)?;
    let list = Tensor::new(&[0u32], &Device::Cpu)?;
    let o = Attention::new(0.25).forward_varlen(&x, &x, &x, &Packed::new(&list, &list, 0, 0)?)?;
    assert!(bits(&o)?.iter().all(|&x| x == 0.));
    Ok(())
}
