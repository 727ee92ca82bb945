"""A recorded environment is read as it was, or refused where it can be read in two ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.cli.env import read_environment
from hpcddp.errors import RequestError


def read(folder: Path, text: str) -> dict[str, str]:
    (folder / "env").write_bytes(text.encode())
    return read_environment(str(folder / "env"))


FUNCTION = "() {  local RANK;\n  RANK=7;\n  WORLD_SIZE=8\n}"
names = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,6}\Z")
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(env=st.dictionaries(names, values, min_size=1))
def test_env_0_is_read_back_exactly(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert read(tmp_path_factory.getbasetemp(), "".join(f"{k}={v}\0" for k, v in env.items())) == env


def test_variables_inside_an_exported_function_are_not_the_environments(tmp_path: Path) -> None:
    env = read(tmp_path, f"PMI_RANK=1\nBASH_FUNC_module%%={FUNCTION}\nPMI_SIZE=2\n")
    assert env == {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"no environment\n", b"\0\0", b'{"a": 1}\n'])
def test_a_file_without_variables_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="env"):
        read_environment(str(path))
