"""Times of implementations, and errors of some rows of their O against float64."""

import dataclasses
import math

import torch

import distributions
import implementations
import settings
import timing


# A relative error that rounding to 16 bits never makes.
WRONG = 1e-2


@dataclasses.dataclass
class Measured:
    """The measurements of a cell, by the name of the implementation."""

    # Milliseconds of a call.
    ms: dict[str, float]
    # Root mean square errors of O.
    rmse: dict[str, float]
    # The root mean square of O.
    size: float

    def relative(self):
        """The errors relative to O, by implementation."""
        return {name: rmse / self.size for name, rmse in self.rmse.items()}

    def wrong(self, bounds=None):
        """The relative errors that are too large, or NaN, by implementation.

        `bounds` are by implementation. One without a bound is not judged. By default all bounds are WRONG.
        """
        bounds = dict.fromkeys(self.rmse, WRONG) if bounds is None else bounds
        judged = {name: error for name, error in self.relative().items() if name in bounds}
        return {name: error for name, error in judged.items() if not error < bounds[name]}

    def print_wrong(self, bounds=None):
        """Prints the errors that are too large, or NaN. Returns whether there are none."""
        wrong = self.wrong(bounds)
        for name, error in wrong.items():
            print(f"WRONG: {name} has a relative error of {error:.3g}", flush=True)
        return not wrong


def measure(functions, kind, cell, dtype, rounds, slice_ms):
    """Measures implementations on a kind of data."""
    q, k, v = distributions.draw(kind, cell.shape, settings.DTYPES[dtype])
    bound = implementations.bind(functions, q, k, v, cell.causal)
    rmse, size = errors(bound, q, k, v, cell.causal)
    return Measured(timing.in_turns(bound, rounds, slice_ms), rmse, size)


def errors(functions, q, k, v, causal):
    """The root mean square errors on some rows of O by implementation, and the root mean square of the right rows.
    `functions` return O.
    """
    rows = sampled_rows(q.shape[1])
    expected = exact(q, k, v, causal, rows)
    rmse = {name: _root_mean_square(run()[:, rows] - expected) for name, run in functions.items()}
    return rmse, _root_mean_square(expected)


def sampled_rows(seqlen):
    """Rows at both ends, at the edges of tiles, and between them."""
    rows = {0, 1, 63, 64, 200, seqlen // 3, seqlen // 2, seqlen - 65, seqlen - 2, seqlen - 1}
    return sorted(row for row in rows if 0 <= row < seqlen)


def exact(q, k, v, causal, rows):
    """These rows of O in float64, (batch, rows, heads, head_dim)."""
    k, v = k.double(), v.double()
    out = []
    for row in rows:
        scores = torch.einsum("bhd,bkhd->bhk", q[:, row].double(), k) / math.sqrt(q.shape[-1])
        if causal:
            scores[..., row + 1 :] = -math.inf
        out.append(torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), v))
    return torch.stack(out, 1)


def _root_mean_square(x):
    return x.double().square().mean().sqrt().item()
