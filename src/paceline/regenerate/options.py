"""What a regeneration is asked to do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from paceline.config import TargetConfig
from paceline.errors import UserError

FLAGS = ("failed", "truncated", "empty", "looping")
"""Reasons for which an answer is not taken into the output, unless it is asked for with `keep`."""


@dataclass(frozen=True)
class RegenerateOptions:
    """Have the target answer every prompt of a data set."""

    sources: tuple[str, ...] = ()
    """Files, folders, globs or hub data sets with conversations or prompts; old answers are replaced."""
    output: str = ""
    """The file to write: .jsonl or .parquet. Beside it lies a journal that makes stopping and starting safe."""
    target: TargetConfig = field(default_factory=TargetConfig)
    shape: Literal["auto", "messages", "sharegpt", "completion", "alpaca", "prompt"] = "auto"
    limit: int = 0
    """Answer only the first prompts; 0 answers all."""
    keep: tuple[str, ...] = ()
    """Flags to let into the output all the same (truncated, looping, empty); others go to OUTPUT.flagged.jsonl."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: Literal["template", "on", "off"] = "template"

    device: str = "auto"
    batch: int = 0
    """Answers written at once in this process; 0 chooses by device."""

    endpoint: str = ""
    """An OpenAI-compatible server, such as http://localhost:8000/v1; empty writes in this process."""
    served_name: str = ""
    """The model's name at the endpoint; empty asks the endpoint."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the endpoint's key, where it wants one."""
    in_flight: int = 64
    """Requests under way at once."""
    requests_per_minute: int = 0
    """0 is no limit but the endpoint's own (429 is waited out)."""
    retries: int = 8
    retry_seconds: float = 1.0
    """The first wait before a request is tried again; it doubles each time, up to a minute."""
    timeout_seconds: float = 600.0

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not self.sources:
            raise UserError("no prompts to answer", "name at least one file, folder or data set")
        if not self.output.endswith((".jsonl", ".parquet")):
            raise UserError(f"output = {self.output!r} ends neither in .jsonl nor in .parquet", "choose one of them")
        unknown = set(self.keep) - set(FLAGS)
        if unknown:
            raise UserError(f"keep = {sorted(unknown)[0]!r} is no flag", f"flags are {', '.join(FLAGS)}")
        for name, low, high in _RANGES:
            value = dataclasses.asdict(self)[name]
            if not low <= value <= high:
                raise UserError(f"{name} = {value} is outside {low:g} … {high:g}", "choose a value inside")

    def fingerprint(self, template: str) -> str:
        """Identity of what decides the answers: a journal is continued only by the same."""
        facts = [
            self.target.model,
            self.target.revision,
            self.served_name,
            bool(self.endpoint),
            self.target.dtype,
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            self.thinking,
            template,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


_RANGES = (
    ("limit", 0, 1 << 40),
    ("max_new_tokens", 1, 1 << 22),
    ("temperature", 0.0, 10.0),
    ("top_p", 1e-6, 1.0),
    ("top_k", 0, 1 << 20),
    ("batch", 0, 1 << 16),
    ("in_flight", 1, 4096),
    ("requests_per_minute", 0, 1 << 30),
    ("retries", 0, 1000),
    ("retry_seconds", 0.0, 3600.0),
    ("timeout_seconds", 0.1, 1e6),
)
