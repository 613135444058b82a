"""Configuration: strict, and dumped so that it comes back equal."""

import ast
import dataclasses
import itertools
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import config
from paceline.errors import UserError


def test_defaults_survive_their_dump(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config.dump(config.Config()))
    assert config.load(path) == config.Config()


def test_overrides_win_and_survive(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nsteps = 5\n[data]\ntrain = ["a.jsonl"]\n')
    found = config.load(path, ["training.steps=200", "target.layer_ids=[1, 3]", "run.name=other", "data.train=b.jsonl"])
    assert (found.training.steps, found.target.layer_ids, found.run.name) == (200, (1, 3), "other")
    assert found.data.train == ("b.jsonl",)
    path.write_text(config.dump(found))
    assert config.load(path) == found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.step=2", ["training.step", "training.steps"]),
        ("trainin.steps=2", ["trainin", "training"]),
        ("training.steps=many", ["training.steps", "'many'", "whole number"]),
        ("training.steps=2.5", ["training.steps", "2.5"]),
        ("training.steps=true", ["training.steps", "True"]),
        ("training.clip=true", ["training.clip", "True"]),
        ("training.steps=-1", ["training.steps", "-1"]),
        ("training.learning_rate=5", ["training.learning_rate", "5"]),
        ("training.learning_rate=nan", ["training.learning_rate", "nan"]),
        ("training.schedule=linear", ["training.schedule", "'linear'", "cosine"]),
        ("training.betas=[0.9]", ["training.betas", "2 values"]),
        ("training.betas=[0.9, 1.0]", ["training.betas", "[0, 1)"]),
        ("drafter.block_size=1", ["drafter.block_size", "1"]),
        ("topology.kind=split", ["split", "topology.targets"]),
        ("data.weights=[1.0, 2.0]", ["data.weights", "2"]),
        ("run.name=a/b", ["run.name", "a/b"]),
        ("steps=3", ["steps=3", "section.key=value"]),
        ("training=3", ["training=3"]),
    ],
)
def test_what_cannot_be_is_one_clear_error(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(None, [override])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.remedy


def test_features_of_a_sharded_target_are_not_kept_on_disk() -> None:
    config.load(None, ["target.tensor_parallel=2", "target.feature_cache=memory"])
    with pytest.raises(UserError, match=r"'disk' with target\.tensor_parallel = 2"):
        config.load(None, ["target.tensor_parallel=2", "target.feature_cache=disk"])


def test_faulty_files_are_user_errors(tmp_path: Path) -> None:
    for name, content in {"a.toml": b"[training\n", "b.toml": b"\xff\xfe\x00", "c.toml": b"training = 3"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError):
            config.load(tmp_path / name)
    with pytest.raises(UserError, match="not found"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(UserError):
        config.load(tmp_path)


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0)])
def test_gamma_is_the_methods(block: int, gamma: float) -> None:
    assert config.default_gamma(block) == gamma


def test_every_number_has_a_range() -> None:
    sections = get_type_hints(config.Config)
    numbers = {
        f"{section}.{field.name}"
        for section, kind in sections.items()
        for field in dataclasses.fields(kind)
        if get_type_hints(kind)[field.name] in (int, float)
    }
    assert numbers - set(config._RANGES) == {"run.seed", "target.mask_token_id"}


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=8), st.booleans()), max_size=4))
def test_any_tree_is_a_config_or_a_user_error(tree: dict[str, Any]) -> None:
    for section in ({"training": tree}, tree):
        try:
            built = config._build(config.Config, section, "")
        except UserError:
            continue
        assert isinstance(built, config.Config)


def test_the_manual_names_every_key_and_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section, kind in get_type_hints(config.Config).items():
        part = page.split(f"## [{section}]")[1].split("\n## ")[0]
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| `")]
        assert [row[0].strip("| `") for row in rows] == [field.name for field in dataclasses.fields(kind)]
        for row, field in zip(rows, dataclasses.fields(kind), strict=True):
            plain = list(field.default) if isinstance(field.default, tuple) else field.default
            shown = '""' if plain == "" else str(plain).lower() if isinstance(plain, bool) else str(plain)
            assert row[-2] == f"`{shown}`", (section, field.name)


def test_the_manual_says_of_every_key_what_its_docstring_says() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    said = _docstrings(ast.parse(Path(config.__file__).read_text(encoding="utf-8")))
    for section, kind in get_type_hints(config.Config).items():
        part = page.split(f"## [{section}]")[1].split("\n## ")[0]
        rows = [line for line in part.splitlines() if line.startswith("| `")]
        for row, field in zip(rows, dataclasses.fields(kind), strict=True):
            words = said.get((kind.__name__, field.name), "")
            assert words, f"{section}.{field.name} has no docstring"
            assert f"| {words}" in row, (section, field.name)


def _docstrings(tree: ast.Module) -> dict[tuple[str, str], str]:
    """The string below each field of each class, on one line."""
    found = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, below in itertools.pairwise(kind.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                found[kind.name, field.target.id] = " ".join(str(below.value.value).split())
    return found
