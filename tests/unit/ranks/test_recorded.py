"""A recorded environment is read as it was, or refused where it can be read in two ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.ranks.recorded import _parse_exact, _parse_lines, read_environment

FUNCTION = "() {  RANK=7\n local x=1\nWORLD_SIZE=8\n}"
names = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,6}\Z")
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.dictionaries(names, values, min_size=1))
def test_env_0_is_read_back_exactly(env: dict[str, str]) -> None:
    assert _parse_exact("".join(f"{k}={v}\0" for k, v in env.items()), "f") == env


@given(st.dictionaries(names, values.filter(lambda v: "=" not in v and "\r" not in v), min_size=1))
def test_values_of_several_lines_are_read_back_from_env(env: dict[str, str]) -> None:
    assert _parse_lines("".join(f"{k}={v}\n" for k, v in env.items()), "f") == env


def test_variables_inside_an_exported_function_are_not_the_environments() -> None:
    text = f"PMI_RANK=1\nBASH_FUNC_module%%={FUNCTION}\nPMI_SIZE=2\n"
    assert _parse_lines(text, "f") == {"PMI_RANK": "1", "BASH_FUNC_module%%": FUNCTION, "PMI_SIZE": "2"}


def test_a_name_that_comes_twice_with_two_values_is_refused() -> None:
    with pytest.raises(RequestError, match="PMI_RANK twice") as error:
        _parse_lines("PMI_RANK=1\nNOTE=see\nPMI_RANK=2\n", "f")
    assert error.value.hint == "record it in another file: env -0 > f.new"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"no environment\n", b"\0\0", b'{"a": 1}\n'])
def test_a_file_without_variables_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="env"):
        read_environment(str(path))


@pytest.mark.parametrize("path", ["/does/not/exist", "/"])
def test_a_file_that_cannot_be_read_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_environment(path)


def test_a_refusal_does_not_show_the_line_which_may_be_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("s3cret without a name\nA=1\n")
    with pytest.raises(RequestError) as error:
        read_environment(str(path))
    assert "s3cret" not in str(error.value)


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_bytes(b"A=\xff\xfe\0PMI_RANK=0\0")
    assert read_environment(str(path))["PMI_RANK"] == "0"
