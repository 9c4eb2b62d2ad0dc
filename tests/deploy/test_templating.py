"""Values are escaped, and a template gets all of them."""

from __future__ import annotations

import tomllib

import pytest
from jinja2 import UndefinedError

from protofed.deploy.templating import render, systemd
from protofed.toml import toml_value


@pytest.mark.parametrize(
    "value", ["", 'a "b" \\ \n\t\x00\x7f', "größe \U0001f600", ["a", 'b"'], True, 7, 0.5, 3600.0]
)
def test_toml_reads_what_was_written(value: object) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}") == {"x": value}
    if isinstance(value, str):
        assert tomllib.loads(f"[{toml_value(value)}]") == {value: {}}


def test_systemd_words_stay_words() -> None:
    assert systemd(["deploy", "--dir", "/srv/a_b-c.d"]) == "deploy --dir /srv/a_b-c.d"
    assert systemd(["a b", '"', "%h", "$X", "\\", ""]) == '"a b" "\\"" "%%h" "$$X" "\\\\" ""'


def test_a_template_without_its_values_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("service", title="server", command=[])
