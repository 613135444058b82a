"""Write the prompts of the demo data: JSON lines of {"id", "kind", "split", "template", "prompt"}.

    python benchmarks/make_demo_prompts.py --out prompts.jsonl

The texts are ours (`demo_sources/*.toml`: frames with slots, and the values that fill them); the kind "arithmetic"
also takes word problems from reasoning-gym 0.1.25 (Apache-2.0), which is needed for this script only.

What is held out is whole topics: a value (a country, a passage, a character, a word problem) belongs to one split, in
every kind in which it occurs. A held-out prompt that still resembles a training prompt (Jaccard similarity of word
5-grams of 0.5 or more) is left out. Everything follows from the seed.
"""

import argparse
import json
import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import reasoning_gym

from demo_checks import SIMILAR, ShingleIndex

SOURCES = Path(__file__).parent / "demo_sources"
MANNERS = SOURCES / "manners.toml"
HELD_OUT_SHARE = 0.13
NUMBER_DRAWS = 4


@dataclass(frozen=True)
class Group:
    """Frames of one kind and the values of their slots; `x` is the slot that a prompt is about."""

    kind: str
    name: str
    share: float
    templates: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[int, int]]
    hold_out: tuple[str, ...]

    @property
    def topic_slot(self) -> str:
        return self.hold_out[0]


@dataclass(frozen=True)
class Prompt:
    """One prompt. `template` names the frame that it was made from, `topic` what must not cross the splits."""

    kind: str
    split: str
    template: str
    prompt: str
    topic: str = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.kind}-{digest(self.prompt)[:10]}"

    def row(self) -> dict[str, str]:
        row = asdict(self)
        del row["topic"]
        return {"id": self.id, **row}


# --- draws that depend on nothing but their arguments ---


def digest(*parts: object) -> str:
    return blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def uniform(*parts: object) -> float:
    """A number in [0, 1) that the arguments determine."""
    return int(digest(*parts), 16) / 2**128


def split_of(value: str, seed: int) -> str:
    return "held_out" if uniform(seed, "split", value) < HELD_OUT_SHARE else "train"


# --- our own frames ---


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def read_groups(kind: str) -> list[Group]:
    passages = lines(tomllib.loads((SOURCES / "passages.toml").read_text("utf-8"))["passages"])
    tables = tomllib.loads((SOURCES / f"{kind}.toml").read_text("utf-8"))["group"]
    return [read_group(kind, f"{kind}{number}", table, passages) for number, table in enumerate(tables)]


def read_group(kind: str, name: str, table: dict, passages: tuple[str, ...]) -> Group:
    slots = {slot: lines(values) for slot, values in table.get("slots", {}).items()}
    if "passages" in table:
        slots[table["passages"]] = passages
    return Group(
        kind=kind,
        name=name,
        share=table.get("share", 1),
        templates=lines(table["templates"]),
        slots=slots,
        numbers={slot: (low, high) for slot, (low, high) in table.get("numbers", {}).items()},
        hold_out=tuple(table.get("hold_out", ["x"])),
    )


def expand(group: Group, split: str, seed: int) -> Iterator[Prompt]:
    """Every frame with every topic of the split; the other slots are drawn, in the same split where it matters."""
    slots = {
        slot: tuple(value for value in values if slot not in group.hold_out or split_of(value, seed) == split)
        for slot, values in group.slots.items()
    }
    if not all(slots.values()):
        return
    for number, template in enumerate(group.templates):
        for topic in slots[group.topic_slot]:
            for draw in range(NUMBER_DRAWS if group.numbers else 1):
                rng = random.Random(digest(seed, template, topic, draw))
                values = {slot: rng.choice(choices) for slot, choices in slots.items()}
                values[group.topic_slot] = topic
                numbers = {slot: str(rng.randint(low, high)) for slot, (low, high) in group.numbers.items()}
                text = substitute(substitute(template, values), {**values, **numbers})
                yield Prompt(group.kind, split, f"{group.name}/{number}", text, topic)


def substitute(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda slot: values.get(slot[1], slot[0]), text)


# --- reasoning-gym ---

GYM_ENDINGS = ("", " Show your working.", " Explain how you got the result.", " Think step by step.")


def gym_prompts(split: str, seed: int) -> Iterator[Prompt]:
    """Word problems and small sums; a word problem is held out with all problems that tell the same story."""
    for entry in reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=2500):
        problem = entry["question"].split(" Give the result as your final answer.")[0]
        story = " ".join(sorted(entry["metadata"]["variables"]))
        if split_of(story, seed) == split:
            ending = GYM_ENDINGS[int(uniform(seed, "ending", problem) * len(GYM_ENDINGS))]
            yield Prompt("arithmetic", split, "gsm_symbolic", problem + ending, story)
    for entry in reasoning_gym.create_dataset("simple_equations", seed=seed, size=100, max_value=40):
        if split_of(entry["question"], seed) == split:
            yield Prompt("arithmetic", split, "simple_equations", entry["question"], entry["question"])


# --- the choice ---


def fair_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """First one prompt of every topic, then a second one of every topic, and so on, each round in a drawn order."""
    by_topic: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: uniform(seed, "order", prompt.prompt)):
        by_topic[prompt.topic].append(prompt)
    rounds = [(turn, prompt) for same in by_topic.values() for turn, prompt in enumerate(same)]
    return [prompt for _, prompt in sorted(rounds, key=lambda pair: (pair[0], digest(seed, pair[1].prompt)))]


def pools(kind: str, split: str, seed: int) -> list[tuple[float, list[Prompt]]]:
    """The groups of a kind with their shares, each in fair order."""
    found = [(group.share, fair_order(expand(group, split, seed), seed)) for group in read_groups(kind)]
    if kind == "arithmetic":
        found.append((1.0, fair_order(gym_prompts(split, seed), seed)))
    return found


def choose(kind: str, split: str, count: int, seed: int, seen: ShingleIndex | None = None) -> list[Prompt]:
    """Up to `count` prompts of one kind, by the groups' shares; with `seen`, only those unlike everything in it."""
    shares_and_pools = pools(kind, split, seed)
    whole = sum(share for share, pool in shares_and_pools if pool)
    chosen: list[Prompt] = []
    spare: list[Prompt] = []
    for share, pool in shares_and_pools:
        fresh = [prompt for prompt in pool if seen is None or seen.highest(prompt.prompt) < SIMILAR]
        quota = round(count * share / whole)
        chosen.extend(fresh[:quota])
        spare.extend(fresh[quota:])
    distinct = {prompt.prompt: prompt for prompt in [*chosen, *spare]}
    return list(distinct.values())[:count]


def with_manners(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """Each prompt again, `count` times, followed by a sentence that asks for another kind of answer."""
    manners = {kind: lines(text) for kind, text in tomllib.loads(MANNERS.read_text("utf-8")).items()}
    found = []
    for prompt in prompts:
        endings = sorted(manners[prompt.kind], key=lambda ending: uniform(seed, "manner", prompt.prompt, ending))
        found += [replace(prompt, prompt=f"{prompt.prompt} {ending}") for ending in endings[:count]]
    return found


def kinds() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.toml") if path.stem not in ("passages", MANNERS.stem))


def make(train_per_kind: int, held_out_per_kind: int, seed: int, manners: int = 0) -> list[Prompt]:
    """All prompts, the training ones first."""
    train = [prompt for kind in kinds() for prompt in choose(kind, "train", train_per_kind, seed)]
    train += with_manners(train, manners, seed)
    seen = ShingleIndex()
    for prompt in train:
        seen.add(prompt.prompt)
    return train + [prompt for kind in kinds() for prompt in choose(kind, "held_out", held_out_per_kind, seed, seen)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-per-kind", type=int, default=1600)
    parser.add_argument("--held-out-per-kind", type=int, default=90)
    parser.add_argument("--manners", type=int, default=3, help="how often a training prompt is asked in another manner")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = make(arguments.train_per_kind, arguments.held_out_per_kind, arguments.seed, arguments.manners)
    arguments.out.write_text("".join(json.dumps(prompt.row(), ensure_ascii=False) + "\n" for prompt in prompts))
    for (split, kind), count in sorted(Counter((prompt.split, prompt.kind) for prompt in prompts).items()):
        print(f"{split:9} {kind:11} {count}")


if __name__ == "__main__":
    main()
