"""Tensors that the extension module reads by DLPack's C exchange count as if their attributes were read one by one, as
a subclass's attributes are.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from fa3 import _fa3

BF16, OPERATION = torch.bfloat16, _fa3.Operation("forward")


class Subclass(torch.Tensor):
    """A tensor whose attributes may be its own."""


def outcome(q, k, v, subclass):
    """O, or the error."""
    o = torch.full((2, 3, 4, 8), float("nan"), dtype=BF16)
    tensors = {name: x.as_subclass(Subclass) if subclass else x for name, x in (("q", q), ("k", k), ("v", v))}
    try:
        _fa3.run(OPERATION, -1, 0, tensors | {"o": o}, None)
    except Exception as error:
        return type(error), str(error)
    return o.view(torch.int16).tolist()


def rows(dtype=BF16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 4, 8, generator=generator).to(dtype)


CHANGES = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every second column": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "a slice": lambda x: torch.cat([x, x], dim=1)[:, 1:4],
    "one column": lambda x: x[..., :1],
    "no rows": lambda x: x[:, :0],
    "three dimensions": lambda x: x[0],
    "six dimensions": lambda x: x[None, None],
    "float32": lambda x: x.float(),
    "float64": lambda x: x.double(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "negated": lambda x: torch.view_as_complex(torch.stack([x.float()] * 2, dim=-1)).conj().imag,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_tensor_is_read_as_by_its_attributes(change):
    x = rows()
    changed = CHANGES[change](x)
    for given in ((changed, x, x), (x, changed, x), (x, x, changed)):
        assert outcome(*given, subclass=False) == outcome(*given, subclass=True)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="skipped: torch is older than 2.10")
def test_no_attribute_is_read(monkeypatch):
    asked = []
    for name in ("data_ptr", "stride", "get_device"):
        monkeypatch.setattr(torch.Tensor, name, lambda x, name=name: asked.append(name))
    o = torch.empty(2, 3, 4, 8, dtype=BF16)
    _fa3.run(OPERATION, -1, 0, dict(q=rows(), k=rows(), v=rows(), o=o), None)
    assert not asked
