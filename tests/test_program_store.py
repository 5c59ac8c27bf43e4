"""Programs on disk: as good as those that were compiled, or not there."""

import functools
import itertools
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jpaged import program_key
from jpaged.program_store import ProgramStore, open_store


@pytest.fixture(scope="module")
def program():
    """Compiled here, as one that was read from jax's cache need not be whole: a mark hides it from that."""
    from jpaged.compilations import _hide_from_jax

    def step(pages, scale):
        return {"pages": [page + scale for page in pages], "sum": sum(page.sum() for page in pages)}

    shapes = [jnp.zeros(3), jnp.zeros((2, 2))], jnp.float32(0)
    lowered = jax.jit(step, donate_argnames="pages").lower(*shapes)
    _hide_from_jax(lowered)
    return lowered.compile()


def pages() -> list[jax.Array]:
    return [jnp.ones(3), jnp.ones((2, 2))]


def make_store(folder: Path, key: str = "key", **options) -> ProgramStore:
    return ProgramStore(folder / "programs", key, jax.devices()[0], **options)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "programs").iterdir())


def test_a_program_that_was_kept_does_what_it_did(tmp_path, program):
    make_store(tmp_path).save(("forward", 8), program)
    kept = make_store(tmp_path).load(("forward", 8))
    assert kept is not None
    for executable in (program, kept):
        given = pages()
        made = executable(given, jnp.float32(2))
        assert [page.tolist() for page in made["pages"]] == [[3.0] * 3, [[3.0, 3.0]] * 2]
        assert float(made["sum"]) == 7
        assert all(page.is_deleted() for page in given)  # donated
    with pytest.raises(TypeError, match="differ"):
        kept([jnp.ones(4), jnp.ones((2, 2))], jnp.float32(2))
    assert kept.out_info["sum"].shape == ()


def test_others_are_not_there(tmp_path, program):
    make_store(tmp_path).save(("forward", 8), program)
    assert make_store(tmp_path).load(("forward", 9)) is None
    assert make_store(tmp_path, "another").load(("forward", 8)) is None
    assert make_store(tmp_path / "elsewhere").load(("forward", 8)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"",
        lambda data: b"#" + data[1:],
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data + b"0",
    ],
)
def test_one_that_is_damaged_is_told_once_and_made_anew(tmp_path, program, caplog, damage):
    make_store(tmp_path).save("forward", program)
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    store = make_store(tmp_path)
    assert store.load("forward") is store.load("forward") is None
    (record,) = caplog.records
    assert "a compiled program is damaged, it is compiled again" in record.getMessage()
    assert str(path) in record.getMessage()
    store.save("forward", program)
    assert store.load("forward") is not None


def test_a_whole_file_that_another_build_cannot_read_is_not_there(tmp_path, program, monkeypatch):
    make_store(tmp_path).save("forward", program)

    def refuse(*args, **options):
        raise RuntimeError("made by another version")

    monkeypatch.setattr("jax.experimental.serialize_executable.deserialize_and_load", refuse)
    assert make_store(tmp_path).load("forward") is None


def test_a_folder_that_cannot_be_used_is_told_once(tmp_path, program, caplog):
    (tmp_path / "programs").write_text("a file where the folder should be")
    store = make_store(tmp_path)
    assert store.load("forward") is store.load("forward") is None
    store.save("forward", program)
    store.save("sampling", program)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "compiled programs cannot be read",
        "compiled programs are not kept",
    ]


def test_a_program_that_cannot_be_taken_down_is_told(tmp_path, caplog):
    make_store(tmp_path).save("forward", lambda: 0)
    assert "compiled programs are not kept" in caplog.text
    assert not (tmp_path / "programs").exists()


def test_what_was_used_longest_ago_goes_first(tmp_path, program):
    store = make_store(tmp_path)
    store.save(0, program)
    (first,) = files(tmp_path)
    size = first.stat().st_size
    store = make_store(tmp_path, max_bytes=3 * size + 100)
    found = {0: first}
    for name in (1, 2):
        store.save(name, program)
        (found[name],) = {*files(tmp_path)} - {*found.values()}
    for age, name in itertools.product([1000], found):
        os.utime(found[name], (time.time() - age + name,) * 2)
    assert store.load(0) is not None  # the oldest is used
    store.save(3, program)
    assert found[1] not in files(tmp_path)
    assert [store.load(name) is not None for name in range(4)] == [True, False, True, True]


def test_what_killed_writers_left_behind_goes_too(tmp_path, program):
    store = make_store(tmp_path)
    store.save(0, program)
    left, fresh, foreign = (tmp_path / "programs" / name for name in ("a.partial", "b.partial", "notes.txt"))
    for path in (left, fresh, foreign):
        path.write_text("half")
    os.utime(left, (1.0, 1.0))
    os.utime(foreign, (1.0, 1.0))
    store.save(1, program)
    assert [path.exists() for path in (left, fresh, foreign)] == [False, True, True]


def test_what_another_process_may_still_write_drives_nothing_out(tmp_path, program):
    store = make_store(tmp_path)
    store.save(0, program)
    size = files(tmp_path)[0].stat().st_size
    (tmp_path / "programs" / "large.partial").write_bytes(bytes(20 * size))
    store = make_store(tmp_path, max_bytes=10 * size)
    for name in (1, 2):
        store.save(name, program)
    assert [store.load(name) is not None for name in range(3)] == [True] * 3


def test_writers_at_once_leave_whole_files_alone(tmp_path, program):
    def use(index: int) -> bool:
        store = make_store(tmp_path)
        store.save(index % 2, program)
        return store.load(index % 2) is not None

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(12)))
    assert len(files(tmp_path)) == 2


WRITER = """
import sys
from pathlib import Path
from jpaged import program_store
data = Path(sys.argv[1]).read_bytes()
program_store._pack = lambda executable: data
rooms = zip(sys.argv[2:], (9 * len(data), 1))
stores = [program_store.ProgramStore(Path(folder), "key", None, max_bytes=size) for folder, size in rooms]
print("ready", flush=True)
while True:
    for store in stores:
        for name in ("forward", "another"):
            store.save(name, None)
"""


def test_a_process_reads_what_another_writes_or_deletes_at_that_moment(tmp_path, program, caplog):
    store, narrow = make_store(tmp_path), make_store(tmp_path / "narrow", max_bytes=1)  # where each deletes the others
    store.save("forward", program)
    (path,) = files(tmp_path)
    data = tmp_path / "data"
    data.write_bytes(path.read_bytes())
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", WRITER, *map(str, (data, path.parent, tmp_path / "narrow" / "programs"))]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    try:
        assert writer.stdout.read(5) == b"ready"
        for index in range(20):
            store.save("forward", program)
            narrow.save(("forward", "another")[index % 2], program)
            assert store.load("forward") is not None
            narrow.load("forward")
    finally:
        writer.kill()  # in the middle of a file, maybe
        writer.communicate()
    assert not caplog.records  # nothing is damaged, nothing refused
    assert len([one for one in files(tmp_path) if one.suffix == ".partial"]) <= 1
    again = make_store(tmp_path).load("forward")
    assert again is not None
    assert float(again(pages(), jnp.float32(2))["sum"]) == 7


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_files_have_the_modes_that_the_user_wants(tmp_path, program, umask, modes):
    before = os.umask(umask)
    try:
        make_store(tmp_path).save("forward", program)
    finally:
        os.umask(before)
    (path,) = files(tmp_path)
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == modes


@pytest.mark.parametrize("name", ["pathlib.Path.write_bytes", "os.replace", "pathlib.Path.iterdir"])
def test_what_may_not_be_written_is_not_there_and_leaves_nothing_behind(tmp_path, program, monkeypatch, caplog, name):
    def refuse(*args):
        raise PermissionError("not yours")

    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(name, refuse)
        store.save("forward", program)
    assert [record.getMessage() for record in caplog.records] == ["compiled programs are not kept: not yours"]
    assert files(tmp_path) == []
    store.save("forward", program)
    assert store.load("forward") is not None


def test_there_is_no_store_where_sources_cannot_be_looked_at(tmp_path, monkeypatch, caplog):
    read = program_key._read_sources()
    monkeypatch.setattr(program_key, "_read_sources", functools.partial(read._replace, paths=(tmp_path / "gone.py",)))
    with caplog.at_level(logging.INFO):
        assert open_store(tmp_path, ("xla", 1), jnp.zeros(1).sharding) is None
    assert "their code is not known" in caplog.text
    assert "gone.py" in caplog.text


def test_there_is_no_store_for_code_that_nobody_has_seen(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(program_key, "_BEGAN", float("inf"))
    place = jnp.zeros(1).sharding
    with caplog.at_level(logging.INFO):
        assert open_store(tmp_path, ("xla", lambda x: x), place) is None
    assert "steps are traced at each start, as their code is not known: tests.test_program_store" in caplog.text
    assert open_store(tmp_path, ("xla", 1), place) is not None
    assert open_store(tmp_path, ("xla", 1), SimpleNamespace(device_set={1, 2})) is None


def test_kernels_find_their_library_before_the_key_is_made(tmp_path, monkeypatch):
    """An import sets a variable that is part of the key: whoever lowered a kernel before has the same key."""
    variable = "MOSAIC_GPU_RUNTIME_LIB_PATH"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    monkeypatch.setattr(program_key, "_BEGAN", float("inf"))
    imports = []

    def import_module(name):
        imports.append(name)
        os.environ[variable] = "library.so"

    gpu = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="cuda"))
    place = SimpleNamespace(device_set=[gpu])
    with monkeypatch.context() as patch:
        patch.setattr("jpaged.program_store.importlib.import_module", import_module)
        first, second = (open_store(tmp_path, ("xla", 1), place) for _ in range(2))
    assert imports == 2 * ["jax.experimental.mosaic.gpu"]
    assert first._key == second._key
    del os.environ[variable]
    open_store(tmp_path, ("xla", 1), jnp.zeros(1).sharding)
    assert variable not in os.environ  # a CPU has no such kernels
