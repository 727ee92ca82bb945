"""The page on why jobs end has the rows of today."""

from __future__ import annotations

import importlib.util


def test_the_page_has_the_table_that_the_rows_make(repo):
    spec = importlib.util.spec_from_file_location("make_troubleshooting", repo / "docs/make_troubleshooting.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.put_table(page), "python docs/make_troubleshooting.py"
