"""Writes docs/sites: one page per shipped site, and the list of them. Run it after changing a site's file."""

from __future__ import annotations

from pathlib import Path

from hpcddp.script.site import Queue
from hpcddp.script.site_file import load_site, site_files
from hpcddp.script.site_text import page_of

_MADE_BY = "docs/make_site_pages.py"
_HEAD = """\
# The sites

<!-- made by docs/make_site_pages.py from the sites' files -->

This page lists the clusters that hpcddp has facts about. `hpcddp sites` prints the list:

```console
$ hpcddp sites | sed -n 1,2p
site                scheduler   GPUs/node  basis       verified
abci3               pbs         8          documented  2026-01-30  ABCI 3.0 (AIST, Japan), 8 x H200 per node
```

`hpcddp sites show NAME` prints one site. How a site is chosen, and how to write your own:
[sites.md](../sites.md), [add-a-site.md](../add-a-site.md).

| site | scheduler | GPUs per node | basis | verified | |
|---|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    sites = [load_site(name, path) for name, path in site_files({}).items()]
    rows = ""
    for site in sites:
        gpus = site.queues.get(site.queue, Queue()).gpus
        cells = [f"[`{site.name}`]({site.name}.md)", site.scheduler, "your option" if gpus is None else str(gpus)]
        rows += f"| {' | '.join([*cells, site.standing, site.verified, site.summary])} |\n"
    return {"README.md": _HEAD + rows, **{f"{site.name}.md": page_of(site, _MADE_BY) for site in sites}}


if __name__ == "__main__":
    folder = Path(__file__).parent / "sites"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text)
