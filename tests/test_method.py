"""The contract of methods: hyper-parameters, hooks, slots, and sums over all weights."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.autograd import gradcheck

from protofed.config import Config, make_config
from protofed.errors import NoSecondDerivative, ProtofedError
from protofed.method import Hyper, Method, Slots, hyper, inner_product, squared_distance
from protofed.methods import FPL, METHODS, FedAvg, FedProto, create
from protofed.testing.checks import TINY, tiny_task

# ---- hyper-parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, -1, 0.0, -1e-9, float("nan"), float("-inf")])
def test_tau_must_be_above_0(tau):
    with pytest.raises(ProtofedError) as error:
        FPL(tau=tau)
    text = str(error.value)
    assert "tau" in text
    assert "above 0" in text
    assert "default is 0.02" in text  # the hint
    assert "\n" not in text


@pytest.mark.parametrize("value", [float("nan"), -0.1])
def test_a_weight_is_at_least_0(value):
    with pytest.raises(ProtofedError, match="weight of fedproto must be at least 0"):
        FedProto(weight=value)


@pytest.mark.parametrize("name", ["tau", "cpcl", "upcr"])
def test_infinity_is_not_a_hyper_parameter(name):
    # TOML as json.dumps writes it knows no Infinity: such a run could not be read back
    with pytest.raises(ProtofedError, match=name):
        FPL(**{name: float("inf")})


@pytest.mark.parametrize("value", [1e300, -1e300, 10**30, 10**400, 2e15])
def test_a_number_too_large_to_compute_with_is_refused(value):
    class Wide(Method):
        x: float = hyper(1.0, "x", "")
        n: int = hyper(1, "n", "")

    Wide = dataclass(frozen=True)(Wide)
    for name in ["x", "n"] if isinstance(value, int) else ["x"]:
        with pytest.raises(ProtofedError, match=f"hyper-parameter {name} .*too large a number"):
            Wide(**{name: value})
    assert Wide(x=-1e15, n=10**15).n == 10**15


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], {}])
def test_a_wrong_type_is_refused(value):
    with pytest.raises(ProtofedError, match="tau of fpl must be a number") as error:
        FPL(tau=value)
    assert repr(value) in str(error.value)


def test_a_number_for_a_word_is_refused():
    with pytest.raises(ProtofedError, match="finch_level of fpl must be a word, got 1"):
        FPL(finch_level=1)


@pytest.mark.parametrize(("default", "words"), [
    ({"default": None}, "has the default None"),
    ({"default": (1, 2)}, r"has the default \(1, 2\)"),
    ({"default_factory": list}, "has no default"),
    ({}, "has no default"),
])  # fmt: skip
def test_a_default_that_no_configuration_could_say_is_refused(default, words):
    @dataclass(frozen=True)
    class Odd(Method):
        name: ClassVar[str] = "odd"
        widths: object = dataclasses.field(**default)

    with pytest.raises(ProtofedError, match=f"hyper-parameter widths of odd {words}"):
        Odd.create({})
    given = {"widths": 1} if not default else {}
    config = make_config(tiny_task(), Odd(**given), **TINY)  # a run without a folder may have it
    with pytest.raises(ProtofedError, match=words):
        config.toml()


def test_whole_numbers_and_booleans_are_kept_apart():
    @dataclass(frozen=True)
    class Kinds(Method):
        name: ClassVar[str] = "kinds"
        n: int = hyper(3, "n", "a count", least=1, most=5)
        on: bool = hyper(True, "", "a switch")

    assert Kinds(n=5, on=False).options() == {"n": 5, "on": False}
    for wrong in (1.0, True, "2"):
        with pytest.raises(ProtofedError, match="n of kinds must be a whole number"):
            Kinds(n=wrong)
    with pytest.raises(ProtofedError, match="on of kinds must be true or false"):
        Kinds(on=1)
    for wrong, words in ((0, "at least 1"), (6, "at most 5")):
        with pytest.raises(ProtofedError, match=words):
            Kinds(n=wrong)


def test_a_whole_number_is_accepted_for_a_number_and_becomes_one():
    method = FPL(tau=1)
    assert type(method.tau) is float
    assert method == FPL(tau=1.0)


def test_choices_name_the_nearest():
    with pytest.raises(ProtofedError, match="did you mean cluster") as error:
        FPL(cpcl_prototypes="clusters")
    assert "cpcl_prototypes" in str(error.value)
    with pytest.raises(ProtofedError, match="valid: first, last"):
        FPL(finch_level="qqq")


def test_create_names_the_nearest_hyper_parameter():
    with pytest.raises(ProtofedError, match="unknown hyper-parameter of fpl 'taus'") as error:
        create("fpl", {"taus": 0.1})
    assert "did you mean tau" in str(error.value)
    with pytest.raises(ProtofedError, match=r"fedavg.*has no hyper-parameter 'tau'"):
        create("fedavg", {"tau": 0.1})


def test_create_names_the_nearest_method():
    with pytest.raises(ProtofedError, match="unknown method 'fedprotto'") as error:
        create("fedprotto")
    assert "did you mean fedproto" in str(error.value)


def test_create_and_options():
    assert create("fpl") == FPL()
    assert create("fpl", {"tau": 0.1}) == FPL(tau=0.1)
    assert create("fpl", FPL(tau=0.1, cpcl=2).options()) == FPL(tau=0.1, cpcl=2)
    assert set(FPL().options()) == {f.name for f in dataclasses.fields(FPL)}
    assert FedAvg().options() == {}


def test_a_reading_stands_for_switches_and_is_not_kept():
    printed = create("fpl", {"reading": "printed"})
    assert printed == FPL(finch_level="first", upcr_reduction="sum", proto_pass="post")
    assert create("fpl", {"reading": "published"}) == FPL()
    for given in ({"finch_level": "last", "reading": "printed"}, {"reading": "printed", "tau": 1}):
        method = create("fpl", given)  # in whatever order, what is given by itself wins
        assert "reading" not in method.options()
        assert method == printed.with_options(**{k: v for k, v in given.items() if k != "reading"})
    config = make_config("glyphs", "fpl", {"reading": "printed"})
    assert config == make_config("glyphs", printed)
    assert config.hash == make_config("glyphs", printed).hash
    assert "reading" not in config.toml()


@pytest.mark.parametrize("value", ["print", 1, None, ["printed"]])
def test_a_reading_that_there_is_not(value):
    with pytest.raises(ProtofedError, match="unknown reading of fpl") as error:
        create("fpl", {"reading": value})
    assert "printed" in str(error.value)


def test_a_methods_own_reading_is_a_hyper_parameter_like_others():
    @dataclass(frozen=True)
    class Reader(Method):
        name: ClassVar[str] = "reader"
        reading: float = hyper(1.0, "", "of a sensor")

    assert Reader.create({"reading": 2}).reading == 2.0


def test_a_whole_number_may_be_the_default_of_a_float():
    @dataclass(frozen=True)
    class Whole(Method):
        name: ClassVar[str] = "whole"
        mu: float = hyper(1, "μ", "weight")
        least: "float" = hyper(0, "", "another")

    assert Whole.create({"mu": 0.5}).options() == {"mu": 0.5, "least": 0.0}
    assert type(Whole().mu) is float


def test_without_weights_keeps_everything_else():
    off = FPL(tau=0.3, finch_level="first").without_weights()
    assert off == FPL(tau=0.3, finch_level="first", cpcl=0, upcr=0)
    assert FedProto(weight=4, proto_pass="post").without_weights() == FedProto(0, "post")
    assert FedAvg().without_weights() == FedAvg()


def test_a_method_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FPL().tau = 1.0


def test_a_field_without_hyper_is_still_a_hyper_parameter():
    @dataclass(frozen=True)
    class Bare(Method):
        name: ClassVar[str] = "bare"
        plain: float = 1.0

    assert Bare.hypers() == {"plain": Hyper("", "")}
    assert Bare.create({"plain": 2}).plain == 2.0


@pytest.mark.parametrize("name", METHODS)
def test_no_hyper_parameter_has_the_name_of_a_setting(name):
    settings = {f.name for f in dataclasses.fields(Config)}
    assert not settings & set(METHODS[name].hypers())


# ---- hooks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("agregate", "aggregate"), ("uplaod", "upload"), ("lose", "loss"), ("phase", "phases")],
)
def test_a_misspelled_hook_is_an_error_that_names_the_nearest(wrong, right):
    with pytest.raises(ProtofedError, match=f"Mine.{wrong} is not a hook.*did you mean {right}"):
        type("Mine", (Method,), {wrong: lambda self: None})
    with pytest.raises(ProtofedError, match=f"did you mean {right}"):
        type("Mine", (FedProto,), {wrong: property(lambda self: None)})
    with pytest.raises(ProtofedError, match=f"did you mean {right}"):
        type("Mine", (Method,), {wrong: "a constant"})


def test_helpers_fields_and_overridden_members_are_no_misspelled_hooks():
    @dataclass(frozen=True)
    class Mine(Method):
        name: ClassVar[str] = "mine"
        weight: float = hyper(1.0, "w", "a field close to `weights`")

        def _losses(self):
            """A private helper."""

        def distill(self):
            """A helper with a name of its own."""

        def update_of(self):
            """Another."""

    type("Derived", (Mine,), {"distill": lambda self: None, "loss": lambda self: None})


# ---- slots --------------------------------------------------------------------------------------


def test_slots_in_words():
    assert str(Slots()) == "model"
    assert str(Slots(model="")) == "nothing"
    told = Slots(model="head", up={"a": "class means"}, down={"b": "prototypes"}, server={"c": "x"})
    assert str(told) == "head; class means (up); prototypes (down)"


def test_the_model_is_not_a_slot_to_declare():
    with pytest.raises(ProtofedError, match=r"declares 'model'.*Slots\(model=...\)"):
        Slots(down={"model": "all of it"})


# ---- sums over all weights whose gradients are written down: against autograd, in float64 --------


SHAPES = {"conv": (2, 3, 2, 2), "bias": (2,), "scalar": ()}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    return {n: w.requires_grad_(seed == 0) for n, w in draw.items()}


@pytest.mark.parametrize("term", [squared_distance, inner_product])
def test_gradients_are_those_of_finite_differences(term):
    here, there = weights(0), weights(1)

    def value(*by):
        return term(dict(zip(here, by, strict=True)), there)

    assert gradcheck(value, tuple(here.values()))
    assert gradcheck(lambda *by: 0.3 * value(*by).square(), tuple(here.values()))
    with pytest.raises(NoSecondDerivative, match="no second derivative"):
        torch.autograd.grad(value(*here.values()), list(here.values()), create_graph=True)


def test_values_and_order_of_names():
    here, there = weights(0), weights(1)
    turned = dict(reversed(there.items()))
    distance = sum((here[n] - there[n]).square().sum() for n in here)
    torch.testing.assert_close(squared_distance(here, turned), distance)
    torch.testing.assert_close(
        inner_product(here, turned), sum((here[n] * there[n]).sum() for n in here)
    )


def test_a_distance_of_zero_has_a_gradient_of_zero():
    here = weights(0)
    squared_distance(here, {n: w.detach() for n, w in here.items()}).backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in here.values())
