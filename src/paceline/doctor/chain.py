"""A chain of shells, each layer understood: what of its words are its own, and how it takes the command behind it.

``ssh`` joins its words with spaces and hands one string to a shell at the other end; ``bash -c`` and ``su -c`` take one
string; ``pct exec``, ``docker exec``, ``kubectl exec``, ``env``, ``sudo`` run an argument list as it is. So the command
is quoted once for each layer that takes a string and never for the others, and nothing but ``python -`` is in it: the
source goes over standard input.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UserError

Takes = Literal["string", "list"]


@dataclass(frozen=True)
class Layer:
    """One program that runs the rest of the chain: its own words, and whether the rest is a string or a list.

    `notes` say what was added or left out of what the user wrote, and why.
    """

    words: tuple[str, ...]
    takes: Takes
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class _Program:
    """How a program's own words end.

    `valued`: options that take the next word; `plain`: how many other words are its own (a host, a container).
    """

    valued: frozenset[str] = frozenset()
    plain: int = 0
    assignments: bool = False


def _options(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SSH = _Program(_options("-B -b -c -D -E -e -F -I -i -J -L -l -m -O -o -P -p -Q -R -S -W -w"), plain=1)
_PROGRAMS = {
    "env": _Program(_options("-u --unset -C --chdir -S --split-string"), assignments=True),
    "sudo": _Program(
        _options("-u -g -h -p -C -r -t -T -U -R -D --user --group --host --prompt --chdir --chroot --role --type"),
        assignments=True,
    ),
    "doas": _Program(_options("-u -C")),
    "nsenter": _Program(_options("-t --target -S --setuid -G --setgid")),
    "chroot": _Program(plain=1),
    "unshare": _Program(_options("-S --setuid -G --setgid -R --root -w --wd")),
    "setpriv": _Program(_options("--reuid --regid --groups --inh-caps --bounding-set --securebits")),
    "runuser": _Program(_options("-u --user -g --group")),
    "nice": _Program(_options("-n --adjustment")),
    "ionice": _Program(_options("-c -n -p --class --classdata")),
    "timeout": _Program(_options("-k -s --kill-after --signal"), plain=1),
    "stdbuf": _Program(_options("-i -o -e")),
    "taskset": _Program(plain=1),
    "numactl": _Program(_options("-N -m -C -i -p --cpunodebind --membind --physcpubind")),
    "nohup": _Program(),
    "setsid": _Program(),
    "time": _Program(),
    "exec": _Program(),
}
_SHELLS = {"sh", "bash", "dash", "zsh", "ash", "ksh", "fish", "csh", "tcsh"}
_CONTAINERS = {"docker", "podman", "nerdctl"}
_CONTAINER_VALUED = _options(
    "-e --env --env-file -u --user -w --workdir --detach-keys -H --host --context -c --config -l --log-level"
)
_KUBE_VALUED = _options(
    "-n --namespace -c --container --context --cluster --kubeconfig -s --server --user --token -f --filename"
)
_CLUSTERS = {"kubectl", "oc"}


def parse(through: Sequence[str]) -> list[Layer]:
    """The layers of a chain, outermost first. One `through` may hold several: ``ssh host sudo docker exec box``.

    Raises:
        UserError: a layer that cannot forward standard input, or that is not a command.
    """
    layers: list[Layer] = []
    for text in through:
        try:
            rest = tuple(shlex.split(text))
        except ValueError as fault:
            raise UserError(f"--through {text!r} is not a command line: {fault}", "close the quote") from fault
        if not rest:
            raise UserError(f"--through {text!r} is empty", "name the command of the layer, such as 'ssh host'")
        while rest:
            layer, rest = _take(rest)
            layers.append(layer)
    return layers


def wrap(layers: Sequence[Layer], command: Sequence[str]) -> list[str]:
    """The argument list that runs `command` behind all `layers`: quoted once for each that takes a string."""
    words = list(command)
    for layer in reversed(layers):
        words = [*layer.words, shlex.join(words)] if layer.takes == "string" else [*layer.words, *words]
    return words


def _take(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    """The first layer of `words`, and the words that are not its own."""
    name = words[0].rpartition("/")[2]
    if name in _SHELLS:
        return _shell(words), ()
    if name in _CONTAINERS or name == "docker-compose":
        return _container(words)
    if name in _CLUSTERS:
        return _cluster(words)
    if name in _SPECIAL:
        return _SPECIAL[name](words)
    if name in _PROGRAMS:
        return _plain(words, _PROGRAMS[name])
    return _unknown(words), ()


def _own_words(words: Sequence[str], program: _Program, start: int = 1) -> int:
    """How many of `words` belong to the program itself: its options, their values, its plain words."""
    at, plain = start, 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return at + 1 if plain >= program.plain else _own_words_after_dashes(words, program, at, plain)
        if word.startswith("-") and len(word) > 1:
            at += 2 if word in program.valued else 1
        elif program.assignments and "=" in word and not word.startswith("="):
            at += 1
        elif plain < program.plain:
            plain, at = plain + 1, at + 1
        else:
            break
    return min(at, len(words))


def _own_words_after_dashes(words: Sequence[str], program: _Program, at: int, plain: int) -> int:
    return min(at + 1 + program.plain - plain, len(words))


def _plain(words: tuple[str, ...], program: _Program) -> tuple[Layer, tuple[str, ...]]:
    end = _own_words(words, program)
    own = words[:end]
    name = own[0].rpartition("/")[2]
    if name == "sudo" and any(_has_letter(word, "S", program) or word == "--stdin" for word in own):
        raise UserError(
            f"{shlex.join(own)}: sudo -S reads a password from standard input, where the source travels",
            "leave -S out: sudo then asks on the terminal; or allow the command without a password and use sudo -n",
        )
    if name == "sudo" and any(_has_letter(word, "b", program) or word == "--background" for word in own):
        raise UserError(f"{shlex.join(own)}: sudo -b puts the command into the background", "leave -b out")
    return Layer(own, "list"), words[end:]


def _has_letter(word: str, letter: str, program: _Program) -> bool:
    """Whether a cluster of short options holds `letter`; what follows a valued option is its value."""
    if not word.startswith("-") or word.startswith("--"):
        return False
    for one in word[1:]:
        if one == letter:
            return True
        if f"-{one}" in program.valued:
            return False
    return False


_SSH_REFUSALS = {
    "n": ("-n takes standard input from /dev/null, so the source would never arrive", "leave -n out"),
    "f": ("-f goes into the background and closes standard input", "leave -f out"),
    "N": ("-N runs no command", "leave -N out"),
}
_SSH_SETTINGS = {
    "stdinnull=yes": ("StdinNull takes standard input from /dev/null", "leave it out"),
    "requesttty=force": ("RequestTTY=force puts a terminal between", "leave it out"),
    "forkafterauthentication=yes": ("ForkAfterAuthentication closes standard input", "leave it out"),
}


def _ssh(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    end = _own_words(words, _SSH)
    own = words[:end]
    flags = [word for before, word in zip(("", *own), own, strict=False) if before not in _SSH.valued]
    for letter, (reason, remedy) in _SSH_REFUSALS.items():
        if any(_has_letter(word, letter, _SSH) for word in flags[1:]):
            raise UserError(f"{shlex.join(own)}: {reason}", remedy)
    for word in own:
        setting = word[2:] if word.startswith("-o") and len(word) > 2 else word
        if refusal := _SSH_SETTINGS.get(setting.lower().replace(" ", "=")):
            raise UserError(f"{shlex.join(own)}: {refusal[0]}", refusal[1])
    if (
        sum(word[1:].count("t") for word in flags[1:] if word.startswith("-") and set(word[1:]) <= set("tqvCATxXaK"))
        > 1
    ):
        raise UserError(
            f"{shlex.join(own)}: -tt forces a terminal, which echoes the source and changes its control characters",
            "leave -tt out; a command at the other end that insists on a terminal cannot be a layer",
        )
    if len([word for word in flags[1:] if not word.startswith("-")]) < 1:
        raise UserError(f"{shlex.join(own)}: no host", "write 'ssh user@host'")
    return Layer(own, "string"), words[end:]


def _shell(words: tuple[str, ...]) -> Layer:
    """A shell whose command string is the rest: ``-c`` must come last, and is added where it is missing."""
    options = [word for word in words[1:] if word.startswith("-")]
    if _own_words(words, _Program(_options("-o +o -O --rcfile --init-file"))) < len(words):
        raise UserError(
            f"{shlex.join(words)}: a shell layer ends with -c, and what follows is filled in",
            f"write {shlex.join([words[0], '-c'])!r}, and give a command behind it as a --through of its own",
        )
    if "c" in "".join(option.lstrip("-") for option in options if not option.startswith("--")):
        return Layer(words, "string")
    return Layer((*words, "-c"), "string", (f"added -c: a bare {words[0]} would read the source as its script",))


def _su(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    if words[-1] in ("-c", "--command"):
        return Layer(words, "string"), ()
    return Layer((*words, "-c"), "string", ("added -c: a bare su would read the source as its script",)), ()


def _container(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    """docker, podman, nerdctl: ``exec`` or ``run`` or ``compose exec``."""
    program = _Program(_CONTAINER_VALUED, plain=0)
    verb = _own_words(words, program)
    compose = words[0].endswith("docker-compose") or words[verb : verb + 1] == ("compose",)
    if compose and not words[0].endswith("docker-compose"):
        verb = _own_words(words, program, verb + 1)
    if words[verb : verb + 1] == ("run",):
        return _interactive(words, verb), ()
    if words[verb : verb + 1] != ("exec",):
        raise UserError(f"{shlex.join(words)}: not an exec", f"write '{words[0]} exec -i CONTAINER'")
    end = _own_words(words, _Program(_CONTAINER_VALUED, plain=1), verb + 1)
    own = words[:end]
    if compose:
        plain = "-T" in own
        notes = () if plain else ("added -T: compose gives a terminal otherwise, which would change the source",)
        return Layer(own if plain else (*own[: verb + 1], "-T", *own[verb + 1 :]), "list", notes), words[end:]
    return _interactive(own, verb), words[end:]


def _interactive(own: tuple[str, ...], verb: int) -> Layer:
    """With ``-i``, without which standard input is not forwarded, and without ``-t``, which makes it a terminal."""
    words = own[verb + 1 :]
    clusters = [word for word in words if word.startswith("-") and set(word[1:]) <= set("itd") and len(word) > 1]
    kept = [word for word in map(_without_terminal, words) if word]
    notes = ["left -t out: a terminal would echo and change the source"] if kept != list(words) else []
    if not any("i" in word for word in clusters) and not {"--interactive", "--stdin"} & set(words):
        kept.insert(0, "-i")
        notes.insert(0, "added -i: standard input is not forwarded without it")
    return Layer((*own[: verb + 1], *kept), "list", tuple(notes))


def _without_terminal(word: str) -> str:
    if word in ("-t", "--tty", "--tty=true"):
        return ""
    return word.replace("t", "") if word in ("-it", "-ti", "-itd", "-tid", "-dit", "-dti") else word


def _cluster(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    """kubectl, oc: options may follow the pod, so its own words end at ``--``, or with the layer."""
    verb = _own_words(words, _Program(_KUBE_VALUED))
    if words[verb : verb + 1] != ("exec",):
        raise UserError(f"{shlex.join(words)}: not an exec", f"write '{words[0]} exec -i POD --'")
    end = words.index("--") if "--" in words else len(words)
    layer = _interactive(words[:end], verb)
    return Layer((*layer.words, "--"), "list", layer.notes), words[end + 1 :]


def _proxmox(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    if words[1:2] != ("exec",):
        raise UserError(f"{shlex.join(words)}: pct {' '.join(words[1:2])} is no layer", "write 'pct exec ID --'")
    return _up_to_dashes(words, _own_words(words, _Program(_options("--keep-env"), plain=1), 2))


def _lxc(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    if words[1:2] != ("exec",):
        raise UserError(f"{shlex.join(words)}: not an exec", f"write '{words[0]} exec NAME --'")
    valued = _options("--env --cwd --user --group --mode --project")
    return _up_to_dashes(words, _own_words(words, _Program(valued, plain=1), 2))


def _with_dashes(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    return _up_to_dashes(words, _own_words(words, _Program(_options("-n --name -P --lxcpath -f --rcfile"))))


def _up_to_dashes(words: tuple[str, ...], end: int) -> tuple[Layer, tuple[str, ...]]:
    """These end their own words with ``--``; it is added where the user left it out."""
    if words[end : end + 1] == ("--",):
        end += 1
    own = words[:end] if words[end - 1] == "--" else (*words[:end], "--")
    return Layer(own, "list"), words[end:]


def _refuse_terminal(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    raise UserError(
        f"{shlex.join(words)}: {words[0]} works on a terminal and does not forward standard input",
        "name the machine's own way in, such as 'ssh host', 'nsenter -t PID -a' or 'docker exec -i NAME'",
    )


def _refuse_eater(words: tuple[str, ...]) -> tuple[Layer, tuple[str, ...]]:
    raise UserError(f"{shlex.join(words)}: {words[0]} reads standard input itself", "leave it out of the chain")


def _unknown(words: tuple[str, ...]) -> Layer:
    """A program that is not known here: its last word tells whether it takes a string."""
    if words[-1] in ("-c", "--command"):
        return Layer(words, "string", (f"{words[0]} is not known here: taken to want one string after {words[-1]}",))
    return Layer(words, "list", (f"{words[0]} is not known here: taken to run an argument list as it is",))


_SPECIAL: dict[str, Callable[[tuple[str, ...]], tuple[Layer, tuple[str, ...]]]] = {
    "ssh": _ssh,
    "su": _su,
    "pct": _proxmox,
    "lxc": _lxc,
    "incus": _lxc,
    "lxc-attach": _with_dashes,
    "machinectl": _refuse_terminal,
    "screen": _refuse_terminal,
    "tmux": _refuse_terminal,
    "xargs": _refuse_eater,
    "parallel": _refuse_eater,
}
