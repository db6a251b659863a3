"""Q, K and V on which attention is measured, from N(0, 1) to the activations of a real model.

The speed of the forward pass depends on its data in two ways. Its lazy softmax does more work where scores grow along a
row; and the bits of the data decide how much power matrix products take, by which boards throttle.

Each distribution is a function of a shape (batch, seqlen, heads, head_dim) and a generator. It returns Q, K
and V in float32. A score is q · k / sqrt(head_dim), in natural units. `draw` rounds the tensors to the type
that is measured. The same seed gives the same tensors on the same kind of device; CPU and GPU draw different
numbers.
"""

import json
import math
import pathlib

import torch

REAL_DATA = pathlib.Path(__file__).parent.parent / "data" / "minilm_layer5.safetensors"

# The standard deviation of `hot`'s scores.
HOT_DEVIATION = 3.0
# `shrink`: how far scores fall from one block of keys to the next, and the number of keys in a block.
SHRINK_STEP, SHRINK_KEYS = 4.0, 64
# `spike`: how far a key's scores stand out, and the number of keys for each such key.
SPIKE_HEIGHT, SPIKE_KEYS = 12.0, 500
# `recency`: the standard deviations of the vector that all queries and keys of a head share, and of their own part.
RECENCY_SHARED, RECENCY_OWN = 1.5, 0.6
# Base of the rotary embedding's frequencies.
RECENCY_BASE = 1e4
# `outlier`: the number of entries for each outlier, and the standard deviation of outliers.
OUTLIER_ENTRIES, OUTLIER_DEVIATION = 1000, 10.0
# `real`: the standard deviation of the noise on copies of one activation, relative to the activation.
REAL_NOISE = 0.05


def normal(shape, generator):
    """Draws Q, K and V from N(0, 1), as the paper's benchmark does: scores are about N(0, 1)."""
    return [_randn(shape, generator) for _ in "qkv"]


def hot(shape, generator):
    """Draws Q from N(0, 9), and K and V from N(0, 1): scores have a standard deviation of 3, so that few keys count."""
    q, k, v = normal(shape, generator)
    return [q * HOT_DEVIATION, k, v]


def shrink(shape, generator):
    """Draws from N(0, 1). Scores fall by 4 from each 64 keys to the next: the first keys have all the weight."""
    keys = torch.arange(shape[1], device=generator.device)
    return _with_bias(normal(shape, generator), -SHRINK_STEP * (keys // SHRINK_KEYS))


def spike(shape, generator):
    """Draws from N(0, 1). One key in 500 has scores that are 12 higher, so that row maxima jump within a row."""
    keys = torch.arange(shape[1], device=generator.device)
    stands_out = keys % SPIKE_KEYS == SPIKE_KEYS // 2
    return _with_bias(normal(shape, generator), SPIKE_HEIGHT * stands_out)


def recency(shape, generator):
    """Draws Q and K whose scores fall with the distance between query and key, as with rotary embedding. Each query and
    key is the sum of its head's shared vector from N(0, 2.25) and of its own vector from N(0, 0.36), rotated by its
    position. At distance 0 the mean score is 2.25 · sqrt(head_dim).
    """
    _, seqlen, heads, head_dim = shape
    q, k, v = normal(shape, generator)
    shared = RECENCY_SHARED * _randn((heads, head_dim), generator)
    pairs = head_dim // 2
    frequencies = RECENCY_BASE ** (-torch.arange(pairs, device=generator.device) / pairs)
    angles = torch.arange(seqlen, device=generator.device)[:, None] * frequencies
    return [_rotated(RECENCY_OWN * q + shared, angles), _rotated(RECENCY_OWN * k + shared, angles), v]


def outlier(shape, generator):
    """Draws from N(0, 1) + N(0, 100) · Bernoulli(0.001), as in the paper's Table 3."""

    def one():
        rare = torch.rand(shape, device=generator.device, generator=generator) < 1 / OUTLIER_ENTRIES
        return _randn(shape, generator) + OUTLIER_DEVIATION * _randn(shape, generator) * rare

    return [one() for _ in "qkv"]


def real(shape, generator):
    """Activations of all-MiniLM-L6-v2 (data/README.md), tiled to a shape.

    The model's text of 512 tokens is repeated along the sequence, its three heads along the heads, and its 32
    channels along the head dimension. Each copy of a number is multiplied by its own N(1, 0.0025), so that no
    two tokens are equal. Q and K are multiplied by (32 / head_dim)^(1/4), so that scores are the model's own.

    Of the model's scores the mean is -1.08, the standard deviation 1.52 and the maximum 6.99, and a row's
    maximum is 4.8 above its mean. At (1, 4096, 8, 128), with seed 1 and in bf16, they are -1.08, 1.50, 7.19
    and 4.8.
    """
    head_dim = shape[3]
    tensors = _safetensors(REAL_DATA)
    q, k, v = (tensors[name].to(generator.device).float() for name in "qkv")
    _, _, _, channels = q.shape
    if head_dim % channels:
        raise ValueError(f"real activations have heads of {channels} channels, which do not fill {head_dim}")
    scale = (channels / head_dim) ** 0.25
    q, k, v = (_tiled(x, shape) * (1 + REAL_NOISE * _randn(shape, generator)) for x in (q, k, v))
    return [scale * q, scale * k, v]


KINDS = {kind.__name__: kind for kind in (normal, hot, shrink, spike, recency, outlier, real)}


def draw(kind, shape, dtype, device="cuda", seed=1):
    """Q, K and V of a kind, in float32 and then rounded to `dtype`."""
    generator = torch.Generator(device).manual_seed(seed)
    return [x.to(dtype) for x in KINDS[kind](shape, generator)]


def _randn(shape, generator):
    return torch.randn(shape, device=generator.device, generator=generator)


def _with_bias(qkv, bias):
    """Adds `bias`, a number for each key, to the scores of that key. The last channel of Q and K is used for it."""
    q, k, v = qkv
    q[..., -1] = 1.0
    k[..., -1] = (bias * math.sqrt(k.shape[-1]))[:, None]
    return [q, k, v]


def _rotated(x, angles):
    """Each row of x rotated by its position's angles, which are of shape (seqlen, head_dim / 2)."""
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _tiled(x, shape):
    """x repeated along each dimension until it has the shape."""
    for dimension, size in enumerate(shape):
        indices = torch.arange(size, device=x.device) % x.shape[dimension]
        x = x.index_select(dimension, indices)
    return x


def _safetensors(path):
    """The half-precision tensors of a safetensors file, which has the header's length, the header, and the bytes."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F16":
            begin, end = (start + offset for offset in entry["data_offsets"])
            numbers = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float16)
            tensors[name] = numbers.reshape(entry["shape"])
    return tensors
