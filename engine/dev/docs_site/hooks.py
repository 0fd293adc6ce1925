"""Hooks of MkDocs: pages for what is outside docs/, with the links that lead there, and a page for each public name.

A page of docs/ links to a file of the project as GitHub shows it. On the site, READMEs are pages like others, and a
source file or a folder is a page that search leaves out. https://www.mkdocs.org/dev-guide/plugins/#events
"""

import posixpath
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HOMES = {"README.md": "index.md", "README.zh.md": "zh.md"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)|(?<=src=\")(?!\w+:)([^\"]+)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def page_of(path: str) -> str:
    """Return where a file or folder of the project is among the pages, as MkDocs names it."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    visible = path.removeprefix(".")  # MkDocs leaves out hidden files
    return HOMES.get(path) or f"source/{visible}" + ("" if path.endswith(".md") else ".md")


def links(text: str, path: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start and the end of each link outside of code, and the path in the project to which it leads."""
    code = [match.span() for match in _FENCE.finditer(text)]
    for match in _LINK.finditer(text):
        if not any(start < match.start() < end for start, end in code):
            yield *match.span(), posixpath.normpath(posixpath.join(posixpath.dirname(path), match.group()))


def with_links_of_the_site(text: str, path: str) -> str:
    """Return the text of a page with links to other pages, instead of files.

    Args:
        text: Markdown.
        path: of the page in the project.
    """
    folder = posixpath.dirname(page_of(path))
    for start, end, target in reversed([*links(text, path)]):
        text = text[:start] + posixpath.relpath(page_of(target), folder or ".") + text[end:]
    return text


def content(path: str) -> str:
    """Return the Markdown of a file or folder outside docs/."""
    file = ROOT / path
    if path.endswith(".md"):
        return with_links_of_the_site(file.read_text(), path)
    if file.is_dir():
        inside = {name.removeprefix(f"{path}/").split("/")[0] for name in _tracked() if name.startswith(f"{path}/")}
        return f"{_HIDDEN}# {path}\n\n```text\n" + "\n".join(sorted(inside)) + "\n```\n"
    kind = {".py": "python", ".pyi": "python", ".cpp": "cpp", ".yaml": "yaml"}.get(file.suffix, "text")
    return f"{_HIDDEN}# {path}\n\n````{kind}\n{file.read_text()}\n````\n"


@cache
def _tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def outside(pages: list[str]) -> list[str]:
    """Return the READMEs, and what is no page of docs/ to which these pages lead, directly or through others."""
    found = dict.fromkeys(HOMES)
    waiting = [*pages, *HOMES]
    while waiting:
        path = waiting.pop()
        if path.endswith(".md") and (ROOT / path).is_file():
            targets = [target for *_, target in links((ROOT / path).read_text(), path)]
            new = [target for target in targets if page_of(target).startswith("source/") and target not in found]
            waiting += new
            found |= dict.fromkeys(new)
    return [*found]


def api() -> str:
    """Return the page of the public names, by subject as `onecurve/__init__.pyi` lists them."""
    lines = ["# API", "", "What `import onecurve` offers, and what your classes may offer to it.", ""]
    for line in (ROOT / "engine" / "onecurve" / "__init__.pyi").read_text().splitlines():
        if line.startswith("#"):
            lines += [f"## {line.removeprefix('# ')}", ""]
        elif match := re.match(r"from \.(\S+) import (\w+)", line):
            lines += [f"::: onecurve.{match[1]}.{match[2]}", ""]
    return "\n".join([*lines, "## What your classes may offer", "", "::: onecurve.protocols", ""])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    texts = {page_of(path): content(path) for path in outside(pages)}
    for uri, text in (texts | {"api.md": api()}).items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page of docs/."""
    is_generated = page.file.generated_by is not None
    return markdown if is_generated else with_links_of_the_site(markdown, f"docs/{page.file.src_uri}")
