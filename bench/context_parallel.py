"""Context parallelism over the GPUs of a machine, compared with one GPU: one process for each GPU, in turns.

    python3 bench/context_parallel.py
    python3 bench/context_parallel.py --seqlens 32768 65536 --heads 16:16 --passes forward
    python3 bench/context_parallel.py --documents zipf --seqlens 65536
    python3 bench/context_parallel.py --window 4096 --seqlens 262144
    python3 bench/context_parallel.py --torch --no-check

Ours is the installed Python package fa3. In each round every GPU computes the whole sequence alone, and then all GPUs
compute it together. The efficiency is the mean time of one GPU alone, divided by the number of GPUs and by the time of
the slowest GPU when all compute together. The last column says whether O and LSE have the same bits as on one GPU. With
--torch, torch's own context parallelism computes the same rows on our kernels, under `fa3.activate()`.
"""

import argparse
import datetime
import functools
import itertools
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional

# The relative lengths of documents.
DOCUMENTS = {"zipf": [1 / i for i in range(1, 33)], "equal": 32 * [1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[32768, 65536, 131072, 262144])
    parser.add_argument("--heads", nargs="+", default=["32:8", "16:16"], help="query heads and heads of K and V")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--passes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--window", type=int, help="how many keys before its own a query sees; all, by default")
    parser.add_argument("--no-mask", action="store_true", help="queries see all keys")
    parser.add_argument("--documents", choices=DOCUMENTS, help="the sequence is packed documents of such lengths")
    parser.add_argument("--method", choices=["all_gather", "ulysses"])
    parser.add_argument("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    parser.add_argument("--sm-margin", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice-ms", type=float, default=60.0)
    parser.add_argument("--torch", action="store_true", help="torch's own context parallelism as well, causal")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    options = parser.parse_args()
    if options.gpus < 2:
        sys.exit(f"skipped: there are {options.gpus} GPUs, expected at least 2")
    if options.torch and (options.documents or options.window or options.no_mask):
        parser.error("--torch is for whole sequences under a causal mask")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    mp.spawn(rank_main, (options,), nprocs=options.gpus)


def rank_main(rank, options):
    """Runs the process of one GPU."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.gpus, timeout=datetime.timedelta(minutes=3))
    if rank == 0:
        print(f"{options.gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}: ms, and efficiency")
        columns = f"{'heads':>7} {'seqlen':>7} {'pass':>8} {'alone':>16} {'together':>9} {'efficiency':>10}"
        print(columns + options.torch * f" {'torch':>9} {'efficiency':>10}" + "  bits")
    for heads, seqlen, which in itertools.product(options.heads, options.seqlens, options.passes):
        measure(options, *map(int, heads.split(":")), seqlen, which)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(options, heads_q, heads_kv, seqlen, which):
    """Measures a cell."""
    from fa3 import flash_attn_func, flash_attn_varlen_func
    from fa3.distributed import attention, attention_varlen, shard

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(0)
    ends, batch = None, [1]
    if options.documents:
        parts = DOCUMENTS[options.documents]
        lengths = [max(1, int(seqlen * part / sum(parts))) for part in parts]
        lengths[0] += seqlen - sum(lengths)
        ends, batch = [0, *itertools.accumulate(lengths)], []

    def normal(heads):
        shape = *batch, seqlen, heads, options.head_dim
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    whole = [normal(heads) for heads in (heads_q, heads_kv, heads_kv)]
    dout = normal(heads_q)
    local = [shard(x, len(batch), layout=options.layout, cu_seqlens=ends) for x in (*whole, dout)]
    *local, local_dout = local
    for x in (*whole, *local):
        x.requires_grad_(which == "both")
    mask = dict(causal=not options.no_mask, window_size=(options.window or -1, -1))
    of_group = dict(method=options.method, layout=options.layout, sm_margin=options.sm_margin)

    def alone():
        if ends is None:
            return flash_attn_func(*whole, return_attn_probs=True, **mask)
        return flash_attn_varlen_func(*whole, cu, cu, max(lengths), max(lengths), return_attn_probs=True, **mask)

    def together():
        if ends is None:
            return attention(*local, return_lse=True, **of_group, **mask)
        return attention_varlen(*local, ends, return_lse=True, **of_group, **mask)

    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    functions = {"alone": (alone, whole, dout), "together": (together, local, local_dout)}
    if options.torch:
        functions["torch"] = torchs(local), local, local_dout

    def step(name):
        function, inputs, gradient = functions[name]
        out, _ = function()
        if which == "both":
            torch.autograd.grad(out, inputs, gradient)

    bits = ""
    if not options.no_check:
        rows = len(batch)
        out, lse = (x.detach() for x in alone())
        its = [shard(out, rows, layout=options.layout, cu_seqlens=ends)]
        its.append(shard(lse, lse.dim() - 1, layout=options.layout, cu_seqlens=ends))
        found = [x.detach() for x in together()]
        same = torch.tensor(all(map(torch.equal, its, found)), device="cuda", dtype=torch.int32)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        bits = "same" if same.item() else "differ"
        del out, lse, its, found
    times = {name: [] for name in functions}
    calls = {}
    for name in functions:
        step(name)
        dist.barrier()
        took = torch.tensor(timed(lambda: step(name), 1), device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        calls[name] = max(1, round(options.slice_ms / took.item()))
    for _ in range(options.rounds):
        for name in functions:
            dist.barrier()
            torch.cuda.synchronize()
            times[name].append(timed(lambda: step(name), calls[name]))
    medians = torch.tensor([statistics.median(times[name]) for name in functions], device="cuda")
    of_ranks = [torch.empty_like(medians) for _ in range(world)]
    dist.all_gather(of_ranks, medians)
    if rank == 0:
        one = [x[0].item() for x in of_ranks]
        ideal = statistics.fmean(one) / world
        slowest = [max(x[number].item() for x in of_ranks) for number in range(1, len(functions))]
        alone_ms = " ".join(f"{x:.3f}" for x in one)
        cell = f"{heads_q}:{heads_kv:>4} {seqlen:7} {which:>8} {alone_ms:>16}"
        print(cell, " ".join(f"{x:9.3f} {ideal / x:10.3f}" for x in slowest), f" {bits}", flush=True)


@functools.cache
def parallel_in_torch():
    """Makes torch's `scaled_dot_product_attention` compute context parallelism on our kernels, from now on."""
    import fa3
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    fa3.activate()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    # context_parallel requires a tensor to shard.
    context = context_parallel(mesh, buffers=[torch.zeros(256, device="cuda")], buffer_seq_dims=[0])
    context.__enter__()
    return context


def torchs(local):
    """Makes a call of torch's own context parallelism over these rows."""
    parallel_in_torch()

    def call():
        q, k, v = (x.transpose(1, 2) for x in local)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2), None

    return call


def timed(function, calls):
    """Milliseconds of a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


if __name__ == "__main__":
    main()
