"""What a state_dict holds comes back in every bit and type; the rest is refused by its path."""

import enum
import json
import math
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from elastic_dp.checkpoint.decoding import decode
from elastic_dp.checkpoint.encoding import encode, types_in
from elastic_dp.errors import CheckpointError, StateError
from tests.checkpoint.states import same, train_state

Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    on = "on"


class Flags(enum.Flag):
    a = 1
    b = 2


class Number(enum.IntEnum):
    one = 1


@dataclass(frozen=True)
class Part:
    at: Point
    weights: torch.Tensor

    def __post_init__(self):
        assert type(self.at) is Point  # so that a constructor that runs at load would show


def there_and_back(tree, **how):
    encoded, tensors = encode(tree)
    text = json.dumps(encoded, allow_nan=False)
    return decode(json.loads(text), [named.tensor.clone() for named in tensors], **how)


DTYPES = [
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
]
TREE = {
    "int keys": {
        1: "a",
        -2: ["b"],
        (1, "x"): None,
        None: True,
        1.5: b"",
        Mode.on: 0,
        frozenset({1}): 1,
    },
    "words": {"$": 1, "": 2, "a.b": 3, "\udc80": "\0é"},
    "numbers": [0, -1, 2**200, -(2**63), 0.1, -0.0, 1e308, 5e-324, complex(-0.0, math.nan)],
    "odd": [math.inf, -math.inf, math.nan, -math.nan],
    "bytes": [b"", b"\0\xff", bytearray(b"x"), bytes(range(256)) * 8, bytearray(5000)],
    "sets": [set(), {1, "1", None}, frozenset({(1, 2)}), {"b", "a"}],
    "tuples": [(), (1,), (1, (2, [3])), Point(1, (2,)), torch.Size([2, 3]), range(2, 9, 3)],
    "dicts": [
        OrderedDict(b=1, a=2),
        Counter({30: 1}),
        defaultdict(list, {1: [2]}),
        defaultdict(None),
    ],
    "more": [deque([1, 2], maxlen=3), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
    "enums": [Mode.on, Flags.a | Flags.b, Flags(0), Number.one],
    "tensors": {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES},
    "shapes": [
        torch.tensor(1.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.randn(4, 4).t(),
        torch.ones(1).expand(4),
    ],
    "scalars": [
        np.float64(0.1),
        np.float32("nan"),
        np.int8(-1),
        np.bool_(True),
        np.str_("é"),
        np.datetime64("2026-01-01"),
    ],
    "arrays": [
        np.arange(6).reshape(2, 3).T,
        np.array(3.0),
        np.zeros((0, 3)),
        np.arange(4, dtype=">i4"),
        np.array([("a", 1)], dtype=[("n", "U3"), ("v", "<f8", (2,))]),
        np.array(["x", "yy"]),
        np.zeros(2000, "f4"),
        np.zeros(400, ">f8"),
        np.ones(500, np.longdouble),
    ],
    "record": Part(Point(0, 1), torch.arange(3)),
}


def test_every_kind_of_value_comes_back():
    back = there_and_back(TREE)
    for key, value in TREE.items():
        assert same(value, back[key]), key
    assert list(map(type, back["tuples"])) == list(map(type, TREE["tuples"]))
    assert list(back["dicts"][0]) == ["b", "a"] and back["more"][0].maxlen == 3


def test_a_state_as_training_has_it():
    tree = train_state().tree([{"eval_loss": 1.0}], "max_steps")
    assert same(there_and_back(tree), tree)
    modules = torch.nn.Linear(2, 2).state_dict()
    assert there_and_back(modules)._metadata == modules._metadata


keys = st.one_of(
    st.text(max_size=3), st.integers(), st.none(), st.booleans(), st.tuples(st.integers())
)
leaves = st.one_of(
    *(keys, st.floats(), st.binary(max_size=5), st.complex_numbers(), st.just(np.float32(2))),
    st_numpy.arrays(st_numpy.scalar_dtypes(), st_numpy.array_shapes(min_dims=0, max_side=3)),
    st.builds(torch.randn, st.integers(0, 4), st.integers(0, 4)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(deque, st.lists(inner, max_size=2)),
        st.sets(keys, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(trees)
def test_any_tree_comes_back(tree):
    assert same(there_and_back(tree), tree)


def test_equal_sets_have_one_text():
    assert encode({"a", "b", "c", 3})[0] == encode({3, "c", "b", "a"})[0]


def test_tied_tensors_are_stored_once():
    weight = torch.randn(3)
    encoded, tensors = encode(
        {"a": weight, "b": [weight], "c": weight[:2], "d": torch.empty(0), "e": torch.empty(0)}
    )
    assert [name for name, _ in tensors] == ["a", "c", "d", "e"]
    back = decode(encoded, [tensor for _, tensor in tensors])
    assert back["a"] is back["b"][0]


def test_names_are_unique():
    _, tensors = encode(
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, 3: torch.ones(1), "3": torch.ones(1)}
    )
    names = [name for name, _ in tensors]
    assert len(set(names)) == 4 and names[0] == "a.b"


def loop():
    made = []
    made.append({"again": made})
    return made


class Subclass(torch.Tensor):
    pass


REFUSED = [
    (lambda: len, "builtins.builtin_function_or_method"),
    (lambda: threading.Lock(), "lock"),
    (lambda: type("Mine", (dict,), {})(), "Mine"),
    (lambda: np.array([object()]), "Python objects"),
    (lambda: torch.empty(3, device="meta"), "meta device"),
    (lambda: torch.eye(3).to_sparse(), "dense"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "dense"),
    (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
    (lambda: defaultdict(lambda: 3), "defaultdict"),
    (loop, "a container that holds itself"),
    (lambda: Part, "type"),
    (lambda: {object(): 1}, "object"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_encode_of_a_value_that_cannot_be_stored_names_its_path(make, words):
    with pytest.raises(StateError, match=words) as caught:
        encode({"body": {"user": {"ema": [0, {"inner": make()}]}}})
    assert caught.value.path.startswith("body.user.ema.1.inner")


def test_types_of_a_script_are_taken_from_the_state_that_is_there():
    @dataclass
    class Local:
        value: int

    with pytest.raises(CheckpointError, match="Local of tests"):
        there_and_back([Local(3)])
    known = types_in({"x": [Local(1), Mode.on, Point(1, 2)]})
    assert there_and_back([Local(3)], types=known) == [Local(3)]
    assert set(known.values()) == {Local, Mode, Point}


def test_plain_values_need_none_of_the_types():
    plain = there_and_back(
        [Part(Point(1, 2), torch.ones(1)), Mode.on, np.int8(3), deque([1])], plain=True
    )
    assert plain == [{"at": (1, 2), "weights": torch.ones(1)}, "on", 3, [1]]
    array = there_and_back(np.arange(3), plain=True)
    assert isinstance(array, torch.Tensor) and array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "nowhere:Thing", "builtins:dict"]
)
@pytest.mark.parametrize("kind", ["dataclass", "named", "enum"])
def test_a_file_names_no_code_to_run(kind, name):
    value = {"dataclass": {"args": 1}, "named": [1], "enum": 1}[kind]
    with pytest.raises(CheckpointError, match="not defined here"):
        decode({"$": kind, "type": name, "v": value, "member": "x"}, [])
