"""A module that one other module of its folder imports, and nothing else, is a part of that one: it needs a reason.

A file is one idea and its helpers. What is cut off a file only because that is long has to be read with it anyway.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hpcddp

_FOLDED = "folded by the next commit"
_PART = "a part of Runtime, until that is composed of its parts"
#: Module below hpcddp -> why it is a file of its own.
ALLOWED = {
    "advise.blocks": _FOLDED,
    "advise.pass_errors": _FOLDED,
    "api": "loaded at the first use of a name: `import hpcddp` alone costs nothing",
    "cli.beside": _FOLDED,
    "cli.chart": _FOLDED,
    "cli.handed_on": _FOLDED,
    "cli.heartbeat": "exec loads it inside a job only; it is the agent beside a rank, and moves into supervisor/",
    "cli.meant": "loaded once somebody has typed an option of a scheduler or a launcher",
    "cli.paths": "loaded once the system has refused a path",
    "cli.refusal": _FOLDED,
    "cli.room": _FOLDED,
    "cli.sites_check": "asks the live scheduler: `hpcddp sites` loads it for its action `check` alone",
    "cli.watch_screen": "needs rich, which may be missing",
    "integrations.lightning_data": _FOLDED,
    "integrations.own_loop": "one file for each kind of loop, loaded at its first use",
    "integrations.random_state": _FOLDED,
    "integrations.save_time": _FOLDED,
    "lint.gridengine": "one file for each scheduler's directives",
    "lint.header_rules": "one file for each kind of rule; the table of all is rules.py",
    "lint.pbs_resources": _FOLDED,
    "lint.python_data_rules": _FOLDED,
    "lint.python_model_rules": _FOLDED,
    "lint.rules": _FOLDED,
    "lint.run_rules": "one file for each kind of rule; the table of all is rules.py",
    "lint.size_rules": _FOLDED,
    "lint.text_rules": _FOLDED,
    "login.clean_env": _FOLDED,
    "login.submit": _FOLDED,
    "ranks.mpi_launchers": _FOLDED,
    "ranks.slurm_step": "what Slurm's step needs beyond its row",
    "runs.begun": _FOLDED,
    "runs.causes": _FOLDED,
    "runs.facts": _FOLDED,
    "schedulers.pbs_queues": _FOLDED,
    "schedulers.slurm_queues": _FOLDED,
    "script.choices": _FOLDED,
    "script.compiled": _FOLDED,
    "script.shape": _FOLDED,
    "supervisor.absent": _FOLDED,
    "supervisor.callers": _FOLDED,
    "supervisor.point": _FOLDED,
    "supervisor.recovery": "which hosts go on after a loss: pure arithmetic, and the loop of the job is long enough",
    "supervisor.relaunch": _FOLDED,
    "supervisor.starter": _FOLDED,
    "supervisor.stop_request": _FOLDED,
    "training.agreement": _PART,
    "training.all_ranks": _FOLDED,
    "training.checkpoint.resume": _FOLDED,
    "training.checkpoint.untouched": _FOLDED,
    "training.checkpoint.writer": _FOLDED,
    "training.data.ahead": _FOLDED,
    "training.data.generators": _FOLDED,
    "training.data_facts": _PART,
    "training.epoch_loops": _FOLDED,
    "training.gate.asked": _FOLDED,
    "training.gate.loss_terms": _FOLDED,
    "training.gate.own_gradients": _FOLDED,
    "training.gate.own_steps": _FOLDED,
    "training.gate.scaled": _FOLDED,
    "training.gate.scalers": _FOLDED,
    "training.gradient.reduction": _FOLDED,
    "training.gradient.slice_buffers": _FOLDED,
    "training.misused": _FOLDED,
    "training.own_run": _PART,
    "training.own_steps": _PART,
    "training.parallel.averaging": _FOLDED,
    "training.parallel.penalties": _FOLDED,
    "training.parallel.shapes_only": _FOLDED,
    "training.prepare": _PART,
    "training.rendezvous.backend": _FOLDED,
    "training.rendezvous.mpi": _FOLDED,
    "training.rendezvous.quiet_lookup": _FOLDED,
    "training.rendezvous.store": _FOLDED,
    "training.saving": _PART,
    "training.stepping": _FOLDED,
    "training.torch_parts": _FOLDED,
    "training.wrapping": _FOLDED,
}


def find_single_importers(package: Path) -> dict[str, str]:
    """Modules below the package that one module alone imports, and that one is in the same folder. By name: who."""
    modules = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    importers = defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in {*named} & modules.keys() - {name}:
                importers[module].add(name)
    return {
        module.partition(".")[2]: importer
        for module, (importer, *others) in importers.items()
        if not others and modules[module].name != "__init__.py" and modules[module].parent == modules[importer].parent
    }


def test_a_module_with_one_importer_in_its_own_folder_has_a_reason_and_no_reason_is_left_of_another():
    found = find_single_importers(Path(hpcddp.__file__).parent)
    assert {module: found[module] for module in sorted(found.keys() - ALLOWED.keys())} == {}, "fold it, or say why not"
    assert {module for module, reason in ALLOWED.items() if reason != _FOLDED} <= found.keys()


def test_an_importer_in_another_folder_or_a_second_one_is_enough(tmp_path: Path):
    package = tmp_path / "p"
    for file, text in {
        "__init__.py": "",
        "a.py": "from p import b, c\nfrom p.r import d",
        "b.py": "",
        "c.py": "",
        "r/__init__.py": "",
        "r/d.py": "def late():\n    import p.c",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    assert find_single_importers(package) == {"b": "p.a"}
