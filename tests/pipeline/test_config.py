from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput, digest, flatten, from_dict, parse, require, to_dict
from pipeline.options.unread import read_when
from tests import helpers


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A group."""

    share: float = 0.5
    """A share."""
    ks: tuple[int, ...] = (1, 5)
    """Some numbers."""

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "inner.share", self.share, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A job."""

    input: tuple[str, ...]
    """Some files."""
    max_steps: int = 3
    """A number."""
    mode: Literal["fast", "slow"] = "fast"
    """A choice."""
    keep: bool = False
    """A flag."""
    name: str = "x"
    """A text, which is described
    on two lines."""
    inner: Inner = field(default_factory=Inner)
    """A group."""


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Another job."""

    least: float | None = None
    """A bound; null: none."""


def read(line: str) -> Config:
    return parse(Config, line.split(), "python -m jobs.test")


def refusal(line: str) -> str:
    return helpers.refusal(read, line)


@pytest.fixture
def yaml(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return file

    return write


def test_a_file_beats_the_defaults_and_the_command_line_beats_the_file(yaml):
    file = yaml("max_steps: 7\nmode: slow\ninner:\n  share: 0.25\n")
    config = read(f"--config {file} --input a --max-steps 9")
    assert config == Config(input=("a",), max_steps=9, mode="slow", inner=Inner(share=0.25))


def test_the_command_line_beats_the_file_wherever_the_file_is_named(yaml):
    file = yaml("max_steps: 7\ninput: [b, c]\n")
    for line in (f"--max-steps 9 --config {file}", f"--max-steps=9 --config={file}"):
        assert read(line) == Config(input=("b", "c"), max_steps=9)


@pytest.mark.parametrize(("options", "values"), [
    ("--max-steps 4", {"max_steps": 4}),
    ("--max_steps 4", {"max_steps": 4}),
    ("--max-steps=4", {"max_steps": 4}),
    ("--name 2011-01-01", {"name": "2011-01-01"}),  # a text stays one
    ("--inner.ks 2 3 4 --mode slow", {"mode": "slow", "inner": Inner(ks=(2, 3, 4))}),
    ("--keep --mode slow", {"keep": True, "mode": "slow"}),
    ("--keep true", {"keep": True}),
    ("--keep=false", {"keep": False}),
])  # fmt: skip
def test_an_option_may_be_typed_in_several_ways(options, values):
    assert read(f"--input 0012 1e5 {options}") == Config(input=("0012", "1e5"), **values)


@pytest.mark.parametrize(
    "text", ["is it 😀 ?", "𝒳\u2028\x85\ufffe", "[DOOR OPENS] who is it ?", "[x"]
)
def test_a_value_of_a_list_is_any_text(text):
    """Emoji and contexts that begin with a bracket were refused, in a line of escapes."""
    for values in ((text,), ("a", text)):
        assert parse(Config, ["--input", *values], "python -m jobs.test").input == values


@pytest.mark.parametrize(
    ("option", "end"),
    [
        ("--max-stepz", "did you mean --max-steps?"),
        ("--share", "did you mean --inner.share?"),
        ("--inner.max-steps", "did you mean --max-steps?"),
        ("--inner.nope", "there are: --inner.ks, --inner.share"),
        ("--nope", "--help all lists them"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_one(option, end):
    assert refusal(f"--input a {option} 1") == f"{option}: unknown option; {end}"


def test_an_unknown_key_in_the_file_is_refused_with_the_file_and_the_nearest_one(yaml):
    file = yaml("inner: {shara: 1}")
    expected = f"--config {file}: inner.shara: unknown option; did you mean --inner.share?"
    assert refusal(f"--input a --config {file}") == expected


def test_a_second_name_is_the_same_option_on_the_command_line(yaml):
    class Named(Config):
        ALIASES = MappingProxyType({"corpus": "mode", "outer": "inner"})

    assert parse(Named, ["--input", "a", "--corpus=slow"], "test").mode == "slow"
    assert parse(Named, ["--input", "a", "--outer.ks", "2", "3"], "test").inner.ks == (2, 3)
    with pytest.raises(BadInput, match="corpus: unknown option"):
        parse(Named, ["--input", "a", "--config", str(yaml("corpus: slow"))], "test")


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--max-steps 2.5", ["max_steps", "'2.5'", "int"]),
        ("--keep maybe", ["keep", "'maybe'", "bool"]),
        ("--mode slwo", ["mode", "'slwo'", "allowed: 'fast', 'slow'; did you mean slow?"]),
        ("--inner.share=-1", ["inner.share", "-1.0", "0 to 1"]),
        ("--inner.share .nan", ["inner.share", "nan", "0 to 1"]),
        ("--inner.ks 1 b", ["inner.ks"]),
        ("--max-steps", ["max_steps"]),
        ("--max-steps 3 4", ["4"]),
    ],
)
def test_a_wrong_value_is_refused_naming_field_value_and_what_is_allowed(option, parts):
    message = refusal(f"--input a {option}")
    assert [part for part in parts if part not in message] == []


def test_a_wrong_value_in_the_file_is_refused(yaml):
    file = yaml("inner: {share: 3}\nmax_steps: x")
    assert refusal(f"--input a --config {file}").endswith(f"allowed: int (in {file})")
    assert refusal(f"--input a --config {file} --max-steps 3").endswith(f"int (in {file})")
    file = yaml("inner: {share: 3}")
    message = refusal(f"--input a --config {file}")
    assert "inner.share" in message and message.endswith(f"0 to 1 (in {file})")
    message = refusal(f"--input a --config {file} --inner.share 4")
    assert "4.0" in message and str(file) not in message


def test_what_is_missing_is_named_and_what_is_too_much(tmp_path):
    assert refusal("--max-steps 1").startswith("--input: missing")
    assert "none.yaml" in refusal(f"--input a --config {tmp_path}/none.yaml")
    assert "stray" in refusal("stray --input a")


def test_a_missing_word_is_named_as_it_is_typed():
    @dataclass(frozen=True, kw_only=True)
    class Typed:
        """A job."""

        POSITIONAL = "table"
        table: str
        """A file."""

    with pytest.raises(BadInput, match=r"^TABLE: missing, as in: polyrank faq TABLE; see --help$"):
        parse(Typed, [], "polyrank faq")


@pytest.mark.parametrize(("text", "says"), [
    ("keep: true\nmax_steps: [1\ninner: {}\n", ", line 3: not YAML"),
    ("keep: true\ninner: share: 1\n", ", line 2: not YAML"),
    ("- 1\n- 2\n", ": holds no options"),
    ("just words\n", ": holds no options"),
])  # fmt: skip
def test_a_file_that_holds_no_options_is_refused_by_its_name(yaml, text, says):
    file = yaml(text)
    assert refusal(f"--input a --config {file}").startswith(f"--config {file}{says}")


def help_of(*argv, capsys):
    with pytest.raises(SystemExit) as stop:
        read(" ".join(argv))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_says_what_is_needed_first_and_names_the_options_of_a_group(capsys):
    shown = help_of("--help", capsys=capsys)
    assert shown.startswith("usage: python -m jobs.test --input TEXT … [--option value …]\n")
    required, options = shown.partition("\nOptions:\n")[::2]
    assert "\n  --input TEXT …\n" in required and "--max-steps INTEGER (default: 3)\n" in options
    assert "  --inner.…" in shown and "share, ks" in shown and "--inner.share" not in shown
    assert "      A text, which is described on two lines.\n" in shown


def test_help_of_a_group_shows_its_options_alone(capsys):
    shown = help_of("--help", "inner", capsys=capsys)
    assert "--inner.share NUMBER (default: " in shown and "--max-steps" not in shown
    message = "--help outer: no such group of options; there are: inner, all"
    assert refusal("--help outer") == message


def test_all_help_shows_groups_too(capsys):
    shown = help_of("--keep", "--help", "all", capsys=capsys)
    assert "  --keep true|false (default: false)\n" in shown and "  --inner.ks INTEGER …" in shown


def test_help_shows_a_default_of_null(capsys):
    with pytest.raises(SystemExit):
        parse(Bounded, ["--help"], "python -m jobs.test")
    assert "  --least NUMBER|null (default: null)\n" in capsys.readouterr().out


_configs = st.builds(
    Config,
    input=st.lists(st.text()).map(tuple),
    max_steps=st.integers(),
    mode=st.sampled_from(["fast", "slow"]),
    keep=st.booleans(),
    name=st.text(),
    inner=st.builds(
        Inner, share=st.floats(0, 1), ks=st.lists(st.integers()).map(tuple)
    ),
)  # fmt: skip


@settings(max_examples=20)
@given(_configs)
def test_a_config_survives_the_way_through_plain_values(config):
    assert from_dict(Config, to_dict(config)) == config


def test_flat_names_are_those_of_the_command_line():
    config = read("--input a --inner.share 0.25")
    flat = flatten(to_dict(config))
    assert set(flat) == {
        "input", "max_steps", "mode", "keep", "name", "inner.share", "inner.ks"
    }  # fmt: skip
    assert flat["inner.share"] == config.inner.share


def test_a_digest_does_not_depend_on_the_order_of_names():
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1, "b": [1, 2]}) != digest({"a": 1, "b": [2, 1]})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all shapes have."""

    kind: str
    size: int = 1
    """Its size."""

    def __post_init__(self) -> None:
        require(self.size > 0, "shape.size", self.size, "above 0")


@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    """A circle."""

    kind: Literal["circle"] = "circle"
    filled: bool = False
    """Whether it is filled."""


@dataclass(frozen=True, kw_only=True)
class Polygon(Shape):
    """A polygon."""

    kind: Literal["polygon"] = "polygon"
    corners: tuple[int, ...] = (3,)
    """Its corners."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A job."""

    name: str = "x"
    """A name."""
    shape: Circle | Polygon = field(default_factory=lambda: Polygon(size=5))
    """What is drawn."""


def draw(*argv: str) -> Drawing:
    return parse(Drawing, argv, "python -m jobs.test")


def test_of_a_union_the_default_is_taken_where_nobody_says_which():
    assert draw().shape == Polygon(size=5)
    assert draw("--shape.corners", "4", "5").shape == Polygon(size=5, corners=(4, 5))


def test_a_union_is_told_apart_by_the_command_line_and_the_file(yaml):
    assert draw("--shape.kind", "circle", "--shape.filled").shape == Circle(filled=True)
    file = yaml("shape: {kind: circle, size: 3}")
    assert draw(f"--config={file}").shape == Circle(size=3)
    assert draw("--config", str(file), "--shape.filled").shape == Circle(size=3, filled=True)
    beaten = draw("--shape.kind=polygon", "--shape.corners", "4", "--config", str(file))
    assert beaten.shape == Polygon(size=3, corners=(4,))


def test_the_last_of_two_files_says_which(yaml, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("shape: {kind: polygon}")
    found = draw("--config", str(yaml("shape: {kind: circle}")), "--config", str(other))
    assert isinstance(found.shape, Polygon)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--shape.filled"], ["shape.filled", "shape.kind 'polygon'", "allowed with: circle"]),
        (["--shape.kind", "circle", "--shape.corners", "4"],
         ["shape.corners", "shape.kind 'circle'", "allowed with: polygon"]),
        (["--shape.kind", "star"], ["shape.kind", "'star'", "circle, polygon"]),
        (["--shape.kind", "circle", "--shape.colour", "red"], ["shape.colour", "shape.filled"]),
        (["--shape.kind", "circle", "--shape.size", "0"], ["shape.size", "0", "above 0"]),
        (["--shape.kind", "circle", "--shape.size", "x"], ["shape.size", "'x'", "int"]),
    ],
)  # fmt: skip
def test_an_option_of_another_dataclass_of_a_union_is_refused(argv, parts):
    message = helpers.refusal(draw, *argv)
    assert [part for part in parts if part not in message] == []


def test_a_file_s_option_of_another_dataclass_is_refused(yaml):
    file = yaml("shape: {kind: circle, corners: [3]}")
    with pytest.raises(BadInput, match=r"shape\.corners.*allowed with: polygon"):
        draw("--config", str(file))


def test_help_shows_the_options_of_the_chosen_dataclass_and_names_the_others(capsys):
    for argv, there, absent in [
        ([], "--shape.corners", "--shape.filled"),
        (["--shape.kind", "circle"], "--shape.filled", "--shape.corners"),
    ]:
        with pytest.raises(SystemExit):
            draw(*argv, "--help", "all")
        shown = capsys.readouterr().out
        assert there in shown and absent not in shown
        assert "circle: A circle." in shown and "polygon: A polygon." in shown


@pytest.mark.parametrize("shape", [Circle(filled=True), Polygon(corners=(4, 7))])
def test_a_union_survives_the_way_through_plain_values(shape):
    drawing = Drawing(shape=shape)
    assert from_dict(Drawing, to_dict(drawing)) == drawing


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A job that runs others."""

    PASSED_ON = ("others", ("inner", "loop"))
    name: str
    """A name."""
    others: tuple[str, ...] = ()
    """Options of the others."""


def test_options_of_another_job_are_passed_on_unread():
    line = "--inner.share 7 --name x --loop.fast --inner.ks=[1] --loop.max-steps -3"
    found = parse(Sweep, line.split(), "test")
    assert found.name == "x"
    assert found.others == (
        "--inner.share", "7", "--loop.fast", "--inner.ks", "[1]", "--loop.max_steps", "-3"
    )  # fmt: skip
    share = ("--inner.share", "0.25")
    passed_on = parse(Sweep, ["--name", "x", *share], "test").others
    assert parse(Config, ["--input", "a", *passed_on], "test").inner.share == 0.25


@pytest.mark.parametrize("argument", ["--inner", "--inners.share", "--outer.share"])
def test_what_is_not_in_their_groups_is_refused(argument):
    with pytest.raises(BadInput):
        parse(Sweep, ["--name", "x", argument, "1"], "test")


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A group."""

    kind: Literal["none", "linear", "steps"] = "none"
    """A choice."""
    end: float = field(default=0.0, metadata=read_when({"fall.kind": ("linear", "steps")}))
    """A number."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A job."""

    source: Literal["batch", "mined", "given"] = "batch"
    """A choice."""
    count: int = field(
        default=9, metadata=read_when({"source": ("mined", "given"), "shape.kind": ("circle",)})
    )
    """A number."""
    mine: Inner = field(default_factory=Inner, metadata=read_when({"source": ("mined",)}))
    """A group that is read as a whole, or not at all."""
    shape: Circle | Polygon = field(default_factory=Circle)
    """A union."""
    fall: Fall = field(default_factory=lambda: Fall(kind="steps", end=0.5))
    """A group with other defaults here."""


def train(*argv: str, **more: bool) -> Training:
    return parse(Training, argv, "python -m jobs.test", **more)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--count 5 --shape.kind polygon",
            "count: 5 has no effect; it is read with source 'mined', 'given' (here 'batch') or "
            "shape.kind 'circle' (here 'polygon')",
        ),
        (
            "--mine.share 0.25 --source given",
            "mine.share: 0.25 has no effect; it is read with source 'mined' (here 'given')",
        ),
        (
            "--fall.kind none --fall.end 0.1",
            "fall.end: 0.1 has no effect; it is read with fall.kind 'linear', 'steps' (here 'none')",
        ),
    ],
)
def test_an_option_that_nothing_reads_is_refused_naming_when_it_is_read(line, message):
    assert helpers.refusal(train, *line.split()) == message


@pytest.mark.parametrize(
    "line",
    [
        "--count 5",
        "--count 5 --shape.kind polygon --source given",
        "--mine.share 0.25 --source mined",
        "--count 9 --shape.kind polygon",  # the default
        "--fall.kind none",
        "--fall.kind none --fall.end 0.5",
        "--fall.end 0.1",
    ],
)
def test_an_option_that_something_reads_or_that_is_the_default_is_taken(line, capsys):
    train(*line.split())
    assert capsys.readouterr().err == ""


def test_a_file_s_options_that_nothing_reads_are_named_in_one_line(yaml, capsys):
    """A file may serve several models."""
    file = str(yaml("count: 5\nmine: {share: 0.25}\nfall: {end: 0.1}"))
    config = train("--config", file, "--shape.kind", "polygon")
    assert (config.count, config.mine.share, config.fall.end) == (5, 0.25, 0.1)
    assert capsys.readouterr().err == "without effect under the other settings: count, mine.share\n"
    with pytest.raises(BadInput, match=r"^count: 7 has no effect"):
        train("--config", file, "--shape.kind", "polygon", "--count", "7")


def test_options_that_configurations_share_may_be_unread(capsys):
    found = train("--count", "5", "--shape.kind", "polygon", allow_unread=True)
    assert found.count == 5
    assert capsys.readouterr().err == ""
