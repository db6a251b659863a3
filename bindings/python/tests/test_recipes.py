"""Runs the programs of docs/recipes.md, each of which checks its own results. Needs torch."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
RECIPES = re.findall(r"^## (.*?)$[^#]*?^<!-- recipe -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_program_is_run():
    assert len(RECIPES) == PAGE.count("```python") >= 8


@pytest.mark.parametrize("source", [source for _, source in RECIPES], ids=[title for title, _ in RECIPES])
def test_recipe(source):
    torch.manual_seed(0)
    exec(compile(source, "docs/recipes.md", "exec"), {"__name__": "__main__"})
