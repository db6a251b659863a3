"""Masks as intervals of keys, compared with the masks of mask functions. Needs torch, but no GPU."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from fa3 import flash_attn_func, flash_attn_varlen_func, masks

I32 = torch.int32
# (rows, keys), with as many rows as keys, with fewer, and with more.
SIZES = [(7, 7), (3, 9), (9, 4), (1, 12), (40, 33)]


def check(intervals, mask_mod, batch, heads, rows, keys):
    """Compares intervals with a mask function's intervals, and the dense mask with the function's values."""
    expected = masks.from_mask_mod(mask_mod, batch, heads, rows, keys, device=intervals.device)
    assert intervals.dtype == expected.dtype == I32 and intervals.is_contiguous()
    if expected.shape[-1] < intervals.shape[-1]:
        # No row of the expected mask has two intervals.
        end = expected[..., 1:]
        expected = torch.cat([expected, end, end], -1)
    assert torch.equal(intervals, expected.expand_as(intervals)), f"{intervals}, expected {expected}"
    seen = dense(mask_mod, batch, heads, rows, keys, intervals.device)
    assert torch.equal(masks.to_dense(intervals, keys).expand_as(seen), seen)


def dense(mask_mod, batch, heads, rows, keys, device):
    """The dense mask of a mask function, from its value for each element."""
    batch, heads = batch or 1, heads or 1
    index = torch.cartesian_prod(*(torch.arange(n, device=device) for n in (batch, heads, rows, keys)))
    return mask_mod(*index.T).expand(len(index)).view(batch, heads, rows, keys)


@pytest.mark.parametrize("rows, keys", SIZES)
def test_windows(device, rows, keys):
    at = keys - rows
    check(masks.causal(rows, keys, device=device), lambda b, h, q, k: k <= q + at, None, None, rows, keys)
    for left, right in [(2, 1), (0, 0), (-1, 3), (4, -1), (-1, -1), (50, 50)]:

        def window(b, h, q, k):
            return ((left < 0) | (k >= q + at - left)) & ((right < 0) | (k <= q + at + right))

        check(masks.sliding_window(rows, keys, left, right, device=device), window, None, None, rows, keys)
        for sink in (0, 1, 3, 100):

            def with_sink(b, h, q, k):
                return (window(b, h, q, k) | (k < sink)) & ((right < 0) | (k <= q + at + right))

            found = masks.sliding_window_with_sink(rows, keys, left, right, sink, device=device)
            check(found, with_sink, None, None, rows, keys)


@pytest.mark.parametrize("rows, keys", SIZES)
def test_prefixes_chunks_and_padding(device, rows, keys):
    at = keys - rows
    lengths = torch.tensor([0, 3, keys, 2], device=device)
    for dtype in (I32, torch.int64):
        found = masks.prefix_lm(lengths.to(dtype), rows, keys)
        check(found, lambda b, h, q, k: (k < lengths[b]) | (k <= q + at), 4, None, rows, keys)
    check(masks.prefix_lm(2, rows, keys, device=device), lambda b, h, q, k: (k < 2) | (k <= q + at), 1, 1, rows, keys)
    for size in (1, 3, 1000):

        def chunk(b, h, q, k):
            return (q + at).div(size, rounding_mode="floor") == k.div(size, rounding_mode="floor")

        check(masks.chunked(rows, keys, size, causal=False, device=device), chunk, None, None, rows, keys)
        causal = masks.chunked(rows, keys, size, device=device)
        check(causal, lambda b, h, q, k: chunk(b, h, q, k) & (k <= q + at), None, None, rows, keys)
    check(masks.padding(lengths, rows, keys), lambda b, h, q, k: k < lengths[b], 4, None, rows, keys)
    left = masks.padding(lengths, rows, keys, left=True)
    check(left, lambda b, h, q, k: k >= keys - lengths[b], 4, None, rows, keys)


def test_lengths_beyond_the_keys_count_as_far_as_there_are_keys():
    assert torch.equal(masks.padding(torch.tensor([9, -1]), 1, 4).view(2, 2), torch.tensor([[0, 4], [0, 0]], dtype=I32))
    assert torch.equal(masks.prefix_lm(9, 2, 4), torch.tensor([[[[0, 4]] * 2]], dtype=I32))


@pytest.mark.parametrize("left", [-1, 2])
@pytest.mark.parametrize("rows, keys", SIZES)
def test_spans(device, rows, keys, left):
    at = keys - rows
    spans = torch.tensor([[[1, 4], [5, 6], [0, 0]], [[-1, 0], [0, 3], [4, 99]]], device=device)

    def sees(b, h, q, k):
        q, (start, end) = q + at, spans[b].movedim(-1, 0)
        own = ((start <= q[..., None]) & (q[..., None] < end) & (start <= k[..., None]) & (k[..., None] < end)).any(-1)
        return (k <= q) & ((left < 0) | (k >= q - left)) | own

    check(masks.with_spans(spans, rows, keys, left), sees, 2, None, rows, keys)
    one = masks.with_spans(spans[:1, :0], rows, keys, left)
    assert torch.equal(one, masks.sliding_window(rows, keys, left, 0, device=device))


@pytest.mark.parametrize("causal", [False, True])
def test_documents(device, causal):
    rows = 12
    ids = torch.tensor([[0] * 5 + [7] * 1 + [3] * 6, [1] * 12, list(range(12))], device=device)

    def same(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (k <= q if causal else k >= 0)

    check(masks.document(ids, causal=causal), same, 3, None, rows, rows)
    one = masks.document(ids[0], causal=causal)
    assert torch.equal(one, masks.document(ids, causal=causal)[:1])
    # Some of these lists have an empty sequence, or rows before the first sequence or behind the last.
    for ends in ([0, 5, 6, 12], [0, 4, 4, 9], [2, 3, 11], [0], [0, 0, 1]):
        cu_seqlens = torch.tensor(ends, dtype=I32, device=device)
        of_row = torch.tensor([sum(x <= i for x in ends) for i in range(rows)], device=device)
        inside = (of_row > 0) & (of_row < len(ends))

        def packed(b, h, q, k):
            return inside[q] & (of_row[q] == of_row[k]) & (k <= q if causal else k >= 0)

        check(masks.document_from_cu_seqlens(cu_seqlens, rows, causal=causal), packed, None, None, rows, rows)


# The rows and keys of packed sequences, and how many of them are in use. Two rows lie behind the last sequence.
ROWS, KEYS, BEHIND = [4, 0, 7, 3, 5], [9, 5, 2, 3, 8], 2
USED = dict(all=(ROWS, KEYS), some=([4, 0, 5, 0, 3], [6, 0, 2, 3, 0]))


def packed(device, used="all", **options):
    """Returns the rows and keys of these sequences."""
    ends_q, ends_k = (torch.tensor([0, *x]).cumsum(0).to(device, I32) for x in (ROWS, KEYS))
    lists = {} if used == "all" else dict(zip(("seqused_q", "seqused_k"), on(device, *USED[used])))
    return masks.packed(ends_q, sum(ROWS) + BEHIND, cu_seqlens_k=ends_k, **lists, **options)


def on(device, *lists):
    return [torch.tensor(x, dtype=I32, device=device) for x in lists]


def packed_makers(device):
    """Functions that make a mask of some sequences, from what `masks.packed` makes or from one sequence's sizes."""
    prefix = torch.tensor([2, 1, 6, 0, 4], device=device)
    spans = torch.tensor([[[5, 8], [0, 2]], [[0, 4], [0, 0]], [[0, 1], [1, 2]], [[0, 3], [0, 0]], [[4, 9], [1, 2]]], device=device)
    window = lambda i, *x: masks.sliding_window(*x, 2, 1, device=device)
    return dict(
        causal=lambda i, *x: masks.causal(*x, device=device),
        window=window,
        left=lambda i, *x: masks.sliding_window(*x, 1, -1, device=device),
        sink=lambda i, *x: masks.sliding_window_with_sink(*x, 2, 0, 1, device=device),
        prefix=lambda i, *x: masks.prefix_lm(prefix[i], *x),
        chunks=lambda i, *x: masks.chunked(*x, 3, device=device),
        spans=lambda i, *x: masks.with_spans(spans[i], *x, 3),
        union=lambda i, *x: masks.union(window(i, *x), masks.prefix_lm(prefix[i], *x)),
        intersection=lambda i, *x: masks.intersection(window(i, *x), masks.prefix_lm(prefix[i], *x)),
    )


def check_packed(found, of_sequence, used="all"):
    """Compares a packed mask with the masks of its sequences. Other rows see no key."""
    other = torch.ones(found.shape[1], dtype=torch.bool)
    for i, (rows, keys, start) in enumerate(zip(*USED[used], torch.tensor([0, *ROWS]).cumsum(0))):
        part = found[:, start : start + rows]
        assert torch.equal(part, of_sequence(i, rows, keys).expand_as(part)), (i, found)
        other[start : start + rows] = False
    assert found.dtype == I32 and found.is_contiguous() and not found[:, other].any()


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("name", packed_makers("cpu"))
def test_packed_masks_are_those_of_their_sequences(device, name, used):
    make = packed_makers(device)[name]
    found = make(slice(None), *packed(device, used))
    check_packed(found, lambda i, *sizes: make(slice(i, i + 1), *sizes)[0], used)


def test_sequences_that_are_not_there(device):
    """Rows lie before the first sequence, there is no sequence, or there are no rows."""
    for ends, rows in (([2, 5], 6), ([0], 3), ([0, 0], 0)):
        found = masks.causal(*masks.packed(*on(device, ends), rows))
        assert found.shape == (1, rows, 2) and found.count_nonzero() == (3 if rows == 6 else 0)


def test_spans_of_rows(device):
    """The form of FlashInfer's ranges: the first and the last key of each row's span, or -1 and -1."""
    ranges = torch.full((sum(ROWS) + BEHIND, 2), -1, dtype=I32, device=device)
    # Rows 1 and 2 of the first sequence have positions 6 and 7, and rows 0 to 2 of the third -5 to -3.
    ranges[1:3] = torch.tensor([6, 7])
    spans = torch.tensor([[[6, 8]]] + [[[0, 0]]] * 4, device=device)
    rows, keys = packed(device)
    found = masks.with_spans(ranges + ranges.new_tensor([0, 1]), rows, keys, 3)
    assert torch.equal(found, masks.with_spans(spans, rows, keys, 3)) and found[0, 1].tolist() == [3, 8]


@pytest.mark.parametrize("used", USED)
def test_functions_of_packed_rows(device, used):
    prefix = torch.tensor([2, 1, 6, 0, 4], device=device)

    def mask_mod(b, h, q, k):
        return (k < prefix[b]) | ((q - k).abs() <= h)

    rows, keys = packed(device, used)
    found = masks.from_mask_mod(mask_mod, None, 2, rows, keys)

    def of_sequence(i, rows, keys):
        at = keys - rows
        of_one = masks.from_mask_mod(lambda b, h, q, k: mask_mod(b + i, h, q + at, k), None, 2, rows, keys, device)
        end = of_one[..., 1:]
        return (of_one if of_one.shape[-1] == 4 else torch.cat([of_one, end, end], -1))[0]

    check_packed(found, of_sequence, used)
    assert torch.equal(masks.from_mask_mod(mask_mod, None, 2, *packed(device, used, max_seqlen_k=30)), found)
    assert masks.from_mask_mod(lambda b, h, q, k: k <= q, None, 2, rows, keys).shape == (1, *found.shape[1:2], 2)
    with pytest.raises(ValueError, match=r"^row 2 sees \d intervals of keys, 0 to 0, 2 to 2, 4 to 4 first, expected"):
        masks.from_mask_mod(lambda b, h, q, k: (k % 2 == 0) & (q > (6 if used == "all" else 3)), None, None, rows, keys)


def test_trees_of_drafts(device):
    """New rows see all older keys and their ancestors, if these are intervals."""
    old, new, (ends,) = torch.tensor([5, 2], device=device), 4, on(device, [0, 4, 8])
    rows, keys = masks.packed(ends, 8, seqused_k=old + new)

    def intervals(parents):
        tree = torch.eye(new, dtype=torch.bool, device=device).repeat(2, 1, 1)
        for b, of_row in enumerate(parents):
            for i, parent in enumerate(of_row):
                if parent is not None:
                    tree[b, i] |= tree[b, parent]
        sees = lambda b, h, q, k: (k < old[b]) | tree[b, q - old[b], (k - old[b]).clamp(0, new - 1)]
        return masks.from_mask_mod(sees, None, None, rows, keys)

    found = intervals([[None, 0, 0, 2], [None, 0, 1, None]])
    assert found[0, 1:4].tolist() == [[0, 7, 7, 7], [0, 6, 7, 8], [0, 6, 7, 9]]
    assert found[0, 6:].tolist() == [[0, 5, 5, 5], [0, 2, 5, 6]]
    with pytest.raises(ValueError, match="^row 7 sees 3 intervals of keys, 0 to 1, 3 to 3, 5 to 5 first"):
        intervals([[None, 0, 1, 2], [None, None, 1, 1]])


def test_masks_of_all_packed_rows_and_keys(device):
    """A bool tensor, a function of FlexAttention and a BlockMask that know nothing of sequences."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="skipped: this torch has no FlexAttention")
    rows, keys = packed(device)
    total_q, total_k = sum(ROWS) + BEHIND, sum(KEYS)

    def near(b, h, q, k):
        return ((q - k).abs() <= 2 + h) | (k > 20)

    heads, starts = torch.arange(2, device=device)[:, None, None], torch.tensor([0, *KEYS]).cumsum(0).tolist()
    place = [torch.arange(n, device=device) for n in (total_q, total_k)]
    seen = near(0, heads, place[0][:, None], place[1]).expand(2, -1, -1)
    found = masks.within_sequences(masks.from_dense(seen[None]), rows, keys)
    dense = masks.to_dense(found, max(KEYS))
    for i, (count, keys_of, start) in enumerate(zip(ROWS, KEYS, torch.tensor([0, *ROWS]).cumsum(0))):
        of_one = dense[:, start : start + count]
        assert torch.equal(of_one[..., :keys_of], seen[:, start : start + count, starts[i] : starts[i + 1]])
        assert not of_one[..., keys_of:].any()
    assert not dense[:, sum(ROWS) :].any()
    blocks = flex.create_block_mask(near, 1, 2, total_q, total_k, device=device, BLOCK_SIZE=16)
    for given in (masks.from_mask_mod(blocks), masks.from_mask_mod(near, 1, 2, total_q, total_k, device)):
        assert torch.equal(masks.within_sequences(given, rows, keys), found)
    # Documents are sequences.
    ends = torch.tensor([0, *ROWS]).cumsum(0).to(device)
    rows, keys = masks.packed(ends, sum(ROWS))
    documents = masks.document_from_cu_seqlens(ends, sum(ROWS), causal=True)
    assert torch.equal(masks.within_sequences(documents, rows, keys), masks.causal(rows, keys))
    with pytest.raises(ValueError, match=r"^intervals is \(1, 1, 18, 2\), expected \(1, heads or 1, 19, 2 or 4\)$"):
        masks.within_sequences(masks.causal(18, 18, device=device), rows, keys)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.hopper)])
def test_packed_masks_in_a_trace(device, backend):
    """One graph makes the mask and attends, for any lengths."""
    q, k = (torch.randn(n, 4, 64, device=device).bfloat16() for n in (sum(ROWS) + BEHIND, sum(KEYS)))
    makers = packed_makers(device)

    def attend(name, q, k, ends_q, ends_k, used_k):
        rows, keys = masks.packed(ends_q, q.shape[0], cu_seqlens_k=ends_k, seqused_k=used_k, max_seqlen_k=9)
        if name == "function":
            intervals = masks.from_mask_mod(lambda b, h, q, k: (k <= q) & (k >= b), None, None, rows, keys)
        elif name == "document":
            ids = torch.bucketize(torch.arange(q.shape[0], device=q.device), ends_q, right=True)
            rows, keys = masks.packed(ends_q, q.shape[0])
            intervals = masks.within_sequences(masks.document(ids), rows, keys)
        else:
            intervals = makers[name](slice(None), rows, keys)
        return flash_attn_varlen_func(q, k, k, ends_q, ends_k, 8, 9, seqused_k=used_k, intervals=intervals)

    ends_q, ends_k = (torch.tensor([0, *x]).cumsum(0).to(device, I32) for x in (ROWS, KEYS))
    for name in (*makers, "function", "document"):
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend=backend)
        for used in USED:
            given = name, q, k, ends_q, ends_k, *on(device, USED[used][1])
            assert torch.equal(compiled(*given), attend(*given)), name
    rows, keys = packed(device)
    with pytest.raises(Exception, match="max_seqlen_k is None, expected the number of keys that a sequence may have"):
        of_trace = lambda keys: masks.from_mask_mod(lambda b, h, q, k: k <= q, None, None, rows, keys)
        torch.compile(of_trace, fullgraph=True, backend=backend)(keys)


def test_a_packed_mask_is_that_of_each_sequence_in_attention(device):
    q, k, v = (torch.randn(n, 4, 64, device=device).bfloat16() for n in (sum(ROWS) + BEHIND, sum(KEYS), sum(KEYS)))
    ends = [torch.tensor([0, *x]).cumsum(0).to(device, I32) for x in (ROWS, KEYS)]
    make = packed_makers(device)["spans"]
    out = flash_attn_varlen_func(q, k, v, *ends, 7, 9, intervals=make(slice(None), *packed(device)))
    for i, (rows, keys) in enumerate(zip(ROWS, KEYS)):
        of_q, of_k = (slice(x[i], x[i + 1]) for x in ends)
        one = flash_attn_func(q[None, of_q], k[None, of_k], v[None, of_k], intervals=make(slice(i, i + 1), rows, keys))
        torch.testing.assert_close(out[of_q], one[0], rtol=1e-2, atol=1e-2)
    assert not out[sum(ROWS) :].any()


@pytest.mark.parametrize("block_size", [128, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_listed_blocks(device, causal, block_size):
    """Lists with repeated blocks, with invalid indices, without a block, and with a block of which few keys exist."""
    rows, keys, heads = 300 * block_size // 128, 400 * block_size // 128, 2
    idx = torch.tensor([[3, 0, 3, 9], [1, -1, 2, 0], [7, 7, 7, 7]], dtype=I32, device=device).expand(1, heads, 3, 4)
    cnt = torch.tensor([[3, 2, 0], [1, 4, 4]], dtype=I32, device=device)[None]
    full = (torch.ones_like(cnt), torch.full_like(idx, 2))
    seen = torch.zeros(1, heads, 3, 4, dtype=torch.bool, device=device)
    for head, row, blocks in [(0, 0, [0, 3]), (0, 1, [1]), (1, 0, [3]), (1, 1, [0, 1, 2])]:
        seen[0, head, row, blocks] = True
    q, k, v = (torch.randn(1, n, heads, 64, dtype=torch.bfloat16, device=device) for n in (rows, keys, keys))
    dout = torch.randn_like(q)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for lists, blocks in [((cnt, idx), seen), ((cnt, idx, *full), seen | (torch.arange(4, device=device) == 2))]:
        words = masks.block_sparse(*lists, block_size=block_size)
        assert words.shape == (1, heads, 3, 3 if block_size == 128 else 6) and words.dtype == I32
        dense = blocks.repeat_interleave(block_size, 2).repeat_interleave(block_size, 3)[..., :rows, :keys]
        if causal:
            dense = dense & torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
        options = dict(causal=causal, deterministic=causal, return_attn_probs=True)
        out, lse = flash_attn_func(q, k, v, intervals=words, **options)
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / 8
        # A row that sees no key has equal weights, which are set to 0.
        weights = scores.masked_fill(~dense, -1e9).softmax(-1) * dense
        expected = torch.einsum("bhij,bjhd->bihd", weights, v.float())
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        of_rows = scores.masked_fill(~dense, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse, of_rows, atol=1e-3, rtol=1e-3)
        exact = torch.autograd.grad(expected, inputs, dout.float())
        for gradient, expected in zip(torch.autograd.grad(out, inputs, dout), exact):
            torch.testing.assert_close(gradient.float(), expected.float(), atol=3e-2, rtol=3e-2)
    # The sign of a word is the last of its 32 bits.
    words = masks.block_sparse(cnt, idx + 30, key_blocks=100)
    assert words.shape[-1] == 5 and words[0, 1, 1].tolist() == [-(2**29), 1, 0, 0, 0]
    words = masks.block_sparse(cnt, idx + 30, key_blocks=200, block_size=64)
    assert words.shape[-1] == 8 and words[0, 1, 1].tolist() == [-(2**29), 1, *[0] * 6]
    with pytest.raises(ValueError, match="^block_size is 32, expected 64 or 128$"):
        masks.block_sparse(cnt, idx, block_size=32)


def test_a_document_in_two_places_is_refused():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])
    with pytest.raises(ValueError, match=r"^ids\[1\] has 2 documents in 3 runs of tokens"):
        masks.document(ids)
    assert masks.from_mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k], 2, None, 4, 4).shape == (2, 1, 4, 4)


def test_functions_of_batch_and_head(device):
    """The batch and head dimensions have size 1 if the mask does not change along them."""
    of_batch = torch.tensor([3, 5], device=device)
    of_head = torch.tensor([1, 4, 2], device=device)
    equal = torch.tensor([2, 2], device=device)

    def both(b, h, q, k):
        return (k < of_batch[b]) & (q - k < of_head[h]) & (q >= k)

    intervals = masks.from_mask_mod(both, 2, 3, 6, 6, device=device)
    assert intervals.shape == (2, 3, 6, 2)
    check(intervals, both, 2, 3, 6, 6)
    for mask_mod, shape in [
        (lambda b, h, q, k: k < of_batch[b], (2, 1, 6, 2)),
        (lambda b, h, q, k: k < of_head[h], (1, 3, 6, 2)),
        # This function reads the batch index, but its mask is the same for all entries.
        (lambda b, h, q, k: k < equal[b], (1, 1, 6, 2)),
        (lambda b, h, q, k: (k < 1) | (k > q), (1, 1, 6, 4)),
        (lambda b, h, q, k: b.new_ones((), dtype=torch.bool), (1, 1, 6, 2)),
        (lambda b, h, q, k: q < 0, (1, 1, 6, 2)),
    ]:
        intervals = masks.from_mask_mod(mask_mod, 2, 3, 6, 6, device=device)
        assert intervals.shape == shape and intervals.is_contiguous()
        check(intervals, mask_mod, 2, 3, 6, 6)
    assert masks.from_mask_mod(lambda b, h, q, k: k < of_batch[b], None, None, 6, 6, device=device).shape[0] == 1


def test_functions_see_one_row_and_key_at_a_time():
    """A mask function may use captured tensors in any way, even to index others."""
    neighbours = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]])
    table = torch.eye(4, dtype=torch.int64)[None]

    def near(b, h, q, k):
        return (neighbours[q] == k).any()

    seen = masks.to_dense(masks.from_mask_mod(near, None, None, 4, 4), 4)[0, 0]
    assert seen.nonzero().tolist() == [[i, j] for i in range(4) for j in sorted(neighbours[i].tolist())]
    # Indices may contain constants.
    check(masks.from_mask_mod(lambda b, h, q, k: table[0, q, k] > 0, 1, 1, 4, 4), lambda b, h, q, k: q == k, 1, 1, 4, 4)


def test_parts_of_rows_give_what_all_at_once_do(monkeypatch):
    def mask_mod(b, h, q, k):
        return (k < 2) | (q - k).abs() < 4 + h

    whole = masks.from_mask_mod(mask_mod, None, 2, 25, 30)
    monkeypatch.setattr(masks, "_AT_ONCE", 100)
    assert torch.equal(whole, masks.from_mask_mod(mask_mod, None, 2, 25, 30))


def test_a_third_interval_is_refused_with_its_row(monkeypatch):
    monkeypatch.setattr(masks, "_AT_ONCE", 100)

    def dilated(b, h, q, k):
        return (k % 3 == 0) & (k <= q) & (b + h > 0)

    sentence = "row 6 of head 1 of entry 0 of the batch sees 3 intervals of keys, 0 to 0, 3 to 3, 6 to 6 first"
    with pytest.raises(ValueError, match=f"^{sentence}, expected at most 2$"):
        masks.from_mask_mod(dilated, 2, 2, 30, 30)


def test_intersections(device):
    rows, keys = 10, 10
    lengths = torch.tensor([4, 10, 0], device=device)
    padding = masks.padding(lengths, rows, keys)
    causal = masks.causal(rows, keys, device=device)
    sink = masks.sliding_window_with_sink(rows, keys, 2, 0, 2, device=device)
    check(masks.intersection(padding, causal), lambda b, h, q, k: (k < lengths[b]) & (k <= q), 3, None, rows, keys)

    def both(b, h, q, k):
        return (k < lengths[b]) & (k <= q) & ((k >= q - 2) | (k < 2))

    for x, y in ((padding, sink), (sink, padding)):
        check(masks.intersection(x, y), both, 3, None, rows, keys)
    # Intervals may be in another order, and may overlap.
    swapped = sink[..., [2, 3, 0, 1]]
    check(masks.intersection(swapped, padding), both, 3, None, rows, keys)
    check(masks.intersection(sink, swapped), lambda b, h, q, k: (k <= q) & ((k >= q - 2) | (k < 2)), 3, None, rows, keys)
    with pytest.raises(ValueError, match=r"^x is \(3, 1, 10, 2\) and y \(1, 1, 9, 2\), expected the same rows"):
        masks.intersection(padding, masks.causal(9, 9, device=device))


def test_unions(device):
    rows, keys = 10, 12
    lengths = torch.tensor([4, 12, 0], device=device)
    padding, window = masks.padding(lengths, rows, keys), masks.sliding_window(rows, keys, 2, 0, device=device)

    def either(b, h, q, k):
        return (k < lengths[b]) | ((k >= q) & (k <= q + 2))

    check(masks.union(padding, window), either, 3, None, rows, keys)
    check(masks.union(window, padding), either, 3, None, rows, keys)
    # Masks of two intervals for each row, whose unions also have only two.
    two = masks.union(padding, window)
    check(masks.union(padding, two), either, 3, None, rows, keys)
    check(masks.union(two, two[..., [2, 3, 0, 1]]), either, 3, None, rows, keys)


def test_masks_of_three_intervals_are_refused(device):
    def mask(*bounds):
        return torch.tensor([[0, 0] * (len(bounds) // 2), bounds], dtype=torch.int32, device=device)[None, None]

    sentence = "row 1 sees 3 intervals of keys, 0 to 1, 3 to 4, 6 to 6 first, expected"
    with pytest.raises(ValueError, match=f"^{sentence} at most 2$"):
        masks.union(mask(6, 7, 0, 2), mask(3, 5))
    with pytest.raises(ValueError, match=f"^{sentence} at most 2$"):
        masks.intersection(mask(0, 2, 3, 9), mask(0, 5, 6, 7))


@pytest.mark.parametrize("of_x, of_y", [(2, 1), (2, 2)])
def test_unions_and_intersections_of_any_masks(of_x, of_y):
    """Random intervals overlap, touch, are empty, or lie beyond the keys."""
    bounds = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-2, 9, (1, 1, 4000, 2 * n), generator=bounds, dtype=torch.int32) for n in (of_x, of_y))
    dense = [masks.to_dense(mask, 8) for mask in (x, y)]
    for function, seen in ((masks.union, dense[0] | dense[1]), (masks.intersection, dense[0] & dense[1])):
        fit = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0] <= 2
        of_fit = [mask[:, :, fit[0, 0]].clamp(0, 8) for mask in (x, y)]
        united = function(*of_fit)
        expected = masks.from_dense(seen[:, :, fit[0, 0]])
        assert torch.equal(united, expected)


def test_dense_masks(device):
    for intervals in (masks.causal(5, 9, device=device), masks.sliding_window_with_sink(9, 9, 1, 0, 2, device=device)):
        seen = masks.to_dense(intervals, 9)
        assert torch.equal(masks.from_dense(seen), intervals) and torch.equal(masks.from_dense(seen[0, 0]), intervals)
    lengths = torch.tensor([3, 5], device=device)
    padding = masks.padding(lengths, 6, 6)
    assert torch.equal(masks.from_dense(masks.to_dense(padding, 6)), padding)
    with pytest.raises(ValueError, match="^row 2 sees 3 intervals of keys"):
        masks.from_dense((torch.arange(6)[:, None] >= 2) & (torch.arange(6) % 2 == 0))
    with pytest.raises(ValueError, match=r"^mask is torch.float32 \(2, 2\), expected torch.bool"):
        masks.from_dense(torch.zeros(2, 2))


@pytest.mark.parametrize("rows, keys, block", [(70, 70, 16), (33, 80, (16, 32))])
def test_block_masks(device, rows, keys, block):
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="skipped: this torch has no FlexAttention")
    lengths = torch.tensor([40, 60], device=device)

    def mask_mod(b, h, q, k):
        return (q >= k) & ((k < lengths[b]) | (q - k < 4))

    of_blocks = flex.create_block_mask(mask_mod, 2, None, rows, keys, device=device, BLOCK_SIZE=block)
    assert torch.equal(masks.from_mask_mod(of_blocks), masks.from_mask_mod(mask_mod, 2, None, rows, keys, device))
    # The blocks belong to the mask, and full blocks do not ask the mask function.
    counts = torch.tensor([[[1, 0]]], device=device, dtype=I32)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], device=device, dtype=I32)
    made = flex.BlockMask.from_kv_blocks(
        counts, indices, counts.flip(-1), indices, BLOCK_SIZE=4, mask_mod=lambda b, h, q, k: q > k, seq_lengths=(8, 8)
    )
    found = masks.to_dense(masks.from_mask_mod(made), 8)[0, 0].long()
    assert torch.equal(found[:4, :4], torch.ones_like(found[:4, :4]).tril(-1)) and not found[:4, 4:].any()
    assert found[4:, 4:].all() and not found[4:, :4].any()
    with pytest.raises(ValueError, match="^there are sizes or a device beside a BlockMask, which knows its own$"):
        masks.from_mask_mod(of_blocks, 2)
    q = torch.zeros(2, rows, 1, 8, device=device, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="^intervals is BlockMask, .*: fa3.masks.from_mask_mod makes one of it$"):
        flash_attn_func(q, q, q, intervals=of_blocks)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.hopper)])
def test_masks_in_a_trace(device, backend):
    """Masks whose numbers a trace does not know compile to one graph."""
    torch._dynamo.reset()
    ids = torch.tensor([[0] * 40 + [1] * 60, [2] * 100], device=device)
    q = torch.randn(2, 100, 4, 64, device=device).bfloat16()
    sees = masks.to_dense(masks.causal(100, 100, device=device), 100)

    def mask_mod(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (q >= k) & (k > h)

    for make, given in [
        (lambda x: masks.document(x, causal=True), ids),
        (lambda x: masks.from_mask_mod(mask_mod, 2, 4, 100, 100, device), ids),
        (lambda x: masks.from_mask_mod(lambda b, h, q, k: (k < 3) | (q - k < 9), 2, 4, 100, 100, device), ids),
        (masks.from_dense, sees),
    ]:
        compiled = torch.compile(
            lambda q, x, make=make: flash_attn_func(q, q, q, intervals=make(x)), fullgraph=True, backend=backend
        )
        expected = flash_attn_func(q, q, q, intervals=make(given))
        assert torch.equal(compiled(q, given), expected)
    # If an assertion fails in one of several threads of Inductor's code, the process ends.
    if device == "cpu" and (backend != "inductor" or torch.get_num_threads() == 1):
        with pytest.raises(RuntimeError, match="tokens of one document lie apart"):
            torch.compile(masks.document, fullgraph=True, backend=backend)(torch.arange(9)[None] % 2)
        with pytest.raises(RuntimeError, match="a row sees three intervals of keys or more, expected at most 2"):
            torch.compile(masks.from_dense, fullgraph=True, backend=backend)(sees & (torch.arange(100) % 2 == 0))


def test_empty_masks():
    for rows, keys in ((0, 5), (5, 0), (0, 0)):
        found = [
            masks.from_mask_mod(lambda b, h, q, k: q >= k, 2, 2, rows, keys),
            masks.causal(rows, keys),
            masks.sliding_window_with_sink(rows, keys, 2, 2, 1),
            masks.chunked(rows, keys, 4),
        ]
        for intervals in found:
            assert intervals.shape[:3] == (1, 1, rows) and not intervals.any()
            assert masks.to_dense(intervals, keys).shape == (1, 1, rows, keys)
    assert masks.document(torch.zeros(2, 0, dtype=I32)).shape == (2, 1, 0, 2)
    assert masks.document_from_cu_seqlens(torch.zeros(1, dtype=I32), 0).shape == (1, 1, 0, 2)


def test_bad_arguments_are_refused():
    yes = lambda b, h, q, k: q >= k
    lengths, ends = torch.tensor([1.0]), torch.tensor([0, 3], dtype=I32)
    for call, error, sentence in [
        (lambda: masks.from_mask_mod(yes, -1, 1, 2, 2), ValueError, "batch is -1, expected 0 or more"),
        (lambda: masks.from_mask_mod(yes, 1, 1, 2.5, 2), TypeError, "seqlen_q is 2.5, expected an integer"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q - k, 1, 1, 2, 2), TypeError, "mask_mod returns torch.int64"),
        (lambda: masks.causal(2, "2"), TypeError, "seqlen_kv is '2', expected an integer"),
        (lambda: masks.sliding_window(2, 2, None, 0), TypeError, "left is None, expected an integer"),
        (lambda: masks.sliding_window_with_sink(2, 2, 1, 0, -1), ValueError, "sink is -1"),
        (lambda: masks.chunked(2, 2, 0), ValueError, "chunk is 0, expected a number of keys"),
        (lambda: masks.padding(lengths, 2, 2), ValueError, "lengths is torch.float32"),
        (lambda: masks.prefix_lm(lengths, 2, 2), ValueError, "prefix is torch.float32"),
        (lambda: masks.document(lengths), ValueError, "ids is torch.float32"),
        (lambda: masks.document([0, 1]), TypeError, "ids is list, expected torch.Tensor"),
        (lambda: masks.document_from_cu_seqlens(torch.zeros(0, dtype=I32), 3), ValueError, "cu_seqlens has no"),
        (lambda: masks.packed(lengths, 3), ValueError, "cu_seqlens_q is torch.float32"),
        (lambda: masks.packed(torch.zeros(0, dtype=I32), 3), ValueError, "cu_seqlens_q has no elements"),
        (lambda: masks.packed(ends, 3, cu_seqlens_k=ends[1:]), ValueError, "cu_seqlens_k has 1 elements, expected 2"),
        (lambda: masks.packed(ends, 3, seqused_k=ends), ValueError, "seqused_k has 2 elements, expected 1"),
        (lambda: masks.prefix_lm(ends, *masks.packed(ends, 3)), ValueError, "prefix has 2 entries, expected 1"),
        (lambda: masks.with_spans(ends, 3, 3), ValueError, "spans is torch.int32"),
        (lambda: masks.with_spans([[0, 1]], 3, 3), TypeError, "spans is list, expected torch.Tensor"),
        (lambda: masks.from_mask_mod(yes, 1, 1, *masks.packed(ends, 3)), ValueError, "there is a batch or a device"),
        (lambda: masks.padding(ends, *masks.packed(ends, 3)), TypeError, "seqlen_q is a PackedRows"),
        (lambda: masks.union(masks.causal(3, 3), masks.causal(*masks.packed(ends, 3))), ValueError, "x is"),
        (lambda: masks.to_dense(torch.zeros(1, 1, 3, 2), 3), ValueError, "intervals is torch.float32"),
        (lambda: masks.to_dense(torch.zeros(1, 1, 3, 6, dtype=I32), 3), ValueError, "intervals is torch.int32"),
    ]:
        with pytest.raises(error, match=f"^{sentence}"):
            call()
