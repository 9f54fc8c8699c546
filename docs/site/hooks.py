"""Hooks of MkDocs: put the READMEs into the site, and let the API pages be rendered by mkdocstrings.

Pages link to files by their place in the repository, so that links work on disk and on a code host. The site has another
layout: `docs/` is its root, and the repository's README is its first page. These hooks add each file outside `docs/` that
a page links to, and rewrite the links.
"""

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
_API = {
    "reference/python.md": "ttlaunch",
    "reference/recipes.md": "ttlaunch.recipe",
    "reference/trainers.md": "ttlaunch.train",
}


def on_config(config: Any) -> Any:
    """List the recipes in the navigation: a new one needs no line there."""
    for section in config.nav:
        if "Recipes" in section:
            section["Recipes"] = [path.relative_to(ROOT).as_posix() for path in _recipes()]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the READMEs, the changelog, and whatever else pages link to outside `docs/`."""
    outside = {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *_recipes()}
    pages = [*outside, *(Path(page.abs_src_path) for page in files.documentation_pages())]
    for page in pages:
        outside.update(file for file in _targets(page) if file.is_file() and not file.is_relative_to(ROOT / "docs"))
    for path in sorted(outside):
        file = File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        file.inclusion = InclusionLevel.INCLUDED  # whatever the patterns say that leave files of `docs/` out
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Translate the page's links; keep only the introduction of an API page, and let mkdocstrings write the rest."""
    uri = page.file.src_uri
    here = Path(page.file.abs_src_path).parent

    def translated(found: re.Match[str]) -> str:
        return os.path.relpath(_uri(here / found[0]), Path(uri).parent)

    markdown = _LINK.sub(translated, markdown)
    return markdown.partition("\n## ")[0] + f"\n\n::: {_API[uri]}\n" if uri in _API else markdown


def _recipes() -> list[Path]:
    return sorted(ROOT.glob("recipes/*/README.md"))


def _targets(page: Path) -> list[Path]:
    return [(page.parent / target).resolve() for target in _LINK.findall(page.read_text(encoding="utf-8"))]


def _uri(target: Path) -> str:
    """The place in the site of a file of the repository."""
    return target.resolve().relative_to(ROOT).as_posix().removeprefix("docs/")
