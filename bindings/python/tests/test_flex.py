"""Functions of scores, compared with torch's own FlexAttention in float64. Needs torch."""

import math

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="skipped: torch has no FlexAttention")

from packing import ends, normal

import fa3
from fa3 import masks, symbols
from fa3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
F32, F64, I32 = torch.float32, torch.float64, torch.int32
HEADS, ROWS, KEYS = 4, 70, 90
LEAVES = ["s", "b", "h", "q", "k"]


def score_mods(device):
    """Functions of scores by what is special about them."""

    def table(*shape, dtype=F32, seed=5):
        return normal(*shape, dtype=dtype, seed=seed, device=device)

    slopes, bias, by_distance, small = table(HEADS), table(2, HEADS, ROWS, KEYS), table(HEADS, 200), table(7)
    document = torch.arange(KEYS, device=device).expand(2, -1) // torch.tensor([[20], [33]], device=device)
    number, of_half, offset = torch.tensor(0.3), table(KEYS, dtype=torch.bfloat16), torch.tensor(3)
    visible = table(ROWS, KEYS) > -0.5
    starts, of_row = torch.tensor([0, 31, 64], device=device), (torch.arange(KEYS, device=device) > 30).int()
    hidden = -float("inf")

    def document_and_alibi(s, b, h, q, k):
        return torch.where(document[b, q] == document[b, k], s + slopes[h] * (k - q), hidden)

    def conditions(s, b, h, q, k):
        seen = (q >= k) & ~(k == 1) | (k < 3) ^ (q > 60) | torch.logical_not(q < 65)
        return s.masked_fill(~(seen | (k == q)), hidden)

    def bucket(s, b, h, q, k):
        distance = torch.clamp(q - k, min=0)
        far = 4 + (torch.log(distance.float() / 4) * 1.7).to(torch.int32)
        return s + small[torch.where(distance < 4, distance, far.clamp(max=6))]

    def integers(s, b, h, q, k):
        quotients = (q - k) // 3 + (k - q) // -4 + q // (1 + k) + torch.div(q - k, 5, rounding_mode="trunc")
        remainders = (q - k) % 7 + (q - k) % -8 + 70 % (1 + k)
        return s + quotients * 0.05 - remainders * 0.1 + by_distance[h, (q ^ k) & 3 | h << 1 & 4] + (~k >> 2) * 0.01

    def nested(s, b, h, q, k):
        at = q - starts[of_row[q]]
        return torch.where((at >= k - starts[of_row[k]]) | (k == q), s + by_distance[h, at // 2], hidden)

    def activations(s, b, h, q, k):
        of_score = torch.nn.functional.gelu(s, approximate="tanh") + torch.nn.functional.silu(s)
        return of_score + torch.nn.functional.softplus(s) + torch.nn.functional.leaky_relu(s) + s.new_zeros(())

    def more_functions(s, b, h, q, k):
        rounded = torch.round(by_distance[h, q] * 4) - torch.trunc(slopes[h] * 9) + torch.fmod(-k.float(), 4)
        return s + 0.1 * rounded + torch.log1p((q - k).abs()) + torch.expm1(slopes[h]) + torch.sign(q - 9)

    return dict(
        bucket=bucket,
        integers=integers,
        nested=nested,
        activations=activations,
        more_functions=more_functions,
        cap=lambda s, b, h, q, k: 2 * torch.tanh(s / 2.0),
        alibi=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        distance=lambda s, b, h, q, k: s + by_distance[h, q - k + KEYS],
        clamped=lambda s, b, h, q, k: s + small[torch.clamp(q - k, 0, 6)],
        rows=lambda s, b, h, q, k: s + by_distance[h][q] * by_distance[1, k],
        bias=lambda s, b, h, q, k: s + bias[b, h, q, k],
        document_and_alibi=document_and_alibi,
        conditions=conditions,
        visible=lambda s, b, h, q, k: torch.where(visible[q, k] | (q == k), s, hidden),
        captured=lambda s, b, h, q, k: s * number + of_half[k + offset - 3] * HEADS - 0.25 * b,
        arithmetic=lambda s, b, h, q, k: (-s + 1) ** 2 / (1 + abs(h - 2)) - (2 - s) * (q * k).float() / 1e4,
        functions=lambda s, b, h, q, k: torch.exp(-s.square()).sqrt() + torch.log2(1 + s.abs()) + s.sigmoid() + torch.relu(s),
        rounded=lambda s, b, h, q, k: s + torch.floor(k / 7) % 3 + torch.maximum(q, k) * 0.01 + k.to(F32).div(9).ceil(),
        choices=lambda s, b, h, q, k: s + (q >= k) * 0.5 + torch.where(q > k, q, 3).to(F32) / 50 + (h == 1).float(),
    )


def tensors(device, rows=ROWS, keys=KEYS, heads=(HEADS, 2), batch=2):
    """Q, K and V, heads first, which a GPU takes in 16 bits."""
    dtype = F32 if device == "cpu" else torch.bfloat16
    shapes = [(batch, heads[0], rows, 64), (batch, heads[1], keys, 64), (batch, heads[1], keys, 32)]
    return [normal(*shape, dtype=dtype, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def torchs(q, k, v, *given, **options):
    """O and LSE of torch's FlexAttention."""
    return flex.flex_attention(q.to(F64), k.to(F64), v.to(F64), *given, **options, enable_gqa=True, return_lse=True)


def assert_close(found, expected, times=1):
    error = times * (1e-4 if found[0].dtype == F32 else 2e-2)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.to(F64), y, rtol=error, atol=error)


@pytest.mark.parametrize("name", score_mods("cpu"))
def test_results_are_those_of_torch(device, name):
    given = *tensors(device), score_mods(device)[name]
    assert_close(flex_attention(*given, enable_gqa=True, return_lse=True), torchs(*given))
    assert_close([flex_attention(*given, None, 0.3, True)], torchs(*given, scale=0.3)[:1])


def test_block_masks(device):
    q, k, v = tensors(device)
    document = torch.arange(KEYS, device=device) // 30

    def causal_in_documents(b, h, q, k):
        return (document[q] == document[k]) & (q >= k) | (h == 1) & (k < 2)

    mask = flex.create_block_mask(causal_in_documents, None, HEADS, ROWS, KEYS, device=device)
    for score_mod in (None, score_mods(device)["alibi"]):
        given = q, k, v, score_mod, mask
        assert_close(flex_attention(*given, enable_gqa=True, return_lse=True), torchs(*given))
    shared = q, k[:1], v[:1], None, mask
    expanded = q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), None, mask
    assert torch.equal(flex_attention(*shared, enable_gqa=True), flex_attention(*expanded, enable_gqa=True))


WINDOWS = [
    (dict(causal=True), lambda b, h, q, k: q >= k),
    (dict(causal=True), lambda b, h, q, k: (k <= q) & ((q // 3 == k // 3) | (q > k - 1))),
    (dict(window_size=(6, 0)), flex.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < 7)),
    (dict(window_size=(6, 2)), lambda b, h, q, k: (q - k <= 6) & (k < q + 3)),
    (dict(window_size=(-1, 1)), lambda b, h, q, k: q + 1 >= k),
    ({}, flex.noop_mask),
]


@pytest.mark.parametrize("options, mask_mod", WINDOWS, ids=range(len(WINDOWS)))
def test_causal_masks_and_windows_have_their_own_kernels(device, options, mask_mod):
    q, k, v = leaves = [x.requires_grad_() for x in tensors(device, rows=KEYS)]
    mask = flex.create_block_mask(mask_mod, None, None, KEYS, KEYS, device=device)
    alibi, dout = score_mods(device)["alibi"], normal(2, HEADS, KEYS, 32, dtype=q.dtype, device=device)

    def call(q, k, v):
        return flex_attention(q, k, v, alibi, mask, enable_gqa=True)

    right = flash_attn_func(*(x.transpose(1, 2) for x in leaves), score=alibi, **options).transpose(1, 2)
    gradients = torch.autograd.grad(right, leaves, dout)
    torch.compiler.reset()
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        assert torch.equal(out, right)
        assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(out, leaves, dout), gradients))
    assert "window_size" in fa3.flex.known_seen_keys(mask)[0]


def test_other_masks_are_no_windows(device):
    others = [
        lambda b, h, q, k: q > k,
        lambda b, h, q, k: (q >= k) & (k != 5),
        lambda b, h, q, k: (q >= k) & (q != 5),
        lambda b, h, q, k: (q >= k) | (q == 5) & (k == 6),
        lambda b, h, q, k: (q >= k) & (q - k < 7 + (q > 80)),
        lambda b, h, q, k: (q >= k) & ((q - k < 7) | (k < 1)),
        lambda b, h, q, k: (q >= k) | (h == 1),
        lambda b, h, q, k: k < 5,
        lambda b, h, q, k: k < 0,
    ]
    q, k, v = tensors(device, rows=KEYS)
    for mask_mod in others:
        mask = flex.create_block_mask(mask_mod, None, HEADS, KEYS, KEYS, device=device)
        assert_close([flex_attention(q, k, v, None, mask, enable_gqa=True)], torchs(q, k, v, None, mask)[:1])
        assert "intervals" in fa3.flex.known_seen_keys(mask)[0]
    # Rows count from the top left, masks of kernels from the bottom right.
    q = q[:, :, :ROWS]
    for mask_mod, name in (
        (lambda b, h, q, k: q >= k, "intervals"),
        (lambda b, h, q, k: q + KEYS - ROWS >= k, "window_size"),
    ):
        mask = flex.create_block_mask(mask_mod, None, None, ROWS, KEYS, device=device)
        assert_close([flex_attention(q, k, v, None, mask, enable_gqa=True)], torchs(q, k, v, None, mask)[:1])
        assert name in fa3.flex.known_seen_keys(mask)[0]


def dense(q, k, v, score_mod):
    """O by the definition, over tensors of all scores; heads are first."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    index = (torch.arange(n, device=q.device).view(-1, *[1] * (3 - i)) for i, n in enumerate(s.shape))
    b, h, row, key = index
    return score_mod(s, b, h, row, key).softmax(-1) @ v


def test_masks_of_many_intervals(device):
    """Functions of scores hide what two intervals do not."""
    q, k, v = tensors(device)
    alibi = score_mods(device)["alibi"]

    def odd(b, h, q, k):
        return (k % 2 == 1) & (k < 70) & ((h == 1) | (q >= k))

    mask = flex.create_block_mask(odd, None, HEADS, ROWS, KEYS, device=device, BLOCK_SIZE=32)
    for score_mod in (None, alibi):
        given = q, k, v, score_mod, mask
        found = flex_attention(*given, enable_gqa=True, return_lse=True)
        assert_close(found, torchs(*given))
    # Blocks of which mask_mod knows nothing.
    half = flex.BlockMask.from_kv_blocks(mask.kv_num_blocks // 2, mask.kv_indices, BLOCK_SIZE=32, mask_mod=odd)
    half.seq_lengths = ROWS, KEYS
    of_half = masks._of_blocks(half)
    of_any = lambda b, h, q, k: of_half(b * 0, h, q, k)
    expected = flex.create_block_mask(of_any, None, HEADS, ROWS, KEYS, device=device)
    found = flex_attention(q, k, v, alibi, half, enable_gqa=True, return_lse=True)
    assert_close(found, torchs(q, k, v, alibi, expected))
    with pytest.raises(ValueError, match="three or more intervals of keys beside a fa3.Score"):
        flex_attention(q, k, v, fa3.Score("s + k"), mask, None, True)


@pytest.mark.parametrize("name", ["cap", "alibi", "document_and_alibi", "functions", "integers"])
def test_gradients(device, name):
    leaves = [x.requires_grad_() for x in tensors(device)]
    score_mod, dtype = score_mods(device)[name], leaves[0].dtype
    dout = normal(2, HEADS, ROWS, 32, dtype=dtype, seed=9, device=device)
    found = torch.autograd.grad(flex_attention(*leaves, score_mod, enable_gqa=True), leaves, dout)
    exact = [x.detach().to(F64).requires_grad_() for x in leaves]
    assert_close(found, torch.autograd.grad(dense(*exact, score_mod), exact, dout.to(F64)), times=3)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_tables(compiled):
    """Tensors that a function reads may require grad on the CPU: of any shape and type, and with s_aux."""
    slopes, bias, cap = normal(HEADS, dtype=F32, seed=5), normal(HEADS, KEYS, dtype=torch.bfloat16, seed=6), torch.tensor(2.0)
    fixed, near = normal(HEADS, dtype=F32, seed=7), normal(5, dtype=F32, seed=8)

    def made(slopes, bias, cap, near):
        def score_mod(s, b, h, q, k):
            of_score = cap * torch.tanh((s + slopes[h] * (k - q) * 0.1) / cap)
            return of_score + bias[h, k] + fixed[h] + near[torch.clamp(q - k, 0, 4)]

        return score_mod

    leaves = [x.requires_grad_() for x in (*tensors("cpu"), slopes, bias, cap, near)]
    dout = normal(2, HEADS, ROWS, 32, dtype=F32, seed=9)

    def run(q, k, v, *learned):
        return flex_attention(q, k, v, made(*learned), enable_gqa=True)

    out = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*leaves)
    found = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().to(F64).requires_grad_() for x in leaves]
    expected = torch.autograd.grad(dense(*exact[:3], made(*exact[3:])), exact, dout.to(F64))
    assert_close(found[:4], expected[:4], times=3)
    torch.testing.assert_close(found[4].to(F64), expected[4], rtol=2e-2, atol=2e-2)
    assert_close(found[5:], expected[5:], times=3)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    # Only the table has a gradient, in packed sequences with sinks.
    q, k, v = (x.detach().transpose(1, 2)[0] for x in leaves[:3])
    q, k, v, of_row = q, k[:ROWS], v[:ROWS], ends((30, 40), "cpu")
    s_aux = normal(HEADS, dtype=F32, seed=3).requires_grad_()
    alibi = fa3.Score("s + slope[h] * (k - q)", slope=slopes)
    out = flash_attn_varlen_func(q, k, v, of_row, of_row, 40, 40, causal=True, s_aux=s_aux, score=alibi)
    of_packed = torch.autograd.grad(out.sum(), [slopes, s_aux])
    of_dense = 0
    for rows in (slice(0, 30), slice(30, 70)):
        x = [x[None, rows] for x in (q, k, v)]
        out = flash_attn_func(*x, causal=True, s_aux=s_aux, score=alibi)
        of_dense = of_dense + torch.stack(torch.autograd.grad(out.sum(), [slopes, s_aux]))
    torch.testing.assert_close(torch.stack(of_packed), of_dense)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_tables_on_a_device(device, compiled):
    """These have kernels."""
    shapes = (HEADS,), (HEADS, ROWS), (9,), (HEADS, KEYS), (HEADS, ROWS, KEYS)
    tables = [normal(*shape, dtype=F32, seed=5, device=device) for shape in shapes]
    cap = torch.tensor(2.0, device=device)

    def made(slopes, gains, near, of_key, bias, cap):
        def score_mod(s, b, h, q, k):
            of_score = cap * torch.tanh((s * gains[h, q] + slopes[h] * (k - q) * 0.1) / cap) * gains[0, q // 3]
            return of_score + near[torch.clamp(q - k, -3, 5) + 3] + of_key[h, k] + bias[h, q, k]

        return score_mod

    leaves = [x.requires_grad_() for x in (*tensors(device), *tables, cap)]

    def run(q, k, v, *learned):
        return flex_attention(q, k, v, made(*learned), enable_gqa=True)

    out = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*leaves)
    dout = normal(2, HEADS, ROWS, 32, dtype=out.dtype, seed=9, device=device)
    found = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().to(F64).requires_grad_() for x in leaves]
    expected = torch.autograd.grad(dense(*exact[:3], made(*exact[3:])), exact, dout.to(F64))
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() < (1e-3 if device == "cpu" else 3e-2) * y.norm()


def test_tables_whose_gradients_kernels_do_not_compute():
    from fa3.learned import refused_gradient

    assert refused_gradient("s + t0[h] * (k - q) + t1[h, q] + t2[h, q - k, k]", (1, 2, 3), (0, 1)) is None
    sentence = (
        "the backward kernels compute no gradient of t2: its indices depend on query and key in other ways than "
        "t[.., q + i, .., k + j, ..] with constants i and j"
    )
    assert refused_gradient("s + t0[h] * (k - q) + t1[h, q] + t2[h, q - k, k]", (1, 2, 3), (0, 1, 2)) == sentence
    packed = "the backward kernels compute no gradient of t0: it is read by query and key of sequences whose lengths are data"
    assert refused_gradient("s + t0[h, q + 3, k]", (3,), (0,)) is None
    assert refused_gradient("s + t0[h, q, k]", (3,), (0,), True) == packed
    assert refused_gradient("s + t0[h, k]", (2,), (0,), True) is None

    def in_a_trace(x):
        return x + (refused_gradient("s + t0[h]", (1,), (0,)) is None)

    assert torch.compile(in_a_trace, backend="eager", fullgraph=True)(torch.zeros(1)) == 1


def test_slopes_of_alibi_are_learned():
    """A model whose slopes start at 0 finds the slopes of the model that made its data."""
    q, k, v = tensors("cpu", heads=(HEADS, HEADS), rows=KEYS)
    alibi = lambda slopes: lambda s, b, h, q, k: torch.where(q >= k, s - slopes[h] * (q - k), -math.inf)
    target = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    expected = flex_attention(q, k, v, alibi(target))
    slopes = torch.nn.Parameter(torch.zeros(HEADS))
    optimizer = torch.optim.Adam([slopes], lr=0.02)
    losses = []
    for _ in range(60):
        loss = (flex_attention(q, k, v, alibi(slopes)) - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20, losses
    torch.testing.assert_close(slopes.detach(), target, rtol=0.2, atol=0.03)


def test_queries_stand_at_the_last_keys(device):
    """In the functions of this package q counts from the bottom right; in FlexAttention from the top left."""
    q, k, v = tensors(device)
    slopes = normal(HEADS, dtype=F32, device=device)
    x = [x.transpose(1, 2) for x in (q, k, v)]

    def alibi(s, b, h, q, k):
        return s + slopes[h] * (k - q)

    expected = torchs(q, k, v, lambda s, b, h, q, k: alibi(s, b, h, q + KEYS - ROWS, k))
    for score in (alibi, fa3.Score("s + slope[h] * (k - q) * one", slope=slopes, one=1.0)):
        o, lse = flash_attn_func(*x, score=score, return_attn_probs=True)
        assert_close([o.transpose(1, 2), lse], expected)
    # Packed sequences of equal lengths, and a cache in pages.
    rows = [x.flatten(0, 1) for x in x]
    lists = [ends([n] * 2, device) for n in (ROWS, KEYS)]
    o = flash_attn_varlen_func(*rows, *lists, ROWS, KEYS, score=alibi)
    assert_close([o.unflatten(0, (2, ROWS)).transpose(1, 2)], expected[:1])
    pages = [x.reshape(18, 10, *x.shape[2:]) for x in x[1:]]
    table = torch.arange(18, dtype=I32, device=device).view(2, 9)
    for split_keys in (None, 128):
        o = flash_attn_with_kvcache(x[0], *pages, page_table=table, score=alibi, split_keys=split_keys)
        assert_close([o.transpose(1, 2)], expected[:1])
    used = torch.tensor([KEYS, 50], dtype=I32, device=device)
    o = flash_attn_with_kvcache(*x, cache_seqlens=used, score=alibi)
    expected = torchs(q[1:], k[1:, :, :50], v[1:, :, :50], lambda s, b, h, q, k: alibi(s, b, h, q + 50 - ROWS, k))
    assert_close([o[1:].transpose(1, 2)], expected[:1])


def test_what_a_function_captures_is_read_at_each_call(device):
    q, k, v = tensors(device)
    factor, table = [1.0], torch.zeros(HEADS, device=device)

    def score_mod(s, b, h, q, k):
        return s * factor[0] + table[h] * k

    before = flex_attention(q, k, v, score_mod, enable_gqa=True)
    for change in (lambda: factor.__setitem__(0, 0.5), lambda: table.add_(0.1)):
        change()
        given = q, k, v, score_mod
        after = flex_attention(*given, enable_gqa=True)
        assert not torch.equal(before, after)
        assert_close([after], torchs(*given)[:1])
        before = after


def test_calls_that_are_made_again_keep_their_functions_apart(device):
    x = [normal(2, rows, heads, 64, seed=rows, device=device) for rows, heads in ((9, 4), (12, 2), (12, 2))]
    lists = dict(cache_seqlens=torch.full((2,), 7, dtype=I32, device=device))
    packed = [x.flatten(0, 1) for x in x], [ends([n] * 2, device) for n in (9, 12)]
    for call in (
        lambda **score: flash_attn_func(*x, **score),
        lambda **score: flash_attn_varlen_func(*packed[0], *packed[1], 9, 12, **score),
        lambda **score: flash_attn_with_kvcache(*x, **lists, **score),
    ):
        functions = [{}, dict(score=fa3.Score("s + k")), dict(score=fa3.Score("s - k"))]
        first, again = ([call(**score) for score in functions] for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, again))
        assert not any(torch.equal(first[i], first[i - 1]) for i in range(3))


def test_compiled_calls_take_other_numbers(device):
    q, k, v = tensors(device)
    slopes = normal(HEADS, dtype=F32, device=device)
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, ROWS, KEYS, device=device)

    def call(q, k, v, factor):
        score_mod = lambda s, b, h, q, k: s * factor + slopes[h] * (k - q) * 0.3
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for factor in (0.7, 0.9, 1.1, 1.3):
        with torch._dynamo.config.patch(error_on_recompile=factor > 1):
            # The number is rounded to 32 bits in a compiled call, as it is elsewhere.
            torch.testing.assert_close(compiled(q, k, v, factor), call(q, k, v, factor))


TABLE = torch.ones(HEADS)
OPERATION = "NotImplementedError: a function of scores has {} in {}:{}, which kernels cannot compute: "
REFUSED = [
    ("sin", lambda s, b, h, q, k: torch.sin(s)),
    ("if, and, or, not or a chain of comparisons", lambda s, b, h, q, k: s if q > k else -s),
    ("a tensor of shape (4,) beside a symbol", lambda s, b, h, q, k: s + TABLE),
    ("a row of a tensor of shape (1, 4)", lambda s, b, h, q, k: s + TABLE[None][b]),
    ("the number of a symbol", lambda s, b, h, q, k: s + [1.0, 2.0][h]),
    ("the number of a symbol", lambda s, b, h, q, k: s + math.exp(s)),
    ("item", lambda s, b, h, q, k: s + TABLE[h].item()),
    ("add_", lambda s, b, h, q, k: s.add_(1)),
    ("add", lambda s, b, h, q, k: s + math.nan),
    ("an index that is a number or a condition", lambda s, b, h, q, k: TABLE[s]),
    ("2 indices of a tensor of shape (4,)", lambda s, b, h, q, k: TABLE[h, k]),
    ("and", lambda s, b, h, q, k: s & 3),
    ("sum of a row of a tensor", lambda s, b, h, q, k: s + TABLE[None][b].sum()),
    ("an element of a symbol", lambda s, b, h, q, k: s[0]),
    ("round", lambda s, b, h, q, k: torch.round(s, decimals=2)),
    ("gelu", lambda s, b, h, q, k: torch.nn.functional.gelu(s)),
    ("pow", lambda s, b, h, q, k: s**2.5),
]


@pytest.mark.parametrize("what, score_mod", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_traced_is_refused_with_its_line(what, score_mod):
    with pytest.raises(NotImplementedError) as caught:
        flex_attention(*tensors("cpu"), score_mod, enable_gqa=True)
    code = score_mod.__code__
    assert f"NotImplementedError: {caught.value}".startswith(
        OPERATION.format(what, code.co_filename, code.co_firstlineno)
    )


def test_other_arguments_are_refused():
    q, k, v = tensors("cpu")
    x = q.transpose(1, 2)
    few = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, ROWS, ROWS, device="cpu")
    learned = torch.ones(HEADS, requires_grad=True)

    def raised(sentence, call, error=ValueError):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value).startswith(sentence)

    raised("query has 4 heads and key 2, expected as many", lambda: flex_attention(q, k, v))
    raised("query has 3 dimensions, expected 4", lambda: flex_attention(q[0], k, v))
    raised("block_mask was created for block_mask.shape=(1, 1, 70, 70)", lambda: flex_attention(q, k, v, None, few, None, True))
    raised("score is str, expected a function or fa3.Score", lambda: flash_attn_func(x, x, x, score="s"), TypeError)
    returns = "the function of scores returns a condition"
    raised(returns, lambda: flash_attn_func(x, x, x, score=lambda s, b, h, q, k: q > k), TypeError)
    raised("the score expression names z", lambda: flash_attn_func(x, x, x, score=fa3.Score("s + z")))
    wrong = "a score expression reads tables of [2] axes, and is given tables of the shapes [[4]]"
    raised(wrong, lambda: flash_attn_func(x, x, x, score=fa3.Score("s + t[h, k]", t=TABLE)))
    raised("a value of score is str", lambda: fa3.Score("s + t", t="x"), TypeError)
    raised("score gives k a value, and it has a meaning of its own", lambda: fa3.Score("s + k[h]", k=TABLE))
    many = lambda s, b, h, q, k: sum((s * n for n in range(3, 103)), s)
    raised("the score expression has more than 96 nodes", lambda: flash_attn_func(x, x, x, score=many))
    of_learned = lambda s, b, h, q, k: s + learned[h]
    gradient = "a tensor that score reads requires grad, and attention over a cache has no gradients"
    raised(gradient, lambda: flash_attn_with_kvcache(x, x, x, score=of_learned), NotImplementedError)
    meta = TABLE.to("meta")
    raised("a tensor that score reads is on meta", lambda: flash_attn_func(x, x, x, score=lambda s, b, h, q, k: s + meta[h]))


def test_texts_are_written_with_few_parentheses():
    """A long chain of operations would else be deeper than a text may be."""
    def chain(s, b, h, q, k):
        for n in range(3, 90):
            s = s + k - (q - n) * h / 2
        return s

    def choice(s, b, h, q, k):
        return torch.where(~(q > k) & (k > 3), -(s + h - (k - 1) * 2.5), s)

    text, _ = symbols.trace(choice, LEAVES, torch.device("cpu"))
    assert text == "(if !(q > k) && k > 3 then -(s + h - (k - 1) * 2.5) else s)"
    text, _ = symbols.trace(chain, LEAVES, torch.device("cpu"))
    assert text.startswith("s + k - (q - 3) * h / 2 + k - (q - 4) * h / 2")
