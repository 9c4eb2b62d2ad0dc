"""Plain data that has another shape than it should."""

import math

import pytest

from protofed.files import Damaged
from protofed.shape import LARGEST_INT, mismatch, require_shape

SHAPE = {"name": str, "sizes": {str: int}, "mean?": float, "rows?": [{"on": bool}], "any?": object,
         "id?": str | None, "means?": {"average": float, str: float}}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [{}, {"mean": 1}, {"mean": math.nan}, {"rows": [{"on": True}, {"on": False, "x": 1}]},
     {"any": []}, {"other": None}, {"sizes": {"a": LARGEST_INT}}, {"id": None}, {"id": "x"},
     {"means": {"average": 1}}, {"means": {"a": 2.0, "average": 1.0}}],
)  # fmt: skip
def test_what_fits(more, tmp_path):
    found = {"name": "x", "sizes": {}, **more}
    assert mismatch(found, SHAPE) == ""
    assert require_shape(tmp_path, found, SHAPE) is found


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"name": None}, "name is not text"),
        ({"sizes": []}, "sizes is not a table"),
        ({"sizes": {"a": 1, "b": 1.5}}, "sizes.b is not a whole number"),
        ({"sizes": {"a": True}}, "sizes.a is not a whole number"),
        ({"sizes": {"a": LARGEST_INT + 1}}, "sizes.a is not a whole number"),
        ({"mean": {}}, "mean is not a number"),
        ({"mean": 10**400}, "mean is not a number"),
        ({"rows": {}}, "rows is not a list"),
        ({"rows": [{"on": True}, {"on": 1}]}, "rows[1].on is not true or false"),
        ({"rows": [{}]}, "it lacks rows[0].on"),
        ({"any": None}, "any is null"),
        ({"id": 3}, "id is not text or null"),
        ({"means": {"a": 1.0}}, "it lacks means.average"),
        ({"means": {"average": 1.0, "a": "1"}}, "means.a is not a number"),
    ],
)
def test_what_does_not_fit(more, wrong, tmp_path):
    assert mismatch({"name": "x", "sizes": {}, **more}, SHAPE) == wrong
    with pytest.raises(Damaged, match="damaged"):
        require_shape(tmp_path, {"name": "x", "sizes": {}, **more}, SHAPE)


def test_what_is_missing():
    assert mismatch({}, SHAPE) == "it lacks name, sizes"
    assert mismatch([], SHAPE) == "it is not a table"
