"""A strategy refuses settings that it cannot keep when it is made, in both of Flower's APIs."""

import re

import pytest

import isoloco_flwr
import isoloco_flwr.legacy


@pytest.mark.parametrize("api", [isoloco_flwr, isoloco_flwr.legacy], ids=["messages", "legacy"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "loss"}, "weighting='loss': allowed is one of uniform, examples"),
        ({"orthogonalize": "no"}, "orthogonalize='no': allowed is one of gradient, update"),
        (
            {"merge": "ties", "merge_options": {}, "orthogonalize": "update"},
            'orthogonalize="update" with merge=\'ties\': allowed is "gradient"',
        ),
        ({"min_train_replies": 0}, "min_train_replies=0: allowed is a number >= 1"),
        ({"scratch_dir": "/no/such"}, "scratch_dir='/no/such': allowed is a folder that exists"),
    ],
)
def test_the_error_names_value_and_what_is_allowed(api, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        api.MergeStrategy(**settings)
