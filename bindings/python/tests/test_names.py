"""The distribution flash-attn-3, by which other libraries find this package under FlashAttention-3's names. Needs torch
and setuptools, but no GPU.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="skipped: torch is not installed")
pytest.importorskip("setuptools", reason="skipped: setuptools is not installed")

import fa3.flash_attn_interface

FOLDER = Path(__file__).parents[2] / "flash-attn-3"
MODULES = ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "flashattn_hopper.flash_attn_interface"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the distribution's modules and metadata, as an installer writes them."""
    source, target = tmp_path_factory.mktemp("source") / "it", tmp_path_factory.mktemp("installed")
    shutil.copytree(FOLDER, source)
    code = "import setuptools; setuptools.setup()"
    commands = "build_py", "--build-lib", str(target), "egg_info", "--egg-base", str(target)
    done = subprocess.run([sys.executable, "-c", code, *commands], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def test_libraries_find_the_distribution(installed):
    [found] = importlib.metadata.distributions(name="flash-attn-3", path=[str(installed)])
    assert (found.version, found.requires) == ("3.0.0", ["fa3"])
    names = {"flash_attn_interface", "flash_attn_3", "flashattn_hopper"}
    assert set(found.read_text("top_level.txt").split()) == names


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_our_functions(installed, monkeypatch, name):
    monkeypatch.syspath_prepend(str(installed))
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(installed)
    for function in fa3.flash_attn_interface.__all__:
        assert getattr(module, function) is getattr(fa3.flash_attn_interface, function)


def test_transformers_finds_it(installed):
    """Transformers' own check finds the distribution. Only its check for a GPU is replaced."""
    pytest.importorskip("transformers", reason="skipped: transformers is not installed")
    code = """
from transformers.utils import import_utils, is_flash_attn_3_available
import_utils.is_torch_cuda_available = lambda: True
assert is_flash_attn_3_available()
"""
    path = dict(PYTHONPATH=f"{installed}:{Path(fa3.__file__).parents[1]}")
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
