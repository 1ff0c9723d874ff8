"""The model every benchmark here trains: a small GPT whose size is one argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    """`width` features, `depth` blocks, over `vocabulary` tokens and up to `length` positions."""

    def __init__(self, width: int, depth: int, vocabulary: int = 256, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


SMALL = {"2 blocks of width 32": (32, 2), "4 blocks of width 128": (128, 4)}
SIZES = {"0.9M": (128, 4), "4.9M": (256, 6), "25.5M": (512, 8), "0.2M": (32, 12)}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


class Text(torch.utils.data.Dataset):
    """Made-up text: row i is a function of i alone."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        return {"tokens": torch.randint(0, 256, (65,), generator=generator)}


class RandomTokens:
    """A data set made up on the spot: a pure function of (step, virtual worker). A
    `BatchSource`."""

    steps_per_epoch = 1_000_000

    def __init__(self, rows: int, length: int = 65, vocabulary: int = 256) -> None:
        self._rows, self._length, self._vocabulary = rows, length, vocabulary
        self.fingerprint = f"random {rows} {length} {vocabulary}"

    def steps_of(self, epochs: int) -> int:
        return epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return 0

    def ends_epoch(self, step: int) -> bool:
        return False

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._rows

    def batch(self, step: int, virtual_worker: int) -> Any:
        generator = torch.Generator().manual_seed(step * 1009 + virtual_worker)
        shape = (self._rows, self._length)
        return {"tokens": torch.randint(0, self._vocabulary, shape, generator=generator)}

    def describe(self, step: int, virtual_worker: int) -> str:
        return f"made-up rows of step {step}, virtual worker {virtual_worker}"

    def read_ahead(self, step: int, virtual_workers: Any) -> None:
        pass

    def masked(self, step: int, virtual_worker: int) -> int:
        return 0

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        return frozenset()

    def check_bad(self, row_groups: Iterable[int]) -> None:
        pass

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        pass

    def describe_row_group(self, row_group: int) -> str:
        return ""
