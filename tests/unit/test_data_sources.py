"""Files in every form and state of repair -> numbered rows."""

from __future__ import annotations

import gzip
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from paceline.data import values
from paceline.data.rows import Problem, Row
from paceline.data.sources import content_digest, read, resolve
from paceline.data.values import Joined, read_elements, read_values
from paceline.errors import UserError

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i} é😀"}, {"role": "assistant", "content": f"a{i}"}]}
    for i in range(5)
]


def jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def asked(rows: list[Row]) -> list[str]:
    return [row.conversation.messages[0]["content"] for row in rows if row.conversation]


def reasons(rows: list[Row]) -> dict[int, str]:
    return {row.place.number: row.problem.reason for row in rows if row.problem}


def write_all(folder: Path) -> dict[str, Path]:
    table = pa.Table.from_pylist(ROWS)
    plain = jsonl(ROWS)
    pretty = json.dumps(ROWS, indent=2, ensure_ascii=False).encode()
    bodies = {
        "a.jsonl": plain,
        "bom.jsonl": b"\xef\xbb\xbf" + plain,
        "a.json": json.dumps(ROWS).encode(),
        "pretty.json": pretty,
        "own_lines.json": b"[\n" + plain.strip().replace(b"}\n{", b"},\n{") + b"\n]\n",
        "wrapped.json": json.dumps({"data": ROWS}).encode(),
        "one_after_another.json": b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS),
        "really_an_array.jsonl": json.dumps(ROWS).encode(),
        "a.jsonl.gz": gzip.compress(plain),
        "a.json.zst": zstandard.compress(pretty),
        "no_suffix_zstd": zstandard.compress(plain),
        "windows.jsonl": plain.replace(b"\n", b"\r\n"),
    }
    paths = {name: folder / name for name in bodies}
    for name, body in bodies.items():
        paths[name].write_bytes(body)
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return {**paths, **{name: folder / name for name in ("a.parquet", "a.arrow", "stream.arrow")}}


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    for name, path in write_all(tmp_path).items():
        rows = list(read((str(path),)))
        assert asked(rows) == [f"q{i} é😀" for i in range(5)], name
        assert [row.place.number for row in rows] == [1, 2, 3, 4, 5], name


def test_folders_and_globs_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.jsonl").write_bytes(jsonl(ROWS[:1]))
    (tmp_path / "deep" / "a.jsonl").write_bytes(jsonl(ROWS[1:2]))
    (tmp_path / "README.md").write_text("no rows here")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert asked(list(read((str(tmp_path),)))) == ["q0 é😀", "q1 é😀"]
    assert [file.path.name for file in resolve((f"{tmp_path}/*.jsonl", f"{tmp_path}/deep"))] == ["b.jsonl", "a.jsonl"]
    assert [file.source for file in resolve((f"{tmp_path}/*.jsonl", f"{tmp_path}/deep"))] == [0, 1]


@pytest.mark.parametrize("entry", ["missing.jsonl", "nothing/*.jsonl"])
def test_a_missing_source_is_one_clear_error(tmp_path: Path, entry: str) -> None:
    with pytest.raises(UserError, match="no data at"):
        resolve((str(tmp_path / entry),))
    with pytest.raises(UserError, match=r"data\.train is empty"):
        resolve(())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no data at"):
        resolve((str(tmp_path / "empty"),))


def test_bad_lines_cost_themselves_alone(tmp_path: Path) -> None:
    good = jsonl(ROWS[:1])
    body = b"[]\n" + b'{"messages": [{"role":\n' + b"\n" + b'{"text": "\xff\xfe"}\n' + b"[" * 100_000 + b"\n" + good
    (tmp_path / "a.jsonl").write_bytes(body + b'{"n": ' + b"1" * 5000 + b"}\n")
    rows = list(read((str(tmp_path / "a.jsonl"),)))
    found = reasons(rows)
    assert found == {1: "no-messages", 2: "not-json", 4: "not-utf8", 5: "not-json", 7: "not-json"}
    assert [row.place.number for row in rows if row.conversation] == [6]


def test_an_array_cut_in_the_middle_gives_every_whole_element(tmp_path: Path) -> None:
    body = json.dumps(ROWS, indent=2).encode()
    for cut in range(3, len(body) - 4, 7):
        (tmp_path / "a.json").write_bytes(body[:cut])
        rows = list(read((str(tmp_path / "a.json"),)))
        whole = sum(1 for i in range(5) if len(json.dumps(ROWS[: i + 1], indent=2)) - 2 <= cut)
        assert asked(rows) == [f"q{i} é😀" for i in range(whole)]
        assert len(rows) - whole <= 1, rows


def test_a_broken_element_costs_itself_alone(tmp_path: Path) -> None:
    body = json.dumps(ROWS).encode().replace(b'"a1"}', b'"a1}')
    (tmp_path / "a.json").write_bytes(body)
    rows = list(read((str(tmp_path / "a.json"),)))
    assert reasons(rows) == {2: "not-json"}
    assert len(asked(rows)) == 4


def test_elements_across_the_edges_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(values, "_CHUNK", size)
        found = [value for _, value in read_elements(Joined(b"", io.BytesIO(b"\n" * 3 + body)))]
        assert found == ROWS


def test_rows_too_large_are_set_aside_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_CHUNK", 64)
    monkeypatch.setattr(values, "LARGEST", 200)
    lines = b'{"a": 1}\n' + b'{"a": "' + b"x" * 1000 + b'"}\n' + b'{"a": 2}\n'
    found = list(read_values(io.BytesIO(lines)))
    assert found[0] == (1, {"a": 1})
    assert isinstance(found[1][1], Problem)
    assert found[1][1].reason == "row-too-large"
    assert found[2] == (3, {"a": 2})


def test_damaged_files_say_so_and_keep_what_came_before(tmp_path: Path) -> None:
    body = gzip.compress(jsonl(ROWS * 2000), mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(body[: len(body) // 2])
    rows = list(read((str(tmp_path / "a.jsonl.gz"),)))
    assert rows[-1].problem is not None
    assert rows[-1].problem.reason == "unreadable-file"
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    (row,) = read((str(tmp_path / "a.parquet"),))
    assert row.problem is not None
    assert row.problem.reason == "unreadable-file"


def test_digest_follows_content_and_not_names(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    (tmp_path / "b.jsonl").write_bytes(jsonl(ROWS))
    one, two = (content_digest(resolve((str(tmp_path / name),))) for name in ("a.jsonl", "b.jsonl"))
    assert one == two
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS[:4]))
    assert content_digest(resolve((str(tmp_path / "a.jsonl"),))) != one


def test_hub_data_sets_go_through_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package `datasets`"):
        resolve(("hub:owner/name",))

    class Loaded(list[Any]):
        cache_files: tuple[dict[str, str], ...] = ()

    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, split: str) -> Loaded:
        calls.append((name, subset, split))
        if name == "owner/none":
            raise ValueError("no such data set")
        return Loaded(ROWS)

    stand_in = types.ModuleType("datasets")
    monkeypatch.setattr(stand_in, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert len(asked(list(read(("hub:owner/name:part@test",))))) == 5
    assert calls == [("owner/name", "part", "test")]
    assert content_digest(resolve(("hub:owner/name",))) == content_digest(resolve(("hub:owner/name",)))
    with pytest.raises(UserError, match="no such data set"):
        resolve(("hub:owner/none",))


def test_a_broken_list_costs_itself_alone(tmp_path: Path) -> None:
    body = json.dumps([row["messages"] for row in ROWS]).encode().replace(b'"a1"}', b'"a1}')
    (tmp_path / "a.json").write_bytes(body)
    rows = list(read((str(tmp_path / "a.json"),)))
    assert reasons(rows) == {2: "not-json"}
    assert len(asked(rows)) == 4
