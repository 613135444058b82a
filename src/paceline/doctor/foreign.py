"""Judges a process that is not ours, from what /proc and py-spy told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.doctor import stacks
from paceline.doctor.checks.numbers import size
from paceline.doctor.checks.settings import environment
from paceline.doctor.findings import Finding, Level, error, info, ok, warning


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Findings on one process, what is wrong first by weight of the report's order: stacks, then the rest."""
    subject = f"process {facts['pid']}"
    if facts.get("ended"):
        return [error(subject, "ended", f"while it was looked at, on {facts['host']}", "", "look at its last output")]
    if facts.get("absent"):
        return [
            error(subject, "not there", f"no such process on {facts['host']}", "", "pgrep -af python names them all")
        ]
    return [
        ok(subject, "command", " ".join(facts["command"])[:200] or facts["name"]),
        *_state(facts, subject),
        *_stacks(facts, subject),
        *_torch(facts["torch"], subject),
        *_forked(facts, subject),
        *_memory(facts["memory"], subject),
        *_files(facts["files"], subject),
        *_environment(facts, subject),
    ]


def samples_of(facts: dict[str, Any]) -> list[list[stacks.Thread]]:
    return [stacks.parse(sample) for sample in facts.get("samples", [])]


def _state(facts: dict[str, Any], subject: str) -> list[Finding]:
    state = facts["state"] or "?"
    asleep = [task for task in facts["tasks"] if task["state"] == "D"]
    threads = f"{state}, {len(facts['tasks'])} threads"
    if state[0] in "Tt":
        why = "it does nothing, and whoever waits for it waits too"
        return [error(subject, "state", threads, why, f"kill -CONT {facts['pid']} (or end its debugger)")]
    if state[0] in "ZX":
        return [error(subject, "state", threads, "it has ended; its parent has not noticed", "look at its parent")]
    if asleep:
        where = ", ".join(f"{task['name']} in {task['wchan'] or 'the kernel'}" for task in asleep[:3])
        why = "a disk, a network file system or a driver does not answer"
        return [warning(subject, "threads in uninterruptible sleep", where, why, "look at dmesg and at the mounts")]
    return [ok(subject, "state", threads)]


def _stacks(facts: dict[str, Any], subject: str) -> list[Finding]:
    samples = samples_of(facts)
    if not samples and (facts["state"] or "?")[0] in "ZX":
        return []
    if not samples:
        return [_no_stacks(facts, subject)]
    found = stacks.recognise(samples[-1], subject)
    found += stacks.contention(samples, subject)
    still = stacks.unmoved(samples)
    if len(samples) < 2:
        return found
    moving = [thread.name for thread in samples[-1] if thread.frames and thread.name not in still]
    value = f"moving: {', '.join(moving)}" if moving else f"no thread moved in {len(samples)} looks"
    if not moving and any(
        thread.find(stacks.is_in_backward) or thread.find(stacks.is_compiling) for thread in samples[-1]
    ):
        why = "a thread inside a backward or a compilation that does not move waits for another, or for the GPU"
        found.append(info(subject, "stacks", value, why))
    else:
        found.append(ok(subject, "stacks", value))
    return found


_AS_ROOT = 'sudo env "PATH=$PATH" paceline doctor --pid'
_SEEN_OF_ALL = "its state, memory, open files and connections are below, as far as this user may see them"


def _no_stacks(facts: dict[str, Any], subject: str) -> Finding:
    """Why there are none: it has none, or what stood between; and what to do about it."""
    if facts["kernel"]:
        return info(subject, "no stacks", f"{facts['name']} is a thread of the kernel, and no program")
    if facts["python"] is False:
        value = f"no Python is loaded in it ({facts['executable'] or facts['name']})"
        why = f"only Python has the stacks that are read here; {_SEEN_OF_ALL}"
        return warning(subject, "not a Python process", value, why, _below(facts))
    if facts["spy_kind"] == "refused":
        return _refused(facts, subject)
    value = facts["spy_fault"] if facts["spy_kind"] == "absent" else f"py-spy: {facts['spy_fault']}"
    by_hand = _SEEN_OF_ALL, f"py-spy dump --pid {facts['pid']} by hand"
    return warning(subject, "no stacks", value, *_SPY_FAULTS.get(facts["spy_kind"], by_hand))


_SPY_FAULTS = {
    "absent": (
        f"py-spy reads them, and is not installed beside the Python that looks; {_SEEN_OF_ALL}",
        "pip install py-spy into the Python that is named with --python",
    ),
    "timed out": (
        "it could not stop the process to read it",
        "look again; a process in uninterruptible sleep (state D) cannot be read",
    ),
    "not python": (
        "it is just starting, or its Python is of a version that this py-spy does not know",
        "look again; else pip install -U py-spy",
    ),
}
"""Why py-spy gave nothing, and what to do."""


def _below(facts: dict[str, Any]) -> str:
    if not facts["python_below"]:
        return "ask about the Python process itself: pgrep -af python names them all"
    shown = "; ".join(f"--pid {one['pid']} ({one['command']})" for one in facts["python_below"])
    return f"ask about the Python that runs below it: {shown}"


def _refused(facts: dict[str, Any], subject: str) -> Finding:
    why, remedy = _refusal(facts)
    value = "this user may not look into its memory"
    if facts["python"] is None and "python" not in " ".join([facts["name"] or "", *facts["command"][:1]]):
        value += f", so not even whether it is Python can be seen (its name is {facts['name']})"
        remedy = f"if it is no Python process, there is nothing more to see; else {remedy}"
    return warning(subject, "no stacks", value, f"{why}; {_SEEN_OF_ALL}", remedy)


def _refusal(facts: dict[str, Any]) -> tuple[str, str]:
    """Why the kernel refused, and the remedy that fits."""
    rights = facts["rights"]
    owner = (facts["uid"] or ["?"])[0]
    container = (
        "docker run --cap-add SYS_PTRACE (Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]), "
        "or look from the host"
    )
    if rights["may_trace"]:
        return (
            "this user has the right to trace, so something stronger forbids it: a security module (seccomp, "
            "AppArmor), or a process that belongs to the system outside",
            "look from the host; in docker, --security-opt seccomp=unconfined beside --cap-add SYS_PTRACE",
        )
    if owner != str(rights["uid"]):
        return (
            f"it belongs to user {owner}, and you are {rights['uid']}",
            container if rights["uid"] == 0 else f"run as that user or as root: {_AS_ROOT} {facts['pid']}",
        )
    if rights["container"]:
        return "containers are started without the right to look into processes", container
    if rights["ptrace_scope"]:
        return (
            f"kernel.yama.ptrace_scope is {rights['ptrace_scope']}: a process may look into its own children alone",
            "run as root, or: echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope",
        )
    return "the kernel refused", f"run as root: {_AS_ROOT} {facts['pid']}"


def _torch(torch: dict[str, Any], subject: str) -> list[Finding]:
    folders = torch["folders"]
    if torch.get("refused"):
        return [info(subject, "torch", "this user may not see whether it is loaded")]
    if len(folders) > 1:
        why = "libraries of two torches in one process do not fit together"
        return [error(subject, "torch", " and ".join(folders), why, "keep one install on the path")]
    if not folders:
        return [info(subject, "torch", "not loaded")]
    version = torch["versions"][0] if torch["versions"] else "version unknown"
    return [ok(subject, "torch", f"{version} from {folders[0]}")]


def _forked(facts: dict[str, Any], subject: str) -> list[Finding]:
    children = facts["forked"]
    if not children or not facts["torch"]["folders"]:
        return []
    return [
        warning(
            subject,
            "forked children",
            ", ".join(map(str, children)),
            "a child that was forked while a thread traced keeps the FX-tracing flag for good (torch up to 2.13), "
            "and CUDA does not work in it",
            "multiprocessing_context='spawn' in DataLoader, get_context('spawn') elsewhere",
        )
    ]


def _memory(memory: dict[str, Any], subject: str) -> list[Finding]:
    if memory["resident"] is None:
        return [ok(subject, "memory", "none of its own")]
    value = f"{size(memory['resident'])} resident, {size(memory['peak'])} at most"
    if not memory["limit"]:
        return [ok(subject, "memory", value)]
    value += f"; {size(memory['used_of_limit'])} of its group's {size(memory['limit'])} used"
    if memory["killed"]:
        why = f"the OOM killer has struck {memory['killed']} times in this group"
        return [error(subject, "memory", value, why, "raise the container's limit, or start fewer workers")]
    if (memory["used_of_limit"] or 0) > 0.9 * memory["limit"]:
        why = "the OOM killer is near"
        return [warning(subject, "memory", value, why, "raise the container's limit, or start fewer workers")]
    return [ok(subject, "memory", value)]


def _files(files: dict[str, Any], subject: str) -> list[Finding]:
    if files.get("refused"):
        return [info(subject, "open files", "may not be read by this user")]
    value = f"{files['count']} of {files['limit'] or '?'}"
    found = [ok(subject, "open files", value)]
    if files["limit"] and files["count"] > 0.9 * files["limit"]:
        found = [
            warning(subject, "open files", value, "'Too many open files' is near", "ulimit -n 65536 before the start")
        ]
    if files["devices"]:
        found.append(ok(subject, "GPUs in use", ", ".join(files["devices"])))
    removed = [name for name in files["deleted"] if "torchinductor" in name or "triton" in name]
    if removed:
        why = "its compile cache was deleted while it ran; it goes on, but its next start is cold"
        found.append(info(subject, "deleted files in use", ", ".join(removed[:3]), why))
    if files["tcp"]:
        ends = [f"{one['here']} {one['state']} {one['there']}" for one in files["tcp"] if one["state"] != "listening"]
        listening = [one["here"] for one in files["tcp"] if one["state"] == "listening"]
        shown = [*(f"listens on {here}" for here in listening[:4]), *ends[:4]]
        found.append(ok(subject, "TCP", "; ".join(shown)))
    return found


def _environment(facts: dict[str, Any], subject: str) -> list[Finding]:
    variables = facts["environment"]
    if variables is None:
        return [info(subject, "environment", "may not be read by this user")]
    return [
        Finding(finding.level, subject, finding.what, finding.value, finding.why, finding.remedy)
        for finding in environment(variables)
        if finding.level > Level.OK
    ]


def stack_lines(samples: Sequence[Sequence[stacks.Thread]], most: int = 12) -> list[str]:
    """The last look's stacks in short, innermost frame first; threads that run the user's own code before the rest."""
    lines: list[str] = []
    for thread in sorted(samples[-1] if samples else [], key=lambda thread: thread.own_code is None):
        gil = " holds the GIL" if thread.owns_gil else ""
        lines.append(f"{thread.name} ({'running' if thread.active else 'idle'}{gil})")
        lines += [f"    {frame.place}" for frame in thread.frames[:most]]
        if len(thread.frames) > most:
            lines.append(f"    … {len(thread.frames) - most} more")
    return lines
