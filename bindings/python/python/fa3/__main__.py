"""`python3 -m fa3`: what this machine has, and where attention runs. All that it says runs has run.

The exit code is 0, even if only the CPU can be used, or 1 if a result is wrong.
"""

import sys

import torch

from . import __version__, flash_attn_func


def attempt(device: str) -> float | str:
    """The largest error of a small attention in bfloat16 beside float64, or the reason why it does not run."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 100, 4, 64, generator=generator).bfloat16() for _ in "qkv")
    try:
        computed = flash_attn_func(q.to(device), k.to(device), v.to(device)).double().cpu()
    except RuntimeError as error:
        return str(error)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    return (computed - torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())).abs().max().item()


def main() -> int:
    print(f"fa3 {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if not torch.cuda.is_available():
        print("no GPU that torch can use")
    right = True
    for device in ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]:
        name = "the CPU" if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"
        found = attempt(device)
        if isinstance(found, float):
            right &= found < 1e-2
            found = f"runs, largest error {found:.0e}" if found < 1e-2 else f"is wrong: largest error {found:.0e}"
        print(f"attention on {name}: {found}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
