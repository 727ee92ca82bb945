"""The table of mistakes: one row each. docs/lint.md has the same rows, with the evidence."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from hpcddp.lint import header_rules, python_rules, run_rules, size_rules
from hpcddp.lint.finding import Rule, Said

# id, whether it is wrong as it stands, what finds it
RULES = (
    Rule("D1", True, header_rules.refused),
    Rule("M1", True, size_rules.no_mpiprocs),
    Rule("M2", True, run_rules.lines_are_no_nodes),
    Rule("M3", True, size_rules.no_ompthreads),
    Rule("M4", False, size_rules.packed),
    Rule("M5", True, header_rules.limits),
    Rule("M7", True, header_rules.not_read),
    Rule("M8", True, header_rules.output_folder),
    Rule("M9", True, header_rules.twice),
    Rule("M10", True, size_rules.idle_nodes),
    Rule("M11", True, run_rules.hostname_reads_nothing),
    Rule("M12", True, run_rules.own_hostname),
    Rule("M13", True, run_rules.job_id_in_port),
    Rule("M15", True, size_rules.two_launchers),
    Rule("M16", True, size_rules.gpu_numbers),
    Rule("M20", False, run_rules.gpu_aware_mpi),
    Rule("M23", True, header_rules.rejected),
    Rule("M24", True, size_rules.no_cpus_for_srun),
    Rule("M25", True, size_rules.too_many_cpus),
    Rule("M29", False, header_rules.requeue),
    Rule("M31", False, header_rules.no_name),
    Rule("M33", True, header_rules.walltime),
    Rule("M34", True, header_rules.other_scheduler),
    Rule("M34", True, header_rules.abci2),
    Rule("A1", False, run_rules.master_addr_stays_here),
    Rule("A2", True, run_rules.nobody_sets_it),
    Rule("A3", True, run_rules.rank_modulo),
    Rule("A4", True, size_rules.first_nodes_only),
    Rule("A5", False, run_rules.fixed_port),
)
PYTHON_RULES: tuple[tuple[str, bool, Callable[[ast.AST], Iterator[Said]]], ...] = (
    ("A3", True, python_rules.device_modulo),
    ("A6", True, python_rules.data_parallel),
    ("A7", False, python_rules.item_in_loop),
    ("A8", False, python_rules.no_workers),
)
