"""The tables of the manual that are made from the code are those of today."""

from __future__ import annotations

import importlib.util


def test_each_table_is_what_the_code_makes(repo):
    spec = importlib.util.spec_from_file_location("make_tables", repo / "docs/make_tables.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    for name in {page for page, _ in maker.TABLES.values()}:
        page = (repo / "docs" / name).read_text(encoding="utf-8")
        assert page == maker.put_tables(name, page), "python docs/make_tables.py"
