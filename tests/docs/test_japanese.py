"""The Japanese pages type and show the same as the English ones, so that one set of tests keeps both true."""

from __future__ import annotations

import re

import pytest

from tests.docs.conftest import blocks_of


def blocks_in(page) -> list[tuple[str, str, str]]:
    return [(block.language, block.info, block.text) for block in blocks_of(page)]


def test_a_japanese_page_has_the_code_blocks_of_the_english_one_in_its_order(japanese_page, repo):
    blocks = blocks_in(japanese_page)
    assert blocks
    assert blocks == blocks_in(repo / "docs" / japanese_page.name)


def test_the_readme_links_each_japanese_page(japanese_page, repo):
    assert f"(docs/ja/{japanese_page.name})" in (repo / "README.md").read_text(encoding="utf-8")


def test_a_japanese_page_has_as_many_sections_and_tables_as_the_english_one(japanese_page, repo):
    def shape(page) -> tuple[int, int]:
        lines = page.read_text(encoding="utf-8").splitlines()
        return sum(line.startswith("## ") for line in lines), sum(line.startswith("|---") for line in lines)

    assert shape(japanese_page) == shape(repo / "docs" / japanese_page.name)


# The one word for a thing, and what else was written for it.
GLOSSARY = {
    "ランチャー (launcher)": r"ランチャ(?!ー)",
    "実行 (run)": r"(?<![ァ-ヶー])ラン(?![ァ-ヶー])",
    "再開 (resume)": r"レジューム",
    "投入 (submit)": r"サブミット|ジョブを投げ",
    "スケジューラ (scheduler)": r"スケジューラー",
    "フォルダ (folder)": r"フォルダー|ディレクトリ",
    "パラメータ (parameter)": r"パラメーター",
    "チェックポイント (checkpoint)": r"スナップショット",
    "ウォールタイム (walltime)": r"制限時刻|実行時間制限",
}


@pytest.mark.parametrize("word", GLOSSARY)
def test_a_japanese_page_uses_the_glossarys_word(word, japanese_page):
    assert not re.findall(GLOSSARY[word], japanese_page.read_text(encoding="utf-8")), word
