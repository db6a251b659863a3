"""fa3's CPU engine compared with torch's scaled_dot_product_attention, call by call in turns."""

import argparse
import subprocess
import time

import torch

ENGINE = "target/release/examples/cpu_speed"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# Seconds between two calls. After this pause, threads that wait for work no longer spin.
PAUSE = 0.02


class Cell:
    """A problem that both fa3 and torch compute."""

    def __init__(self, direction, dtype, lens, heads, head_dim, causal):
        self.words = [direction, dtype, *lens, *heads, head_dim, "causal" if causal else "dense"]
        self.causal = causal
        shapes = [(heads[0], lens[0]), (heads[1], lens[1]), (heads[1], lens[1])]
        # Tensors are (batch, heads, rows, head_dim), but in memory (batch, rows, heads, head_dim), as the engine's.
        self.qkv = [
            (torch.rand(1, rows, n, head_dim) * 2 - 1).to(DTYPES[dtype]).transpose(1, 2)
            for n, rows in shapes
        ]
        for x in self.qkv:
            x.requires_grad_(direction == "backward")
        self.gqa = heads[0] != heads[1]
        self.best = {"fa3": float("inf"), "torch": float("inf")}

    def forward(self):
        return torch.nn.functional.scaled_dot_product_attention(*self.qkv, is_causal=self.causal, enable_gqa=self.gqa)

    def torch_ms(self):
        if self.words[0] == "forward":
            with torch.no_grad():
                return milliseconds(self.forward)
        o = self.forward()
        dout = self.qkv[0].detach()
        return milliseconds(lambda: torch.autograd.grad(o, self.qkv, dout))

    def time(self, engine):
        """Times one call of fa3 and one of torch."""
        time.sleep(PAUSE)
        print(*self.words, file=engine.stdin, flush=True)
        self.best["fa3"] = min(self.best["fa3"], float(engine.stdout.readline()))
        time.sleep(PAUSE)
        self.best["torch"] = min(self.best["torch"], self.torch_ms())

    def row(self):
        """A row of the table."""
        direction, dtype, q, k, heads, heads_kv, head_dim, mask = self.words
        heads = heads if heads == heads_kv else f"{heads}/{heads_kv}"
        fa3, other = self.best["fa3"], self.best["torch"]
        name = f"{direction} {dtype} {mask} | {q} x {k} | {heads} | {head_dim}"
        return f"| {name} | {fa3:.1f} | {other:.1f} | {fa3 / other:.2f} |"


def milliseconds(function):
    """The time of a call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def cells(dtypes):
    """Yields all problems."""
    for dtype in dtypes:
        for direction in ("forward", "backward"):
            for head_dim in (64, 128):
                for causal in (False, True):
                    yield Cell(direction, dtype, (2048, 2048), (8, 8), head_dim, causal)
        for causal in (False, True):
            yield Cell("forward", dtype, (512, 512), (8, 8), 64, causal)
        yield Cell("forward", dtype, (1, 32768), (32, 4), 128, False)


def main():
    """Prints a table with the least time of several calls for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["f32", "bf16"])
    parser.add_argument("--engine", default=ENGINE)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    environment = {"RAYON_NUM_THREADS": str(arguments.threads)}
    pipe = subprocess.PIPE
    with subprocess.Popen([arguments.engine], env=environment, stdin=pipe, stdout=pipe, text=True) as engine:
        print("| call | rows x keys | heads | head_dim | fa3 ms | torch ms | fa3 / torch |")
        print("|---|---|---|---|---|---|---|")
        for cell in cells(arguments.dtypes):
            for _ in range(arguments.rounds):
                cell.time(engine)
            print(cell.row(), flush=True)
        engine.stdin.close()


if __name__ == "__main__":
    main()
