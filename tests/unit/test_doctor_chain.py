"""Chains of shells: what each layer is, and that a command comes out of the last one as it went in."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.doctor.chain import Layer, parse, wrap
from paceline.doctor.remote import python_words
from paceline.errors import UserError


def one(text: str) -> Layer:
    (layer,) = parse([text])
    return layer


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("ssh root@host", "string"),
        ("ssh -p 22 -i ~/.ssh/key -J hop user@host", "string"),
        ("bash -c", "string"),
        ("bash -lc", "string"),
        ("sh -c", "string"),
        ("su - trainer -c", "string"),
        ("pct exec 200 --", "list"),
        ("docker exec -i box", "list"),
        ("kubectl exec -i -n jobs pod -c main --", "list"),
        ("sudo -u trainer -n", "list"),
        ("env -u LANG A=b", "list"),
        ("nsenter -t 4242 -m -n", "list"),
        ("chroot /srv/image", "list"),
        ("gcloud compute ssh box --command", "string"),
        ("something exec box", "list"),
    ],
)
def test_kinds_of_layers(text: str, takes: str) -> None:
    layer = one(text)
    assert layer.takes == takes
    assert shlex.split(text) == list(layer.words)


def test_one_string_may_hold_several_layers() -> None:
    layers = parse(["ssh -p 2222 root@host sudo -u x docker exec -i box env A=b bash -c"])
    assert [layer.text for layer in layers] == [
        "ssh -p 2222 root@host",
        "sudo -u x",
        "docker exec -i box",
        "env A=b",
        "bash -c",
    ]


@pytest.mark.parametrize(
    ("text", "words", "note"),
    [
        ("docker exec box", "docker exec -i box", "-i"),
        ("docker exec -it box", "docker exec -i box", "-t"),
        ("docker exec -t box", "docker exec -i box", "-i"),
        ("podman exec --tty --interactive box", "podman exec --interactive box", "-t"),
        ("docker compose exec web", "docker compose exec -T web", "-T"),
        ("kubectl exec pod", "kubectl exec -i pod --", "-i"),
        ("kubectl -n jobs exec -it pod", "kubectl -n jobs exec -i pod --", "-t"),
        ("bash", "bash -c", "-c"),
        ("su trainer", "su trainer -c", "-c"),
    ],
)
def test_what_is_missing_is_added_and_said(text: str, words: str, note: str) -> None:
    layer = one(text)
    assert layer.text == words
    assert any(note in told for told in layer.notes)


def test_dashes_are_added_without_a_word() -> None:
    assert one("pct exec 200").text == "pct exec 200 --"
    assert one("lxc exec box").text == "lxc exec box --"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ssh -n host", "/dev/null"),
        ("ssh -qn host", "/dev/null"),
        ("ssh -tt host", "terminal"),
        ("ssh -t -t host", "terminal"),
        ("ssh -f host", "background"),
        ("ssh -o StdinNull=yes host", "StdinNull"),
        ("ssh -oRequestTTY=force host", "terminal"),
        ("ssh -p 22", "no host"),
        ("sudo -S", "password"),
        ("sudo -u x -b", "background"),
        ("xargs -n1", "standard input"),
        ("tmux", "terminal"),
        ("bash script.sh", "-c"),
        ("docker ps", "exec"),
        ("pct enter 200", "pct exec"),
        ("ssh 'host", "quot"),
        ("", "empty"),
    ],
)
def test_layers_that_cannot_carry_the_source_are_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        parse([text])
    assert reason.lower() in str(refused.value).lower()


def test_a_value_is_not_taken_for_an_option() -> None:
    assert one("ssh -l nobody -o ServerAliveInterval=5 host").takes == "string"
    assert one("ssh -i -n host").words == ("ssh", "-i", "-n", "host")  # a key file that is called "-n"


@given(
    words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(["bash -c", "ssh host", "env", "docker exec -i box", "pct exec 1 --"]), max_size=5),
)
def test_each_string_layer_is_quoted_exactly_once(words: list[str], kinds: list[str]) -> None:
    layers = parse(kinds)
    command = wrap(layers, words)
    for layer in layers:  # peel as the layers themselves would
        assert command[: len(layer.words)] == list(layer.words)
        command = command[len(layer.words) :]
        if layer.takes == "string":
            (text,) = command
            command = shlex.split(text)
    assert command == words


def test_a_home_folder_is_the_one_over_there() -> None:
    assert python_words("~/venv/bin/python") == ["sh", "-c", 'exec "$HOME/$0" "$@"', "venv/bin/python"]
    assert python_words("uv run python") == ["uv", "run", "python"]
