"""The table of mistakes: one row each. docs/lint.md has the same rows, with the evidence."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable

from hpcddp.errors import RequestError
from hpcddp.lint import header_rules, python_rules, run_rules
from hpcddp.lint.python_rules import find_spawning
from hpcddp.lint.script import Finding, Rule, Script
from hpcddp.lint.training_script import TrainingScript, read_training_script
from hpcddp.script.spec import quote_words

# id, whether it is wrong as it stands, what finds it
RULES = (
    Rule("D1", True, header_rules.refused),
    Rule("D4", True, header_rules.refused_options),
    Rule("M1", True, header_rules.no_mpiprocs),
    Rule("M2", True, run_rules.lines_are_no_nodes),
    Rule("M3", True, header_rules.no_ompthreads),
    Rule("M4", False, header_rules.packed),
    Rule("M5", True, header_rules.limits),
    Rule("M7", True, header_rules.not_read),
    Rule("M8", True, header_rules.output_folder),
    Rule("M9", True, header_rules.twice),
    Rule("M10", True, header_rules.idle_nodes),
    Rule("M11", True, run_rules.hostname_reads_nothing),
    Rule("M12", True, run_rules.hostname_of_each_task),
    Rule("M13", True, run_rules.job_id_in_port),
    Rule("M15", True, header_rules.two_launchers),
    Rule("M16", True, header_rules.gpu_numbers),
    Rule("M20", False, run_rules.gpu_aware_mpi),
    Rule("M23", True, header_rules.rejected),
    Rule("M24", False, header_rules.no_cpus_for_srun),
    Rule("M25", True, header_rules.too_many_cpus),
    Rule("M29", False, header_rules.requeue),
    Rule("M33", True, header_rules.walltime),
    Rule("M33", False, header_rules.short_walltime),
    Rule("M34", True, header_rules.other_scheduler),
    Rule("A1", False, run_rules.master_addr_stays_here),
    Rule("A2", True, run_rules.nobody_sets_it),
    Rule("A3", True, run_rules.rank_modulo),
    Rule("A4", True, header_rules.first_nodes_only),
    Rule("A4", False, header_rules.rank_per_slot),
    Rule("A5", False, run_rules.fixed_port),
    Rule("A9", True, run_rules.localhost_for_several_nodes),
    Rule("A23", True, run_rules.tee_hides_status),
    Rule("A24", True, run_rules.open_document),
    Rule("A26", True, run_rules.rank_of_batch_shell),
    Rule("A26", True, run_rules.host_of_batch_shell),
    Rule("A26", True, run_rules.node_agent_without_place),
    Rule("A27", True, run_rules.submit_host),
    Rule("A29", True, run_rules.port_of_each_task),
    Rule("A30", True, run_rules.signal_kills_script),
    Rule("A31", True, run_rules.signal_to_nothing),
    Rule("A32", True, run_rules.requeue_of_array),
    Rule("A34", True, run_rules.ends_before_its_ranks),
)
PYTHON_RULES = (
    Rule("A3", False, python_rules.device_modulo),
    Rule("A5", False, python_rules.fixed_master_port),
    Rule("A6", True, python_rules.data_parallel),
    Rule("A7", False, python_rules.item_in_loop),
    Rule("A8", False, python_rules.no_workers),
    Rule("A9", False, python_rules.fixed_address),
    Rule("A10", False, python_rules.global_rank_as_device),
    Rule("A11", True, python_rules.no_set_epoch),
    Rule("A14", False, python_rules.whole_data_on_each_rank),
    Rule("A15", False, python_rules.no_rank_check),
    Rule("A17", True, python_rules.optimizer_before_sharding),
    Rule("A18", True, python_rules.bare_model_called),
    Rule("A20", False, python_rules.starts_processes),
    Rule("A22", True, python_rules.collective_on_some_ranks),
    Rule("A29", True, python_rules.port_of_each_rank),
)


def lint_script(file: str, script: Script) -> list[Finding]:
    """Every mistake of a job script, by line."""
    refuse_no_text(file, script.text)
    return _apply(RULES, file, script)


def lint_python(file: str, text: str) -> list[Finding]:
    """Every mistake of a training script, by line. Raises RequestError if it is no Python."""
    refuse_no_text(file, text)
    try:
        # bytes: the file may name its encoding in the first line
        script = _parse(text.encode("utf-8", "surrogateescape"))
    except _NO_PYTHON as e:
        what = f"{file} is not Python: {str(e) or 'it is nested too deeply'}"
        raise RequestError(what, f"python -m py_compile {file}") from e
    return _apply(PYTHON_RULES, file, script)


def find_spawning_line(text: bytes) -> int:
    """Find the line at which a script starts a node's ranks itself, whatever its options (A20); 0: none."""
    try:
        return min((call.lineno for call in find_spawning(_parse(text))), default=0)
    except _NO_PYTHON:
        return 0


_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # the last two: nested too deeply


def _parse(text: bytes) -> TrainingScript:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's remarks about "\\d"
        return read_training_script(ast.parse(text))


def refuse_no_text(file: str, text: str) -> None:
    """Refuses what is no script: "nothing was found" would look like a good result."""
    if not text.strip():
        raise RequestError(f"{file} is empty", f"check the path: ls -l {quote_words([file])}")
    # no line of text begins with such a byte; further on, a script may have bytes of another encoding
    if "\0" in text or re.match(r"[\x01-\x08\x0e-\x1f\x7f\udc80-\udcff]", text):
        raise RequestError(f"{file} is a binary file, not a script", f"see what it is: file {quote_words([file])}")
    if file.endswith(".ipynb") or (text.lstrip("\ufeff \t\r\n").startswith("{") and '"nbformat"' in text):
        name = quote_words([file.removesuffix(".ipynb")])
        hint = f"jupyter nbconvert --to script {quote_words([file])}"
        hint += f" && hpcddp lint {name}.py" if file.endswith(".ipynb") else ""
        raise RequestError(f"{file} is a notebook, not a script", hint)


def _apply(rules: Iterable[Rule], file: str, script: Script | TrainingScript) -> list[Finding]:
    found = {
        Finding(file, one.line, rule.id, "mistake" if rule.certain else "warning", one.what, one.instead): None
        for rule in rules
        for one in rule.check(script)
    }
    return sorted(found, key=lambda finding: (finding.line, finding.rule))
