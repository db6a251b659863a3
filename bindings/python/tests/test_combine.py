"""`fa3.flash_attn_combine` against its definition. Needs torch; what needs a GPU is skipped without one."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from packing import assert_equal, ends, normal

from fa3 import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.flash_mla import flash_mla_with_kvcache

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}


def parts(splits, rows, head_dim, dtype=F32, device="cpu"):
    """O and LSE of parts of the keys. Some rows see no key of a part, and the first row sees no key at all."""
    generator = torch.Generator().manual_seed(splits * head_dim)
    o = torch.randn(splits, *rows, head_dim, generator=generator)
    lse = 3 * torch.randn(splits, *rows, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -math.inf
    lse.view(splits, -1)[:, 0] = -math.inf
    o[lse == -math.inf] = math.nan
    return o.to(device, dtype), lse.to(device)


def definition(o, lse):
    """O and LSE in float64."""
    o, lse = o.double(), lse.double()
    total = lse.logsumexp(0)
    weight = (lse - torch.where(total == -math.inf, 0, total)).exp()[..., None]
    return torch.where(weight == 0, 0, weight * o).sum(0), total


def judge(result, o, lse, dtype=None):
    out, total = result
    expected, expected_total = definition(o, lse)
    dtype = dtype or o.dtype
    assert (out.shape, out.dtype, total.shape, total.dtype) == (o.shape[1:], dtype, lse.shape[1:], F32)
    # LSE is contiguous as (..., heads, rows), as FlashAttention-3 has it.
    assert total.transpose(-1, -2).is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)
    torch.testing.assert_close(total.double(), expected_total, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("splits, head_dim", [(1, 8), (3, 64), (5, 96), (33, 128), (132, 512)])
def test_parts_are_merged(device, dtype, splits, head_dim):
    o, lse = parts(splits, (2, 5, 3), head_dim, dtype, device)
    for out_dtype in (None, F32, F16, BF16):
        result = flash_attn_combine(o, lse, out_dtype=out_dtype)
        judge(result, o, lse, out_dtype)
        assert result[0].is_contiguous()


def test_sequences_may_be_packed(device):
    o, lse = parts(4, (7, 3), 64, device=device)
    judge(flash_attn_combine(o, lse, out_dtype=BF16), o, lse, BF16)


def test_strides_are_free(device):
    o, lse = parts(4, (2, 5, 3), 64, device=device)
    # In memory O is (batch, heads, seqlen, num_splits, head_dim), and LSE (num_splits, batch, heads, seqlen).
    o = o.permute(1, 3, 2, 0, 4).contiguous().permute(3, 0, 2, 1, 4)
    lse = lse.transpose(2, 3).contiguous().transpose(2, 3)
    judge(flash_attn_combine(o, lse), o, lse)
    judge(flash_attn_combine(o[:, :, 1:, ::2], lse[:, :, 1:, ::2]), o[:, :, 1:, ::2], lse[:, :, 1:, ::2])


def test_the_whole_is_attention_over_all_keys(device):
    dtype = F32 if device == "cpu" else F16
    q, k, v = (torch.randn(2, n, 4, 64, dtype=dtype, device=device) for n in (9, 50, 50))
    cuts = (slice(0, 20), slice(20, 21), slice(21, 50))
    of_parts = [flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True) for keys in cuts]
    o, lse = (torch.stack(x) for x in zip(*of_parts))
    out, total = flash_attn_combine(o, lse.transpose(2, 3), out_dtype=F32)
    whole, whole_lse = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, whole.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(total, whole_lse.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_without_rows_there_is_nothing(device):
    o, lse = torch.empty(3, 2, 0, 4, 64, device=device), torch.empty(3, 2, 0, 4, device=device)
    out, total = flash_attn_combine(o, lse)
    assert (out.shape, total.shape) == ((2, 0, 4, 64), (2, 0, 4))


def test_tensors_that_overlap_are_refused():
    memory, lse = torch.empty(3, 2, 5, 3, 64), torch.zeros(3, 2, 5, 3)
    with pytest.raises(ValueError, match="overlap"):
        flash_attn_combine(memory, lse, memory[0])


# Functions of Q (2, 1, 4, columns), a tensor of 90 keys that are values as well, and a range of them: O (2, 1, 4, ...)
# and LSE (2, 4, 1).


def of_dense(q, kv, keys):
    kv = kv[:, keys.start : keys.stop, :, :64]
    return flash_attn_func(q[..., :64], kv, kv, return_attn_probs=True)


def of_packed(q, kv, keys):
    kv, device = kv[:, keys.start : keys.stop, :, :64].flatten(0, 1), kv.device
    lists = ends([1, 1], device), ends([len(keys)] * 2, device), 1, len(keys)
    out, lse = flash_attn_varlen_func(q[:, 0, :, :64], kv, kv, *lists, return_attn_probs=True)
    return out.unsqueeze(1), lse.T.unsqueeze(2)


def of_cache(q, kv, keys):
    kv = kv[:, keys.start :, :, :64]
    return flash_attn_with_kvcache(q[..., :64], kv, kv, cache_seqlens=len(keys), return_softmax_lse=True)[:2]


def of_latent(q, kv, keys, **options):
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([[0], [1]], [len(keys)] * 2))
    return flash_mla_with_kvcache(q, kv[:, keys.start :], table, lengths, 512, neutral_lse=True, **options)


def of_lists(q, kv, keys):
    indices = torch.tensor([[[90 * i + key for key in keys] + [-1]] for i in range(2)], dtype=torch.int32, device=q.device)
    return flash_mla_with_kvcache(q, kv, None, None, 512, indices=indices, neutral_lse=True)


def in_base_2(q, kv, keys):
    out, lse = of_latent(q, kv, keys, lse_base=2)
    return out, lse * math.log(2)


@pytest.mark.parametrize("function", [of_dense, of_packed, of_cache, of_latent, of_lists, in_base_2])
def test_shards_without_keys_add_nothing(device, function):
    """In decode context parallelism each rank has a part of the keys, and some ranks have none."""
    q, kv = normal(2, 1, 4, 576, device=device), normal(2, 90, 1, 576, seed=1, device=device)
    shards = [range(0), range(70), range(70, 70), range(70, 90)]
    results = [function(q, kv, keys) for keys in shards]
    for (out, lse), keys in zip(results, shards):
        assert len(keys) or not out.any() and (lse == -math.inf).all()

    def merged(results):
        o, lse = (torch.stack(x) for x in zip(*results, strict=True))
        return flash_attn_combine(o, lse.transpose(-1, -2))

    out, lse = merged(results)
    assert_equal([out, lse], merged(results[1::2]))
    whole, of_whole = function(q, kv, range(90))
    torch.testing.assert_close(out, whole, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.transpose(-1, -2), of_whole, rtol=1e-4, atol=1e-4)
