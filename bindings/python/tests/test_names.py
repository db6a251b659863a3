"""The distribution flash-attn-3, by which other libraries find this package under FlashAttention-3's names. Needs torch
and setuptools, but no GPU.
"""

import ast
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import types
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


def detection(package, file, version):
    """Runs another library's own detection. Returns the names that its statements about FlashAttention-3 bind.

    The library is read and not imported, since its other modules need a GPU's libraries. `version` has what these
    statements take from elsewhere in their file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        pytest.skip(f"skipped: {package} is not installed")
    source = (Path(spec.submodule_search_locations[0]) / file).read_text()
    hints = "flash-attn-3", "flash_attn_3", "flashattn_hopper"
    statements = [x for x in ast.parse(source).body if isinstance(x, (ast.Try, ast.If))]
    detects = [x for x in statements if any(hint in ast.get_source_segment(source, x) for hint in hints)]
    assert detects, f"{package} looks for FlashAttention-3 elsewhere than in {file}"
    names = dict(version, PackageNotFoundError=importlib.metadata.PackageNotFoundError)
    exec(compile(ast.Module(detects, []), file, "exec"), names)
    return names


def test_transformer_engine_finds_it(installed, monkeypatch):
    utilities = types.SimpleNamespace(set_flash_attention_3_params=lambda: setattr(utilities, "is_set", True))
    version = dict(
        get_pkg_version=importlib.metadata.version,
        PkgVersion=pytest.importorskip("packaging.version", reason="skipped: packaging is not installed").Version,
        fa_utils=utilities,
    )
    file = "pytorch/attention/dot_product_attention/backends.py"
    monkeypatch.syspath_prepend(str(installed))
    names = detection("transformer_engine", file, version)
    assert utilities.is_set and not utilities.fa3_version.is_prerelease
    expected = fa3.flash_attn_interface
    assert names["flash_attn_func_v3"] is expected.flash_attn_func
    assert names["flash_attn_varlen_func_v3"] is expected.flash_attn_varlen_func
    assert names["flash_attn_with_kvcache_v3"] is expected.flash_attn_with_kvcache
    assert names["_flash_attn_fwd_v3"] is expected._flash_attn_forward
    assert names["_flash_attn_bwd_v3"] is expected._flash_attn_backward


def test_megatron_finds_it(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    names = detection("megatron.core", "transformer/attention.py", {})
    assert names["HAVE_FA3"]
    expected = fa3.flash_attn_interface
    assert names["_flash_attn_forward"] is expected._flash_attn_forward
    assert names["flash_attn3_with_kvcache"] is expected.flash_attn_with_kvcache
