"""The configuration of a run: where values come from, what is refused, TOML and back, the hash."""

import json
import math
import re
import tomllib
from dataclasses import fields, replace

import pytest

from protofed.config import (
    AUTO,
    CHOSEN,
    PROTOCOLS,
    SETTINGS,
    Config,
    make_config,
    merged_config,
    paper_differences,
    read_config,
    training_options,
)
from protofed.data import TaskInfo, load_task
from protofed.data.choose import Survey
from protofed.errors import ProtofedError
from protofed.methods import FPL, METHODS, FedAvg, FedProto
from protofed.testing.checks import TINY, tiny_task


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def round_trip(config, tmp_path, task=None):
    read = read_config(write(tmp_path, config.toml()))
    return make_config(**({**read, "task": task} if task else read))


# ---- where values come from ---------------------------------------------------------------------


def test_defaults_come_from_the_task_and_its_protocol():
    config, base, task = make_config(), PROTOCOLS["glyphs"], load_task("glyphs")
    assert config.task == "glyphs"
    assert config.method == FedAvg()
    for name in ("model", "width", "norm", "rounds", "epochs", "batch", "lr", "momentum"):
        assert getattr(config, name) == getattr(base, name), name
    assert config.weight_decay == base.weight_decay
    assert dict(config.clients) == dict(task.clients)
    assert dict(config.samples) == dict(task.samples)
    for name, setting in SETTINGS.items():
        if setting.default is not None:
            assert getattr(config, name) == setting.default, name
    assert (config.device, config.precision, config.engine) == (AUTO, AUTO, AUTO)


def test_large_images_have_a_model_of_their_own():
    small, large = (make_config("pacs", image_size=size) for size in (95, 96))
    assert (small.model, large.model) == ("resnet18", "resnet18_imagenet")
    assert make_config("pacs", image_size=224, model="resnet18").model == "resnet18"
    # the width and norm of a protocol are for its own model
    glyphs = make_config(image_size=96)
    assert (glyphs.model, glyphs.width, glyphs.norm) == ("resnet18_imagenet", None, None)
    assert make_config(model="resnet10").width == PROTOCOLS["glyphs"].width
    assert make_config(image_size=96, width=8).width == 8


def test_paths_of_weights_and_models_are_absolute_and_not_hashed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [
        make_config(weights=weights, model=model)
        for weights, model in (("w.pth", "net.py:f"), ("a/v.pth", "b/net.py:f"))
    ]
    assert made[0].weights == str(tmp_path / "w.pth")
    assert made[0].model == f"{tmp_path / 'net.py'}:f"
    assert made[0].hash == made[1].hash != make_config(model="net.py:f").hash
    assert round_trip(made[0], tmp_path) == made[0]
    assert make_config(model={"scan-0": "net.py:f"}).models == (made[0].model,)


def test_what_is_given_wins_and_none_is_not_given():
    config = make_config(rounds=7, lr=0.5, seed=None, norm="group", average="uniform")
    assert (config.rounds, config.lr, config.seed, config.norm) == (7, 0.5, 0, "group")
    assert config.average == "uniform"
    assert config.epochs == PROTOCOLS["glyphs"].epochs


def test_a_file_wins_over_the_protocol_and_the_typed_over_the_file(tmp_path):
    path = write(tmp_path, 'rounds = 3\nlr = 0.2\n[method]\nname = "fpl"\ntau = 0.1\n')
    read = read_config(path)
    assert read == {"rounds": 3, "lr": 0.2, "method": "fpl", "options": {"tau": 0.1}}
    config = make_config(**{**read, "lr": 0.3})
    assert config.rounds == 3
    assert config.lr == 0.3
    assert config.method == FPL(tau=0.1)
    assert config.batch == PROTOCOLS["glyphs"].batch


def test_a_typed_reading_wins_over_the_switches_of_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(make_config("glyphs", "fpl", {"tau": 0.5}).toml(), "utf-8")  # has them all
    made = merged_config(path, None, None, {"reading": "printed", "proto_pass": "last_epoch"}, {})
    assert made.method == FPL(0.5, finch_level="first", upcr_reduction="sum")
    path.write_text('method = {name = "fpl", reading = "printed"}', "utf-8")
    assert merged_config(path, None, None, {"upcr_reduction": "mean"}, {}).method == FPL(
        finch_level="first", proto_pass="post"
    )


def test_a_method_as_a_plain_word_and_without_one(tmp_path):
    assert read_config(write(tmp_path, 'method = "fedproto"'))["method"] == "fedproto"
    assert make_config(**read_config(write(tmp_path, ""))).method == FedAvg()


def test_a_method_object_takes_no_options():
    assert make_config(method=FPL(tau=0.3)).method == FPL(tau=0.3)
    with pytest.raises(ProtofedError, match="method object"):
        make_config(method=FPL(), options={"tau": 0.3})


def test_one_number_is_meant_for_all_domains_and_a_table_only_for_its_own():
    config = make_config(clients=2, samples=0.1)
    domains = list(load_task("glyphs").domains)
    assert dict(config.clients) == dict.fromkeys(domains, 2)
    assert dict(config.samples) == dict.fromkeys(domains, 0.1)
    config = make_config(clients={"photo": 1, "scan": 2})
    assert dict(config.clients) == {"scan": 2, "photo": 1}
    assert list(config.clients) == ["scan", "photo"]  # in the task's order


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "near"), [("round", "rounds"), ("sed", "seed"), ("lrr", "lr")])
def test_an_unknown_setting_names_the_nearest(name, near, tmp_path):
    with pytest.raises(ProtofedError, match=f"unknown setting '{name}'") as error:
        make_config(**{name: 1})
    assert near in error.value.hint
    with pytest.raises(ProtofedError, match=f"'{name}'") as error:
        read_config(write(tmp_path, f"{name} = 1"))
    assert near in error.value.hint
    assert "config.toml" in str(error.value)


BAD = {
    "seed": [-1, 1.5, True, "1", math.nan],
    "rounds": [0, -3, 1.0, True, "5"],
    "epochs": [0, 2.5, False],
    "batch": [0, -1, 32.0],
    "checkpoint_every": [0, 1.5],
    "width": [0, -4, 2.0, True],
    "lr": [0, -0.1, math.nan, math.inf, True, "0.1"],
    "momentum": [-0.1, 1, 1.0, math.nan, True],
    "weight_decay": [-1e-9, math.inf, "0"],
    "participation": [0, -0.5, 1.1, math.nan, True],
    "step_every": [0, 1.5, True],
    "step_factor": [0, 1, 1.0, math.nan, "0.1"],
    "warmup_rounds": [-1, 0.5, True],
    "label_smoothing": [-0.1, 1, math.nan, True],
    "clip_norm": [0, -1, math.inf, "1"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_each_limit(name, value):
    with pytest.raises(ProtofedError, match=rf"^{name} must be ") as error:
        make_config(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 0), ("rounds", 1), ("epochs", 1), ("batch", 1), ("checkpoint_every", 1),
        ("width", 1), ("lr", 1e-9), ("lr", 1), ("momentum", 0), ("momentum", 0.999),
        ("weight_decay", 0), ("participation", 1), ("participation", 1e-6), ("warmup_rounds", 19),
        ("label_smoothing", 0.99), ("clip_norm", 1e-9),
    ],
)  # fmt: skip
def test_the_edges_that_are_allowed(name, value):
    assert getattr(make_config(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("average", "sample", "samples"),
        ("precision", "fp16", "fp"),
        ("device", "gpu", "cpu"),
        ("norm", "batchnorm", "batch"),
        ("optimizer", "adamax", "adam"),
        ("schedule", "cosin", "cosine"),
        ("sampling", "balance", "balanced"),
        ("protocol", "glyph", "glyphs"),
        ("model", "resnet11", "resnet10"),
    ],
)
def test_each_choice(name, value, near):
    with pytest.raises(ProtofedError, match=f"{name} '{value}'") as error:
        make_config(**{name: value})
    assert near in error.value.hint


@pytest.mark.parametrize("value", [0, 1, 1.0, -0.1, True, math.nan, "used", "0.1", [0.1]])
def test_validation_images_are_the_unused_ones_or_a_fraction(value, tmp_path):
    with pytest.raises(ProtofedError, match=r"^validate must be 'unused', 'folder' or a fr"):
        make_config(validate=value)
    for fine in ("unused", "folder", 0.1):
        config = make_config(validate=fine)
        assert round_trip(config, tmp_path) == config
    assert make_config().validate is None and "validate" not in make_config().toml()


@pytest.mark.parametrize("value", [-1, 1.5, True, "many", None, [1], 1.0])
def test_clients_are_whole_numbers(value):
    with pytest.raises(ProtofedError):
        make_config(clients={"scan": value})


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.5, True, "all", math.nan])
def test_samples_are_a_count_or_a_fraction(value):
    with pytest.raises(ProtofedError, match=r"samples of \w+ must be a count or a fraction"):
        make_config(samples=value)


def test_one_sample_and_all_samples_are_told_apart():
    assert make_config(samples=1).samples["scan"] == 1
    assert type(make_config(samples=1).samples["scan"]) is int
    assert type(make_config(samples=1.0).samples["scan"]) is float
    assert make_config(samples=1).hash != make_config(samples=1.0).hash


def test_an_unknown_domain_names_the_nearest():
    for name in ("clients", "samples"):
        with pytest.raises(ProtofedError, match="unknown domain of glyphs 'scans'") as error:
            make_config(**{name: {"scans": 1}})
        assert "scan" in error.value.hint


def test_an_unknown_task_and_method():
    with pytest.raises(ProtofedError, match="unknown task 'glyph'") as error:
        make_config("glyph")
    assert "glyphs" in error.value.hint
    with pytest.raises(ProtofedError, match="unknown task '/my/photos'") as error:
        make_config("/my/photos")
    assert "--task folder:/my/photos" in error.value.hint
    with pytest.raises(ProtofedError, match="unknown method 'fedprot'"):
        make_config(method="fedprot")


@pytest.mark.parametrize(
    "text",
    ["task = 5", "method = 5", "[method]\nname = 5", "task = ['glyphs']", "protocol = [1]",
     "model = [1]", "device = 3", "clients = [1]", "[task]\nname = 'glyphs'"],
)  # fmt: skip
def test_odd_types_in_a_file_are_errors_in_words(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ProtofedError):
        make_config(**read_config(path))


# ---- files --------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path):
    with pytest.raises(ProtofedError, match=r"cannot read config .*none\.toml"):
        read_config(tmp_path / "none.toml")
    with pytest.raises(ProtofedError, match="cannot read config"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "text", ["rounds = ", "rounds = 1\nrounds = 2", "[method", b"\xff\xfe", "seed = 2026-01-01"]
)
def test_a_file_that_is_not_toml(tmp_path, text):
    with pytest.raises(ProtofedError, match=r"config\.toml' is not valid TOML") as error:
        read_config(write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_domain_cannot_be_left_out_if_no_other_has_a_client():
    clients = {"scan": 0, "print": 0, "photo": 0}
    with pytest.raises(ProtofedError, match="without 'inverse' no domain has a client"):
        make_config(leave_out="inverse", clients=clients)


def test_a_file_may_begin_with_the_mark_of_an_editor(tmp_path):
    assert read_config(write(tmp_path, b"\xef\xbb\xbfrounds = 3"))["rounds"] == 3


def test_a_method_without_a_name(tmp_path):
    with pytest.raises(ProtofedError, match=r"\[method\] .* has no name") as error:
        read_config(write(tmp_path, "[method]\ntau = 0.1"))
    assert "name =" in error.value.hint


# ---- TOML and back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "fpl", "options": {"tau": 0.1, "finch_level": "first", "cpcl": 0}},
        {"method": FedProto(weight=1e-30)},
        {"clients": {"photo": 2}, "samples": {"photo": 0.25, "scan": 3}},
        {"rounds": 3, "lr": 1e-05, "seed": 123456789, "precision": "fp64", "participation": 0.1},
        {"norm": "none", "width": 5, "model": "resnet10"},
    ],
)
def test_toml_and_back(tmp_path, given):
    config = make_config(**{"device": "cpu", **given})
    again = round_trip(config, tmp_path)
    assert again == config
    assert again.hash == config.hash
    assert again.toml() == config.toml()
    assert list(again.clients) == list(config.clients)


def test_toml_has_everything_filled_in(tmp_path):
    config = make_config(method="fpl")
    raw = tomllib.loads(config.toml())
    given = {f.name for f in fields(Config) if getattr(config, f.name) is not None}
    assert set(raw) == given | {"format"}
    assert raw["method"] == {"name": "fpl", **FPL().options()}


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a.b",
        'quote"d',
        "back\\slash",
        "tab\there",
        "é",
        "日本",
        "😀",
        "a-b",
        "new\nline",
        "",
    ],
)
def test_odd_domain_names_are_quoted(tmp_path, name):
    plain = tiny_task()
    domains = {name: plain.domains["left"], "right": plain.domains["right"]}
    counts = dict.fromkeys(domains, 1)
    task = replace(plain, domains=domains, clients=counts, samples=dict.fromkeys(domains, 5))
    config = make_config(task, "fedavg", **TINY)
    again = round_trip(config, tmp_path, task)
    assert again == config
    assert dict(again.clients) == counts
    assert again.hash == config.hash


# ---- options of training ------------------------------------------------------------------------


def test_adam_has_a_learning_rate_of_its_own():
    assert make_config().lr == 0.01
    assert make_config(optimizer="adam").lr == make_config(optimizer="adamw").lr == 0.001
    assert make_config(optimizer="adam", lr=0.01).lr == 0.01


def test_a_step_is_a_third_of_the_rounds():
    assert make_config(schedule="step").step_every == 7
    assert make_config(schedule="step", step_every=3).step_every == 3
    assert make_config(schedule="step", rounds=1).step_every == 1
    assert make_config().step_every is None
    with pytest.raises(ProtofedError, match="step_every = 3 has no effect without a schedule"):
        make_config(step_every=3)
    with pytest.raises(ProtofedError, match=r"step_factor = 0\.5 has no effect without"):
        make_config(step_factor=0.5)
    assert make_config(step_factor=0.1) == make_config()  # as in a run's config.toml
    other = make_config(schedule="cosine", step_every=3, step_factor=0.5)  # as in a sweep
    assert other == make_config(schedule="cosine")


def test_a_warmup_ends_before_the_run():
    with pytest.raises(ProtofedError, match="warmup_rounds = 4 leaves none of the 4"):
        make_config(rounds=4, warmup_rounds=4)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize(
    "method", [("scaffold", {}), ("fednova", {}), ("fedseproto", {"decoder_step": 10.0})]
)
def test_a_method_that_needs_sgd_refuses_others_by_name(method, optimizer):
    name, options = method
    match = f"{name} does not work with optimizer = {optimizer}: "
    with pytest.raises(ProtofedError, match=match):
        make_config(method=name, options=options, optimizer=optimizer)
    assert make_config(method=name, options=options, clip_norm=1.0, schedule="cosine")
    assert make_config(method="fedseproto", optimizer=optimizer)


def test_the_options_in_use():
    assert training_options(vars(make_config(lr=0.5, epochs=2))) == []
    options = {"optimizer": "adamw", "schedule": "step", "rounds": 6, "clip_norm": 1.0}
    words = ["optimizer adamw", "schedule step", "step_every 2", "clip_norm 1"]
    assert training_options(vars(make_config(**options))) == words
    assert training_options({"task": "glyphs"}) == []  # as a run of an earlier version has it


# ---- a paper's own protocol -------------------------------------------------------------------


def test_what_the_papers_of_methods_train_with():
    for method in METHODS.values():
        theirs = method.protocol
        if isinstance(theirs, str):
            assert theirs in ("", *PROTOCOLS)
        else:
            config = make_config("digits", method(), **theirs)
            assert paper_differences(config) == {}


@pytest.mark.parametrize(
    ("task", "method", "settings", "expected"),
    [
        ("digits", "fedavg", {}, {}),
        ("digits", "fpl", {}, {}),
        ("digits", "fpl", {"protocol": "i2pfl"}, {"batch": (64, 32)}),
        ("digits", "i2pfl", {}, {"batch": (32, 64)}),
        ("digits", "i2pfl", {"batch": 32}, {}),
        ("pacs", "i2pfl", {}, {}),
        ("pacs", "fpl", {}, {"model": ("resnet10", "resnet18"), "batch": (64, 16)}),
        ("digits", "fedseproto", {}, {"model": ("cnn3", "resnet10")}),
        ("digits", "fedseproto", {"model": "cnn3,cnn2"}, {"model": ("cnn3", "cnn3 and cnn2")}),
        ("vlcs", "fedseproto", {}, {}),
        ("glyphs", "i2pfl", {}, {}),
        ("digits", "fpl", {"clip_norm": 1.0}, {"clip_norm": (None, 1.0)}),
        ("digits", "fpl", {"optimizer": "adam", "lr": 0.01}, {"optimizer": ("sgd", "adam")}),
    ],
)
def test_what_a_paper_does_otherwise(task, method, settings, expected):
    assert paper_differences(make_config(task, method, **settings)) == expected


# ---- the hash -----------------------------------------------------------------------------------


def test_the_hash_is_stable_and_short():
    assert make_config(**TINY).hash == make_config(**TINY).hash
    assert re.fullmatch("[0-9a-f]{10}", make_config().hash)


CHANGES = [
    {"seed": 1}, {"rounds": 19}, {"epochs": 4}, {"batch": 31}, {"lr": 0.02}, {"momentum": 0.8},
    {"weight_decay": 0.0}, {"model": "cnn2"}, {"width": 17}, {"norm": "group"},
    {"clients": 1}, {"clients": {"scan": 1}}, {"samples": 9}, {"samples": 0.5},
    {"participation": 0.5}, {"average": "uniform"},
    {"method": "fpl"}, {"method": "fpl", "options": {"tau": 0.1}},
    {"method": "fpl", "options": {"finch_level": "first"}}, {"method": "fedproto"},
]  # fmt: skip


def test_the_hash_changes_with_everything_that_can_change_a_number():
    hashes = [make_config(device="cpu", **change).hash for change in [{}, *CHANGES]]
    assert len(set(hashes)) == len(CHANGES) + 1


def test_the_hash_changes_with_every_field_that_is_not_exempt():
    # also with a field that is added later
    config = make_config(device="cpu")
    names = {f.name for f in fields(Config)} - {"method"}
    kept = {n for n in names if replace(config, **{n: "other"}).hash == config.hash}
    assert kept == {name for name, setting in SETTINGS.items() if not setting.hashed}
    assert not kept & {name for change in CHANGES for name in change}


def test_a_setting_that_was_added_later_leaves_the_hashes_of_earlier_runs_alone():
    assert make_config(seed=3).hash == "b408cef7a8"
    office = {"rounds": 7, "leave_out": "dslr"}
    assert make_config("office_caltech", FPL(tau=0.05), **office).hash == "a123e25885"
    given = [None, "unused", 0.1, 0.2]
    assert len({make_config(validate=v).hash for v in given}) == len(given)
    defaults = {n: s.default for n, s in SETTINGS.items() if s.later}
    assert make_config(seed=3, **defaults).hash == "b408cef7a8"
    assert make_config(min_class_count=2).hash != make_config(min_class_count=1).hash


def test_the_hash_does_not_change_with_checkpoint_every():
    assert make_config(checkpoint_every=1).hash == make_config(checkpoint_every=9).hash


def test_the_hash_is_made_of_plain_numbers():
    config = make_config(tiny_task(), FPL(), **TINY)
    json.dumps({f.name: getattr(config, f.name) for f in fields(config) if f.name != "method"})


# ---- without images and without a GPU -----------------------------------------------------------


def test_a_config_is_made_where_neither_images_nor_a_gpu_are(monkeypatch):
    def refuse(*args, **more):
        raise AssertionError("a config looked for images or a GPU")

    monkeypatch.setattr("protofed.data.load_task", refuse)
    monkeypatch.setattr("torch.cuda.is_available", refuse)
    for task in ("glyphs", "digits", "office_caltech", "pacs", "vlcs", "folder:no/such/pets"):
        config = make_config(task, "fpl", device="cuda", precision="bf16")
        assert re.fullmatch("[0-9a-f]{10}", config.hash)
        assert tomllib.loads(config.toml())["task"] == task


def test_a_folders_clients_are_filled_in_when_its_domains_are_known(tmp_path):
    config = make_config("folder:no/such/pets", clients=2)
    assert (config.clients, config.samples) == (2, None)
    task = replace(tiny_task(), name=config.task)
    complete = config.for_task(task.info)
    assert complete.domain_clients == {"left": 2, "right": 2}
    assert complete.domain_samples == task.samples
    assert round_trip(config, tmp_path) == config
    with pytest.raises(ProtofedError, match="unknown domain"):
        make_config("folder:no/such/pets", clients={"lift": 1}).for_task(task.info)


def folder_info(size=32, training=600, survey=None):
    training = {"a": training, "b": 2 * training} if training else {}
    ones = {"a": 1, "b": 1}
    return TaskInfo("folder:no/such/pets", ("a", "b"), ("x", "y"), ones, dict.fromkeys(ones, 1.0),
                    size, training=training, survey=survey)  # fmt: skip


def test_what_is_not_given_is_chosen_by_the_images_of_a_folder(tmp_path):
    asked = make_config("folder:no/such/pets")
    assert [getattr(asked, name) for name in CHOSEN] == [None] * len(CHOSEN)
    assert asked.protocol == "folder" and asked.models == ()
    assert round_trip(asked, tmp_path) == asked

    def chosen(config, info):
        complete, settled = config.for_task(info), config.settled(info)
        found = [getattr(complete, name) for name in CHOSEN]
        assert found == [getattr(settled, name) for name in CHOSEN]
        assert (settled.clients, settled.samples) == (config.clients, config.samples)
        assert round_trip(settled, tmp_path) == settled
        return found

    assert chosen(asked, folder_info()) == [32, "resnet10", 64, 7, "crop", None]
    deep = Survey(300, {"a": 300}, "0:4095")
    large = [224, "resnet18_imagenet", 32, 4, "large", "0:4095"]
    assert chosen(asked, folder_info(224, survey=deep)) == large
    given = {"model": "cnn3", "batch": 5, "epochs": 3, "augment": "crop", "pixel_range": "0:9"}
    own = make_config("folder:no/such/pets", image_size=64, **given)
    assert chosen(own, folder_info(224, survey=deep)) == [64, *given.values()]
    # a paper's protocol says all but what it says of its own images
    paper = make_config("folder:no/such/pets", protocol="fpl")
    assert chosen(paper, folder_info(64)) == [64, "resnet10", 64, 10, "crop", None]
    # fewer images, or parts of them: smaller batches and more epochs
    assert chosen(asked, folder_info(training=40))[2:4] == [8, 10]
    few = make_config("folder:no/such/pets", samples=40)
    assert chosen(few, folder_info())[2:4] == [8, 10]
    # a deployment's task has no images
    assert chosen(asked, folder_info(training=0))[1:4] == ["resnet10", 64, 10]


def test_one_folder_in_two_places_is_the_same_config():
    assert make_config("folder:a/pets").hash == make_config("folder:b/pets").hash
    assert make_config("folder:a/pets").hash != make_config("folder:a/dogs").hash


@pytest.mark.parametrize(("format", "fine"), [(1, True), (2, True), (3, False), ('"x"', False)])
def test_a_config_of_a_later_format_is_refused(tmp_path, format, fine):
    path = write(tmp_path, f"format = {format}\nrounds = 3\n")
    if fine:
        assert read_config(path)["rounds"] == 3
    else:
        with pytest.raises(ProtofedError, match=r"config\.toml"):
            read_config(path)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_says_what_it_is(name):
    setting = SETTINGS[name]
    assert setting.help.endswith(".") and setting.panel
    assert setting.kind in ("int", "float", "bool", "str", "table", "rounds", "part")
    if setting.kind in ("int", "float"):
        assert "number" in setting.range
    if setting.default is not None:
        assert setting.check(name, setting.default) == setting.default
