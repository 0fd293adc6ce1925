"""The pages of the site: links to files of the project, the navigation, the public names."""

import re

import pytest

import onecurve
from engine.dev.docs_site.hooks import api, page_of, with_links_of_the_site
from tests.support.commands import ROOT


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("docs/use.md", "[a](runs.md#resume)", "[a](runs.md#resume)"),
        ("docs/use.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/guide/README.md", "[a](../../train.py)", "[a](../source/train.py.md)"),
        ("docs/guide/README.md", "[a](check.py)", "[a](../source/docs/guide/check.py.md)"),
        ("docs/use.md", "[a](../engine/onecurve/parallel)", "[a](source/engine/onecurve/parallel.md)"),
        ("README.md", "![a](docs/pictures/bits.svg)", "![a](pictures/bits.svg)"),
        ("README.md", "[a](.env.example)", "[a](source/env.example.md)"),
        ("engine/README.md", "[a](../docs/use.md#x) [b](CHANGELOG.md)", "[a](../../use.md#x) [b](CHANGELOG.md)"),
        ("docs/use.md", "[a](https://a.b/c) [b](#c)", "[a](https://a.b/c) [b](#c)"),
        ("docs/use.md", "```\n[a](../train.py)\n```\n", "```\n[a](../train.py)\n```\n"),
    ],
)
def test_links_lead_to_pages(page: str, text: str, expected: str) -> None:
    assert with_links_of_the_site(text, page) == expected


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = [name for name in re.findall(r"- (?:\w+: )?(\S+\.md)$", text, re.MULTILINE) if "source/" not in name]
    pages = [page_of(str(file.relative_to(ROOT))) for file in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, "index.md", "zh.md", "api.md"])


def test_the_api_has_every_public_name() -> None:
    listed = re.findall(r"^::: onecurve\.\S+\.(\w+)$", api(), re.MULTILINE)
    assert set(onecurve.__all__) <= set(listed)
