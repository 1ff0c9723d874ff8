"""Sums of gradients in 8 bits: whole numbers with a scale for each block of 256 elements.

A block is a record of 257 bytes: its scale 2^(s - 127) as the byte s, and a number from -127 to 127
for each element, in the order in which the elements lie in the parameter's memory. A parameter's
last block is padded with zeros, so blocks depend neither on workers nor on buckets.

Q chooses the least scale for which all numbers fit, and rounds at random: x / scale is rounded up
with the probability of its fraction, so that Q(x) is x on average. (QSGD, Alistarh et al. 2017,
rounds so, with the norm of a block as its scale.) Rounding to the nearest would lose all gradients
that stay small beside the largest of their block.

- The scale is a power of two. So numbers are converted without an error, and what was rounded
  stays as it is when it is rounded again, whatever is drawn. The zeros that travel for an absent
  gradient therefore change nothing.
- What is drawn is a function of the step's seed, the node and the element. It does not matter who
  adds a node, where, in which order, or how often.
- A block with an element that is not finite, or that is within 1 % of the largest fp32 number, has
  the byte 255, which is read as an infinite scale: none of its elements is finite from then on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from elastic_dp.distributed.gradient_rounding import GradientRounding
from elastic_dp.distributed.gradient_units import in_memory_order
from elastic_dp.distributed.reduction_tree import Node

BLOCK = 256
RECORD = 1 + BLOCK
_LARGEST_NUMBER = 127
_LARGEST_SCALE = 248  # 2^121; 127 times the next is not finite
_NOT_FINITE = 255  # the exponent of infinity
_PIECE_BLOCKS = 512  # which are converted and added while they are in the cache


class Int8Rounding(GradientRounding):
    """For fp32."""

    dtype, block, record = torch.uint8, BLOCK, RECORD

    def __init__(self) -> None:
        self._seed = 0

    def begin(self, seed: int) -> None:
        self._seed = seed

    def write(
        self,
        gradients: Sequence[torch.Tensor],
        node: Node,
        firsts: Sequence[int],
        outs: Sequence[torch.Tensor],
    ) -> None:
        for gradient, first, out in zip(gradients, firsts, outs, strict=True):
            if gradient.dtype == self.dtype:
                out.copy_(gradient)
            else:
                self._write_one(gradient, node, first, out)

    def _write_one(self, gradient: torch.Tensor, node: Node, first: int, out: torch.Tensor) -> None:
        flat = in_memory_order(gradient)
        blocks = len(out) // RECORD
        key, records = self._key(node), _records(out)
        for at in range(0, blocks, _PIECE_BLOCKS):
            values = flat[at * BLOCK : (at + _PIECE_BLOCKS) * BLOCK]
            if padding := -len(values) % BLOCK:
                values = torch.nn.functional.pad(values, (0, padding))
            _write(values.view(-1, BLOCK), records[at : at + _PIECE_BLOCKS], key, first + at)

    def add(
        self, one: torch.Tensor, other: torch.Tensor, node: Node, first: int, out: torch.Tensor
    ) -> torch.Tensor:
        key = self._key(node)
        pieces = (_records(sums).split(_PIECE_BLOCKS) for sums in (one, other, out))
        for number, (left, right, records) in enumerate(zip(*pieces, strict=True)):
            values = _read(left).add_(_read(right))
            _write(values, records, key, first + number * _PIECE_BLOCKS)
        return out

    def restore(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        values = out.split(_PIECE_BLOCKS * BLOCK)
        for records, piece in zip(_records(sums).split(_PIECE_BLOCKS), values, strict=True):
            _read(records, piece.view(len(records), BLOCK))

    def _key(self, node: Node) -> tuple[int, int]:
        """Returns two words of 32 bits, for what is drawn at a node of this step."""
        words = b"".join(part.to_bytes(8, "little") for part in (self._seed, *node))
        key = hashlib.blake2b(words, digest_size=8).digest()
        return int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "little")


def _records(sums: torch.Tensor) -> torch.Tensor:
    return sums.view(len(sums) // RECORD, RECORD)


def _read(records: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the elements, of shape (blocks, BLOCK) in fp32. `records`: (blocks, RECORD)."""
    scales = (records[:, :1].int() << 23).view(torch.float32)
    numbers = records[:, 1:].view(torch.int8)
    values = numbers.float() if out is None else out.copy_(numbers)
    return values.mul_(scales)


def _write(values: torch.Tensor, records: torch.Tensor, key: tuple[int, int], first: int) -> None:
    """Rounds elements, of shape (blocks, BLOCK) in fp32, to `records`: (blocks, RECORD)."""
    largest = values.abs().amax(1, keepdim=True)
    # The exponent of 127 (6 more than that of its scale) has a mantissa of 0x7E0000; one above that
    # needs the next scale.
    scales = ((largest.view(torch.int32) + 0x1FFFF) >> 23).sub_(6).clamp_(1, _LARGEST_SCALE)
    numbers = values * ((254 - scales) << 23).view(torch.float32)
    # From -1/2 to 1/2, both exclusive, so a whole number stays what it is.
    noise = _drawn(len(values), key, first, values.device)
    numbers.add_(noise, alpha=2.0**-16).round_()
    is_finite = largest <= _LARGEST_NUMBER * 2.0 ** (_LARGEST_SCALE - 127)
    records[:, :1] = scales.masked_fill_(is_finite.logical_not_(), _NOT_FINITE)
    records[:, 1:].view(torch.int8).copy_(numbers)


def _drawn(blocks: int, key: tuple[int, int], first: int, device: torch.device) -> torch.Tensor:
    """Returns an odd number of 16 bits for each element, of shape (blocks, BLOCK) in fp32. Two
    elements share a counter. It is mixed as MurmurHash3 does last, in which every bit of the input
    affects every bit of the output."""
    x = torch.arange(blocks * (BLOCK // 2), dtype=torch.int32, device=device)
    x.add_(_signed(first * (BLOCK // 2) + key[0]))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    x.add_(_signed(key[1]))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_or_(0x00010001)
    return x.view(torch.int16).view(blocks, BLOCK).float()


def _signed(word: int) -> int:
    """Returns the int32 of the same 32 bits."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
