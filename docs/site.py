"""What makes a site of the repository's Markdown as GitHub shows it: the hooks of MkDocs that ``mkdocs.yml`` names.

Pages outside this folder are part of the site, and what a link leads to that is no page of it is on GitHub. Markdown is
what GitHub takes for it, where Python's differs.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "operations/security.md",
    "CHANGELOG.md": "changelog.md",
    "k8s/README.md": "how-to/kubernetes.md",
    "k8s/helm/gpustream/README.md": "how-to/helm.md",
}
"""Where the site has the pages that lie outside of ``docs/``."""

_LINK = re.compile(r"\]\((?![a-z]+://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"^( *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LIST = re.compile(r"^((?![-*] |\d+\. |[ |>#]).+)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A folder in the navigation is all of its pages, README.md first."""
    for entry in (entry for part in config.nav or [] for entries in part.values() for entry in entries):
        for title, folder in list(entry.items()) if isinstance(entry, dict) else ():
            if str(folder).endswith("/"):
                names = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
                entry[title] = [folder + name for name in sorted(names, key=lambda name: name != "README.md")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The same page for Python's Markdown, its links as the site needs them."""
    pages = {os.path.normpath(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}
    source = Path(page.file.abs_src_path or "")

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(source.parent / match[1])
        inside = pages.get(target) or pages.get(f"{target}/README.md")
        if inside is not None:
            address = os.path.relpath(inside, Path(page.file.src_uri).parent)
        elif Path(target).exists():
            address = f"{config.extra['tree']}/{Path(target).relative_to(ROOT).as_posix()}"
        else:
            return match[0]
        return f"]({address}{match[2] or ''})"

    # Python's Markdown wants a blank line before a list, and four spaces before what belongs to an item, not three
    parts = []
    for part in _FENCED.split(markdown):
        if part.startswith("```"):
            parts.append(part)
        elif part.startswith("   ```"):
            parts.append(re.sub(r"^", " ", part, flags=re.MULTILINE))
        else:
            parts.append(_LIST.sub(r"\1\n\n", re.sub(r"^ {3}(?=\S)", "    ", part, flags=re.MULTILINE)))
    return _LINK.sub(link, "".join(parts))
