"""A thousand malformed replies among good ones: the model is that of the good ones alone.

Two strategies of the same settings play the same rounds. One gets the good replies in Flower's own
layout and in the order of the nodes; the other gets them in any layout that is legal, in any order,
with malformed replies between them. Model, momentum and metrics must have the same bits.
"""

import math
import random
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from rounds import ask, record, reply, tensors

from isoloco_flwr import MergeStrategy
from isoloco_flwr.merging import METHODS
from isoloco_flwr.presets import PRESETS

NUM_NODES = 12
NUM_ROUNDS = 7
BAD_A_ROUND = 9
"""16 strategies of 7 rounds of 9: 1,008 malformed replies."""

MOMENTUM = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
STRATEGIES = {name: vars(preset) for name, preset in PRESETS.items()}
STRATEGIES |= {
    f"{merge} by examples": {"merge": merge, "weighting": "examples", **MOMENTUM}
    for merge in METHODS
}
STRATEGIES |= {
    "update": {"merge": "iso_c", "orthogonalize": "update", **MOMENTUM},
    "update by examples": {
        "merge": "iso_c",
        "orthogonalize": "update",
        "weighting": "examples",
        **MOMENTUM,
    },
}


def initial_model():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "tall": draw(30, 24),
        "wide": draw(4, 11),
        "half": draw(6, 5).half(),
        "kernel": draw(3, 2, 2, 2),
        "vector": draw(7),
        "double": draw(5).double(),
        "scalar": draw(),
        "norm.running_mean": draw(4),
        "norm.num_batches_tracked": torch.tensor(10),
        "counters": torch.tensor([3, -4, 2**40]),
        "mask": torch.tensor([True, False, True, True, False]),
    }


MODEL = {name: value.numpy() for name, value in initial_model().items()}
FLOATS = [name for name, value in MODEL.items() if value.dtype.kind == "f"]


def worker_values(rng, sent):
    """Draw the parameters that a worker comes back with."""
    generator = np.random.default_rng(rng.getrandbits(64))
    values = {}
    for name, value in sent.items():
        if value.dtype.kind == "f":
            step = 0.1 * generator.standard_normal(value.shape)
            values[name] = (value - step).astype(value.dtype)
        elif value.dtype.kind == "b":
            values[name] = generator.integers(2, size=value.shape).astype(bool)
        else:
            values[name] = value + generator.integers(1, 9, size=value.shape)
    return {name: np.asarray(value) for name, value in values.items()}


# What is legal and must be read right. Each changes a good reply in place.


def as_it_is(rng, answer):
    pass


def fortran_order(rng, answer):
    change_all(answer, lambda value: Array(np.array(value, order="F")))


def big_endian(rng, answer):
    change_all(answer, lambda value: Array(value.astype(value.dtype.newbyteorder(">"))))


def newer_npy_version(rng, answer):
    def change(value):
        file = BytesIO()
        np.lib.format.write_array(file, value, version=(2, 0))
        return Array(str(value.dtype), value.shape, "numpy.ndarray", file.getvalue())

    change_all(answer, change)


def other_order_of_names(rng, answer):
    arrays = list(answer.content["arrays"].items())
    rng.shuffle(arrays)
    answer.content["arrays"] = ArrayRecord(dict(arrays))


def compiled(rng, answer):
    arrays = answer.content["arrays"]
    answer.content["arrays"] = ArrayRecord({f"_orig_mod.{key}": arrays[key] for key in arrays})


def record_of_another_name(rng, answer):
    answer.content["weights"] = answer.content.pop("arrays")


def with_config(rng, answer):
    answer.content["config"] = ConfigRecord({"lr": 0.1})


LEGAL = [
    as_it_is,
    fortran_order,
    big_endian,
    newer_npy_version,
    other_order_of_names,
    compiled,
    record_of_another_name,
    with_config,
]


def change_all(answer, change):
    for name, array in answer.content["arrays"].items():
        answer.content["arrays"][name] = change(array.numpy())


# What is malformed under any strategy. Each changes a good reply to `question` in place, or returns
# another in its place.


def error(rng, answer, question):
    return Message(Error(code=rng.randrange(1, 9), reason="out of memory"), reply_to=question)


def not_finite(rng, answer, question):
    name = rng.choice(FLOATS)
    value = values_of(answer, name)
    value.reshape(-1)[rng.randrange(value.size)] = rng.choice([math.nan, math.inf, -math.inf])
    put(answer, name, rng.choice([value, np.array(value, order="F")]))


def not_finite_at_all(rng, answer, question):
    for name in FLOATS:
        put(answer, name, np.full_like(values_of(answer, name), rng.choice([math.nan, math.inf])))


def missing(rng, answer, question):
    for name in rng.sample(list(MODEL), rng.choice([1, 2, len(MODEL)])):
        del answer.content["arrays"][name]


def extra(rng, answer, question):
    put(answer, rng.choice(["more", "", "tall.bias", "TALL"]), np.zeros(2, dtype=np.float32))


def extra_under_a_compiled_name(rng, answer, question):
    name = rng.choice(list(MODEL))
    put(answer, f"_orig_mod.{name}", values_of(answer, name))


def renamed(rng, answer, question):
    name = rng.choice(list(MODEL))
    answer.content["arrays"][f"module.{name}"] = answer.content["arrays"].pop(name)


def swapped(rng, answer, question):
    arrays = answer.content["arrays"]
    one, other = rng.sample(list(MODEL), 2)
    arrays[one], arrays[other] = arrays[other], arrays[one]


def another_shape(rng, answer, question):
    name = rng.choice(list(MODEL))
    value = values_of(answer, name)
    shapes = [np.stack([value, value]), value[None], value[..., None]]
    if value.ndim:
        shapes += [value[:-1], value[:0]]
    if value.ndim > 1:
        shapes += [value.T, value.reshape(-1)]
    put(answer, name, rng.choice(shapes))


def another_dtype(rng, answer, question):
    name = rng.choice(list(MODEL))
    value = values_of(answer, name)
    dtypes = ["f2", "f4", "f8", "i1", "u1", "i4", "i8", "u8", "?", "c8", "U8", "S8", "M8[s]"]
    dtype = rng.choice([dtype for dtype in dtypes if np.dtype(dtype) != value.dtype])
    put(answer, name, np.ones_like(value).astype(dtype))


def pickled(rng, answer, question):
    name = rng.choice(list(MODEL))
    file = BytesIO()
    np.save(file, values_of(answer, name).astype(object), allow_pickle=True)
    put_bytes(answer, name, file.getvalue())


def zipped(rng, answer, question):
    name = rng.choice(list(MODEL))
    file = BytesIO()
    np.savez(file, values_of(answer, name))
    put_bytes(answer, name, file.getvalue())


def garbage(rng, answer, question):
    name = rng.choice(list(MODEL))
    length = rng.choice([0, 1, 8, len(answer.content["arrays"][name].data), 4096])
    put_bytes(answer, name, rng.randbytes(length))


def garbage_behind_the_magic(rng, answer, question):
    name = rng.choice(list(MODEL))
    put_bytes(answer, name, b"\x93NUMPY" + rng.randbytes(rng.randrange(200)))


def cut(rng, answer, question):
    name = rng.choice(list(MODEL))
    data = answer.content["arrays"][name].data
    put_bytes(answer, name, data[: rng.randrange(len(data))])


def bytes_behind(rng, answer, question):
    name = rng.choice(list(MODEL))
    put_bytes(
        answer, name, answer.content["arrays"][name].data + rng.randbytes(rng.randrange(1, 9))
    )


def damaged_header(rng, answer, question):
    """Change bytes of a header until NumPy itself reads something else, or nothing."""
    name = rng.choice(list(MODEL))
    data = answer.content["arrays"][name].data
    end = data.index(b"\n") + 1
    while True:
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(end)] = rng.choice(b"\x00 \n(){}[],:'\"-0123456789<>|fiub\xff")
        if not numpy_reads(bytes(damaged), MODEL[name]):
            put_bytes(answer, name, bytes(damaged))
            return


def header_cut_inside_a_bracket(rng, answer, question):
    name = rng.choice(list(MODEL))
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 24), }"
    text = text[: rng.randrange(1, len(text) - 1)]
    put_bytes(answer, name, npy_header(text) + rng.randbytes(2880))


def header_that_is_no_python(rng, answer, question):
    text = rng.choice(
        ["  x\n y z\n", "-" * 9000 + "1", "(" * 4000, "{'descr': 'f4,,'}", "{[1]: 2}"]
    )
    put_bytes(answer, rng.choice(list(MODEL)), npy_header(text))


def header_of_another_dtype(rng, answer, question):
    """Say of the right number of bytes that they are something else."""
    name = rng.choice(list(MODEL))
    value = values_of(answer, name)
    kinds = "iuV" if value.itemsize == 1 else "iufV"
    kind = rng.choice([kind for kind in kinds if kind != value.dtype.kind])
    text = header_text(f"<{kind}{value.itemsize}", value.shape)
    put_bytes(answer, name, npy_header(text) + value.tobytes())


def header_of_another_shape(rng, answer, question):
    name = rng.choice(["tall", "wide", "half", "kernel"])
    value = values_of(answer, name)
    first, *rest = value.shape
    shapes = [(first + 1, *rest), (value.size,), (1, first, *rest), (-first, *rest), (10**30, 0)]
    text = header_text(value.dtype.str, rng.choice(shapes))
    put_bytes(answer, name, npy_header(text) + value.tobytes())


def array_of_another_shape(rng, answer, question):
    """Say of a payload that is right that it has another shape."""
    name = rng.choice(list(MODEL))
    array = answer.content["arrays"][name]
    shape = rng.choice([(*array.shape, 1), (1, *array.shape), (0,), (7, 7)])
    answer.content["arrays"][name] = Array(array.dtype, shape, array.stype, array.data)


def array_of_another_dtype(rng, answer, question):
    """Say of a payload that is right that it has another dtype."""
    name = rng.choice(list(MODEL))
    array = answer.content["arrays"][name]
    dtypes = ["", "float", "f4,,", "bfloat16", "object", "int16", "float128", "(2,3)f4", "\x00"]
    answer.content["arrays"][name] = Array(rng.choice(dtypes), array.shape, array.stype, array.data)


def another_serialisation(rng, answer, question):
    name = rng.choice(list(MODEL))
    array = answer.content["arrays"][name]
    stype = rng.choice(["", "pickle", "torch.Tensor", "safetensors", "numpy"])
    answer.content["arrays"][name] = Array(array.dtype, array.shape, stype, array.data)


def two_records(rng, answer, question):
    arrays = dict(answer.content["arrays"].items())
    answer.content["more"] = ArrayRecord(rng.choice([arrays, {}]))


def no_record(rng, answer, question):
    del answer.content["arrays"]


def nothing(rng, answer, question):
    return Message(RecordDict(), reply_to=question)


ANY = [
    error,
    not_finite,
    not_finite_at_all,
    missing,
    extra,
    extra_under_a_compiled_name,
    renamed,
    swapped,
    another_shape,
    another_dtype,
    pickled,
    zipped,
    garbage,
    garbage_behind_the_magic,
    cut,
    bytes_behind,
    damaged_header,
    header_cut_inside_a_bracket,
    header_that_is_no_python,
    header_of_another_dtype,
    header_of_another_shape,
    array_of_another_shape,
    array_of_another_dtype,
    another_serialisation,
    two_records,
    no_record,
    nothing,
]


# What is malformed only where replies are weighed, and legal elsewhere.


def negative_weight(rng, answer, question):
    answer.content["metrics"]["num-examples"] = rng.choice([-1, -0.5, -math.inf])


def weight_not_finite(rng, answer, question):
    answer.content["metrics"]["num-examples"] = rng.choice([math.nan, math.inf])


def weight_beyond_float32(rng, answer, question):
    answer.content["metrics"]["num-examples"] = rng.choice([1e39, 1e308])


def several_weights(rng, answer, question):
    answer.content["metrics"]["num-examples"] = rng.choice([[1, 2], [0.5], []])


def no_weight(rng, answer, question):
    del answer.content["metrics"]["num-examples"]


def no_metrics(rng, answer, question):
    del answer.content["metrics"]


def two_metric_records(rng, answer, question):
    answer.content["more"] = MetricRecord({"num-examples": 5})


WEIGHT = [
    weight_beyond_float32,
    negative_weight,
    weight_not_finite,
    several_weights,
    no_weight,
    no_metrics,
    two_metric_records,
]


# Good parameters that answer no question of this round, or not for the first time.


def late(rng, questions, late_questions, values, answered):
    return reply(rng.choice(late_questions), values)


def of_a_node_not_asked(rng, questions, late_questions, values, answered):
    answer = reply(rng.choice(questions), values)
    answer.metadata.__dict__["_src_node_id"] = 999
    return answer


def to_another_nodes_question(rng, questions, late_questions, values, answered):
    question, node = rng.sample(questions, 2)
    answer = reply(question, values)
    answer.metadata.__dict__["_src_node_id"] = node.metadata.dst_node_id
    return answer


def to_an_unknown_question(rng, questions, late_questions, values, answered):
    answer = reply(rng.choice(questions), values)
    answer.metadata.__dict__["_reply_to_message_id"] = "f" * 64
    return answer


def a_second_time(rng, questions, late_questions, values, answered):
    return reply(rng.choice(answered), values)


UNASKED = [late, of_a_node_not_asked, to_another_nodes_question, to_an_unknown_question]


def values_of(answer, name):
    return answer.content["arrays"][name].numpy()


def put(answer, name, value):
    answer.content["arrays"][name] = Array(value)


def put_bytes(answer, name, data):
    array = answer.content["arrays"][name]
    answer.content["arrays"][name] = Array(array.dtype, array.shape, array.stype, data)


def npy_header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def header_text(dtype, shape):
    return str({"descr": dtype, "fortran_order": False, "shape": shape})


def numpy_reads(data, like):
    """Tell whether NumPy takes bytes for an array of a shape and dtype."""
    try:
        value = np.load(BytesIO(data), allow_pickle=False)
    except Exception:
        return False
    return value.shape == like.shape and value.dtype.newbyteorder("=") == like.dtype


def decks(rng, weighted):
    """Deal the kinds of malformed replies to rounds: each at least once a strategy."""
    kinds = ANY + UNASKED + [a_second_time] + (WEIGHT if weighted else [])
    deck = kinds + rng.choices(kinds, k=NUM_ROUNDS * BAD_A_ROUND - len(kinds))
    rng.shuffle(deck)
    return [deck[start : start + BAD_A_ROUND] for start in range(0, len(deck), BAD_A_ROUND)]


def make_replies(rng, questions, plain_questions, late_questions, sent, kinds, weighted):
    """Return the good replies alone, and the good in any layout among malformed ones."""

    def values():
        return worker_values(rng, sent)

    places = list(range(NUM_NODES))
    rng.shuffle(places)
    plain, mixed, answered = {}, [], []
    for _ in range(rng.choice([0, 1, 2, 3, 3, 3])):
        place, metrics = places.pop(), {"num-examples": rng.randrange(50), "loss": rng.random()}
        tensors_ = values()
        answer = reply(questions[place], tensors_, metrics)
        plain[place] = reply(plain_questions[place], tensors_, metrics)
        if not weighted and rng.random() < 0.3:
            # The same oddity on both sides: it may cost the metrics, never the parameters.
            odd, state = rng.choice(WEIGHT), rng.getstate()
            odd(rng, answer, None)
            rng.setstate(state)
            odd(rng, plain[place], None)
        elif rng.random() < 0.2:
            for one in (answer, plain[place]):
                one.content["metrics"]["loss"] = [1.0] * place
        rng.choice(LEGAL)(rng, answer)
        mixed.append(answer)
        answered.append(questions[place])
    for kind in kinds:
        if kind in UNASKED:
            mixed.append(kind(rng, questions, late_questions, values(), answered))
        elif kind is not a_second_time:
            question = questions[places.pop()]
            answer = reply(question, values(), {"num-examples": 5, "loss": 0.5})
            mixed.append(kind(rng, answer, question) or answer)
            answered.append(question)
    rng.shuffle(mixed)
    for _ in range(kinds.count(a_second_time)):
        again = a_second_time(rng, questions, late_questions, values(), answered)
        first = next(
            place
            for place, answer in enumerate(mixed)
            if answer.metadata.src_node_id == again.metadata.src_node_id
            and answer.metadata.reply_to_message_id == again.metadata.reply_to_message_id
        )
        mixed.insert(rng.randrange(first + 1, len(mixed) + 1), again)
    return [plain[place] for place in sorted(plain)], mixed


def test_a_thousand_replies_are_malformed():
    assert len(STRATEGIES) * NUM_ROUNDS * BAD_A_ROUND >= 1000


@pytest.mark.filterwarnings("ignore:iso_cts of", "ignore:Reading `.npy`")
@pytest.mark.parametrize("name", STRATEGIES)
def test_malformed_replies_leave_no_trace(name, monkeypatch):
    rng = random.Random(name)
    weighted = STRATEGIES[name].get("weighting") == "examples"
    fuzzed, undisturbed = (MergeStrategy(**STRATEGIES[name], seed=3) for _ in range(2))
    arrays = record({key: torch.from_numpy(value) for key, value in MODEL.items()})
    expected = arrays
    stepped = 0
    for server_round, kinds in enumerate(decks(rng, weighted), start=1):
        late_questions = ask(fuzzed, arrays, num_nodes=NUM_NODES, server_round=server_round - 1)
        questions = ask(fuzzed, arrays, num_nodes=NUM_NODES, server_round=server_round)
        plain_questions = ask(undisturbed, expected, num_nodes=NUM_NODES, server_round=server_round)
        sent = {key: value.numpy() for key, value in tensors(arrays).items()}
        good, mixed = make_replies(
            rng, questions, plain_questions, late_questions, sent, kinds, weighted
        )
        # What waits for its turn does so in memory or on disk.
        limit = rng.choice([0, 64 << 20])
        monkeypatch.setattr("isoloco_flwr.aggregation._WAITING_BYTES", limit)
        handed_over = rng.choice([iter, list])(mixed)
        result, metrics = fuzzed.aggregate_train(server_round, handed_over)
        expected_result, expected_metrics = undisturbed.aggregate_train(server_round, iter(good))

        assert (metrics["replies-used"], metrics["replies-rejected"]) == (len(good), BAD_A_ROUND)
        assert (result is None) == (expected_result is None)
        if result is not None:
            stepped += 1
            assert bits(result) == bits(expected_result)
            arrays, expected = result, expected_result
        assert momentum(fuzzed) == momentum(undisturbed)
        for counted in ("replies-rejected", "bytes-up", "aggregate-seconds"):
            del metrics[counted], expected_metrics[counted]
        # As text: a loss weighed by an infinite number of examples is NaN on both sides.
        assert str(dict(metrics)) == str(dict(expected_metrics))
    assert stepped >= 3
    assert bits(arrays).keys() == MODEL.keys()


def bits(arrays):
    return {name: (array.dtype, array.shape, array.data) for name, array in arrays.items()}


def momentum(strategy):
    state = strategy.engine.outer.state_dict()
    return {name: buffer.numpy().tobytes() for name, buffer in state.items()}
