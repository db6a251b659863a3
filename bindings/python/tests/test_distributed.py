"""Context parallelism: its plans for up to 64 ranks against their definition, and its results against one process, on
the CPU by gloo and on two GPUs by NCCL. Needs torch.
"""

import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("skipped: this torch has no torch.distributed", allow_module_level=True)

import ranks
import torch.distributed as dist
from torch.nn import functional as F

import fa3
from fa3 import flash_attn_func, flash_attn_varlen_func
from fa3.distributed import attention, attention_varlen, groups, handshake, layout, plan, positions, shard, unshard

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="skipped: needs two GPUs")
ON_GPUS = pytest.param("cuda", marks=[pytest.mark.hopper, needs_two_gpus])
LAYOUTS = [layout.ZIGZAG, layout.CONTIGUOUS]
WINDOWS = [plan.Window(*sides) for sides in [(-1, -1), (-1, 0), (0, 0), (5, 0), (9, 4), (-1, 3), (6, -1)]]
# Two ranks split two of these documents, and three ranks split four.
DOCUMENTS = [625, 3, 0, 1, 700, 40, 64, 900, 17, 1300]
ENDS = [0, *itertools.accumulate(DOCUMENTS)]


def visible(rows, window):
    """Which keys each row of a document sees."""
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    left, right = window
    return (distance <= left if left >= 0 else True) & (distance >= -right if right >= 0 else torch.ones_like(distance, dtype=bool))


def computed(of, window):
    """For each document, how often each row's score for each key is computed in the plans of all ranks."""
    found = [torch.zeros(rows, rows, dtype=torch.int32) for rows in of.documents]
    for rank in range(of.world):
        own = [(piece.document, row) for piece in of.pieces[rank] for row in range(piece.start, piece.stop)]
        its = plan.plan(of, rank, window)
        buffer = [None] * its.buffer_rows
        for copy in its.copies:
            theirs = [(piece.document, row) for piece in of.pieces[copy.owner] for row in range(piece.start, piece.stop)]
            assert buffer[copy.there] == [None] * copy.rows
            if copy.again is not None:
                assert buffer[copy.again : copy.again + copy.rows] == theirs[copy.here]
            buffer[copy.there] = theirs[copy.here]
        for rows in its.zeros:
            assert buffer[rows] == [None] * (rows.stop - rows.start)
        for launch in its.launches:
            keys = own if launch.is_local else buffer
            left, right = launch.window
            for call in launch.calls:
                document = own[call.row][0]
                for row in range(call.rows):
                    # The last query is aligned with the last key.
                    at = row + call.keys - call.rows
                    first = 0 if left < 0 else max(0, at - left)
                    last = call.keys if right < 0 else min(call.keys, at + right + 1)
                    for key in range(call.key + first, call.key + last):
                        assert keys[key][0] == document
                        found[document][own[call.row + row][1], keys[key][1]] += 1
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_every_rank_counts_each_key_once(world, kind):
    for window in WINDOWS:
        of = layout.dense(126 if world == 3 else 128, world, kind)
        [found] = computed(of, window)
        assert torch.equal(found, visible(of.documents[0], window).int()), window


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("even", [layout.EVEN, 0])
def test_documents_are_counted_once(monkeypatch, even, world, kind):
    monkeypatch.setattr(layout, "LEAST_ROWS", 2)
    monkeypatch.setattr(layout, "EVEN", even)
    documents = (50, 3, 0, 1, 31, 61)
    of = layout.packed.__wrapped__((0, *itertools.accumulate(documents)), world, kind)
    rows = [row for rank in range(world) for rows in layout.rows_of(of, rank) for row in rows]
    assert sorted(rows) == list(range(sum(documents)))
    for window in WINDOWS:
        for found, rows in zip(computed(of, window), documents, strict=True):
            assert torch.equal(found, visible(rows, window).int()), window


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_rank_has_one_launch_for_what_it_shares_and_one_for_the_rest(world):
    causal = plan.Window(-1, 0)
    of = layout.dense(96 * world, world, layout.ZIGZAG)
    assert [len(plan.plan(of, rank, causal).launches) for rank in range(world)] == world * [1]
    lengths = [4096, 40, 3000, 64, 64, 700, 5]
    of = layout.packed((0, *itertools.accumulate(lengths)), world, layout.ZIGZAG)
    launches = [plan.plan(of, rank, causal).launches for rank in range(world)]
    assert all([launch.is_local for launch in found] in ([False], [False, True]) for found in launches)
    # A rank gets no key twice.
    for rank in range(world):
        its = plan.plan(of, rank, causal)
        rows = [(copy.owner, row) for copy in its.brought for row in range(copy.row, copy.row + copy.rows)]
        assert len(rows) == len(set(rows))


@pytest.mark.parametrize("world", [2, 8, 64])
def test_gradients_go_back_the_way_that_keys_came(world):
    for kind, window in itertools.product(LAYOUTS, WINDOWS):
        of = layout.dense(128, world, kind)
        for owner in range(world):
            parts = plan.returns(of, owner, window)
            covered = []
            for part in plan.sums(of, owner, window):
                covered += range(part.row, part.row + part.rows)
                for number, row in part.terms:
                    assert part.row == parts[number].row + row and row + part.rows <= parts[number].rows
            assert covered == list(range(of.rows(owner)))
            # Each return is a term of some sum.
            terms = [term for part in plan.sums(of, owner, window) for term, _ in part.terms]
            assert set(terms) == set(range(len(parts)))


def test_ranks_have_as_much_to_do():
    # Lengths by Zipf's law, many short documents, one long document, and lengths without a pattern.
    mixes = [[8192 // i for i in range(1, 13)] + 20 * [64], 128 * [128], [16384], [1537, 3, 911, 4099, 77, 2600, 1, 5003]]
    for lengths, world in itertools.product(mixes, [2, 4, 8]):
        of = layout.packed((0, *itertools.accumulate(lengths)), world, layout.ZIGZAG)
        scores = [plan.plan(of, rank, plan.Window(-1, 0)).scores for rank in range(world)]
        assert max(scores) <= 1.05 * sum(scores) / world, (lengths, world, scores)


def test_no_more_documents_are_cut_than_it_takes():
    def cut(lengths, world):
        of = layout.packed((0, *itertools.accumulate(lengths)), world, layout.ZIGZAG)
        return len({piece.document for pieces in of.pieces for piece in pieces if piece.rows < lengths[piece.document]})

    assert cut(32 * [2048], 8) == 0
    assert cut(33 * [2048], 8) == 1
    assert cut([8192, *(40 * [512])], 2) == 1
    assert cut([8192, 8192, 8192, *(40 * [512])], 2) == 1


def test_heads_go_in_few_groups():
    assert groups.groups(8, 0, 1e15, 1e6, 0, groups.SENT) == [slice(0, 8)]
    assert groups.groups(8, 0, 6e12, 0.18e9, 0, groups.SENT) == [slice(0, 1), slice(1, 8)]
    assert groups.groups(8, 0, 6e12, 0.18e9, 0.18e9, groups.SENT) == [slice(0, 1), slice(1, 7), slice(7, 8)]
    assert groups.groups(2, 0, 6e12, 1.8e9, 1.8e9, groups.SENT) == [slice(0, 1), slice(1, 2)]
    assert groups.groups(1, 0, 6e12, 1.8e9, 1.8e9, groups.SENT) == [slice(0, 1)]
    # The first keys arrive while local operations run.
    assert groups.groups(8, 1e12, 6e12, 0.18e9, 0, groups.SENT) == [slice(0, 8)]


def test_rows_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="has 100 rows, expected a multiple of 8: 8 pieces, which the zigzag layout has for 4 ranks"):
        layout.dense(100, 4, "zigzag")
    with pytest.raises(ValueError, match="layout is 'ring', expected 'zigzag' or 'contiguous'"):
        layout.dense(96, 4, "ring")
    with pytest.raises(ValueError, match="none before another"):
        layout.packed((0, 5, 3), 2, "zigzag")


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator)


def largest(x):
    return x.abs().max() if x.numel() else torch.tensor(0.0)


def check(whole, local, its, results, tolerance):
    """A rank's results are its rows of the results of one process. Gradients agree to rounding."""
    (out, lse, gradients), (own_out, own_lse, own_gradients) = whole, local
    if not own_out.is_cuda:
        # On a GPU the bits are equal only if a launch has the tile of the whole sequence.
        assert torch.equal(own_out, its(out, -3)), (own_out - its(out, -3)).abs().max()
        assert torch.equal(own_lse, its(lse, -1))
    assert largest(own_lse - its(lse, -1)) <= tolerance
    for own, of_all in zip((own_out, *own_gradients[:3]), (out, *gradients)):
        expected = its(of_all, -3)
        error = largest(own.float() - expected.float())
        assert error <= tolerance * largest(of_all.float()), (results, error)


def exchanging(device, by, folder):
    """Makes ranks exchange rows by messages or by copies."""
    module = sys.modules["fa3.distributed.attention"]
    if by == "messages":
        module.memory_of = lambda group, device: None
    elif device.type == "cpu":
        files = ranks.Files(folder)
        module.memory_of = lambda group, device: files
    else:
        assert module.memory_of(dist.group.WORLD, device) is not None


def beside_one(device, by, folder, world_of, dtype, tolerance):
    """Compares sequences and documents: each rank computes all rows alone, and its own rows with other ranks."""
    exchanging(device, by, folder)
    generator = torch.Generator().manual_seed(0)
    world = dist.get_world_size()
    size = 64 if device.type == "cuda" else 32
    heads, dims = (8, 4), (size, size if device.type == "cuda" else 16)
    seqlen = 16 * 2 * world if device.type == "cpu" else 16384 * world
    shapes = [(2, seqlen)] if world_of == "dense" else [(ENDS[-1],)]

    def make(*last):
        return normal(generator, *shapes[0], *last).to(device, dtype)

    q, k, v = make(heads[0], dims[0]), make(heads[1], dims[0]), make(heads[1], dims[1])
    dout, dlse = make(heads[0], dims[1]), normal(generator, *shapes[0][:-1], heads[0], shapes[0][-1]).to(device)
    s_aux = normal(generator, heads[0]).to(device)
    cu = torch.tensor(ENDS, dtype=torch.int32)
    options = [
        dict(causal=True),
        dict(method="ulysses", causal=True, softcap=3.0, s_aux=s_aux),
        dict(window_size=(20, 0), s_aux=s_aux),
        dict(layout="contiguous", window_size=(9, 7)),
        dict(layout="contiguous", causal=True, softcap=3.0, deterministic=True),
        dict(method="ulysses", layout="contiguous"),
        dict(window_size=(-1, 5), softmax_scale=0.3),
    ]
    for given in options:
        given = dict(given)
        if given.get("method") == "ulysses" and heads[1] % world:
            continue
        of_group = {name: given.pop(name) for name in ("method", "layout") if name in given}
        kind = of_group.get("layout", "zigzag")
        its_ends = None if world_of == "dense" else cu

        def its(x, dim):
            return shard(x.detach(), dim, layout=kind, cu_seqlens=its_ends)

        def results(function, inputs, wanted, *lists):
            inputs = [x.detach().requires_grad_() for x in inputs]
            sinks = {} if "s_aux" not in given else dict(s_aux=given["s_aux"].detach().requires_grad_())
            out, lse = function(*inputs, *lists, **(given | sinks))
            return out.detach(), lse.detach(), torch.autograd.grad((out, lse), [*inputs, *sinks.values()], wanted)

        function, of_ranks, lists, ends = flash_attn_func, attention, (), ()
        if world_of == "documents":
            function, of_ranks = flash_attn_varlen_func, attention_varlen
            lists, ends = (cu.to(device), cu.to(device), max(DOCUMENTS), max(DOCUMENTS)), (cu,)
        whole = results(functools.partial(function, return_attn_probs=True), (q, k, v), (dout, dlse), *lists)
        local = results(
            functools.partial(of_ranks, return_lse=True, **of_group),
            [its(x, -3) for x in (q, k, v)],
            (its(dout, -3), its(dlse, -1)),
            *ends,
        )
        check(whole, local, its, (given, of_group), tolerance)
        if "s_aux" in given:
            total = local[2][3].clone()
            dist.all_reduce(total)
            assert (total - whole[2][3]).abs().max() <= tolerance * whole[2][3].abs().max()
        own = its(q, -3)
        assert torch.equal(unshard(own, -3 % q.dim(), layout=kind, cu_seqlens=its_ends), q)


EXCHANGES = [("cpu", 2, "messages"), ("cpu", 3, "messages"), ("cpu", 3, "copies")]
EXCHANGES += [pytest.param("cuda", 2, by, marks=ON_GPUS.marks) for by in ("messages", "copies")]


@pytest.mark.parametrize("world_of", ["dense", "documents"])
@pytest.mark.parametrize("device, world, by", EXCHANGES)
def test_ranks_compute_what_one_computes(tmp_path, device, world, by, world_of):
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 1.6e-2)
    ranks.run(beside_one, world, by, tmp_path, world_of, dtype, tolerance, device=device)


@pytest.mark.parametrize("world_of", ["dense", "documents"])
def test_a_rank_alone_computes_what_one_computes(tmp_path, world_of):
    ranks.run(beside_one, 1, "messages", tmp_path, world_of, torch.float32, 1e-5)


def between_graphs(device):
    """A compiler has the code before attention and behind it, and attention has the code between."""

    def layer(x):
        return attention(x * 2, x * 2, x * 2, causal=True) + 1

    x, graphs = normal(torch.Generator().manual_seed(0), 1, 64, 2, 32), []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
        assert len(graphs) == 2


def test_a_compiler_leaves_attention_out():
    ranks.run(between_graphs, 1)


class Slow:
    """A store whose methods that read take a while, and whose other methods do not."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        if "get" in name:
            time.sleep(1)
        return getattr(self._store, name)


def reads_slowly(device):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() > 0:
        dist.distributed_c10d._get_default_store = lambda: Slow(store)
    handshake.agree(dist.group.WORLD, "a call")


def test_the_rank_that_keeps_the_store_leaves_last():
    ranks.run(reads_slowly, 3)


# cu_seqlens of so few documents that some ranks have no rows.
FEW = [(0, 10), (0, 64, 72, 128), (0, 70, 75, 128), (0, 0, 5), (0,)]


def few_documents(device, by, folder):
    """Ranks without rows take part in both passes."""
    exchanging(device, by, folder)
    generator = torch.Generator().manual_seed(0)
    for ends in FEW:
        heads = 2 * dist.get_world_size()
        q, dout, k, v = (normal(generator, ends[-1], count, 32) for count in (2 * heads, 2 * heads, heads, heads))
        s_aux = normal(generator, 2 * heads)
        cu = torch.tensor(ends, dtype=torch.int32)
        for given in (dict(causal=True), dict(window_size=(3, 2), s_aux=s_aux)):
            for method in ("all_gather", "ulysses"):

                def results(function, inputs, wanted, *lists, **options):
                    inputs = [x.detach().requires_grad_() for x in inputs]
                    out, lse = function(*inputs, *lists, return_attn_probs=True, **options, **given)
                    return out.detach(), lse.detach(), torch.autograd.grad(out, inputs, wanted)

                def its(x, dim):
                    return shard(x.detach(), dim, cu_seqlens=cu)

                longest = max(ends)
                whole = results(flash_attn_varlen_func, (q, k, v), dout, cu, cu, longest, longest)
                local = results(attention_varlen, [its(x, 0) for x in (q, k, v)], its(dout, 0), cu, method=method)
                check(whole, local, its, (ends, given, method), 1e-5)
        assert torch.equal(unshard(its(q, 0), 0, cu_seqlens=cu), q)
    empty = torch.zeros(2, 0, 4, 32, requires_grad=True)
    attention(empty, empty, empty, causal=True).sum().backward()


@pytest.mark.parametrize("by", ["messages", "copies"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_rows_take_part(tmp_path, world, by):
    ranks.run(few_documents, world, by, tmp_path)


class Model(torch.nn.Module):
    """A language model with two layers of attention, a product between them, and rotary embedding by position."""

    def __init__(self, width=64, heads=4, tokens=32):
        super().__init__()
        self.heads = heads
        self.embed = torch.nn.Embedding(tokens, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList([torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)]) for _ in range(2)
        )
        self.head = torch.nn.Linear(width, tokens)

    def forward(self, tokens, position, attend):
        x = self.embed(tokens)
        for project, out in self.layers:
            q, k, v = project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q, k = (rotated(y, position) for y in (q, k))
            x = x + out(attend(q, k, v).flatten(2))
        return self.head(x)


def rotated(x, position):
    half = x.shape[-1] // 2
    angle = position[:, None].to(x.device) / 100 ** (torch.arange(half, device=x.device) / half)
    cos, sin = (f(angle).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def losses(device, dtype, rows, seqlen, total, attend, position):
    """The losses of training steps. A rank has the loss of its own rows, and gradients are summed over ranks."""
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(8):
        tokens = torch.randint(0, 8, (2, seqlen + 1), generator=generator).cumsum(1).remainder(32).to(device)
        inputs, targets = (rows(x) for x in (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        logits = model(inputs, position, attend)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / (2 * seqlen)
        optimizer.zero_grad()
        loss.backward()
        found.append(total(loss.detach()))
        for parameter in model.parameters():
            total(parameter.grad)
        optimizer.step()
    return torch.stack(found)


def trains_as_one(device, dtype, tolerance):
    seqlen = 128

    def total(x):
        dist.all_reduce(x)
        return x.clone()

    alone = losses(
        device, dtype, lambda x: x, seqlen, torch.clone, lambda q, k, v: flash_attn_func(q, k, v, causal=True), torch.arange(seqlen)
    )
    together = losses(
        device, dtype, lambda x: shard(x, 1), seqlen, total, lambda q, k, v: attention(q, k, v, causal=True), positions(seqlen)
    )
    assert alone[-1] < 0.95 * alone[0]
    assert (alone - together).abs().max() <= tolerance * alone[0], (alone, together)


@pytest.mark.parametrize("device", ["cpu", ON_GPUS])
def test_a_model_trains_on_two_ranks_as_on_one(device):
    dtype, tolerance = (torch.float32, 1e-4) if device == "cpu" else (torch.bfloat16, 2e-2)
    ranks.run(trains_as_one, 2, dtype, tolerance, device=device)


def fails_clearly(device):
    rank = dist.get_rank()
    q = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"ranks have different calls.*rank 0: .*16\).*rank 1: .*32\)"):
        attention(*(torch.zeros(1, 8, 2, 16 * (rank + 1)) for _ in range(3)))
    with pytest.raises(ValueError, match="has 6 rows, expected a multiple of 4"):
        attention(q[:, :3], q[:, :3], q[:, :3])
    with pytest.raises(ValueError, match="there are 3 heads of k for 2 ranks"):
        attention(*(torch.zeros(1, 8, 3, 16) for _ in range(3)), method="ulysses")
    with pytest.raises(ValueError, match=r"q is \(3, 2, 16\), expected \(rows, heads, head_dim\) with the rank's 4 rows"):
        attention_varlen(*(torch.zeros(3, 2, 16) for _ in range(3)), [0, 4, 8])
    dist.barrier()
    handshake.PATIENCE = datetime.timedelta(seconds=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 waited 1 s for ranks \[1\] to begin a call that is new to it"):
            attention(q, q, q, causal=True)
    dist.barrier()


def forgets(device):
    handshake.MOST = 3
    group = dist.group.WORLD
    for number in (0, 1, 2, 0, 3):
        handshake.agree(group, f"call {number}")
    assert list(handshake._agreed[group]) == ["call 2", "call 0", "call 3"]


def compares_all(device):
    """Checks that ranks compare every call of both passes."""
    os.environ["FA3_DISTRIBUTED_CHECK"] = "1"
    handshake.PATIENCE = datetime.timedelta(seconds=5)
    rank = dist.get_rank()
    x = torch.zeros(1, 8, 2, 16, requires_grad=True)
    for method in ("all_gather", "ulysses"):
        for _ in range(2):
            for causal in (True, False):
                attention(x, x, x, causal=causal, method=method).sum().backward()
        with pytest.raises(ValueError, match=r"ranks have different calls.*rank 0: .*right=0.*rank 1: .*right=-1"):
            attention(x, x, x, causal=rank == 0, method=method)
        # Rank 1 skips the backward pass and goes on to the next call.
        out = attention(x, x, x, method=method)
        with pytest.raises(ValueError, match="ranks have different calls.*rank 0: gradients of O of .*rank 1: "):
            out.sum().backward() if rank == 0 else attention(x, x, x, method=method)
    store = dist.distributed_c10d._get_default_store()
    number = handshake._asked[dist.group.WORLD]
    dist.barrier()
    # Descriptions of calls are deleted from the store.
    assert not any(store.check([f"fa3/{dist.group.WORLD.group_name}/{i}/0"]) for i in range(1, number + 1))


def test_every_call_is_compared_if_asked_for():
    ranks.run(compares_all, 2)


def is_outlived(device):
    """Graphs and caches do not keep a group: Python aborts if a thread of its needs Python while it shuts down."""
    for checked in ("0", "1"):
        os.environ["FA3_DISTRIBUTED_CHECK"] = checked
        group = dist.new_group([0, 1])
        x = torch.zeros(1, 8, 2, 16, requires_grad=True)
        made = [attention(x, x, x, group=group, method=method) for method in ("all_gather", "ulysses")]
        reference = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        assert reference() is None
        for out in made:
            with pytest.raises(RuntimeError, match="the process group of this call was destroyed"):
                out.sum().backward()


def test_a_group_is_outlived_by_its_graphs():
    ranks.run(is_outlived, 2)


def layouts_differ(device):
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match="ranks have different calls.*rank 0: .*zigzag.*rank 1: .*contiguous"):
        attention(x, x, x, layout=LAYOUTS[dist.get_rank()])


def test_layouts_that_differ_are_found():
    ranks.run(layouts_differ, 2)


def test_ranks_forget_the_same_calls():
    ranks.run(forgets, 2)


def test_ranks_that_differ_say_so():
    ranks.run(fails_clearly, 2)


@pytest.mark.parametrize("device", ["cpu", ON_GPUS])
def test_the_documentations_example_runs(tmp_path, device):
    page = Path(__file__).parents[3] / "docs" / "distributed.md"
    file = tmp_path / "attend.py"
    file.write_text(re.search("```python\n(.*?)```", page.read_text(), re.S)[1])
    hidden = {} if device == "cuda" else dict(CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | hidden)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows of documents") == 2


def test_the_module_comes_with_the_package():
    code = "import fa3, sys; assert 'fa3.distributed' not in sys.modules; fa3.distributed.attention"
    code += "; assert 'torch._dynamo' not in sys.modules, 'the compiler is imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="^module 'fa3' has no attribute 'other'$"):
        fa3.other


def torchs_own(device, heads, kernels):
    """Compares torch's own context parallelism, on our kernels, with `fa3.distributed.attention`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    generator = torch.Generator().manual_seed(0)
    seqlen = 4096

    def make(count):
        return shard(normal(generator, 1, seqlen, count, 128).to(device, torch.bfloat16), 1)

    q, k, v, dout = (make(count).requires_grad_() for count in (heads[0], heads[1], heads[1], heads[0]))
    called = []
    for name in kernels:
        launch = getattr(fa3.activation._Call, name)
        counted = lambda *x, launch=launch, name=name, **y: (called.append(name), launch(*x, **y))[1]
        setattr(fa3.activation._Call, name, counted)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with fa3.activate(), context_parallel(mesh, buffers=[torch.zeros(256, device=device)], buffer_seq_dims=[0]):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=heads[0] != heads[1]).transpose(1, 2)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert set(called) == set(kernels)
    own = attention(q, k, v, causal=True)
    for x, right in zip((out, *gradients), (own, *torch.autograd.grad(own, (q, k, v), dout))):
        assert (x - right).abs().max() <= 2**-5 * right.abs().max()


@pytest.mark.hopper
@needs_two_gpus
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_torchs_own_context_parallelism_runs_on_our_kernels(heads):
    ranks.run(torchs_own, 2, heads, ["launch", "launch_backward"], device="cuda")
