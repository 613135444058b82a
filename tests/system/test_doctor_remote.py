"""Source through real shells: it arrives unchanged, and a chain that breaks names the layer that did."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.doctor import remote
from paceline.doctor.command import DoctorOptions, place_for, run_doctor, run_there
from paceline.errors import UserError

AWKWARD = """quotes ' " ''' ` ; dollars $HOME $(whoami) ${x} ; slashes \\ \\\\ \\n ; !bang %s {x} * ~ # & | < > ()
a new line, a tab\t, żółć 漢字 🙂 \u00e9"""
ARGUMENTS = ["plain", "two words", "q'uo\"te", "$HOME", "*", "", "ünï", "new\nline", "back\\slash"]
SCRIPT = f'''# -*- coding: utf-8 -*-
import json, sys
text = {AWKWARD!r}
def shown(x):
    """doc 'string' with "both" and $HOME `id` \\\\ """
    return f"{{x!r}} \\"$x\\" `id` żółć"
print(json.dumps([text, shown("a'b\\"c"), sys.argv[1:], __name__]))
'''
FOUR_SHELLS = ("bash -c",) * 4


def write_script(folder: Path, text: str) -> str:
    path = folder / "scrîpt 'with\" quotes.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def told(capfd: pytest.CaptureFixture[str]) -> object:
    return json.loads(capfd.readouterr().out)


def expected() -> list[object]:
    return [AWKWARD, '"a\'b\\"c" "$x" `id` żółć'.replace('"a\'b\\"c"', repr("a'b\"c")), ARGUMENTS, "__main__"]


@pytest.mark.parametrize(
    "through",
    [(), FOUR_SHELLS, ("bash -c", "env A=b", "sh -c", "env")],
    ids=["here", "four shells", "mixed"],
)
def test_source_and_arguments_come_out_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], through: tuple[str, ...]
) -> None:
    code = run_there(write_script(tmp_path, SCRIPT), ARGUMENTS, through, sys.executable, 60)
    assert code == 0
    assert told(capfd) == expected()


def test_a_large_source_through_four_shells(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    padding = "x = 1  # 'padding' \"$`\n" * 12_000
    assert len(padding) > 1 << 17, "longer than one argument may be"
    assert run_there(write_script(tmp_path, SCRIPT + padding), ARGUMENTS, FOUR_SHELLS, sys.executable, 60) == 0
    assert told(capfd) == expected()


def test_exit_codes_and_tracebacks_come_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_there(write_script(tmp_path, "import sys\nsys.exit(7)\n"), [], FOUR_SHELLS, sys.executable, 60) == 7
    assert run_there(write_script(tmp_path, "def f():\n    return 1 / 0\nf()\n"), [], (), sys.executable, 60) == 1
    assert "return 1 / 0" in capfd.readouterr().err, "the traceback shows the script's own lines"


def test_output_is_streamed_as_it_is_printed(tmp_path: Path) -> None:
    """The script waits for what only a reader of its first line can give."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = write_script(tmp_path, f"print('first')\nopen({str(gate)!r}).read()\nprint('second')\n")
    program = (
        "import sys\nfrom paceline.doctor.command import run_there\n"
        f"sys.exit(run_there({script!r}, [], ('bash -c',), sys.executable, 60))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        gate.write_text("go")
        assert process.stdout.read() == "second\n"
    assert process.returncode == 0


ALTERNATING = """
import sys
for number in range(200):
    print("out", number)
    print("err", number, file=sys.stderr)
"""


@pytest.mark.parametrize("through", [(), ("bash -c", "env")], ids=["here", "shells"])
def test_both_streams_in_one_file_keep_their_order(tmp_path: Path, through: tuple[str, ...]) -> None:
    """Whole lines, each where it was printed: the far end writes both into what is one file here."""
    words = [word for layer in through for word in ("--through", layer)]
    command = [sys.executable, "-m", "paceline", "run-there", write_script(tmp_path, ALTERNATING), *words]
    both = tmp_path / "both"
    with open(both, "wb") as file:
        subprocess.run([*command, "--python", sys.executable], stdout=file, stderr=file, check=True)
    assert both.read_text().splitlines() == [f"{name} {number}" for number in range(200) for name in ("out", "err")]


@pytest.mark.timeout(60)
def test_a_banner_is_shown_before_the_script_begins(tools: Path) -> None:
    """A layer may print where to log in, and wait for it: here it waits until its words have come through."""
    gate = tools / "gate"
    os.mkfifo(gate)
    program(tools, "portal", f'echo "log in at https://example.org"; read word <{gate}; exec "$@"')
    command = [sys.executable, "-m", "paceline", "run-there", write_script(tools, "print('in')"), "--through", "portal"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--python", sys.executable], text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "portal is not known here" in process.stderr.readline()
            assert process.stderr.readline() == "log in at https://example.org\n"
            gate.write_text("go\n")
            assert process.stdout.read() == "in\n"
        finally:
            remote.end_tree(process.pid)


def test_the_probe_answers_through_four_shells(capfd: pytest.CaptureFixture[str]) -> None:
    options = DoctorOptions(target="/", through=FOUR_SHELLS, python=sys.executable, json=True)
    assert run_doctor(options) == 2, "no run there"
    body = json.loads(capfd.readouterr().out)
    assert body["facts"]["run"]["host"] == socket.gethostname()


# -- chains that break -------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return name


def failure(*through: str, python: str = sys.executable, timeout: float = 20) -> remote.ChainError:
    with pytest.raises(remote.ChainError) as raised:
        remote.gather(place_for(through, python, timeout), "workers", {"folder": "/", "timeout": 1})
    return raised.value


def test_a_layer_that_eats_standard_input_is_named(tools: Path) -> None:
    """Python then exits 0 and prints nothing."""
    program(tools, "eater", 'exec "$@" </dev/null')
    fault = failure("bash -c", "eater", "bash -c")
    assert fault.layer is not None
    assert fault.layer.text == "eater"
    assert "layer 2 (eater) runs commands but does not forward standard input" in fault.what
    assert len(str(fault).splitlines()) == 2


def test_run_there_notices_an_eater_too(tools: Path) -> None:
    program(tools, "eater", 'exec "$@" </dev/null')
    with pytest.raises(remote.ChainError, match=r"layer 1 \(eater\)"):
        run_there(write_script(tools, "print(1)"), [], ("eater",), sys.executable, 20)


def test_a_layer_that_fails_is_named_with_its_own_words(tools: Path) -> None:
    program(tools, "broken", "echo 'no such container: 200' >&2; exit 3")
    fault = failure("bash -c", "env", "broken exec 200")
    assert fault.layer is not None
    assert fault.what == "layer 3 (broken exec 200) ended with code 3: no such container: 200"


def test_a_program_that_is_not_there() -> None:
    assert "layer 1 (no-such-program)" in failure("no-such-program").what
    assert "layer 2 (no-such-program)" in failure("bash -c", "no-such-program").what


def test_a_layer_that_never_answers_is_ended_and_named(tools: Path) -> None:
    program(tools, "mute", "exec sleep 600")
    fault = failure("env", "mute", timeout=0.5)
    assert fault.what == "layer 2 (mute) did not answer in time"


def test_an_unreachable_host() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh client")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        fault = failure(f"ssh -o BatchMode=yes -p {port} nobody@127.0.0.1")
    assert "code 255" in fault.what
    assert "refused" in fault.what.lower()
    assert "ssh itself failed" in fault.remedy


@pytest.mark.parametrize("python", ["/no/such/python", "cat", "false"])
def test_a_wrong_interpreter(python: str) -> None:
    fault = failure("bash -c", python=python)
    assert fault.layer is None
    assert f"{python!r} is not a Python behind 'bash -c'" in fault.what
    assert "--python" in fault.remedy


def test_an_interpreter_that_is_too_old(tools: Path) -> None:
    program(tools, "python9", "echo Python 3.6.15")
    fault = failure("bash -c", python="python9")
    assert "is Python 3.6.15; 3.8 or later is needed" in fault.what


def test_an_interpreter_that_reads_nothing(tools: Path) -> None:
    program(tools, "wrapped", '[ "$1" = --version ] && echo Python 3.12.0; exit 0')
    assert "did not read its standard input" in failure("bash -c", python="wrapped").what


def test_a_home_relative_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = place_for(FOUR_SHELLS, "~/venv/python", 20)
    assert remote.gather(place, "workers", {"folder": str(tmp_path), "timeout": 1})["workers"] == []


def test_a_script_that_takes_too_long(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(remote.ChainError, match="was ended after 3 s"):
        run_there(script, [], ("bash -c",), sys.executable, 3)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        run_there("/no/such/script.py", [], (), sys.executable, 3)


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.14"])
def test_the_probe_on_another_python(version: str, capfd: pytest.CaptureFixture[str]) -> None:
    python = other_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    code = run_doctor(DoctorOptions(through=("bash -c",), python=python, json=True))
    body = json.loads(capfd.readouterr().out)
    assert body["facts"]["machine"]["python"]["version"].startswith(version)
    absent = [one for one in body["findings"] if one["what"] == "torch" and "not installed" in one["value"]]
    assert (code == 2) == bool(absent) or code == 2


def other_python(version: str) -> str | None:
    versions = Path.home() / ".pyenv" / "versions"
    candidates = [*versions.glob(f"{version}.*/bin/python"), Path(f"/usr/bin/python{version}")]
    return next((str(path) for path in candidates if path.exists()), None)


# -- a real sshd -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the test's own on the loopback, with keys of its own; the ``ssh`` command that reaches it."""
    server = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
    if server is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssh-server is not installed")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder / 'host'}", "StrictModes no", "UsePAM no",
        f"AuthorizedKeysFile {folder / 'authorized'}", f"PidFile {folder / 'pid'}", "PermitRootLogin yes",
        "PasswordAuthentication no",
    ]  # fmt: skip
    (folder / "config").write_text("\n".join(settings) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd separates its privileges
    process = subprocess.Popen([server, "-D", "-e", "-f", folder / "config"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    if "listening" not in line:
        process.kill()
        pytest.skip(f"sshd does not start here: {line.strip()}")
    options = f"-F none -i {folder / 'user'} -p {port} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    yield f"ssh {options} -o LogLevel=ERROR -o BatchMode=yes 127.0.0.1"
    process.terminate()
    process.wait()
    process.stderr.close()


def test_through_a_real_sshd_and_shells_behind_it(ssh: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    through = (ssh, "env A=b", "bash -c", ssh, "bash -c")
    code = run_there(write_script(tmp_path, SCRIPT), ARGUMENTS, through, sys.executable, 60)
    assert code == 0
    assert told(capfd) == expected()


def test_a_container_that_is_missing_behind_a_real_sshd(ssh: str) -> None:
    fault = failure(ssh, "pct-not-there exec 200 --")
    assert "layer 2 (pct-not-there exec 200 --) ended with code 127" in fault.what


def test_a_key_that_the_server_does_not_know(ssh: str, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    words = ssh.split()
    words[words.index("-i") + 1] = str(tmp_path / "other")
    fault = failure(" ".join([*words[:-1], "-o", "IdentitiesOnly=yes", words[-1]]))
    assert "Permission denied" in fault.what
