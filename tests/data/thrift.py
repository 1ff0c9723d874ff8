"""Thrift's compact protocol as a tree that can be changed and written again: Parquet's footer and
page headers.

A node is [type, value]. The value of a struct is a list of [field id, node]; of a list [item type,
nodes, size written].
"""

from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
INTEGERS = (I16, I32, I64)
Node = list[Any]


def decode(content, at=0):
    """The struct that begins at byte `at`, and where it ends."""
    return _decode(content, at, STRUCT)


def encode(node):
    kind, value = node
    if kind == STRUCT:
        return _encode_struct(value)
    if kind in (LIST, SET):
        item, nodes, size = value
        size = len(nodes) if size is None else size
        head = bytes([size << 4 | item]) if 0 <= size < 15 else bytes([0xF0 | item]) + _varint(size)
        return head + b"".join(_encode_item(node) for node in nodes)
    if kind == BINARY:
        return _varint(len(value)) + value
    if kind in INTEGERS:
        return _varint((value << 1) ^ (value >> 63))
    assert kind in (TRUE, FALSE, BYTE, DOUBLE)
    return b"" if kind in (TRUE, FALSE) else value


def field(struct, number):
    """Return the value of a field; None where it is absent."""
    return next((node[1] for found, node in struct[1] if found == number), None)


def _decode(content, at, kind):
    if kind == STRUCT:
        fields, last = [], 0
        while True:
            head, at = content[at], at + 1
            if not head:
                return [STRUCT, fields], at
            step, inner = head >> 4, head & 15
            if step:
                last += step
            else:
                number, at = _read_varint(content, at)
                last = (number >> 1) ^ -(number & 1)
            node, at = _decode(content, at, inner)
            fields.append([last, node])
    if kind in (LIST, SET):
        size, item = content[at] >> 4, content[at] & 15
        at += 1
        if size == 15:
            size, at = _read_varint(content, at)
        nodes = []
        for _ in range(size):
            if item in (TRUE, FALSE):
                node, at = [content[at], None], at + 1
            else:
                node, at = _decode(content, at, item)
            nodes.append(node)
        return [kind, [item, nodes, None]], at
    if kind == BINARY:
        size, at = _read_varint(content, at)
        return [kind, content[at : at + size]], at + size
    if kind in INTEGERS:
        number, at = _read_varint(content, at)
        return [kind, (number >> 1) ^ -(number & 1)], at
    size = {TRUE: 0, FALSE: 0, BYTE: 1, DOUBLE: 8}[kind]
    return [kind, content[at : at + size]], at + size


def _encode_struct(fields):
    parts, last = [], 0
    for number, node in fields:
        step = number - last
        if 0 < step < 16:
            parts.append(bytes([step << 4 | node[0]]))
        else:
            parts.append(bytes([node[0]]) + _varint((number << 1) ^ (number >> 63)))
        parts.append(encode(node))
        last = number
    return b"".join(parts) + b"\0"


def _encode_item(node):
    return bytes([node[0]]) if node[0] in (TRUE, FALSE) else encode(node)


def _varint(number):
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _read_varint(content, at):
    number = shift = 0
    while True:
        byte = content[at]
        at, number = at + 1, number | (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
