"""What a state_dict holds comes back in every bit and type; the rest is refused by its path. Data
make no object, import nothing and call nothing."""

import contextlib
import enum
import hashlib
import io
import json
import math
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import tree_of
from elastic_dp.checkpoint.codec import _DECODERS, decode, encode, from_bytes, to_bytes
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.checkpoint.layout import canonical
from elastic_dp.errors import CheckpointDamaged, CheckpointError, StateError
from tests.checkpoint.states import memory_store, same, save, train_state

Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    on = "on"


@dataclass(frozen=True)
class Part:
    weights: torch.Tensor


def there_and_back(tree, **how):
    encoded, tensors = encode(tree)
    text = json.dumps(encoded, allow_nan=False)
    return decode(json.loads(text), [named.tensor.clone() for named in tensors], **how)


DTYPES = [
    getattr(torch, name)
    for name in """bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32
    float64 complex64 complex128 float8_e4m3fn float8_e5m2""".split()  # noqa: SIM905
]
TREE = {
    "int keys": {1: "a", -2: ["b"], (1, "x"): None, None: True, 1.5: b"", frozenset({1}): 1},
    "words": {"$": 1, "": 2, "a.b": 3, "\udc80": "\0é"},
    "numbers": [0, -1, 2**200, -(2**63), 0.1, -0.0, 1e308, 5e-324, complex(-0.0, math.nan)],
    "odd": [math.inf, -math.inf, math.nan, -math.nan],
    "bytes": [b"", b"\0\xff", bytearray(b"x"), bytes(range(256)) * 8, bytearray(5000)],
    "sets": [set(), {1, "1", None}, frozenset({(1, 2)}), {"b", "a"}],
    "tuples": [(), (1,), (1, (2, [3])), torch.Size([2, 3])],
    "dicts": [
        OrderedDict(b=1, a=2),
        Counter({30: 1}),
        defaultdict(list, {1: [2]}),
        defaultdict(None),
    ],
    "more": [deque([1, 2], maxlen=3), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
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
        np.array(["x", "yy"]),
        np.zeros(2000, "f4"),
        np.zeros(400, ">f8"),
        np.ones(500, np.longdouble),
    ],
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


class Subclass(torch.Tensor):
    pass


REFUSED = [
    (lambda: len, "builtins.builtin_function_or_method"),
    (lambda: threading.Lock(), "lock"),
    (lambda: type("Mine", (dict,), {})(), "Mine"),
    (lambda: np.array([object()]), "array of objects"),
    (lambda: torch.empty(3, device="meta"), "meta device"),
    (lambda: torch.eye(3).to_sparse(), "dense"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "dense"),
    (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
    (lambda: defaultdict(lambda: 3), "defaultdict"),
    (lambda: Part(torch.ones(1)), r"dataclasses.asdict\(\)"),
    (lambda: Point(1, 2), r"_asdict\(\)"),
    (lambda: Mode.on, "store its name"),
    (lambda: np.zeros(1, [("a", "f4")]), "records"),
    (lambda: range(3), "builtins.range"),
    (lambda: Part, "type"),
    (lambda: {object(): 1}, "object"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_encode_of_a_value_that_cannot_be_stored_names_its_path(make, words):
    with pytest.raises(StateError, match=words) as caught:
        encode({"body": {"user": {"ema": [0, {"inner": make()}]}}})
    assert caught.value.path.startswith("body.user.ema.1.inner")


def test_container_that_holds_itself_is_refused():
    made = []
    made.append(made)
    with pytest.raises(StateError, match="a container that holds itself"):
        encode(made)


def test_plain_values_need_no_numpy():
    plain = there_and_back([np.int8(3), deque([1]), defaultdict(list, a=[1])], plain=True)
    assert plain == [3, [1], {"a": [1]}] and type(plain[2]) is dict
    array = there_and_back(np.arange(3), plain=True)
    assert isinstance(array, torch.Tensor) and array.tolist() == [0, 1, 2]


def test_tensor_subclass_comes_back_only_if_its_type_is_registered():
    pytest.importorskip("torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    stored = OptimState8bit.zeros(torch.Size([2, 128]))
    back = there_and_back({"x": stored})["x"]
    assert type(back) is OptimState8bit and torch.equal(back.codes, stored.codes)
    assert there_and_back(stored, plain=True)["codes"].equal(stored.codes)
    encoded, tensors = encode(stored)
    other = encoded | {"type": "torch:Tensor"}
    with pytest.raises(CheckpointError, match="is not registered: import its package"):
        decode(other, [named.tensor for named in tensors])


def test_bytes_of_a_value_are_its_own():
    assert same(from_bytes(to_bytes(TREE)), TREE)
    assert to_bytes({"a", "b"}) == to_bytes({"b", "a"}) != to_bytes({"a"})


ALLOWED = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set),
    *(frozenset, OrderedDict, Counter, defaultdict, deque, np.ndarray, np.generic, io.BytesIO),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size),
)
GADGETS = [
    {"elastic_dp": "object", "type": "tempfile:_TemporaryFileCloser", "attributes": {"delete": 1}},
    {"$": "object", "type": "tempfile:_TemporaryFileCloser", "v": {"name": "x", "delete": True}},
    {"$": "dataclass", "type": "tests.checkpoint.test_codec:Part", "v": {"weights": 1}},
    {"$": "enum", "type": "tests.checkpoint.test_codec:Mode", "v": "on", "member": "on"},
    {"$": "named", "type": "tests.checkpoint.test_codec:Point", "v": [1, 2]},
    {"$": "subclass", "type": "os:system", "v": {}, "context": ["true"], "size": [], "stride": []},
    {"$": "subclass", "type": "torch:Tensor", "v": {}, "context": [], "size": [1], "stride": [1]},
    {"$": "defaultdict", "factory": "eval", "v": []},
    {"$": "array", "v": {"dtype": "O", "shape": [1], "content": "AAAAAAAAAAA="}},
    {"$": "dtype", "v": "load"},
    {"$": "dtype", "v": "__class__"},
    {"$": ["list"], "v": 0},
    {"$": "tensor", "v": -1},
]


@contextlib.contextmanager
def nothing_runs():
    """A context in which an import, a compilation and the opening of a file are failures."""
    seen = []

    def hook(event, args):
        if events and event in ("import", "exec", "compile", "open", "os.system", "os.remove"):
            seen.append((event, args))

    events = False
    sys.addaudithook(hook)
    events = True
    try:
        yield
    finally:
        events = False
    assert not seen


def made_of(value):
    """Yields all that a tree holds."""
    yield value
    if isinstance(value, dict):
        for item in [*value, *value.values()]:
            yield from made_of(item)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from made_of(item)


def check_harmless(encoded, tensors):
    with nothing_runs():
        try:
            tree = decode(encoded, tensors)
        except CheckpointError:
            return
    assert all(isinstance(value, ALLOWED) for value in made_of(tree))


@pytest.mark.parametrize("gadget", GADGETS, ids=repr)
@pytest.mark.parametrize("plain", [False, True])
def test_data_that_name_code_are_refused_or_stay_data(gadget, plain):
    made = decode(gadget, [], plain=plain) if "$" not in gadget else None
    assert made in (None, gadget)
    if made is None and not (plain and gadget["$"] == "subclass"):
        with pytest.raises(CheckpointError):
            decode({"x": [gadget]}, [], plain=plain)


def mutated(value, random, rarity=1):
    """A tree of JSON with some values replaced by others, or by gadgets."""
    draw = random.random() * rarity
    if draw < 0.02:
        return random.choice(GADGETS)
    if draw < 0.06:
        kinds = [*_DECODERS, "object", 7]
        return {"$": random.choice(kinds), "v": value, "type": "os:system", "factory": "eval"}
    if draw < 0.1:
        words = [None, -1, 0, 10**9, 0.5, "", "os", "__class__", [], {}, [[1]], True]
        return random.choice(words)
    if isinstance(value, dict):
        items = [item for item in value.items() if random.random() * rarity > 0.02]
        return {key: mutated(item, random, rarity) for key, item in items}
    if isinstance(value, list):
        return [mutated(item, random, rarity) for item in value]
    return value


@pytest.mark.parametrize("seed", range(100))
def test_mutated_data_make_only_values(seed):
    random = Random(seed)
    encoded, tensors = encode(TREE if seed % 2 else train_state().tree([], None))
    check_harmless(mutated(encoded, random), [named.tensor for named in tensors])
    content = bytearray(to_bytes({"x": TREE["arrays"][:3], "y": torch.ones(3)}))
    for _ in range(seed % 5 + 1):
        content[random.randrange(len(content))] = random.randrange(256)
    with nothing_runs(), contextlib.suppress(CheckpointError):
        assert all(isinstance(value, ALLOWED) for value in made_of(from_bytes(bytes(content))))


@pytest.mark.parametrize("seed", range(20))
def test_mutated_manifests_are_refused_or_describe_values(seed):
    random = Random(seed)
    committed = save(Catalog(memory_store()), train_state(), 4)
    stored = json.loads(committed.to_bytes())
    body = mutated(stored["body"], random, rarity=50)  # some are read
    digest = hashlib.sha256(canonical(body)).hexdigest()
    content = canonical(stored | {"body": body, "digest": digest})
    with nothing_runs(), contextlib.suppress(CheckpointError, CheckpointDamaged):
        read = CommitRecord.from_bytes(content, 4)
        memory = {
            name: torch.zeros(min(spec.nbytes, 1 << 20), dtype=torch.uint8)
            for name, spec in read.manifest.specs.items()
        }
        tree = None
        with contextlib.suppress(RuntimeError, AssertionError):
            tree = tree_of(read.manifest, memory)
        assert all(isinstance(value, ALLOWED) for value in made_of(tree))


@pytest.mark.parametrize("seed", range(20))
def test_mutated_state_makes_no_object_in_the_worker_that_takes_it(seed):
    """It fails, or writes values: into the optimizer, its groups and the scheduler that exist."""
    taker = train_state(seed=1)
    kinds = {type(value) for value in vars(taker.optimizer).values()}
    encoded, named = encode(train_state().tree([], None))
    step, body = encoded["step"], encoded["body"]
    for tree in (step, body):
        tree["held"] = mutated(tree["held"], Random(seed), rarity=20)  # some are adopted
    step["optimizer"] = mutated(step["optimizer"], Random(seed), rarity=20)
    with nothing_runs(), contextlib.suppress(Exception):
        taker.adopt(decode(encoded, [one.tensor.clone() for one in named]), body=True)
    holders = [vars(taker.optimizer), vars(taker.scheduler), *taker.optimizer.param_groups]
    found = {type(value) for holder in holders for value in holder.values()}
    held = (*ALLOWED, *kinds, type(taker.optimizer), type(vars(taker.optimizer).get("step")))
    assert all(issubclass(kind, held) for kind in found)
