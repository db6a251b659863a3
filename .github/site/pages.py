"""A hook of mkdocs: the sections of docs/README.md are the site's, and links may lead to files of the repository."""

import pathlib
import re

# A link from docs to what is beside it, such as `](../fa3-types/src/mask.rs)`.
OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")
# A heading of docs/README.md, or a row of its tables that begins with a link to a page.
ENTRY = re.compile(r"^(?:## (.+)|\| \[([^]]+)\]\(([^/)]+\.md)\) \|.*)$", re.MULTILINE)


def on_config(config):
    """Makes the navigation."""
    config.nav = [{"Overview": "README.md"}]
    for section, title, page in ENTRY.findall((pathlib.Path(config.docs_dir) / "README.md").read_text()):
        if section:
            config.nav.append({section: []})
        else:
            next(iter(config.nav[-1].values())).append({title: page})


def on_page_markdown(markdown, config, **_):
    """Lets links that leave the folder docs lead to the repository."""
    return OUTSIDE.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)
