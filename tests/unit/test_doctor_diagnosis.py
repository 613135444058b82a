"""From made-up answers of workers to what is wrong with a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, TrainingConfig, dump
from paceline.doctor.diagnosis import Left, Seen, diagnose, left_from, seen_from
from paceline.doctor.findings import Finding, Level
from paceline.doctor.travel import workers

NOW = 1000.0


def worker(
    rank: int, waits_for: str | None = None, phase: str = "train", seconds: float = 1.0, step: int = 412, **parts: Any
) -> Seen:
    status = {
        "rank": rank,
        "role": "drafter",
        "step": step,
        "phase": phase,
        "waits_for": waits_for,
        "batch": step,
        "since": NOW - seconds,
    }
    return Seen(rank, "answered", NOW, host="a", pid=100 + rank, answer={"status": status, "threads": [], **parts})


def absent(rank: int, state: Any, **known: Any) -> Seen:
    return Seen(rank, state, NOW, host="a", pid=100 + rank, **known)


def ended(rank: int, step: int = 3, phase: str = "end", state: Any = "ended") -> Seen:
    return absent(rank, state, heartbeat={"pid": 100 + rank, "step": step, "phase": phase, "time": NOW - 9})


def serious(*workers: Seen) -> list[Finding]:
    return [finding for finding in diagnose(workers) if finding.level >= Level.WARNING]


COMPILING = [
    {
        "name": "MainThread",
        "thread_id": 1,
        "os_thread_id": 1,
        "frames": [
            {"name": "_compile.<locals>._compile_inner", "file": "torch/_dynamo/convert_frame.py", "line": 1534},
            {"name": "compile_wrapper", "file": "torch/_dynamo/eval_frame.py", "line": 1024},
            {"name": "step", "file": "train.py", "line": 7},
            {"name": "<module>", "file": "train.py", "line": 70},
        ],
    }
]


def test_nothing_is_wrong() -> None:
    (found,) = diagnose([worker(0), worker(1, step=413)])
    assert (found.level, found.value) == (Level.OK, "2 of 2 workers answer; steps 412 to 413; train")


def test_an_empty_folder_is_an_error() -> None:
    (found,) = diagnose([])
    assert found.level is Level.ERROR
    assert "runs/NAME" in found.remedy


def test_the_rank_that_is_waited_for_is_compiling() -> None:
    waiting = worker(6, "features of batch 412 from rank 2", seconds=12)
    (found,) = serious(waiting, worker(2, seconds=12, threads=COMPILING))
    assert found.value == (
        "rank 6 waits for features of batch 412 from rank 2; rank 2 is compiling for 12 s: "
        "MainThread compiles what step (train.py:7) calls"
    )


def test_compiling_in_the_warm_up_is_expected() -> None:
    found = diagnose([worker(6, "the warm-up of rank 2"), worker(2, phase="warm-up", threads=COMPILING)])
    assert [one.level for one in found] == [Level.OK, Level.INFO]


def test_a_chain_of_waits_is_followed_to_its_end() -> None:
    found = serious(
        worker(5, "gradients from rank 4"),
        worker(4, "features of batch 9 from rank 1"),
        absent(1, "gone", heartbeat={"pid": 101, "step": 410, "phase": "train", "time": NOW - 35}),
    )
    gone, waits = found
    assert gone.subject == "rank 1"
    assert "last heard of 35 s ago at step 410 in phase train" in gone.value
    assert waits.value.endswith("rank 1 is gone")
    assert "rank 5 waits" in waits.value
    assert "rank 4 waits" in waits.value


def test_a_circle_of_waits_is_an_error_once_it_is_old() -> None:
    def circle(seconds: float) -> list[Finding]:
        first = worker(0, "a free buffer at rank 1", seconds=seconds)
        return serious(first, worker(1, "features of batch 3 from rank 0", seconds=seconds))

    assert circle(0.1) == []
    (found,) = circle(30)
    assert found.what == "ranks wait for each other"
    assert "rank 0 and rank 1" in found.why


def test_in_a_collective_the_one_that_has_not_come_is_named() -> None:
    everyone = "all-reduce of step 412 with ranks 1, 2 and 3"
    late = worker(3, seconds=90, phase="data")
    (found,) = serious(worker(1, everyone, seconds=90), worker(2, everyone, seconds=90), late)
    assert "rank 3 is in phase data for 90 s" in found.value
    assert found.level is Level.WARNING


def test_a_collective_that_all_have_come_to_and_that_does_not_end() -> None:
    everyone = "all-reduce of step 412 with ranks 1 and 2"
    (found,) = serious(worker(1, everyone, seconds=90), worker(2, everyone, seconds=80))
    assert "the transfer itself" in found.why
    assert serious(worker(1, everyone), worker(2, everyone)) == []


def test_stopped_and_traced_workers() -> None:
    (stopped,) = serious(absent(1, "stopped", letter="T"))
    assert stopped.remedy == "kill -CONT 101"
    (traced,) = serious(absent(1, "stopped", letter="t", traced_by=77))
    assert traced.remedy == "end the debugger (pid 77)"


def test_a_silent_worker_is_told_by_its_state() -> None:
    (holds,) = serious(absent(1, "silent", letter="R", waited=5.0))
    assert "holds the interpreter" in holds.why
    assert "--pid 101" in holds.remedy
    (kernel,) = serious(absent(1, "silent", letter="D", waited=5.0))
    assert "waits in the kernel" in kernel.why


def test_workers_of_another_host_are_no_fault() -> None:
    found = diagnose([worker(0), Seen(1, "elsewhere", NOW, host="b", pid=5)])
    assert [one.level for one in found] == [Level.OK, Level.INFO]
    assert "ssh b" in found[1].remedy


def test_a_rank_on_another_host_speaks_through_its_heartbeat() -> None:
    beat = {"pid": 5, "step": 9, "phase": "receive", "time": NOW - 2, "waits_for": "features of batch 9 from rank 0"}
    elsewhere = Seen(1, "elsewhere", NOW, host="b", pid=5, heartbeat=beat)
    found = diagnose([absent(0, "gone"), elsewhere])
    assert found[-1].value == "rank 1 waits for features of batch 9 from rank 0; rank 0 is gone"


def test_a_leaked_flag_names_who_set_it() -> None:
    culprit = {"thread": "loader", "stack": ["prefetch.py:9 fill", "prefetch.py:2 run"]}
    (found,) = serious(worker(0, fx={"flag": True, "leaked": True, "culprit": culprit}))
    assert found.level is Level.ERROR
    assert "thread 'loader' at prefetch.py:9 fill" in found.value


def test_a_flag_that_is_set_while_a_thread_traces_is_left_to_the_stacks() -> None:
    assert serious(worker(0, fx={"flag": True, "leaked": False, "culprit": None})) == []


def test_recompilations_near_the_limit_are_a_warning() -> None:
    def again(count: int) -> Seen:
        one = {"function": "attend", "file": "m.py", "line": 3, "reason": "size mismatch: 128, 256", "when": NOW}
        return worker(0, dynamo={"recompiles": [one] * count})

    assert serious(again(2)) == []
    (found,) = serious(again(6))
    assert "size mismatch" in found.value
    assert "7 times" in found.why


def test_a_part_that_could_not_be_read_is_said() -> None:
    found = diagnose([worker(0, memory={"fault": "OSError: no"})])
    assert [one.what for one in found if one.level is Level.INFO] == ["its memory could not be read"]


def test_seen_from_keeps_what_the_traveller_found() -> None:
    facts = {
        "time": NOW,
        "workers": [
            {"rank": 3, "state": "stopped", "pid": 9, "host": "a", "heartbeat": None, "letter": "T", "waited": 2.0},
            {"rank": 4, "state": "answered", "pid": 10, "host": "a", "heartbeat": None, "answer": {"time": NOW - 1}},
        ],
    }
    stopped, answered = seen_from(facts)
    assert (stopped.state, stopped.letter, stopped.now) == ("stopped", "T", NOW)
    assert answered.now == NOW - 1


LEFT = Left("/runs/a", step=3, total=3, evaluations=((0, 1.2), (2, 2.1), (3, 1.9)))


def test_a_run_that_ended_well_has_finished() -> None:
    (found,) = diagnose([ended(0), ended(1)], LEFT)
    assert (found.level, found.what, found.value) == (Level.OK, "finished", "3 of 3 steps, τ 2.10 (best at step 2)")
    (by_epochs,) = diagnose([ended(0)], replace(LEFT, total=0, evaluations=()))
    assert by_epochs.value == "3 of 3 steps"


def test_a_finished_worker_whose_pid_is_another_process_now() -> None:
    (found,) = diagnose([ended(0, state="unopened")], LEFT)
    assert found.what == "finished"


def test_a_warm_up_alone_is_no_finished_run() -> None:
    for left in (Left("/runs/a"), replace(LEFT, step=2), replace(LEFT, total=0)):
        (found,) = diagnose([ended(0, step=0)], left)
        assert (found.level, found.what) == (Level.OK, "all workers have ended well")


def test_a_worker_that_ended_before_its_run_is_an_error() -> None:
    (found,) = serious(ended(0, phase="train"))
    assert found.what == "the worker is gone"
    assert "before the run did" in found.value


def test_of_a_single_worker_no_others_wait() -> None:
    for alone in (absent(0, "gone"), ended(0, phase="train"), absent(0, "stopped", letter="T")):
        (found,) = serious(alone)
        assert "others" not in found.why
    (found,) = serious(absent(0, "gone"), worker(1))
    assert "the others wait" in found.why
    assert all("others" not in one.why for one in serious(absent(0, "gone"), absent(1, "gone")))


def test_a_run_that_was_interrupted_is_no_error_and_goes_on() -> None:
    for state in ("ended", "gone", "unopened", "elsewhere"):
        stopped = [ended(0, phase="interrupted", state=state), ended(1, phase="interrupted", state=state)]
        (found,) = diagnose(stopped, replace(LEFT, total=9, checkpoint=2))
        assert (found.level, found.what) == (Level.WARNING, "was interrupted")
        assert found.value == "at step 3 of 9; the newest whole checkpoint is of step 2"
        assert "go on from step 2: paceline train /runs/a/config.toml --resume" in found.remedy
    (found,) = diagnose(stopped, Left("/runs/a"))
    assert found.value == "at step 0; there is no whole checkpoint yet"
    assert "go on from step 0: paceline train /runs/a/config.toml --resume" in found.remedy
    (found,) = diagnose(stopped, Left("/runs/a", claimed=False))
    assert "start it again as before" in found.remedy


def test_beside_an_interrupted_worker_a_killed_one_stays_an_error() -> None:
    stopped, gone = serious(ended(0, phase="interrupted"), absent(1, "gone"))
    assert (stopped.level, stopped.what) == (Level.WARNING, "was interrupted")
    assert (gone.level, gone.what) == (Level.ERROR, "the worker is gone")
    assert "others" not in gone.why


def test_only_files_that_exist_are_named() -> None:
    (found,) = serious(absent(0, "gone"))
    assert "terminal" in found.remedy
    assert "logs/" not in found.remedy
    assert "stacks/" not in found.remedy
    words = ("logs/rank-0.log", "logs/rank-10.log", "stacks/rank-0.txt")
    (found,) = diagnose([absent(0, "gone")], replace(LEFT, words=words))
    assert "/runs/a/logs/rank-0.log" in found.remedy
    assert "/runs/a/stacks/rank-0.txt" in found.remedy
    assert "terminal" not in found.remedy
    assert "rank-10" not in found.remedy


def test_the_way_on_depends_on_a_whole_checkpoint() -> None:
    (found,) = diagnose([absent(0, "gone")], LEFT)
    assert "start again" in found.remedy
    assert "--resume" not in found.remedy
    (found,) = diagnose([absent(0, "gone")], replace(LEFT, checkpoint=2))
    assert "paceline train /runs/a/config.toml --resume" in found.remedy


def test_what_a_run_left_is_read_from_its_folder(tmp_path: Path) -> None:
    records = [
        {"event": "evaluation", "step": 0, "tau": 1.5},
        {"event": "step", "step": 1, "loss": 1.0},
        {"event": "step", "step": 2, "loss": 1.0},
        {"event": "evaluation", "step": 2, "tau": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + '{"event": "st')
    chosen = Config(training=TrainingConfig(steps=7, epochs=2.0))
    (tmp_path / "config.toml").write_text(dump(chosen))
    for name, whole in (("step-1", True), ("step-2", False), ("step-2.partial", True)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (tmp_path / "checkpoints" / name / "whole.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("died")
    (tmp_path / "logs" / "rank-2.log").write_text("")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank-0.signal.txt").write_text("Thread")
    left = left_from(workers.main({"folder": str(tmp_path), "timeout": 1})["left"])
    assert left == Left(str(tmp_path), 2, 7, ((0, 1.5), (2, 2.5)), 1, ("logs/rank-1.log", "stacks/rank-0.signal.txt"))


def test_an_empty_run_folder_has_left_nothing(tmp_path: Path) -> None:
    assert left_from(workers.main({"folder": str(tmp_path), "timeout": 1})["left"]) == Left(
        str(tmp_path), claimed=False
    )
