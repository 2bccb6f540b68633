"""Options of the merges: defaults, ranges, and errors that say what is allowed."""

import inspect

import pytest
import torch

from isoloco_flwr.merging import METHODS, check_options, merge

STACK = torch.ones(2, 3, 3)


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_those_of_the_function(method):
    parameters = list(inspect.signature(METHODS[method].function).parameters.values())
    assert check_options(method, {}) == {p.name: p.default for p in parameters[1:]}


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_allowed(method):
    assert check_options(method, check_options(method, {})) == check_options(method, {})


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("iso_c", "polar", "qr"),
        ("iso_c", "scale", 2),
        ("iso_cts", "common_space_fraction", 1.5),
        ("iso_cts", "common_space_fraction", -0.1),
        ("tsv", "singular_ratio", 0),
        ("tsv", "singular_ratio", 1.01),
        ("tsv", "decorrelate", "yes"),
        ("ties", "sparsity", 1.2),
        ("ties", "sparsity", float("nan")),
        ("ties", "sparsity", True),
        ("dare", "sparsity", 1.0),
        ("dare", "sparsity", "0.1"),
        ("dare", "generator", 7),
        ("dare", "generator", [torch.Generator(), None]),
    ],
)
def test_bad_value_is_named_with_what_is_allowed(method, key, value):
    with pytest.raises(ValueError, match=key) as caught:
        merge(method, STACK, **{key: value})
    message = str(caught.value)
    assert method in message
    assert repr(value) in message
    assert METHODS[method].options[key].allowed in message


def test_unknown_option_lists_what_exists_and_the_nearest():
    with pytest.raises(ValueError, match=r"iso_c: option 'scal' .* polar, scale.* 'scale'"):
        merge("iso_c", STACK, scal="rms")


def test_unknown_merge_lists_what_exists_and_the_nearest():
    with pytest.raises(ValueError, match=r"merge 'isoc' .*mean, iso_c, .*did you mean 'iso_c'"):
        merge("isoc", STACK)


def test_option_of_a_merge_without_any():
    with pytest.raises(ValueError, match="there are: none"):
        merge("mean", STACK, sparsity=0.1)


@pytest.mark.parametrize("edge", [0, 1, 0.0, 1.0])
def test_ends_of_closed_ranges_are_allowed(edge):
    assert check_options("ties", {"sparsity": edge}) == {"sparsity": edge}
    assert check_options("iso_cts", {"common_space_fraction": edge})


@pytest.mark.parametrize("method", METHODS)
def test_from_mean_is_the_merge_of_the_mean(method):
    entry = METHODS[method]
    if entry.from_mean is None:
        assert method not in ("mean", "iso_c")
        return
    for shape in [(3, 6, 4), (3, 7), (3, 2, 2, 2)]:
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        torch.testing.assert_close(
            entry.from_mean(stack.mean(0), **check_options(method, {})), merge(method, stack)
        )
