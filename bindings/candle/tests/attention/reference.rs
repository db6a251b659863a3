//! Attention compared with candle's own operations.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use fa3_candle::*;

use crate::bits;

/// A call in f32, with the options that this crate and the reference get.
#[derive(Debug)]
struct Case {
    /// Batch, rows of Q, rows of K.
    rows: [usize; 3],
    /// Heads of Q and of K.
    heads: [usize; 2],
    /// Head dimensions of Q and K, and of V.
    head_dims: [usize; 2],
    window: [Option<usize>; 2],
    softcap: Option<f32>,
    /// Whether query heads have sinks.
    sink: bool,
}

impl Default for Case {
    fn default() -> Case {
        let (rows, heads, head_dims) = ([2, 37, 50], [4, 4], [16, 16]);
        Case { rows, heads, head_dims, window: [None; 2], softcap: None, sink: false }
    }
}

const SCALE: f32 = 0.3;

impl Case {
    fn attention(&self) -> Attention {
        let attention = Attention::new(SCALE).window(self.window[0], self.window[1]);
        match self.softcap {
            Some(cap) => attention.softcap(cap),
            None => attention,
        }
    }

    fn inputs(&self) -> Result<[Var; 3]> {
        let &Case { rows: [batch, seqlen_q, seqlen_k], heads: [heads, heads_kv], head_dims, .. } = self;
        let [head_dim, head_dim_v] = head_dims;
        Ok([
            wave(&[batch, seqlen_q, heads, head_dim], 0.31)?,
            wave(&[batch, seqlen_k, heads_kv, head_dim], 0.47)?,
            wave(&[batch, seqlen_k, heads_kv, head_dim_v], 0.73)?,
        ])
    }

    fn sink(&self) -> Result<Option<Var>> {
        self.sink.then(|| wave(&[self.heads[0]], 1.7)).transpose()
    }

    /// O (batch, seqlen_q, heads, head_dim_v) and LSE (batch, heads, seqlen_q), by matrix products and a softmax.
    fn reference(&self, [q, k, v]: [&Tensor; 3], sink: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let ((_, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _)) = (q.dims4()?, k.dims4()?);
        let shared =
            Tensor::from_iter((0..heads).map(|head| (head / (heads / heads_kv)) as u32), &Device::Cpu)?;
        let [k, v] = [k.index_select(&shared, 2)?, v.index_select(&shared, 2)?];
        let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
        let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? * f64::from(SCALE))?;
        let scores = match self.softcap.map(f64::from) {
            Some(cap) => ((scores / cap)?.tanh()? * cap)?,
            None => scores,
        };
        let hidden = |row: usize, key: usize| {
            let (position, key) = (row as i64 + seqlen_k as i64 - seqlen_q as i64, key as i64);
            let [left, right] = self.window.map(|bound| bound.map_or(i64::MAX / 2, |bound| bound as i64));
            key < position - left || key > position + right
        };
        let mask = (0..seqlen_q).flat_map(|row| (0..seqlen_k).map(move |key| (row, key)));
        let mask = mask.map(|(row, key)| if hidden(row, key) { f32::NEG_INFINITY } else { 0. });
        let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((seqlen_q, seqlen_k))?;
        let scores = scores.broadcast_add(&mask)?;
        let sink =
            sink.map(|sink| sink.reshape((1, (), 1, 1))?.broadcast_as(scores.narrow(3, 0, 1)?.shape()));
        let lse = match sink.transpose()? {
            Some(sink) => Tensor::cat(&[&scores, &sink], 3)?.log_sum_exp(D::Minus1)?,
            None => scores.log_sum_exp(D::Minus1)?,
        };
        let p = scores.broadcast_sub(&lse.unsqueeze(D::Minus1)?)?.exp()?;
        Ok((p.matmul(&v.contiguous()?)?.transpose(1, 2)?.contiguous()?, lse))
    }

    /// Compares O, LSE and the gradients of both with the reference. Each row must see a key.
    fn check(&self) -> Result<()> {
        let vars = self.inputs()?;
        let [q, k, v] = vars.each_ref().map(Var::as_tensor);
        let sink = self.sink()?;
        let sink = sink.as_deref();
        let attention = sink.into_iter().fold(self.attention(), Attention::sink);
        let (o, lse) = attention.forward_with_lse(q, k, v)?;
        let (expected_o, expected_lse) = self.reference([q, k, v], sink)?;
        assert_near("o", &o, &expected_o)?;
        assert_near("lse", &lse, &expected_lse)?;
        let [of_o, of_lse] = [wave(expected_o.dims(), 0.9)?, wave(expected_lse.dims(), 1.1)?];
        let phi = |o: &Tensor, lse: &Tensor| {
            (o * of_o.as_tensor())?.sum_all()? + (lse * of_lse.as_tensor())?.sum_all()?
        };
        let vars = ["dq", "dk", "dv", "dsink"].into_iter().zip([q, k, v].into_iter().chain(sink));
        assert_near_gradients(vars, [&phi(&o, &lse)?, &phi(&expected_o, &expected_lse)?])
    }
}

fn wave(dims: &[usize], step: f32) -> Result<Var> {
    let count = dims.iter().product::<usize>();
    let x = Tensor::from_iter((0..count).map(|i| (step * i as f32).sin()), &Device::Cpu)?;
    Var::from_tensor(&x.reshape(dims)?)
}

/// Asserts that two results differ only by the order of f32 sums. All numbers here are of the order of 1.
fn assert_near(name: &str, given: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!((given.dims(), given.dtype()), (expected.dims(), DType::F32), "{name}");
    let [largest, error] = [expected.abs()?, (given - expected)?.abs()?].map(|x| x.flatten_all()?.max(0));
    let (largest, error) = (largest?.to_scalar::<f32>()?, error?.to_scalar::<f32>()?);
    assert!(error <= 2e-6 * largest.max(1.), "{name}: {error} of {largest}");
    Ok(())
}

/// Compares the gradients of two scalars with respect to each of `vars`.
fn assert_near_gradients<'a>(
    vars: impl IntoIterator<Item = (&'static str, &'a Tensor)>,
    [given, expected]: [&Tensor; 2],
) -> Result<()> {
    let both = [given.backward()?, expected.backward()?];
    for (name, x) in vars {
        let [given, expected] = both.each_ref().map(|all| all.get(x).expect("it has a gradient"));
        assert_near(name, given, expected)?;
    }
    Ok(())
}

#[test]
fn calls_are_as_those_of_candles_operations() -> Result<()> {
    let all = || Case::default();
    let (causal, sliding, softcap) = ([None, Some(0)], [Some(9), Some(0)], Some(0.8));
    let windows =
        [[Some(7), None], [None, Some(5)], [Some(7), Some(0)], [Some(0), Some(3)], [Some(90), Some(90)]];
    let cases = [
        all(),
        Case { window: causal, ..all() },
        Case { heads: [6, 2], ..all() },
        Case { heads: [5, 1], window: causal, ..all() },
        Case { softcap, ..all() },
        Case { softcap, heads: [4, 2], window: sliding, ..all() },
        Case { sink: true, ..all() },
        Case { sink: true, softcap, heads: [4, 2], window: sliding, ..all() },
        Case { head_dims: [9, 20], ..all() },
        // Each sequence has one new token.
        Case { rows: [3, 1, 70], heads: [8, 2], window: causal, ..all() },
    ];
    let windows = windows.map(|window| Case { window, ..all() });
    cases.into_iter().chain(windows).try_for_each(|case| {
        println!("{case:?}");
        case.check()
    })
}

/// The gradient of the sinks has the type of the sinks, whether or not Q has a gradient. If the sinks have no gradient,
/// Q is not copied and O is equal.
#[test]
fn sinks_of_another_type() -> Result<()> {
    let case = Case { rows: [1, 9, 20], ..Case::default() };
    let [q, k, v] = case.inputs()?;
    let sink = Var::from_tensor(&wave(&[4], 1.7)?.to_dtype(DType::BF16)?)?;
    let o = case.attention().sink(&sink).forward(&q.detach(), &k.detach(), &v.detach())?;
    let gradient = o.sum_all()?.backward()?.get(&sink).expect("it has a gradient").to_dtype(DType::F32)?;

    let sink = Var::from_tensor(&sink.to_dtype(DType::F32)?)?;
    let (expected, _) = case.reference([&q, &k, &v], Some(&sink))?;
    let expected =
        expected.sum_all()?.backward()?.get(&sink).expect("it has a gradient").to_dtype(DType::BF16)?;
    assert_near("dsink", &gradient, &expected.to_dtype(DType::F32)?)?;
    let alone = case.attention().sink(&sink.detach()).forward(&q, &k, &v)?;
    assert_near("o", &alone, &o)
}

/// There are 5 rows and 3 keys, so rows 0 and 1 see no key.
#[test]
fn rows_without_keys_are_0_and_have_no_gradients() -> Result<()> {
    let case = Case { rows: [1, 5, 3], ..Case::default() };
    let [q, k, v] = case.inputs()?;
    let (o, lse) = Attention::new(SCALE).causal().forward_with_lse(&q, &k, &v)?;
    let all = |x: &Tensor, expected: f32| {
        Ok::<_, candle_core::Error>(x.flatten_all()?.to_vec1::<f32>()?.into_iter().all(|x| x == expected))
    };
    assert!(all(&o.narrow(1, 0, 2)?, 0.)? && !all(&o.narrow(1, 2, 1)?, 0.)?);
    assert!(all(&lse.narrow(2, 0, 2)?, f32::NEG_INFINITY)?);
    let gradients = o.sum_all()?.backward()?;
    assert!(all(&gradients.get(&q).expect("it has a gradient").narrow(1, 0, 2)?, 0.)?);
    Ok(())
}

/// Each packed sequence has the result and the gradients that it has alone.
#[test]
fn packed_sequences() -> Result<()> {
    let (of_q, of_k) = ([0u32, 11, 11, 30], [0u32, 15, 24, 50]);
    let case = Case { rows: [1, 30, 50], heads: [4, 2], window: [Some(12), Some(0)], ..Case::default() };
    let vars = case.inputs()?;
    let [q, k, v] = vars.each_ref().map(|x| x.squeeze(0).expect("it has one batch"));
    let [of_q_list, of_k_list] = [Tensor::new(&of_q, &Device::Cpu)?, Tensor::new(&of_k, &Device::Cpu)?];
    let packed = Packed::new(&of_q_list, &of_k_list.to_dtype(DType::I32)?, 19, 26)?;
    let (o, lse) = case.attention().forward_varlen_with_lse(&q, &k, &v, &packed)?;

    let (mut outputs, mut lses) = (vec![], vec![]);
    for (of_q, of_k) in of_q.windows(2).zip(of_k.windows(2)) {
        let rows = |x: &Var, of: &[u32]| x.narrow(1, of[0] as usize, (of[1] - of[0]) as usize);
        let [q, k, v] = [rows(&vars[0], of_q)?, rows(&vars[1], of_k)?, rows(&vars[2], of_k)?];
        if of_q[0] < of_q[1] {
            let (o, lse) = case.reference([&q, &k, &v], None)?;
            outputs.push(o.squeeze(0)?);
            lses.push(lse.squeeze(0)?);
        }
    }
    let (expected_o, expected_lse) = (Tensor::cat(&outputs, 0)?, Tensor::cat(&lses, 1)?);
    assert_near("o", &o, &expected_o)?;
    assert_near("lse", &lse, &expected_lse)?;
    let phi = |o: &Tensor, lse: &Tensor| o.sqr()?.sum_all()? + lse.sqr()?.sum_all()?;
    let vars = ["dq", "dk", "dv"].into_iter().zip(vars.iter().map(Var::as_tensor));
    assert_near_gradients(vars, [&phi(&o, &lse)?, &phi(&expected_o, &expected_lse)?])
}

/// An operation runs once. Its gradients run any number of times: of O, of LSE, or of a tensor that is its own query.
#[test]
fn gradients_add_up_as_those_of_other_operations() -> Result<()> {
    let case = Case { rows: [1, 20, 20], window: [None, Some(0)], ..Case::default() };
    let x = wave(&[1, 20, 4, 16], 0.4)?;
    let given = case.attention().forward(&x, &x, &x)?;
    let (expected, _) = case.reference([&x, &x, &x], None)?;
    let [of_given, of_expected] = [given.sqr()?.sum_all()?, expected.sqr()?.sum_all()?];
    for _ in 0..2 {
        assert_near_gradients([("dx", x.as_tensor())], [&of_given, &of_expected])?;
    }
    let (_, lse) = case.attention().forward_with_lse(&x, &x, &x)?;
    let (_, expected) = case.reference([&x, &x, &x], None)?;
    assert_near_gradients([("dx", x.as_tensor())], [&lse.sum_all()?, &expected.sum_all()?])
}

#[test]
fn functions_are_short_forms() -> Result<()> {
    let [q, k, v] = Case::default().inputs()?;
    let of = |attention: Attention| bits(&attention.forward(&q, &k, &v)?);
    let plain = Attention::new(SCALE);
    assert_eq!(bits(&flash_attn(&q, &k, &v, SCALE, false)?)?, of(plain.clone())?);
    assert_eq!(bits(&flash_attn(&q, &k, &v, SCALE, true)?)?, of(plain.clone().causal())?);
    let window = flash_attn_windowed(&q, &k, &v, SCALE, Some(3), Some(4))?;
    assert_eq!(bits(&window)?, of(plain.clone().window(Some(3), Some(4)))?);
    let capped = |cap| bits(&flash_attn_alibi_windowed_softcap(&q, &k, &v, None, SCALE, Some(3), None, cap)?);
    assert_eq!(capped(0.)?, of(plain.clone().window(Some(3), None))?);
    assert_eq!(capped(0.5)?, of(plain.window(Some(3), None).softcap(0.5))?);
    Ok(())
}

#[test]
fn functions_of_packed_sequences_are_short_forms() -> Result<()> {
    let vars = Case { rows: [1, 20, 20], ..Case::default() }.inputs()?;
    let [q, k, v] = vars.each_ref().map(|x| x.squeeze(0).expect("it has one batch"));
    let list = Tensor::new(&[0u32, 8, 20], &Device::Cpu)?;
    let packed = Packed::new(&list, &list, 12, 12)?;
    let of = |attention: Attention| bits(&attention.forward_varlen(&q, &k, &v, &packed)?);
    let plain = Attention::new(SCALE);
    for causal in [false, true] {
        let o = flash_attn_varlen(&q, &k, &v, &list, &list, 12, 12, SCALE, causal)?;
        assert_eq!(bits(&o)?, of(plain.clone().window(None, causal.then_some(0)))?);
    }
    let o = flash_attn_varlen_windowed(&q, &k, &v, &list, &list, 12, 12, SCALE, Some(2), Some(1))?;
    assert_eq!(bits(&o)?, of(plain.clone().window(Some(2), Some(1)))?);
    let left = Some(2);
    let o = flash_attn_varlen_alibi_windowed_softcap(
        &q, &k, &v, None, &list, &list, 12, 12, SCALE, left, None, 0.7,
    )?;
    assert_eq!(bits(&o)?, of(plain.window(left, None).softcap(0.7))?);
    Ok(())
}

/// The blocks are in any order, two sequences share one of them, and all rows that belong to no sequence hold NaN.
#[test]
fn pages_are_read_in_the_order_of_the_table() -> Result<()> {
    let vars = Case { rows: [1, 20, 20], ..Case::default() }.inputs()?;
    let [q, k, v] = vars.each_ref().map(|x| x.squeeze(0).expect("it has one batch"));
    let rows = |x: &Tensor, of: [u32; 20]| x.index_select(&Tensor::new(&of, &Device::Cpu)?, 0);
    // Two sequences of 6 and 14 rows in blocks of 8. Both begin with the same block.
    let of_rows = std::array::from_fn(|row| if row < 6 { row } else { row - 6 } as u32);
    let (k_rows, v_rows) = (rows(&k, of_rows)?, rows(&v, of_rows)?);
    let pool = |x: &Tensor| {
        let (_, heads, columns) = x.dims3()?;
        let unused = Tensor::full(f32::NAN, (8, heads, columns), &Device::Cpu)?;
        let second = Tensor::cat(&[x.narrow(0, 8, 6)?, unused.narrow(0, 0, 2)?], 0)?;
        Tensor::cat(&[second, unused, x.narrow(0, 0, 8)?], 0)?.reshape((3, 8, heads, columns))
    };
    let (of_q, of_k) =
        (Tensor::new(&[0u32, 8, 20], &Device::Cpu)?, Tensor::new(&[0u32, 6, 20], &Device::Cpu)?);
    let table = Tensor::new(&[[2u32, 9], [2, 0]], &Device::Cpu)?;
    let (k, v, left, right, cap) = (pool(&k)?, pool(&v)?, Some(9), Some(0), Some(2.));
    let paged = flash_attn_varlen_paged_windowed(
        &q, &k, &v, &of_q, &of_k, &table, None, 12, 14, SCALE, left, right, 8, cap,
    )?;
    let packed = Packed::new(&of_q, &of_k, 12, 14)?;
    let expected = Attention::new(SCALE).window(left, right).softcap(2.);
    let expected = expected.forward_varlen(&q, &k_rows, &v_rows, &packed)?;
    assert_eq!(bits(&paged)?, bits(&expected)?);
    Ok(())
}
