"""`paceline data show`: what is coloured, counted and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from data_world import BY_NAME, token
from rich.console import Console

from paceline.batches import TokenBatch
from paceline.config import Config, load
from paceline.data.corpus import open_corpus
from paceline.data.show import Agreement, gather, histogram, show
from paceline.data.show_page import page
from paceline.data.template import Template
from paceline.errors import UserError

KIND = BY_NAME["smollm2"]


def config_of(tmp_path: Path, rows: list[object], *settings: str) -> Config:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    fixed = (
        f"data.train={path}",
        f"data.cache_folder={tmp_path / 'cache'}",
        "training.tokens=512",
        "training.anchors=16",
    )
    return load(None, [*fixed, *settings])


def talk(number: int) -> dict[str, object]:
    turns = [f"What about number {number} <b>?", f"It is \x1b[31m so {number} 😀."]
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]
    }


def run(config: Config, html: Path | None = None, *, right: bool = True) -> tuple[int, str]:
    console = Console(width=120, record=True, file=None, quiet=True)

    def next_tokens(batch: TokenBatch) -> torch.Tensor:
        following = torch.roll(batch.ids_S, -1)
        return following if right else following + 1

    console.quiet = False
    with console.capture() as captured:
        code = show(
            config,
            KIND.tokenizer(),
            mask_token_id=token("<|mask|>"),
            eos_ids=KIND.eos_ids,
            html=html,
            agreement=next_tokens,
            console=console,
        )
    return code, captured.get()


def test_good_data_is_shown_on_screen_and_page(tmp_path: Path) -> None:
    config = config_of(tmp_path, [talk(item) for item in range(12)])
    code, text = run(config, tmp_path / "out" / "page.html")
    assert code == 0
    assert "\x1b[31m so" not in text  # the data's own escape sequences are drawn, not sent
    assert "the target's own greedy answers" in text
    written = (tmp_path / "out" / "page.html").read_text()
    assert '<span class="learnt special">&lt;|im_end|&gt;</span>' in written
    assert "&lt;b&gt;" in written
    assert "packing fill" in written


def test_answers_of_another_model_are_warned_of(tmp_path: Path) -> None:
    _, text = run(config_of(tmp_path, [talk(item) for item in range(12)]), right=False)
    assert "regenerate" in text
    assert Agreement(96, 100).verdict != Agreement(80, 100).verdict != Agreement(10, 100).verdict


def test_data_that_a_run_would_refuse_is_shown_all_the_same(tmp_path: Path) -> None:
    code, text = run(config_of(tmp_path, [talk(1), {"x": 1}, {"x": 2}]))
    assert code == 1
    assert "wrong-shape" in text
    assert "2 of 3 rows are set aside" in text
    code, text = run(config_of(tmp_path, [{"x": 1}]))
    assert code == 1
    assert "wrong-shape" in text


def test_pieces_hold_the_whole_text_in_order(tmp_path: Path) -> None:
    config = config_of(tmp_path, [talk(item) for item in range(3)])
    template = Template(KIND.tokenizer(), KIND.eos_ids)
    corpus = open_corpus(config.data, template, mask_token_id=token("<|mask|>"), seed=0)
    facts = gather(corpus, config, KIND.tokenizer(), rows=2)
    for item, number in zip(facts.documents, (0, len(corpus.train) // 2), strict=True):
        whole = KIND.tokenizer().decode(corpus.train.document(number)[0])
        assert "".join(piece.text for piece in item.pieces) == whole
        learnt = "".join(piece.text for piece in item.pieces if piece.supervised)
        assert learnt.startswith("It is \x1b[31m so ")
        assert learnt.endswith("😀.<|im_end|>")
    assert "<!doctype html>" in page(facts)


def test_histogram_counts_every_document() -> None:
    import numpy as np

    lengths = np.asarray([1, 15, 16, 31, 32, 4096])
    found = histogram(lengths)
    assert sum(count for _, _, count in found) == 6
    assert found[0] == (1, 15, 2)
    assert found[1] == (16, 31, 2)
    assert histogram(lengths[:0]) == ()


def test_a_page_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        run(config_of(tmp_path, [talk(item) for item in range(12)]), tmp_path / "file" / "page.html")
