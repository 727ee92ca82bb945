"""The page on lines to change shows what benchmarks/lines/count.py counts, and the counts are within their targets."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="module")
def count(repo):
    spec = importlib.util.spec_from_file_location("count_lines", repo / "benchmarks/lines/count.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lines_page(repo):
    return (repo / "docs/lines.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_that_is_counted(count, lines_page):
    assert count.format_table() in lines_page, "put the output of benchmarks/lines/count.py into docs/lines.md"


def test_the_page_has_the_lines_that_change_in_the_classifier(count, lines_page):
    assert (
        f"$ python benchmarks/lines/count.py classifier\n{count.format_diff('classifier', 'with_hpcddp')}```"
        in lines_page
    )


def test_hpcddp_changes_no_more_lines_than_accelerate_and_fewer_than_accelerate_with_as_much(count):
    for kind in count.KINDS:
        plain = count.load_lines(kind, "plain")
        changes = {name: count.count_changes(plain, count.load_lines(kind, name)) for name in count.VERSIONS}
        assert changes["with_hpcddp"] <= changes["with_accelerate"], (kind, changes)
        assert changes["with_hpcddp"] < changes["with_accelerate_full"], (kind, changes)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("abc", "abc", 0),
        ("abc", "abxc", 1),  # added
        ("abc", "axc", 1),  # changed: counts once
        ("abcd", "xbcdy", 2),
    ],
)
def test_a_place_where_scripts_differ_counts_the_larger_of_removed_and_added_lines(count, before, after, changes):
    assert count.count_changes(list(before), list(after)) == changes


def test_indentation_blank_lines_and_comments_do_not_count(count, tmp_path, monkeypatch):
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind/plain.py").write_text("# a remark\nstep()\n\n    more()  # why\n")
    monkeypatch.setattr(count, "HERE", tmp_path)
    assert count.load_lines("kind", "plain") == ["step()", "more()  # why"]
