"""The Python code of all documents runs, on the CPU and on a GPU. Needs torch.

The blocks of a page are one program, in their order. A block below `<!-- recipe -->` is a program of its own, and
blocks below `<!-- not run: REASON -->` and `<!-- torchrun: TEST -->` are only compiled.
"""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "bindings" / "python" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- (recipe|not run|torchrun)(?:: .+?)? -->\n)?```python\n(.*?)^```$", re.M | re.S)


def programs():
    """The programs of all pages, each a list of (marker, source)."""
    for page in PAGES:
        blocks = BLOCK.findall(page.read_text())
        assert len(blocks) == page.read_text().count("```python")
        name = str(page.relative_to(ROOT))
        if whole := [block for block in blocks if block[0] != "recipe"]:
            yield pytest.param(name, whole, id=name)
        for number, block in enumerate(block for block in blocks if block[0] == "recipe"):
            yield pytest.param(name, [block], id=f"{name}-{number}")


@pytest.mark.parametrize("name, blocks", list(programs()))
def test_code_of_documents_runs(name, blocks):
    for module in ("jax", "tvm_ffi"):
        if f"import {module}" in "".join(source for _, source in blocks):
            pytest.importorskip(module, reason=f"skipped: {module} is not installed")
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for marker, source in blocks:
        if not torch.cuda.is_available():
            source = source.replace('"cuda"', '"cpu"')
        code = compile(source, name, "exec")
        if marker in ("", "recipe"):
            exec(code, names)
    if "fa3.activate()" in "".join(source for _, source in blocks):
        torch.nn.attention.restore_flash_attention_impl()


def options(script):
    """The options that a script of bench and the modules beside it declare."""
    text = script.read_text()
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"^import (\w+)", text, re.M)]
    return set(re.findall(r'"(--[\w-]+)"', "".join([text, *(path.read_text() for path in beside if path.exists())])))


def test_documents_name_benchmarks_and_options_that_there_are():
    commands = set()
    for page in PAGES:
        commands |= set(re.findall(r"bench/(\w+\.py)([^`#]*?)(?=`|#|python|\Z)", page.read_text()))
    assert len(commands) > 20
    for name, words in commands:
        unknown = set(re.findall(r"(?<=\s)--[\w-]+", words)) - options(ROOT / "bench" / name)
        assert not unknown, (name, words)
