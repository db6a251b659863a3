"""Doors, by which other software calls attention: their results and gradients obey the error law, for each feature that
a door offers. Tests of one door alone are in the file with its name. Needs torch.
"""

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

from doors import DOORS, FEATURES

CASES = [
    pytest.param(door, FEATURES[feature], dtype, id=f"{name}-{feature}-{dtype}")
    for name, door in DOORS.items()
    for feature in door.offers
    for dtype in (torch.bfloat16, torch.float16)[: 2 if feature == "causal" else 1]
]


@pytest.mark.parametrize("door, options, dtype", CASES)
def test_results_and_gradients_are_those_of_attention(request, nan_in_new_tensors, device, door, options, dtype):
    if door.is_torchs:
        request.getfixturevalue("active")
    options = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in options.items()}
    batch = door.batch(device, dtype)
    leaves = [x.detach().requires_grad_(door.backward is True) for x in (batch.q, batch.k, batch.v)]
    out, lse = door.call(batch, leaves, **options)
    batch.judge(out.detach().contiguous(), lse.detach().contiguous(), **options)
    if not door.backward:
        return
    dout, _ = batch.given(of_lse=False)
    if door.backward is True:
        results = torch.autograd.grad(out, leaves, dout)
    else:
        results = door.backward(batch, dout, leaves, out, lse, **options)
    batch.judge_gradients([x.contiguous() for x in results], dout, **options)
