"""Adds to the site what lies outside of docs/, and what drawings need. MkDocs calls the functions by their names.

The documents link to files of the whole repository, so that they can be read there too. Each file that is linked gets
a place in the site: documents as pages, pictures as they are, and sources and folders as pages that show them. Links
are found and rewritten by one table from the repository's paths to the site's. Nothing is fetched from the network:
mermaid, which draws in the reader's browser, comes from the package of PyPI that has it.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
MERMAID = "assets/mermaid.js"
FOREIGN = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'> ]*)""")
# Documents of the root that have a place of their own in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".cu": "cpp", ".py": "python", ".sh": "bash", ".lua": "lua", ".eb": "python"}


def place(path: str) -> str:
    """Return where a file of the repository is in the site; a folder's and a source's page ends in ``.md``."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
        return path.removeprefix("docs/")
    if path.endswith((".md", ".png", ".svg")):
        return f"repository/{path}"
    return f"repository/{path}.md"


def targets(text: str, path: str) -> dict[str, str]:
    """Return the links of the document at ``path`` to files: each as it is written, and the file's path."""
    found = {}
    for link in LINK.findall(text):
        if "://" not in link and not link.startswith("mailto:"):
            target = os.path.normpath(os.path.join(os.path.dirname(path), link))
            if (ROOT / target).exists():
                found[link] = target
    return found


def relinked(text: str, path: str) -> str:
    """Return a document with its links as the site needs them."""
    here = os.path.dirname(place(path)) or "."
    new = {link: os.path.relpath(place(target), here) for link, target in targets(text, path).items()}
    return LINK.sub(lambda match: new.get(match[1], match[1]), text)


def shown(path: str) -> str:
    """Return the page of a source or a folder, which search leaves out."""
    file = ROOT / path
    if file.is_dir():
        body = "\n".join(f"- `{child.name}`" for child in sorted(file.iterdir()) if child.name != "__pycache__")
    else:
        body = f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````"
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{body}\n"


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of the root and of all files that a document links to."""
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not (ROOT / path).exists():
            continue
        document = path.endswith(".md")
        if place(path) not in files.src_uris:
            source = ROOT / path
            if document:
                added = File.generated(config, place(path), content=relinked(source.read_text(), path))
            elif path.endswith((".png", ".svg")):
                added = File.generated(config, place(path), abs_src_path=str(source))
            else:
                added = File.generated(config, place(path), content=shown(path))
            files.append(added)
        if document:
            new = set(targets((ROOT / path).read_text(), path).values()) - seen
            seen |= new
            waiting += new
    drawer = importlib.resources.files("mermaidx") / "assets" / "mermaid.js"
    files.append(File.generated(config, MERMAID, content=drawer.read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite the links of the pages in docs/; those of the others are rewritten already."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}")


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Load mermaid in the pages that have a drawing for it, before the theme would fetch it from elsewhere.

    Raises:
        PluginError: If a page would fetch a script, a style or a picture from the network.

    """
    foreign = FOREIGN.search(output)
    if foreign:
        raise PluginError(f"{page.file.src_uri} fetches {foreign[1]}: the site has to work without a network")
    if 'class="mermaid"' not in output:
        return output
    depth = page.url.count("/")
    return output.replace("</head>", f'<script src="{"../" * depth}{MERMAID}"></script></head>', 1)
