"""A small GPT that takes any attention function."""

import dataclasses

from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model. `context` is the largest number of tokens of a sequence."""

    blocks: int
    heads: int
    head_dim: int
    context: int
    vocabulary: int = 256

    @property
    def width(self):
        """The number of columns of all heads together."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Self-attention and then an MLP. Each takes the normalised input, and its result is added to the input.
    `attention` is a function of Q, K and V (batch, seqlen, heads, head_dim).
    """

    def __init__(self, sizes, attention):
        super().__init__()
        self.heads, self.attention, width = (sizes.heads, sizes.head_dim), attention, sizes.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        first, second = self.norms
        q, k, v = self.qkv(first(x)).unflatten(-1, (3, *self.heads)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(second(x))


class Gpt(nn.Module):
    """Returns the logits of all next tokens, or only of the last one. The head shares the token embedding's weights."""

    def __init__(self, sizes, attention):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(sizes, attention) for _ in range(sizes.blocks)))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens, only_last=False):
        x = self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return functional.linear(self.norm(x[:, -1:] if only_last else x), self.tokens.weight)
