"""The table of mistakes: one row each. docs/lint.md has the same rows, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcddp.lint import (
    header_rules,
    python_data_rules,
    python_model_rules,
    python_rules,
    run_rules,
    size_rules,
    text_rules,
)
from hpcddp.lint.finding import Rule, Said
from hpcddp.lint.training_script import TrainingScript

# id, whether it is wrong as it stands, what finds it
RULES = (
    Rule("D1", True, header_rules.refused),
    Rule("D2", True, header_rules.refused_value),
    Rule("D3", False, header_rules.unknown_resource),
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
    Rule("A4", False, size_rules.rank_per_slot),
    Rule("A5", False, run_rules.fixed_port),
    Rule("A23", True, run_rules.tee_hides_status),
    Rule("A24", True, text_rules.open_document),
    Rule("A25", True, text_rules.carriage_returns),
)
PYTHON_RULES: tuple[tuple[str, bool, Callable[[TrainingScript], Iterator[Said]]], ...] = (
    ("A3", False, python_rules.device_modulo),
    ("A5", False, python_rules.fixed_port),
    ("A6", True, python_rules.data_parallel),
    ("A7", False, python_model_rules.item_in_loop),
    ("A8", False, python_data_rules.no_workers),
    ("A9", False, python_rules.fixed_address),
    ("A10", False, python_rules.global_rank_as_device),
    ("A11", True, python_data_rules.no_set_epoch),
    ("A12", True, python_data_rules.shuffle_beside_sampler),
    ("A13", False, python_data_rules.never_shuffled),
    ("A14", False, python_data_rules.whole_data_on_each_rank),
    ("A15", False, python_model_rules.no_rank_check),
    ("A16", False, python_data_rules.mean_of_means),
    ("A17", True, python_model_rules.optimizer_before_sharding),
    ("A18", True, python_model_rules.bare_model_called),
    ("A19", False, python_model_rules.no_destroy),
    ("A20", False, python_rules.starts_processes),
    ("A21", False, python_model_rules.no_map_location),
    ("A22", True, python_model_rules.collective_on_some_ranks),
)
