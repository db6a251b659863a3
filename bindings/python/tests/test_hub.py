"""bindings/hub/build.py: two versions of a kernel repository in one process, beside the package itself. Needs torch."""

import importlib.util
import json
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

import fa3

BUILD = runpy.run_path(str(Path(__file__).parents[2] / "hub" / "build.py"))["build"]


def repository(folder, version):
    """A repository of a wheel with this package's files, and a file that differs between versions."""
    wheel = folder / "fa3-0.1.0-cp310-abi3-manylinux_2_17_x86_64.whl"
    package = Path(fa3.__file__).parent
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fa3/version.txt", str(version))
        for path in package.rglob("*"):
            if path.suffix in (".py", ".pyi", ".so", ".typed"):
                archive.write(path, Path("fa3") / path.relative_to(package))
    BUILD(version, folder, wheel)
    return folder / "build"


def load(builds):
    """The module of a repository's variant for the CPU, by the hub's own loader where it is installed."""
    try:
        from kernels import get_local_kernel
    except ModuleNotFoundError:
        (variant,) = builds.glob("torch-stable-abi24-cpu-*")
        name = json.loads((variant / "metadata.json").read_text())["id"]
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return get_local_kernel(builds, backend="cpu")


def operators(namespace):
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix(f"{namespace}::") for name in names if name.startswith(f"{namespace}::")}


def test_two_versions_in_one_process(tmp_path):
    before = operators("fa3")
    modules = [fa3]
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        modules.append(load(repository(folder, version)))
    assert len({module.__name__ for module in modules}) == 3
    # A version that named another's operators would have fewer of its own.
    assert [operators(module.__name__) for module in modules] == [before] * 3

    x = torch.randn(1, 20, 2, 64, dtype=torch.bfloat16)
    results = []
    for module in modules:
        leaf = x.clone().requires_grad_()
        out = torch.compile(module.flash_attn_func, backend="eager", fullgraph=True)(leaf, leaf, leaf, causal=True)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), leaf)
        assert out.grad_fn is not None and module.distributed.__name__ == f"{module.__name__}.distributed"
        results.append((out, gradient))
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(gradient, results[0][1])


def test_metadata_names_each_variant(tmp_path):
    variants = sorted(repository(tmp_path, 3).iterdir())
    assert [path.name.split("-")[3] for path in variants] == ["cpu", "cu120", "cu130"]
    found = [json.loads((path / "metadata.json").read_text()) for path in variants]
    assert len({one["id"] for one in found}) == 3 and {one["version"] for one in found} == {3}
    assert [one["backend"]["type"] for one in found] == ["cpu", "cuda", "cuda"]
