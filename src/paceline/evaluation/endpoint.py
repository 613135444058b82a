"""Acceptance through a running vLLM or SGLang, by our convention, from what they publish.

vLLM counts drafts (steps), drafted and accepted tokens and accepted tokens by position in its Prometheus metrics; they
are read before and after the prompts. SGLang reports verifications with each answer (`spec_verify_ct`), and an average
acceptance length as a gauge.

Engines may count accepted tokens beyond the end of an answer. τ by our convention comes from the tokens that reached
the client: (answer tokens - answers) / steps, for the token of the prefill is no step's.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError
from paceline.evaluation.prompts import Prompt
from paceline.evaluation.sampling import Sampling
from paceline.fields import Fields

_LINE = re.compile(r"^(?P<name>[\w:]+)(\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class Served:
    """What an engine accepted while our prompts ran."""

    engine: str
    answers: int
    answer_tokens: int
    steps: int
    accepted: int
    """By the engine's own count."""
    by_slot: tuple[float, ...]
    """Share of steps whose slot was accepted, where the engine says it."""

    @property
    def tau(self) -> float:
        """Tokens committed over steps, by our convention."""
        return (self.answer_tokens - self.answers) / self.steps

    @property
    def tau_engine(self) -> float:
        """1 + accepted / drafts, as engines print it: counts what lies beyond an end, too."""
        return 1 + self.accepted / self.steps


def measure(
    url: str,
    prompts: Sequence[Prompt],
    *,
    limit: int,
    sampling: Sampling,
    model: str = "",
    workers: int = 1,
    timeout: float = 600.0,
) -> Served:
    """Send prompts to an OpenAI-compatible server and read its acceptance.

    url: its root, `http://host:port`. Raises UserError when it cannot be reached, publishes no speculation metrics, or
    drafted nothing while the prompts ran.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{url} is not an http address", "give http://host:port")
    root = url.rstrip("/").removesuffix("/v1")
    name = model or _model_name(root, timeout)
    before = metrics(_get(f"{root}/metrics", timeout))
    send = _Sender(root, name, limit, sampling, timeout)
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        replies = list(pool.map(send, prompts))
    after = metrics(_get(f"{root}/metrics", timeout))
    tokens = sum(_answer_tokens(reply, root) for reply in replies)
    return _served(before, after, replies, tokens, root)


def _served(
    before: Mapping[str, Any], after: Mapping[str, Any], replies: Sequence[Mapping[str, Any]], tokens: int, root: str
) -> Served:
    if any(key.startswith("vllm:") for key in after):
        return vllm_served(before, after, len(replies), tokens, root)
    if any(key.startswith("sglang:") for key in after):
        return sglang_served(replies, tokens, root)
    raise UserError(f"{root}/metrics is neither vLLM's nor SGLang's", "start vLLM, or SGLang with --enable-metrics")


def vllm_served(
    before: Mapping[str, float], after: Mapping[str, float], answers: int, tokens: int, root: str
) -> Served:
    """Differences of vLLM's counters, over all of its engines."""
    steps = _grown(before, after, "vllm:spec_decode_num_drafts")
    if steps is None:
        raise UserError(f"{root} runs without speculative decoding", "start it with --speculative-config")
    if steps == 0:
        raise UserError(f"{root} drafted nothing while the prompts ran", "check that the drafter belongs to its model")
    accepted = _grown(before, after, "vllm:spec_decode_num_accepted_tokens") or 0
    slots = _grown_by_position(before, after, "vllm:spec_decode_num_accepted_tokens_per_pos")
    return Served("vLLM", answers, tokens, steps, accepted, tuple(slots[p] / steps for p in sorted(slots)))


def sglang_served(replies: Sequence[Mapping[str, Any]], tokens: int, root: str) -> Served:
    """Verifications that SGLang reports with each answer."""
    verified = [_meta(reply, root).whole("spec_verify_ct", 0, default=0) for reply in replies]
    steps = sum(verified)
    if steps == 0:
        raise UserError(
            f"{root} reports no verification with its answers (spec_verify_ct)",
            "start SGLang with --speculative-algorithm DFLASH, in a version that reports meta_info",
        )
    accepted = sum(
        _meta(reply, root).whole("spec_accept_token_num", 0, default=max(0, _answer_tokens(reply, root) - 1 - own))
        for reply, own in zip(replies, verified, strict=True)
    )
    return Served("SGLang", len(replies), tokens, steps, accepted, ())


def _fields(value: Mapping[str, Any], root: str) -> Fields:
    return Fields(value, root, "is this an OpenAI-compatible server?")


def _answer_tokens(reply: Mapping[str, Any], root: str) -> int:
    return _fields(_fields(reply, root).object("usage"), root).whole("completion_tokens", 0, default=0)


def _meta(reply: Mapping[str, Any], root: str) -> Fields:
    said = _fields(reply, root)
    inner = _fields((said.items("choices", dict) or [{}])[0], root)
    return _fields(said.object("meta_info") or inner.object("meta_info"), root)


def metrics(text: str) -> dict[str, float]:
    """A Prometheus page as sample (name and position label) -> value, summed over all other labels.

    Counters carry `_total`, which is taken off; creation times are left out.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or line.startswith("#") or match["name"].endswith("_created"):
            continue
        position = re.search(r'position="(\d+)"', match["labels"] or "")
        key = match["name"].removesuffix("_total") + (f"#{position[1]}" if position else "")
        try:
            found[key] = found.get(key, 0.0) + float(match["value"])
        except ValueError:
            continue  # a value that is no number is no sample of ours
    return found


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> int | None:
    return None if name not in after else round(after[name] - before.get(name, 0.0))


def _grown_by_position(before: Mapping[str, float], after: Mapping[str, float], name: str) -> dict[int, int]:
    keys = [key for key in after if key.startswith(f"{name}#")]
    return {int(key.partition("#")[2]): round(after[key] - before.get(key, 0.0)) for key in keys}


@dataclass(frozen=True)
class _Sender:
    root: str
    model: str
    limit: int
    sampling: Sampling
    timeout: float

    def __call__(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(prompt.messages),
            "max_tokens": self.limit,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "return_meta_info": True,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        if self.sampling.top_k:
            body["top_k"] = self.sampling.top_k
        request = urllib.request.Request(
            f"{self.root}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return _json(_open(request, self.timeout), self.root)


def _model_name(root: str, timeout: float) -> str:
    models = _fields(_json(_get(f"{root}/v1/models", timeout), root), root).items("data", dict)
    if not models:
        raise UserError(f"{root} serves no model", "name it with --model")
    return _fields(models[0], root).text("id")


def _get(address: str, timeout: float) -> str:
    return _open(urllib.request.Request(address), timeout)


def _open(request: urllib.request.Request, timeout: float) -> str:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        detail = error.read().decode("utf-8", "replace")[:200]
        raise UserError(f"{request.full_url} answered {error.code}: {detail}", "check the server's log") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"{request.full_url} cannot be reached: {error}", "check the address and the port") from None


def _json(text: str, root: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(
            f"{root} did not answer with JSON: {text[:80]!r}", "is this an OpenAI-compatible server?"
        ) from None
    return value if isinstance(value, dict) else {"data": value}
