"""The package's archive of compiled kernels, in any state. Needs a C compiler and no GPU."""

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fa3

HERE, PACKAGE = Path(__file__).parent, Path(fa3.__file__).parent


def hash_of(bytes):
    """FNV-1a with 128 bits."""
    found = 0x6C62272E07BB014262B821756295C58D
    for byte in bytes:
        found = (found ^ byte) * ((1 << 88) + 0x13B) % (1 << 128)
    return found


def archive(kernels):
    """The file of an archive, from machine code by PTX, as the documentation of the crate describes it."""
    entries = sorted((hash_of(text.encode()), code) for text, code in kernels.items())
    file, offset = b"fa3 kernels 001\n" + struct.pack("<Q", len(entries)), 24 + 48 * len(entries)
    for ptx, code in entries:
        file += ptx.to_bytes(16, "little") + hash_of(code).to_bytes(16, "little")
        file += struct.pack("<QQ", offset, len(code))
        offset += len(code)
    return file + b"".join(code for _, code in entries)


@pytest.fixture
def loads(stand_in_driver, tmp_path):
    """Runs `loads_of_kernels` with a package whose archive has these bytes, and returns what it prints."""
    package = tmp_path / "fa3"
    package.mkdir()
    for path in PACKAGE.iterdir():
        (package / path.name).symlink_to(path)

    def loads(file=None, *words, **environment):
        if file is not None:
            (package / "kernels.sm_90a").write_bytes(file)
        environment |= stand_in_driver | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, HERE / "loads_of_kernels.py", *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    return loads


@pytest.fixture
def texts(loads):
    """The kernels that are compiled without an archive, as PTX."""
    seen = loads()
    assert not seen["failures"] and Counter(place for _, place in seen["kernels"]) == {"compiler": len(seen["compiled"])}
    assert len(seen["compiled"]) > 4
    return seen["compiled"]


def entries(texts):
    return sorted(re.search(r"\.entry (\w+)", text)[1] for text in texts)


def test_kernels_come_from_the_archive(loads, texts):
    seen = loads(archive({text: b"sm_90a" for text in texts}))
    assert not seen["compiled"] and not seen["failures"]
    assert seen["kernels"] == [[entry, "archive"] for entry in entries(texts)]


def test_what_the_archive_lacks_or_the_driver_refuses_is_compiled(loads, texts):
    codes = {text: (b"sm_90a", b"sm_100a")[number] for number, text in enumerate(texts[:2])}
    seen = loads(archive(codes))
    assert seen["compiled"] == texts[1:]
    assert Counter(place for _, place in seen["kernels"]) == {"archive": 1, "compiler": len(texts) - 1}


def test_a_damaged_archive_is_none(loads, texts):
    file = archive({text: b"sm_90a" for text in texts})
    changed = file.replace(b"sm_90a", b"sm_90b")
    for damaged in (b"", b"another file", file[:20], file[:100], file[:-1], changed):
        seen = loads(damaged)
        assert seen["compiled"] == texts and not seen["failures"]


def test_a_lost_device_is_no_reason_to_compile(loads, texts):
    seen = loads(archive({text: b"lost" for text in texts}))
    assert not seen["compiled"]
    assert all("the device is lost: cuModuleLoadData found it" in failure for failure in seen["failures"])


def test_many_processes_read_one_archive(loads, texts):
    loads(archive({text: b"sm_90a" for text in texts}))
    with ThreadPoolExecutor(8) as threads:
        for seen in threads.map(lambda _: loads(), range(8)):
            assert not seen["compiled"]


def test_kernels_are_compiled_once_and_side_by_side(loads, texts):
    for words in ((), ("warm",)):
        seen = loads(None, *words)
        assert seen["compiled"] == texts and not seen["failures"]
        # The backward pass has several kernels. With one processor there is one thread.
        assert seen["at once"] > 1 or len(os.sched_getaffinity(0)) == 1


def test_the_drivers_own_cache_is_told_from_its_compiler(loads):
    seen = loads(FA3_STAND_IN_CACHE="1")
    assert {place for _, place in seen["kernels"]} == {"driver's cache"}
