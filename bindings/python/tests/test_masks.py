"""Masks as intervals of keys, compared with the masks of mask functions. Needs torch, but no GPU."""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from fa3 import flash_attn_func, masks

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

    sentence = "row 1 of head 0 of entry 0 of the batch sees 3 intervals of keys, 0 to 1, 3 to 4, 6 to 6 first, expected"
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
    with pytest.raises(ValueError, match="row 2 of head 0 of entry 0 of the batch sees 3 intervals of keys"):
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
    lengths = torch.tensor([1.0])
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
        (lambda: masks.to_dense(torch.zeros(1, 1, 3, 2), 3), ValueError, "intervals is torch.float32"),
        (lambda: masks.to_dense(torch.zeros(1, 1, 3, 6, dtype=I32), 3), ValueError, "intervals is torch.int32"),
    ]:
        with pytest.raises(error, match=f"^{sentence}"):
            call()
