"""One vocabulary for all schedulers: what each prints, and what it refuses."""

from __future__ import annotations

import re

import pytest

from hpcddp.errors import RequestError, SiteError
from hpcddp.schedulers.registry import scripted_schedulers
from hpcddp.script.plan import plan_job
from hpcddp.script.render import render_script
from hpcddp.script.site import Account
from hpcddp.script.site_file import load_site
from hpcddp.script.spec import read_spec

from .conftest import PLANNED_BY, plan, script

ASPIRE = {"gpus_per_node": "4", "cpus_per_rank": "8", "launcher": "mpich"}


def directives(site: str, **asked: object) -> list[str]:
    return [
        line.split(" ", 1)[1] for line in script(site, **asked).splitlines() if re.match(r"#(PBS|SBATCH|\$) ", line)
    ]


@pytest.mark.parametrize(
    ("asked", "pbs", "slurm", "gridengine"),
    [
        ({"hold": "true"}, "-h", "--hold", "-h"),
        ({"requeue": "true"}, "-r y", "--requeue", "-r y"),
        ({"requeue": "false"}, "-r n", "--no-requeue", "-r n"),
        ({}, "-r n", "--no-requeue", "-r n"),
        ({"output": "logs/x.log"}, "-o logs/x.log", "--output=logs/x.log", "-o logs/x.log"),
        ({"mail": "end fail"}, "-m ea", "--mail-type=END,FAIL", "-m ea"),
        ({"mail": "end", "mail_to": "a@b.org"}, "-M a@b.org", "--mail-user=a@b.org", "-M a@b.org"),
        ({"array": "1-9"}, "-J 1-9", "--array=1-9", "-t 1-9"),
        ({"array": "1-9:2", "array_limit": "3"}, "-J 1-9:2%3", "--array=1-9:2%3", "-tc 3"),
        ({"reservation": "R77"}, "-q R77", "--reservation=R77", "-ar R77"),
        ({"dependency": "afterany:7"}, "-W depend=afterany:7", "--dependency=afterany:7", "-hold_jid 7"),
    ],
)
def test_each_wish_is_said_in_the_schedulers_words(asked, pbs, slurm, gridengine):
    for site, wanted in (("generic-pbs", pbs), ("generic-slurm", slurm), ("generic-gridengine", gridengine)):
        assert wanted in directives(site, **asked), site


@pytest.mark.parametrize(
    ("site", "asked", "words"),
    [
        ("generic-gridengine", {"mem_gb": "4"}, "cannot take mem_gb"),
        ("generic-gridengine", {"array": "0-3"}, "--set array=1-9"),
        ("generic-gridengine", {"dependency": "afterok:7"}, "dependency=afterany:7"),
        ("local", {"hold": "true"}, "site local cannot take hold"),
        ("generic-pbs", {"array": "1-3", "requeue": "false"}, "PBS takes an array only if its jobs may start again"),
        ("generic-pbs", {"array": "1,3"}, "is not FIRST-LAST"),
        ("generic-pbs", {"array": "1-4%2"}, "for few at once: --set array_limit=2"),
        ("generic-pbs", {"array_limit": "3"}, "without array"),
        ("local", {"max_micro_batch": "8"}, "max_micro_batch 8 without global_batch"),
        ("generic-pbs", {"mail_to": "a@b.org"}, "without mail"),
        ("generic-pbs", {"mail": "never"}, "'never' is no event"),
        ("generic-pbs", {"output": "$HOME/x"}, "output '$HOME/x'"),
        ("generic-slurm", {"output": "logs/"}, "output 'logs/'"),
        ("generic-slurm", {"dependency": "7"}, "is not KIND:JOBID"),
        ("generic-slurm", {"constraint": "a b"}, "constraint 'a b'"),
        ("generic-slurm", {"signal": "1:00:00"}, "not within 01:00:00"),
        ("generic-slurm", {"hold": "true", "directives": ["--hold"]}, "printed by the script itself"),
        ("generic-slurm", {"signal": "0:10:00", "directives": ["--signal=B:USR2@60"]}, "printed by the script itself"),
        ("generic-pbs", {"output": "x", "directives": ["-ofile"]}, "printed by the script itself"),
        ("abci3", {"mem_gb": "100"}, "site abci3 refuses mem"),
        ("polaris", {"account": "a", "walltime": "1:00:00", "output": "x"}, "site polaris refuses -o"),
        ("vista", {"walltime": "1:00:00", "directives": ["--gres=gpu:1"]}, "site vista refuses --gres"),
        ("abci3", {"ssh": "7"}, "ssh '7' is nothing that site abci3 takes"),
    ],
)
def test_what_a_scheduler_or_a_site_cannot_do_is_refused_and_never_left_out(site, asked, words):
    nodes = {"queue": "debug"} if site == "polaris" else {}
    with pytest.raises(RequestError) as error:
        plan(site, **nodes, **asked)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("site", "asked", "directive", "message"),
    [
        (
            "slurm",
            {"mem_gb": "64"},
            "--mem-per-cpu=4G",
            "'--mem=64G' and '--mem-per-cpu=4G': Slurm refuses options that exclude each other",
        ),
        ("slurm", {}, "--gres=gpu:a100:2", "Slurm refuses options that ask for GPUs with a type and without one"),
        ("slurm", {}, "--gpus-per-node=1", "Slurm would read only one of them"),
        ("slurm", {}, "--gpus-per-socket=1", "Slurm takes it with --sockets-per-node or --extra-node-info only"),
        ("slurm", {}, "--cpus-per-gpu=2", "Slurm refuses options that exclude each other"),
        ("slurm", {}, "-m arbitrary", "Slurm takes it with --nodelist or --nodefile only"),
        ("slurm", {}, "--tasks-per-node=4", "is printed by the script itself"),
        ("slurm", {}, "--array=1-3", "is printed by the script itself\nhint: use the job key array"),
        ("slurm", {}, "-o x", "'--output=%x-%j.out' and '-o x': Slurm would read only one of them"),
        ("slurm", {}, "--test-only", "would queue no job, or wait for its end"),
        ("pbs", {}, "-l mem=4gb", "PBS refuses options that exclude each other"),
        ("pbs", {}, "-l nodes=2:ppn=4", "is printed by the script itself"),
        ("pbs", {}, "-W block=true", "would queue no job, or wait for its end"),
        ("gridengine", {}, "-l gpu=1,h_rt=60", "is printed by the script itself"),
        ("gridengine", {}, "-t 1-3", "is printed by the script itself\nhint: use the job key array"),
        ("gridengine", {}, "-wd /x", "Grid Engine refuses options that exclude each other"),
        ("gridengine", {"constraint": "mem_free=4G"}, "-l mem_free=8G", "Grid Engine would read only one of them"),
    ],
)
def test_a_directive_that_excludes_or_repeats_what_the_script_prints_is_refused(site, asked, directive, message):
    with pytest.raises(RequestError) as error:
        script(f"generic-{site}", **asked, directives=[directive])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("site", "directive"),
    [
        *(("slurm", text) for text in ("--mem-per-cpu=4G", "--gres=lustre:1", "--gpus-per-task=1", "--gres-flags=x")),
        *(("slurm", text) for text in ("--gpus-per-node=2", "--nodelist=a", "--ntasks-per-core=1", "-x node4")),
        *(("pbs", text) for text in ("-l software=x", "-W umask=022", "-l pmem=4gb", "-v A=1")),
        *(("gridengine", text) for text in ("-l gpu=1", "-hard", "-p -5")),
    ],
)
def test_a_directive_beside_which_the_script_prints_nothing_of_the_kind_is_taken(site, directive):
    assert directive in directives(f"generic-{site}", directives=[directive])


def test_a_gpu_type_is_asked_for_in_the_form_that_the_site_has_for_gpus():
    assert "--gpus-per-node=a100:2" in directives("generic-slurm", gpu_type="a100")
    with pytest.raises(RequestError, match="asks for GPUs by its queue alone, so that gpu_type a100 cannot"):
        script("vista", walltime="1:00:00", gpu_type="a100")
    with pytest.raises(RequestError, match="site generic-pbs cannot take gpu_type"):
        script("generic-pbs", gpu_type="a100")
    with pytest.raises(RequestError, match="can carry gpu_type 'a:2'"):
        script("generic-slurm", gpu_type="a:2")
    with pytest.raises(RequestError, match=r"gpu_type 4 is a number.*\nhint: gpu_type: a100, or gpus_per_node: 4$"):
        script("generic-slurm", gpu_type="4")
    with pytest.raises(RequestError, match="gpu_type a100, and no GPUs are asked for"):
        script("generic-slurm", gpu_type="a100", gpus_per_node="0")
    assert ":gpu_type=A100\n" in script("imperial-cx3", gpu_type="A100", walltime="1:00:00")


SWEEP = {"sweep": {"lr": ["0.1", "a b"], "n-x": ["1", "2"]}, "command": ["python", "a.py", "{lr}", "{n-x}"]}


def test_a_chain_of_a_sweep_is_refused_as_a_sweep():
    with pytest.raises(RequestError, match="chain 3 beside sweep: a sweep is one array") as error:
        plan("generic-slurm", **SWEEP, chain="3", name="a")
    assert error.value.hint == "leave out chain, or submit each point by itself: --set sweep.NAME=VALUE"


def test_a_sweep_that_cannot_be_an_array_is_no_one_script():
    with pytest.raises(RequestError, match=r"4 points is as many jobs on this site.*\nhint: hpcddp submit … runs them"):
        plan("local", **SWEEP)


def test_options_of_one_directive_are_put_together():
    found = directives("abci3", reservation="R1234.pbs1", ssh="1", directives=["-v BEEOND_ON=1"], walltime="200:00:00")
    assert "-q R1234" in found
    assert [d for d in found if d.startswith("-v")] == ["-v USE_SSH=1,RTYPE=rt_HF,BEEOND_ON=1"]


def test_the_sites_constraint_and_the_jobs_hold_together():
    perlmutter = {"account": "a", "walltime": "1:00:00"}
    assert "--constraint=gpu" in directives("perlmutter", **perlmutter)
    assert "--constraint=gpu&hbm80g" in directives("perlmutter", **perlmutter, constraint="hbm80g")
    assert "--constraint=gpu&(a|b)" in directives("perlmutter", **perlmutter, constraint="a|b")


def test_the_script_warns_the_ranks_where_slurm_does_not():
    assert "--signal=USR1@120" in directives("generic-slurm", signal="0:02:00")
    assert " --signal 00:02:00 " in script("generic-pbs", signal="0:02:00")
    assert "--signal 0" not in script("generic-slurm", signal="0:02:00")
    assert " --signal 00:02:00 " in script(
        "generic-slurm", signal="0:02:00", launcher="torchrun"
    )  # it would end of Slurm's
    assert " --signal 00:01:00 " in script("stampede3", signal="0:01:00", walltime="1h")


@pytest.mark.parametrize(
    ("row", "option"),
    [(row, option) for row in scripted_schedulers() for option in row.directives.site_words.get("account", ())],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_every_option_that_a_site_may_have_for_its_account_is_printed(row, option):
    known = plan(row.generic_site)
    site = known.site._replace(account=Account(option=option))
    text = render_script(plan_job(known.spec._replace(account="luna"), site, PLANNED_BY))
    assert re.search(rf"^{re.escape(f'{row.directives.prefix} {option}')}[ =]luna$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("chunk: [ncpus]", "leave out chunk"),
        ("placement: scatter", "leave out placement"),
        ("vars: {foo: {chunk: 'gpu_type={}', default: a}}", "leave out chunk"),
    ],
)
@pytest.mark.parametrize("scheduler", ["slurm", "gridengine"])
def test_a_site_says_nothing_of_chunks_where_its_scheduler_has_none(scheduler, said, hint, tmp_path):
    (tmp_path / "lab.yaml").write_text(
        f"# https://example.org/\nschema: 1\nsummary: x\nscheduler: {scheduler}\nstanding: practice\n"
        f"verified: 2026-11-22\n{said}\n"
    )
    with pytest.raises(SiteError) as error:
        load_site("lab", str(tmp_path / "lab.yaml"))
    assert error.value.hint == hint


@pytest.mark.parametrize(
    ("site", "asked", "option"),
    [
        ("gadi", {"account": "a", "walltime": "1:00:00"}, "--set storage=gdata"),
        ("horizon", {"walltime": "1:00:00"}, "--launcher"),
        ("aurora", {"account": "a", "queue": "debug", "walltime": "1:00:00"}, "--set filesystems=home:flare"),
        ("juwels-booster", {"account": "a", "walltime": "1:00:00"}, "--cpus-per-rank"),
        ("aspire2a", {"cpus_per_rank": "8", "walltime": "1:00:00"}, "--gpus-per-node"),
        ("generic-gridengine", {"pe": None}, "--set pe=mpi"),
    ],
)
def test_a_fact_that_the_site_does_not_know_is_asked_for_by_its_option(site, asked, option):
    with pytest.raises(SiteError) as error:
        plan(site, **asked)
    assert option in error.value.hint


def test_an_account_that_no_script_can_carry_is_said_with_the_command():
    job = plan("tsubame4", account="tga-x", walltime="1:00:00")
    assert any("qsub -g tga-x" in remark for remark in job.remarks)
    assert "tga-x" not in "".join(directives("tsubame4", account="tga-x", walltime="1:00:00"))
    assert any("trial job" in remark for remark in plan("tsubame4", walltime="0:10:00").remarks)


@pytest.mark.parametrize(
    ("site", "asked", "words"),
    [
        ("polaris", {"queue": "prod", "nodes": "5"}, ["drop the job without a word", "--nodes 10"]),
        ("polaris", {"queue": "prod", "nodes": "5"}, ["--queue debug-scaling"]),
        ("polaris", {"queue": "prod", "nodes": "10", "walltime": "24:00:00"}, ["at most 03:00:00", "10 to 24 nodes"]),
        ("polaris", {"queue": "debug", "walltime": "0:04:59"}, ["at least 00:05:00"]),
        ("frontier", {"nodes": "4", "walltime": "6:00:00"}, ["1 to 91 nodes run at most 02:00:00"]),
        ("clariden", {"queue": "debug", "nodes": "3", "walltime": "1:00:00"}, ["1.5 node-hours", "00:30:00"]),
        ("aspire2a", {**ASPIRE, "nodes": "17", "walltime": "48:00:00"}, ["65 to 256 GPUs run at most 24:00:00"]),
        ("imperial-cx3", {"gpus_per_node": "2", "nodes": "2"}, ["1 node and 1 to 8 GPUs", "not 2 with 4 GPUs"]),
        ("lumi-g", {"account": "mine"}, ["account matches project_"]),
        ("lumi-g", {"account": "project_1", "cpus_per_rank": "8"}, ["8 ranks of 8 CPUs do not fit on the 56 CPUs"]),
        ("imperial-cx3", {"account": "x", "gpus_per_node": "2"}, ["knows no accounts"]),
        ("delta", {"account": "x"}, ["account matches"]),
    ],
)
def test_a_request_beyond_a_sites_rules_is_refused_with_the_rule(site, asked, words):
    known = {"account": "abcd-gpu" if site != "imperial-cx3" else None, "walltime": "1:00:00"}
    with pytest.raises(RequestError) as error:
        plan(site, **{**known, **asked})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_shared_nodes_cpus_and_memory_follow_the_gpus():
    asked = {"account": "a", "walltime": "1:00:00", "storage": "x"}
    found = directives("gadi", **asked, gpus_per_node="1", nodes="1")
    assert {"-l ncpus=12", "-l ngpus=1", "-l mem=95GB"} <= set(found)
    found = directives("gadi", **asked, nodes="3")
    assert {"-l ncpus=144", "-l ngpus=12", "-l mem=1146GB"} <= set(found)
    assert not any("select" in d for d in found)


@pytest.mark.parametrize(
    "asked",
    [{"nodes": "2", "gpus_per_node": "2"}, {"nodes": "1", "spares": "1", "max_restarts": "1", "gpus_per_node": "1"}],
)
def test_totals_of_several_nodes_are_whole_nodes(asked):
    with pytest.raises(RequestError, match="2 nodes are whole nodes, of 48 CPUs each") as error:
        plan("gadi", account="a", walltime="1:00:00", storage="x", **asked)
    assert error.value.hint == "--gpus-per-node 4, or --nodes 1"


@pytest.mark.parametrize("where", ["--set directives", "directives in job.yaml"])
@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("-v USE_SSH=1", ("-v USE_SSH=1",)),
        ("-v USE_SSH=1 -W umask=022 -V", ("-v USE_SSH=1", "-W umask=022", "-V")),
        (["-v", "USE_SSH=1"], ("-v USE_SSH=1",)),
        ("--mem-per-gpu 4G", ("--mem-per-gpu=4G",)),
    ],
)
def test_a_word_behind_an_option_is_its_value(where, typed, options):
    assert read_spec({"directives": (typed, where)}).directives == options
