"""Acceptance through an engine's metrics, against local servers that publish as vLLM and SGLang do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.evaluation.command import EvalOptions, run_eval
from paceline.evaluation.endpoint import measure, metrics
from paceline.evaluation.prompts import Prompt
from paceline.evaluation.sampling import Sampling

PROMPTS = [Prompt(({"role": "user", "content": f"question {n}"},)) for n in range(3)]


class Engine:
    """Answers of 11 tokens in 4 steps (10 after the prefill's: τ is 2.5); it counts 2 drafts beyond each end."""

    def __init__(self, kind: str, drafting: bool = True) -> None:
        self.kind, self.drafting = kind, drafting
        self.requests: list[dict[str, Any]] = []
        # What other users did before: must not count.
        self.steps, self.accepted, self.per_slot = 1000, 5000, [900, 700, 0]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        if self.drafting:
            self.steps += 4
            self.accepted += 8
            self.per_slot = [self.per_slot[0] + 4, self.per_slot[1] + 3, self.per_slot[2] + 1]
        reply: dict[str, Any] = {"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 11}}
        if self.kind == "sglang":
            reply["meta_info"] = {"spec_verify_ct": 4 if self.drafting else 0}
        return reply

    def page(self) -> str:
        if self.kind == "sglang":
            return 'sglang:num_requests_total{model_name="m"} 5.0\nsglang:spec_accept_length{model_name="m"} 3.1\n'
        if self.kind == "other":
            return "process_cpu_seconds_total 4\n"
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "vllm:num_requests_running 0"]
        if self.kind == "vllm":
            half = self.steps // 2
            # Two engines behind one address.
            lines += [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {half}.0']
            lines += [f'vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} {self.steps - half}.0']
            lines += ['vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09']
            lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.accepted}']
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {count}'
                for place, count in enumerate(self.per_slot)
            ]
        return "\n".join(lines)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(json.dumps({"data": [{"id": "tiny"}]}))
            elif self.path == "/metrics":
                self._send(engine.page())
            else:
                self.send_error(404, "no such page")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(engine.complete(body)))

        def _send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_vllm_counters_are_differenced_and_summed_over_engines():
    engine = Engine("vllm")
    with serving(engine) as url:
        found = measure(f"{url}/v1/", PROMPTS, limit=64, sampling=Sampling(0.7, top_k=5), workers=3)
    assert (found.engine, found.steps, found.accepted, found.answers) == ("vLLM", 12, 24, 3)
    assert found.tau == 30 / 12  # our convention: what reached the client, the prefill's token aside
    assert found.tau_engine == 1 + 24 / 12  # the engine counts past the end
    assert found.by_slot == (1.0, 0.75, 0.25)
    sent = engine.requests[0]
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["top_k"]) == ("tiny", 64, 0.7, 5)


def test_sglang_reports_with_each_answer():
    with serving(Engine("sglang")) as url:
        found = measure(url, PROMPTS, limit=64, sampling=Sampling())
    assert (found.engine, found.steps, found.tau) == ("SGLang", 12, 2.5)


FAULTS = {
    "without speculative decoding": Engine("vllm-plain"),
    "drafted nothing": Engine("vllm", drafting=False),
    "no verification": Engine("sglang", drafting=False),
    "neither vLLM's nor SGLang's": Engine("other"),
}


@pytest.mark.parametrize("message", FAULTS)
def test_an_engine_that_does_not_speculate_is_an_error(message: str):
    with serving(FAULTS[message]) as url, pytest.raises(UserError, match=message):
        measure(url, PROMPTS, limit=8, sampling=Sampling())


def test_addresses_that_lead_nowhere_are_one_line():
    with serving(Engine("vllm")) as url, pytest.raises(UserError, match="answered 404"):
        measure(f"{url}/nowhere", PROMPTS, limit=8, sampling=Sampling())
    with pytest.raises(UserError, match="cannot be reached"):
        measure(url, PROMPTS, limit=8, sampling=Sampling())
    with pytest.raises(UserError, match="not an http address"):
        measure("file:///etc", PROMPTS, limit=8, sampling=Sampling())
    with pytest.raises(UserError, match="not an http address"):
        measure("127.0.0.1:8000", PROMPTS, limit=8, sampling=Sampling())
    with pytest.raises(UserError, match="cannot be reached"):
        measure("http://a host:80", PROMPTS, limit=8, sampling=Sampling())


ODD_REPLIES: list[dict[str, Any]] = [
    {"usage": [1], "choices": []},
    {"usage": {"completion_tokens": "11"}},
    {"usage": {"completion_tokens": -1}},
    {"usage": {"completion_tokens": 11}, "choices": 5},
    {"usage": {"completion_tokens": 11}, "meta_info": "x"},
    {"usage": {"completion_tokens": 11}, "meta_info": {"spec_verify_ct": 4.5}},
]


@pytest.mark.parametrize("reply", ODD_REPLIES, ids=str)
def test_replies_of_other_kinds_are_one_line(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    engine = Engine("sglang")
    monkeypatch.setattr(engine, "complete", lambda _: reply)
    with serving(engine) as url, pytest.raises(UserError, match="is not"):
        measure(url, PROMPTS, limit=8, sampling=Sampling())


def test_metrics_pages_with_odd_lines():
    page = 'a_total{x="1"} 2\na_total{x="2"} 3\nb NaNish\nc{position="4",m="q"} 1e3 1700000000\n\n# d 4\nd_created 9\n'
    assert metrics(page) == {"a": 5.0, "c#4": 1000.0}


def test_the_command_compares_with_our_own_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    options = {"prompts": str(prompts), "out": str(tmp_path / "served.json")}
    with serving(Engine("vllm")) as url:
        assert run_eval(EvalOptions(endpoint=url, compare=2.52, **options)) == 0
        assert run_eval(EvalOptions(endpoint=url, compare=3.1, **options)) == 1
    assert "more than 2 % apart" in capsys.readouterr().out
    assert json.loads((tmp_path / "served.json").read_text())["tau"] == 2.5
