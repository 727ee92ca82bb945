"""A site's file is what its pages said on a day: an old one is said to be."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpcddp.script.site import Site

_OLD_DAYS = 366


def remark_age(site: Site, now: float) -> Iterator[str]:
    """What to say of a file whose last look at its pages is more than a year ago; `now`: seconds since 1970. Generic
    sites say nothing of a cluster, and do not age."""
    try:
        looked = time.mktime(time.strptime(site.verified[:10], "%Y-%m-%d"))
    except (ValueError, OverflowError):
        return
    if site.standing != "generic" and now - looked > _OLD_DAYS * 86400:
        when = f"{site.verified[:10]}, more than a year ago"
        yield f"site {site.name} was last held against its pages on {when}: hpcddp sites check {site.name}"
