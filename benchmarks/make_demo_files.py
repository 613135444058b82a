"""Make the shipped files of the demo data from prompts and raw answers.

    python benchmarks/make_demo_files.py --prompts prompts.jsonl --raw raw.jsonl.gz --tokenizer smollm2/ \
        --out src/paceline/demo_data

Left out, and counted by reason in `record.json`: answers that are empty, that loop, whose text does not encode to the
same ids again, held-out answers that resemble a training answer, and training prompts that `paceline` itself would set
aside as near a held-out one. Answers that hit the limit of tokens are cut to whole sentences, as are looping training
answers before their loop, if enough is left: it still is what the target writes. They are marked `"truncated": true`:
no end of turn follows them. Of each kind, answers that came to an end are preferred.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo_checks import SIMILAR, ShingleIndex, loops, start_of_loop
from make_demo_answers import END, Answer, chat, compressed, prompt_ids, read_rows, record_path
from paceline.data.split import groups, signature, touches

SPLITS = ("train", "held_out")
CUT_AT_LEAST = 48
SENTENCE_END = re.compile(r"[.!?][\"')*]*(?=\s)|\n\s*\n")


@dataclass(frozen=True)
class Candidate:
    """A prompt with its answer, fit to be shipped unless `reason` says why not."""

    row: dict[str, Any]
    answer: Answer
    text: str
    reason: str | None = None

    @property
    def preference(self) -> tuple[bool, str]:
        """Answers that came to an end first; beyond that no order but chance (the id is a hash)."""
        return not self.answer.finished, self.row["id"].rpartition("-")[2]

    def shipped(self) -> dict[str, Any]:
        messages = [*chat(self.row["prompt"]), {"role": "assistant", "content": self.text}]
        row = {"id": self.row["id"], "kind": self.row["kind"], "messages": messages}
        return row if self.answer.finished else {**row, "truncated": True}


# --- what is wrong with an answer ---


def whole_sentences(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The ids up to the last end of a sentence; none if that is too short or splits a token."""
    text = decoded(tokenizer, ids)
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    cut = tokenizer.encode(text[: ends[-1]].rstrip(), add_special_tokens=False) if ends else []
    return cut if len(cut) >= CUT_AT_LEAST and cut == ids[: len(cut)] else []


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encodes_back(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: Answer, text: str) -> bool:
    """Whether the conversation, rendered and encoded as training does it, holds exactly the ids that were written."""
    messages = [*chat(prompt), {"role": "assistant", "content": text}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    wanted = [*prompt_ids(tokenizer, prompt), *answer.ids, tokenizer.convert_tokens_to_ids(END)]
    return ids[: len(wanted)] == wanted


def judged(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], answer: Answer) -> Candidate:
    candidate = Candidate(row, answer, decoded(tokenizer, answer.ids))
    if not candidate.text.strip():
        return replace(candidate, reason="empty")
    if loops(answer.ids, candidate.text):
        return replace(candidate, reason="looping")
    if not encodes_back(tokenizer, row["prompt"], answer, candidate.text):
        return replace(candidate, reason="encodes differently")
    return candidate


def best_version(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], answer: Answer) -> Candidate:
    """The answer as it is, or, where it broke off or (training only) loops, its whole sentences before that."""
    candidate = judged(tokenizer, row, answer)
    looping = candidate.reason == "looping"
    if answer.finished and not looping:
        return candidate
    if looping and row["split"] != "train":
        return candidate
    stop = start_of_loop(answer.ids) if looping else len(answer.ids)
    shorter = judged(tokenizer, row, Answer(whole_sentences(tokenizer, answer.ids[:stop]), finished=False))
    return candidate if shorter.reason else shorter


# --- what is taken ---


def split_apart(candidates: list[Candidate]) -> Iterator[Candidate]:
    """The same candidates, training ones first; a held-out answer that is like a training answer gets a reason."""
    seen = ShingleIndex()
    for candidate in sorted(candidates, key=lambda candidate: SPLITS.index(candidate.row["split"])):
        if candidate.reason is None and candidate.row["split"] == "train":
            seen.add(candidate.text)
            yield candidate
        elif candidate.reason is None and seen.highest(candidate.text) >= SIMILAR:
            yield replace(candidate, reason="answer resembles a training answer")
        else:
            yield candidate


def fit(candidates: Iterable[Candidate], split: str) -> list[Candidate]:
    return [each for each in candidates if each.reason is None and each.row["split"] == split]


def away_from(held_out: list[Candidate], candidates: list[Candidate]) -> Iterator[Candidate]:
    """The training candidates; those that `paceline.data` would set aside beside these held-out rows get a reason."""
    both = [*fit(candidates, "train"), *held_out]
    group = groups(np.stack([signature(each.row["prompt"]) for each in both]))
    near = touches(group, [each.row["split"] == "held_out" for each in both])
    for each, is_near in zip(both, near, strict=True):
        if each.row["split"] == "train":
            yield replace(each, reason="prompt near a held-out one") if is_near else each


def best_of_each_kind(candidates: list[Candidate], limit: int) -> dict[str, list[Candidate]]:
    by_kind: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda candidate: candidate.preference):
        if len(by_kind[candidate.row["kind"]]) < limit:
            by_kind[candidate.row["kind"]].append(candidate)
    return dict(sorted(by_kind.items()))


def mixed(by_kind: dict[str, list[Candidate]]) -> list[dict[str, Any]]:
    """One row of each kind in turn, so that every prefix of the file is balanced."""
    shuffled = [sorted(same, key=lambda candidate: candidate.preference[1]) for same in by_kind.values()]
    return [candidate.shipped() for turn in zip_longest(*shuffled) for candidate in turn if candidate is not None]


def summary(by_kind: dict[str, list[Candidate]]) -> dict[str, Any]:
    answers = [candidate.answer for same in by_kind.values() for candidate in same]
    tokens = sum(len(answer.ids) for answer in answers)
    return {
        "rows": len(answers),
        "by_kind": {kind: len(same) for kind, same in by_kind.items()},
        "answer_tokens": tokens,
        "mean_answer_tokens": round(tokens / max(len(answers), 1), 1),
        "truncated": sum(not answer.finished for answer in answers),
    }


def add(arguments: argparse.Namespace, candidates: list[Candidate]) -> None:
    """Put new training rows behind those of an earlier run; its held-out rows stay what they are."""
    old = {split: read_rows(arguments.out / f"{split}.jsonl.gz") for split in SPLITS}
    record = json.loads((arguments.out / "record.json").read_text())
    held_out = [kept(row, "held_out") for row in old["held_out"]]
    known = [kept(row, "train") for row in old["train"]]
    fresh = [each for each in candidates if each.row["split"] == "train"]
    prompts = {each.row["prompt"] for each in known}
    fresh = [each for each in fresh if each.row["prompt"] not in prompts]
    seen = ShingleIndex()
    for each in held_out:
        seen.add(each.text)
    like = "answer resembles a held-out answer"
    judged_rows = [
        replace(each, reason=like) if each.reason is None and seen.highest(each.text) >= SIMILAR else each
        for each in fresh
    ]
    apart = [each for each in away_from(held_out, [*known, *judged_rows]) if each.row["prompt"] not in prompts]
    chosen = best_of_each_kind(fit(apart, "train"), arguments.train_per_kind)
    rows = [*old["train"], *mixed(chosen)]
    (arguments.out / "train.jsonl.gz").write_bytes(compressed(rows))
    left_out = Counter(f"train: {each.reason}" for each in [*judged_rows, *apart] if each.reason)
    record["train"] = together(record["train"], summary(chosen))
    record["added"] = [
        *record.get("added", []),
        {
            "generation": json.loads(record_path(arguments.raw).read_text()),
            **summary(chosen),
            "left_out": dict(sorted(left_out.items())),
        },
    ]
    (arguments.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["added"][-1], indent=1), len(rows))


def together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two summaries as one."""
    rows, tokens = one["rows"] + other["rows"], one["answer_tokens"] + other["answer_tokens"]
    return {
        "rows": rows,
        "by_kind": dict(sorted((Counter(one["by_kind"]) + Counter(other["by_kind"])).items())),
        "answer_tokens": tokens,
        "mean_answer_tokens": round(tokens / max(rows, 1), 1),
        "truncated": one["truncated"] + other["truncated"],
    }


def kept(row: dict[str, Any], split: str) -> Candidate:
    """A shipped row as a candidate; its ids are not needed any more."""
    prompt, text = row["messages"][0]["content"], row["messages"][-1]["content"]
    return Candidate({**row, "prompt": prompt, "split": split}, Answer([], not row.get("truncated")), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--prompts", "--raw", "--tokenizer", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--train-per-kind", type=int, default=550)
    parser.add_argument("--held-out-per-kind", type=int, default=34)
    parser.add_argument("--add", action="store_true", help="keep the rows that --out holds, and add training rows")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    answers = {row["id"]: Answer(row["ids"], row["finished"]) for row in read_rows(arguments.raw)}
    answered = [row for row in read_rows(arguments.prompts) if row["id"] in answers]
    candidates = list(split_apart([best_version(tokenizer, row, answers[row["id"]]) for row in answered]))
    if arguments.add:
        add(arguments, candidates)
        return
    held_out = best_of_each_kind(fit(candidates, "held_out"), arguments.held_out_per_kind)
    apart = list(away_from([each for same in held_out.values() for each in same], candidates))
    chosen = {"train": best_of_each_kind(fit(apart, "train"), arguments.train_per_kind), "held_out": held_out}
    left_out = Counter(f"{each.row['split']}: {each.reason}" for each in [*candidates, *apart] if each.reason)
    record: dict[str, Any] = {"generation": json.loads(record_path(arguments.raw).read_text())}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, pool in (("train", apart), ("held_out", candidates)):
        (arguments.out / f"{split}.jsonl.gz").write_bytes(compressed(mixed(chosen[split])))
        record[split] = summary(chosen[split])
        left_out[f"{split}: more than wanted of its kind"] = len(fit(pool, split)) - record[split]["rows"]
    record["left_out"] = dict(sorted(left_out.items()))
    (arguments.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
