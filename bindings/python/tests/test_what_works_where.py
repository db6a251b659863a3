"""docs/what-works-where.md: each call on the page raises the error that the page names. Needs torch, but no GPU."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
from fa3 import flash_attn_interface

PAGE = Path(__file__).parents[3] / "docs" / "what-works-where.md"
I32, BF16, E4M3 = torch.int32, torch.bfloat16, torch.float8_e4m3fn


def calls(device):
    """(call, the error that it raises) for each row of the page's table for a device."""
    _, _, table = PAGE.read_text().partition(f"<!-- calls: {device} -->\n")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [re.match(r"\| `(.*)` \| `(.*)`.* \|$", row).groups() for row in rows]


def names(device):
    """The values of the names that the page's calls use."""

    def t(*shape, dtype=BF16):
        return torch.zeros(*shape, device=device).to(dtype)

    q, kv = t(2, 16, 4, 64), t(2, 16, 2, 64)
    known = {name: getattr(fa3, name) for name in fa3.__all__} | vars(flash_attn_interface)
    return known | dict(
        torch=torch,
        fa3=fa3,
        t=t,
        q=q,
        k=kv,
        v=kv,
        x=q.clone().requires_grad_(),
        q8=q.to(E4M3),
        k8=kv.to(E4M3),
        v8=kv.to(E4M3),
        qv=q,
        lse=torch.zeros(2, 4, 16, device=device),
        rows=t(32, 4, 64),
        keys=t(32, 2, 64),
        ends=torch.tensor([0, 10, 32], dtype=I32, device=device),
        pages=t(4, 16, 2, 64),
        table=torch.zeros(2, 2, dtype=I32, device=device),
        lengths=torch.ones(2, dtype=I32, device=device),
        new=t(2, 1, 2, 64),
    )


def raised(call, device):
    try:
        eval(call, names(device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check(call, expected, device):
    found = raised(call, device)
    assert found.startswith(expected[:-3]) if expected.endswith("...") else found == expected


@pytest.mark.parametrize("call, expected", calls("cpu"), ids=lambda x: x[:50])
def test_calls_raise_what_the_page_says(call, expected):
    check(call, expected, "cpu")


@pytest.mark.parametrize("call, expected", calls("cuda"), ids=lambda x: x[:50])
def test_calls_on_a_gpu_raise_what_the_page_says(call, expected):
    """Fake tensors are checked by the rules of an H100. The CPU accepts these calls."""
    with FakeTensorMode():
        check(call, expected, "cuda")
    assert raised(call, "cpu") == "nothing"


@pytest.mark.hopper
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_calls_raise_the_same_on_a_gpu(device):
    for call, expected in calls(device):
        check(call, expected, "cuda")


def test_the_page_has_calls():
    assert len(calls("cpu")) > 20 and len(calls("cuda")) > 5
