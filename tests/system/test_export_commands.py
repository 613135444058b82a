"""`paceline export`, `verify` and `eval` as functions, on a tiny target's folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "numerics"))

from decode_world import (
    Oracle,
    ends_of,
    grouped_prompts,
    make_drafter,
    make_target,
    one_hot_ends,
    save_target,
    shapes_of,
    slow_answers,
    tokenizer,
)

from paceline import export
from paceline.config import TargetConfig
from paceline.errors import UserError
from paceline.evaluation.command import EvalOptions, VerifyOptions, run_eval, run_verify
from paceline.evaluation.decode import Engine
from paceline.evaluation.report import EncodedPrompt, by_context, evaluate
from paceline.evaluation.verify import check_features, failed, verify
from paceline.export.command import ExportOptions, run_export
from paceline.export.origin import origin_of
from paceline.target.ends import load_ends


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("world")
    model = make_target("qwen3")
    config = save_target(model, place / "target")
    target, shape = shapes_of(place / "target")
    drafter = make_drafter(shape)
    rows = (export.TauRow("code", 2.5, 1.5, 10),)
    origin = origin_of(config)
    card = export.CardFacts(origin.name, origin.revision, origin.weights, settings="[training]", results=rows)
    export.write(
        place / "run" / "best", drafter.state_dict(), shape, target, dtype="float32", tokenizer=tokenizer(), card=card
    )
    return place, model, config, shape, drafter


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_export_verify_import(world, layout: str, capsys: pytest.CaptureFixture[str]):
    place, _, config, shape, drafter = world
    out = place / f"out-{layout}"
    assert run_export(ExportOptions(str(place / "run"), str(out), layout=layout, dtype="float32")) == 0
    assert "num_speculative_tokens" in capsys.readouterr().out
    back, tensors = export.read(out)
    assert back == shape
    assert all(torch.equal(tensors[name], tensor) for name, tensor in drafter.state_dict().items())
    assert run_verify(VerifyOptions(str(out), config.model)) == 0
    assert "fail" not in capsys.readouterr().out
    assert (out / "tokenizer.json").exists()
    card = (out / "README.md").read_text()
    assert "| code | 2.500 |" in card, "what was measured travels with the drafter"
    assert "[training]" in card
    assert ("sglang" in card) == (layout == "dflash")


def test_an_export_says_what_it_took_and_what_it_replaced(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, *_ = world
    options = ExportOptions(str(place / "run"), str(tmp_path / "out"))
    assert run_export(options) == 0
    first = capsys.readouterr()
    assert f"taking {place / 'run' / 'best'}" in first.err
    assert "replaced" not in first.out
    assert f"vllm serve {place}" not in first.out
    assert run_export(dataclasses.replace(options, drafter=str(place / "run" / "best"))) == 0
    second = capsys.readouterr()
    assert f"replaced {tmp_path / 'out'}" in second.out
    assert "taking" not in second.err


def test_a_noted_target_that_is_not_here_is_told_from_one_that_was_named(world, tmp_path: Path):
    place, *_ = world
    shutil.copytree(place / "run" / "best", tmp_path / "d")
    path = tmp_path / "d" / "paceline.json"
    path.write_text(path.read_text().replace(str(place / "target"), "/was/elsewhere"))
    for run in (
        lambda: run_eval(EvalOptions(str(tmp_path / "d"), prompts="x")),
        lambda: run_export(ExportOptions(str(tmp_path / "d"), str(tmp_path / "out"))),
    ):
        with pytest.raises(UserError, match="d was made for the target '/was/elsewhere', which is not here"):
            run()


def test_names_that_cannot_be_are_one_line(world, tmp_path: Path):
    place, *_ = world
    name = "x" * 300
    drafter = str(place / "run" / "best")
    prompts = str(prompts_file(tmp_path, 3))
    for run in (
        lambda: run_verify(VerifyOptions(name)),
        lambda: run_verify(VerifyOptions(drafter, f"./{name}")),
        lambda: run_export(ExportOptions(drafter, str(tmp_path / name))),
        lambda: run_eval(EvalOptions(drafter, prompts=prompts, out=str(tmp_path / name))),
        lambda: run_eval(EvalOptions(drafter, prompts=str(tmp_path / name))),
    ):
        with pytest.raises(UserError):
            run()


def test_an_export_deletes_nothing_that_is_not_its_own(world, tmp_path: Path):
    place, *_ = world
    options = ExportOptions(str(place / "run"), str(tmp_path / "out"))
    assert run_export(options) == 0
    (tmp_path / "out" / "drafter.gguf").write_text("made from it")
    with pytest.raises(UserError, match=r"out holds drafter\.gguf beside a drafter"):
        run_export(options)
    assert (tmp_path / "out" / "drafter.gguf").exists()


def test_verify_fails_on_another_template(world, tmp_path: Path):
    place, model, *_ = world
    changed = save_target(model, tmp_path / "target")
    other = tokenizer()
    other.chat_template = "{{ messages }}"
    other.save_pretrained(tmp_path / "target")
    assert [check.name for check in failed(verify(place / "run" / "best", changed))] == ["chat template"]
    assert run_verify(VerifyOptions(str(place / "run" / "best"), changed.model)) == 1


def test_other_weights_of_the_target_are_noted(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A target of the same sizes that was trained further: no fault, and said by every command."""
    place, *_ = world
    drafter, other = str(place / "run" / "best"), save_target(make_target("qwen3", seed=5), tmp_path / "other")
    assert run_verify(VerifyOptions(drafter, str(place / "target"))) == 0
    assert "ok    target's weights: those that it was trained with" in capsys.readouterr().out
    assert run_verify(VerifyOptions(drafter, other.model)) == 0
    told = capsys.readouterr()
    assert f"note  target's weights: trained with {place / 'target'} (fingerprint " in told.out
    assert "1 with a note" in told.err
    options = EvalOptions(drafter=drafter, target=other.model, prompts=str(prompts_file(tmp_path, 3)), tokens=8)
    assert run_eval(options) == 0
    assert "warning: the target's weights: trained with" in capsys.readouterr().err
    assert run_export(ExportOptions(drafter, str(tmp_path / "out"), target=other.model)) == 0
    assert "warning: the target's weights: trained with" in capsys.readouterr().err
    assert "- trained with `target`, weights " in (tmp_path / "out" / "README.md").read_text()
    # From now on it is the other one's.
    assert run_verify(VerifyOptions(str(tmp_path / "out"), other.model)) == 0
    assert "note" not in capsys.readouterr().out


def prompts_file(folder: Path, *lengths: int) -> Path:
    path = folder / "some.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": " ".join(["w9"] * length)}) for length in lengths))
    return path


def test_eval_sets_prompts_beyond_the_context_aside(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, *_ = world
    out = tmp_path / "result.json"
    options = EvalOptions(
        drafter=str(place / "run" / "best"), prompts=str(prompts_file(tmp_path, 5, 300, 6)), tokens=8, out=str(out)
    )  # fmt: skip
    assert run_eval(options) == 0
    assert "1 prompt set aside: longer than the target's context of 256 tokens" in capsys.readouterr().err
    settings = json.loads(out.read_text())["settings"]
    assert settings["prompts"] == 2
    assert list(settings["set_aside"].values()) == [1]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (256, (5,), "--tokens = 256 leaves no room for a prompt in the target's context of 256"),
        (8, (300, 301), "none of 2 prompts can be decoded"),
    ],
)
def test_eval_refuses_a_context_that_is_too_short_before_it_loads(
    world, tokens: int, lengths: tuple[int, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, *_ = world
    monkeypatch.setattr("paceline.evaluation.command.TransformersTarget", None)
    options = EvalOptions(drafter=str(place / "run" / "best"), prompts=str(prompts_file(tmp_path, *lengths)))
    with pytest.raises(UserError, match=message):
        run_eval(dataclasses.replace(options, tokens=tokens))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_eval_refuses_a_target_whose_logits_are_no_numbers(world, value: float, tmp_path: Path):
    """Their argmax is a token like any other, and a drafter fed with such states agrees with it: τ was perfect."""
    place, *_ = world
    shutil.copytree(place / "target", tmp_path / "target")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(value)
    save_file(weights, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    options = EvalOptions(
        str(place / "run" / "best"), str(tmp_path / "target"), str(prompts_file(tmp_path, 3)), tokens=8
    )
    with pytest.raises(UserError, match="logits are not finite in float32"):
        run_eval(options)


def test_a_batch_beyond_the_prompts_is_refused(world, tmp_path: Path):
    place, *_ = world
    options = EvalOptions(str(place / "run" / "best"), prompts=str(prompts_file(tmp_path, 3, 4)), tokens=8)
    with pytest.raises(UserError, match="--batches = 1 3 has one beyond the 2 prompts"):
        run_eval(dataclasses.replace(options, batches=(1, 3)))


def test_eval_warns_of_a_drafter_that_was_changed(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, *_ = world
    shutil.copytree(place / "run" / "best", tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-5}))
    options = EvalOptions(drafter=str(tmp_path / "changed"), prompts=str(prompts_file(tmp_path, 3)), tokens=8)
    assert run_eval(options) == 0
    assert "warning: the drafter was changed since it was exported: rms eps 1e-05" in capsys.readouterr().err


@pytest.mark.parametrize(("mask", "status", "word"), [(96, "ok", "unused"), (7, "note", "w7"), (95, "note", "end-of")])
def test_verify_notes_a_mask_token_that_text_may_hold(world, mask: int, status: str, word: str, tmp_path: Path):
    place, _, config, shape, drafter = world
    target, _ = shapes_of(place / "target")
    out = export.write(
        tmp_path / "d", drafter.state_dict(), dataclasses.replace(shape, mask_token_id=mask), target, dtype="float32"
    )
    (found,) = [check for check in verify(out, config) if check.name == "mask token"]
    assert found.status == status
    assert word in found.detail


@pytest.mark.parametrize("verb", ["verify", "eval", "export"])
def test_a_damaged_record_stops_every_command(world, verb: str, tmp_path: Path):
    place, _, config, *_ = world
    shutil.copytree(place / "run" / "best", tmp_path / "d")
    (tmp_path / "d" / "paceline.json").write_text('{"paceline": "0.1.0", "target": "x"')
    drafter = str(tmp_path / "d")
    run = {
        "verify": lambda: run_verify(VerifyOptions(drafter, config.model)),
        "eval": lambda: run_eval(EvalOptions(drafter=drafter, target=config.model, prompts="x")),
        "export": lambda: run_export(ExportOptions(drafter, str(tmp_path / "out"), target=config.model)),
    }
    with pytest.raises(UserError, match=r"paceline\.json cannot be read"):
        run[verb]()


def test_another_template_is_said_by_every_command(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, model, *_ = world
    drafter, changed = str(place / "run" / "best"), save_target(model, tmp_path / "target")
    other = tokenizer()
    other.chat_template = "{% for m in messages %}{{ m['content'] }} w9 {% endfor %}"
    other.save_pretrained(tmp_path / "target")
    assert run_eval(EvalOptions(drafter, changed.model, str(prompts_file(tmp_path, 3)), tokens=8)) == 0
    assert "warning: the chat template: trained with" in capsys.readouterr().err
    # Written again for that target, it is still the drafter of the other template.
    assert run_export(ExportOptions(drafter, str(tmp_path / "out"), target=changed.model)) == 0
    assert [check.name for check in failed(verify(tmp_path / "out", changed))] == ["chat template"]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [_cut, lambda path: path.write_bytes(b""), lambda path: path.write_text("version")])
def test_a_target_whose_weights_are_damaged_is_one_line(world, damage: Any, tmp_path: Path):
    place, *_ = world
    shutil.copytree(place / "target", tmp_path / "target")
    damage(tmp_path / "target" / "model.safetensors")
    drafter, changed = str(place / "run" / "best"), str(tmp_path / "target")
    for run in (
        lambda: run_verify(VerifyOptions(drafter, changed)),
        lambda: run_eval(EvalOptions(drafter, changed, str(prompts_file(tmp_path, 3)), tokens=8)),
        lambda: load_ends(TargetConfig(model=changed), "cpu", torch.float32),
    ):
        with pytest.raises(UserError, match="cannot read the weights of") as caught:
            run()
        assert "\n" not in caught.value.what


def test_verify_catches_a_rope_that_readers_would_take(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Trained with one theta and exported with another: logits at 0 are close, at 5,000 they are not."""
    place, _, config, shape, drafter = world
    from paceline.evaluation import verify as module

    wrong = dataclasses.replace(shape, rope={"rope_type": "default", "rope_theta": 500.0})
    monkeypatch.setattr(module, "config_json", lambda _shape, dtype: export.folder.config_json(wrong, dtype))
    names = [check.name for check in failed(verify(place / "run" / "best", config, trained=drafter.state_dict()))]
    assert names == ["logits, as an engine computes it"]


def test_verify_sees_features_of_wrong_layers(world):
    _, model, _, shape, _ = world
    assert not failed(check_features(model, shape))
    from paceline.evaluation.capture import Capture

    shifted = dataclasses.replace(shape, layer_ids=(1, 2, 3))
    with pytest.MonkeyPatch.context() as patch:
        original = Capture.__init__
        patch.setattr(Capture, "__init__", lambda self, m, ids: original(self, m, [i - 1 for i in ids]))
        assert failed(check_features(model, shifted))


def test_verify_names_both_when_target_and_drafter_differ(world, tmp_path: Path):
    place, *_ = world
    save_target(make_target("qwen3", vocab_size=113), tmp_path / "other")
    with pytest.raises(UserError, match=r"vocabulary 97, but .*other has 113"):
        verify(place / "run" / "best", TargetConfig(model=str(tmp_path / "other")))


def test_eval_measures_and_writes(world, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, *_ = world
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"w{n} w{n + 1} w40", "kind": "odd" if n % 2 else "even"} for n in range(6)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    options = EvalOptions(
        drafter=str(place / "run" / "best"), prompts=str(prompts), count=0, tokens=24, batches=(1, 3),
        device="cpu", dtype="float32", out=str(tmp_path / "result.json"),
    )  # fmt: skip
    assert run_eval(options) == 0
    told = capsys.readouterr()
    assert "equal to plain decoding" in told.out
    assert told.out.count("batch 3") <= 2, "its speed and its block length, each once"
    assert "tok/s" not in told.err
    for word in ("loading the target", "batch 3, with the drafter", "batch 3, without the drafter"):
        assert word in told.err
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["lossless"] is True
    assert set(found["acceptance"]["by_kind"]) == {"odd", "even"}
    assert [speed["batch"] for speed in found["speeds"]] == [1, 3]
    assert len(found["identity"]["drafter_sha256"]) == 64
    assert found["identity"]["target_fingerprint"]
    assert run_eval(dataclasses.replace(options, temperature=1.0, out="")) == 0


def test_evaluation_of_an_oracle_saves_the_steps(world):
    _, model, _, shape, _ = world
    prompts = grouped_prompts(each=2)
    truth = slow_answers(model, prompts, 31)
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, truth, strict=True)]
    encoded = [EncodedPrompt(tuple(prompt), "all") for prompt in prompts]
    engine = Engine(model, one_hot_ends(), Oracle(whole), shape)
    found = evaluate(engine, encoded, limit=31, end_ids=(), batches=(4,))
    assert found.acceptance.tau_micro == 6.0  # 30 tokens in 5 whole blocks
    assert found.speeds[0].steps_saved == pytest.approx(1 - 5 / 30)
    assert found.lossless


def test_a_drafter_that_proposes_nothing_is_an_error(world):
    _, model, _, shape, _ = world
    prompts = grouped_prompts(each=2)
    truth = slow_answers(model, prompts, 60)
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, truth, strict=True)]
    engine = Engine(model, one_hot_ends(), Oracle(whole, range(91)), shape)
    with pytest.raises(UserError, match="proposed nothing"):
        evaluate(engine, [EncodedPrompt(tuple(prompt)) for prompt in prompts], limit=60, end_ids=(), batches=(4,))
    assert ends_of(model).embedding_VH.shape[0] == 97


def test_acceptance_by_context(world):
    from paceline.evaluation.decode import Decoded

    prompts = [EncodedPrompt((1,) * length) for length in (5, 127, 128, 600)]
    answers = [Decoded([0] * 5, [1, 1], [2, 2]), Decoded([0] * 3, [0, 0], [1, 1])] * 2
    found = by_context(answers, prompts, 4)
    assert {name: item.requests for name, item in found.items()} == {"0–127": 2, "128–511": 1, "512–2047": 1}
    assert found["128–511"].tau == 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "gguf"}, "layout = 'gguf'"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"drafter": "nowhere"}, "holds no exported drafter"),
    ],
)
def test_bad_options_are_one_line(world, change: dict[str, str], message: str, tmp_path: Path):
    place, *_ = world
    options = ExportOptions(str(place / "run"), str(tmp_path / "out"))
    with pytest.raises(UserError, match=message):
        run_export(dataclasses.replace(options, **change))
    assert not (tmp_path / "out").exists()
