"""A hook of mkdocs: documents link to files of the repository, which are no pages of the site."""

import re

# A link from docs to what is beside it, such as `](../fa3-types/src/mask.rs)`.
OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown, config, **_):
    """Lets links that leave the folder docs lead to the repository."""
    return OUTSIDE.sub(rf"]({config.repo_url}/blob/main/\1)", markdown)
