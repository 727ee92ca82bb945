"""YAML files: job files, sites, and which site is taken."""

from __future__ import annotations

import re

import pytest

from hpcddp.errors import RequestError, SiteError
from hpcddp.script.fields import read_command, read_directives, read_name_list, read_variables, read_words
from hpcddp.script.site_file import (
    QUEUE,
    SITE,
    SITE_FIELDS,
    SiteChoice,
    chosen_site,
    config_folders,
    load_site,
    load_yaml,
    open_site,
    parse_yaml,
    site_files,
    site_of_host,
    site_of_scheduler,
)
from hpcddp.script.spec import KEYS, read_spec
from hpcddp.units import assign


def test_plain_values_are_the_text_that_stands_in_the_file():
    text = "walltime: 1:30:00\nenv: {A: FALSE, B: no, C: 010, D: 1.50, E: ~}\nnodes: 4\n"
    assert parse_yaml(text, "x") == {
        "walltime": "1:30:00",
        "env": {"A": "FALSE", "B": "no", "C": "010", "D": "1.50", "E": "~"},
        "nodes": "4",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: 1\nnodes: 2\n", "line 2 is not YAML: 'nodes' stands twice"),
        ("nodes: [1\n", "line 2 is not YAML"),
        ("- a\n", "holds a list"),
        ("just text", "holds plain text"),
        ("env:\n\tA: 1\n", "line 2 is not YAML.*\nhint: .*indented with blanks"),
        ("? [a]\n: b\n", "a key is not plain text"),
    ],
)
def test_what_is_no_mapping_of_keys_is_refused(text, words):
    with pytest.raises(RequestError, match=words):
        parse_yaml(text, "job.yaml")


@pytest.mark.parametrize("depth", [3000, 200_000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("[", ""), ("{a: ", "}")])
def test_levels_without_end_are_refused_and_end_no_process(depth, begin, end):
    with pytest.raises(RequestError, match=r"job.yaml line \d is not YAML"):
        parse_yaml(f"a: {begin * depth}{end * depth}", "job.yaml")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("nodes", "0", "'0' is not a whole number of 1 or more\nhint: nodes: 4$"),
        ("gpus_per_node", "-3", "not a whole number of 0 or more"),
        ("nodes", ["1"], "is a list"),
        ("walltime", "90", "not a duration with one meaning"),
        ("signal", "0:0:0", "no time at all"),
        ("exclusive", "yes", "'yes' is not known"),
        ("launcher", "mpirun", "'mpirun' is not known\nhint: launcher: openmpi"),
        ("launcher", "opnmpi", "did you mean 'openmpi'"),
        ("env", "A=1", "not a mapping"),
        ("env", {"1A": "x"}, "not a variable's name"),
        ("env", {"A": ["x"]}, "A is a list"),
        ("env.A B", "x", "not a variable's name"),
        ("command", "python 'x", "cannot be split"),
        ("command", {"a": "b"}, "not a list of words"),
        (
            "command",
            ["python", {"world_size": ""}],
            r'YAML reads as something else: .*\n?.*quotes around it: "\{world_size\}"',
        ),
        ("command", ["python", ["a"]], "YAML reads as something else"),
    ],
)
def test_a_job_files_values_are_checked_and_their_source_named(key, value, words):
    with pytest.raises(RequestError, match=words) as error:
        read_spec({key: (value, f"{key} in job.yaml")})
    assert "job.yaml" in str(error.value) or key in str(error.value)


def test_each_unknown_key_is_named_with_the_nearest_one():
    asked = {
        "nodez": ("1", "nodez in job.yaml"),
        "walltme": ("1h", "--set walltme"),
        "zebra": ("x", "zebra in job.yaml"),
    }
    with pytest.raises(RequestError) as error:
        read_spec(asked)
    assert error.value.message == (
        "unknown keys 'nodez' (nodez in job.yaml) (did you mean 'nodes'?),"
        " 'walltme' (--set walltme) (did you mean 'walltime'?), 'zebra' (zebra in job.yaml)"
    )
    assert error.value.hint == "known keys: docs/job-file.md"


@pytest.mark.parametrize("more", ["| tee", "&& x", "> x", "2>&1", "data; x", "\nexport A=1"])
def test_an_operator_of_the_shells_in_a_commands_text_stands_in_quotes(more):
    with pytest.raises(RequestError, match=r"and no shell reads it\nhint: command: bash -c '…'"):
        read_spec({"command": (f"python train.py 'a b' {more}", "command in job.yaml")})
    assert read_spec({"command": (["python", *more.split()], "the command after --")}).command[0] == "python"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py --note 'a b'", ["python", "train.py", "--note", "a b"]),
        ("python a|b c&d=1 x>5 '|' \"a > b\" \\>", ["python", "a|b", "c&d=1", "x>5", "|", "a > b", ">"]),
        (
            "python train.py \\\n    --lr 0.1 \\\n --note 'it is\nso'\n",
            ["python", "train.py", "--lr", "0.1", "--note", "it is\nso"],
        ),
        ("bash -c 'a # b\n# c\nd' a#b", ["bash", "-c", "a # b\n# c\nd", "a#b"]),
    ],
)
def test_a_commands_text_is_split_like_a_shell_line(text, words):
    assert read_spec({"command": (text, "command in job.yaml")}).command == tuple(words)


@pytest.mark.parametrize("where", ["KEY in job.yaml", "--set KEY"])
@pytest.mark.parametrize("key", KEYS)
def test_an_empty_value_empties_a_list_or_variables_and_is_refused_for_every_other_key(key, where):
    where = where.replace("KEY", key)
    if KEYS[key] in {read_words, read_name_list, read_command, read_directives, read_variables}:
        assert not getattr(read_spec({key: ("", where)}), key)
        return
    with pytest.raises(RequestError) as error:
        read_spec({key: ("", where)})
    assert error.value.message == f"{where} has no value"
    assert error.value.hint == f"{assign(where, 'VALUE')}, or leave it out"


def test_single_variables_are_added_to_the_job_files():
    spec = read_spec({"env": ({"A": "1", "B": "2"}, "f"), "env.B": ("3", "--set"), "env.C": ("", "--set")})
    assert spec.env == {"A": "1", "B": "3", "C": ""}


_UNCITED = {"schema", "summary", "scheduler", "standing", "verified", "sources", "cited", "hostname", "queue", "notes"}


@pytest.mark.parametrize("name", list(site_files({})))
def test_every_fact_of_a_shipped_site_names_its_source(name):
    site = open_site(SiteChoice(name, "test"), {})
    assert re.match("https?://", site.guide)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", site.verified)
    assert set(site.cited.values()) <= set(site.sources)
    assert site.cited.keys() <= {*SITE, *QUEUE}
    for rule in (site.account, *map(site.account_of, site.queues), *site.vars.values()):
        for example in filter(None, (rule.example, getattr(rule, "default", ""))):
            assert re.fullmatch(rule.pattern or ".*", example), rule
    if site.standing == "generic":
        return
    for key in load_yaml(site.file)[0].keys() - _UNCITED:
        value = getattr(site, SITE_FIELDS.get(key, key))
        blocks = value.values() if key in {"queues", "vars"} else [value]
        cited = [site.cited.get(key) or getattr(block, "source", "") for block in blocks]
        assert set(cited) <= set(site.sources), f"{key} of {name}"


GOOD = """\
# https://x.org
schema: 1
summary: s
scheduler: slurm
standing: practice
verified: 2026-01-01
launcher: {name: srun}
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("# https://x.org\n", ""), "lacks the address of the user guide"),
        (GOOD.replace("verified: 2026-01-01\n", ""), "lacks the key 'verified'"),
        (GOOD + "hostname: '['\n", r"hostname in .*'\[' is no regular expression"),
        (GOOD + "account: {pattern: '('}\n", "pattern in account in .* is no regular expression"),
        (GOOD + "gpu_order: [0, 0]\n", "gpu_order in .* is 0 0, not each of a node's GPUs once"),
        (GOOD + "rendezvous: {suffix: 'a b'}\n", "'a b' is not one plain word"),
        (GOOD + "queues: {a: {gpu: 1, gpuz: 4}}\n", "unknown key 'gpuz' in a in queues"),
        (GOOD + "queues: {a: {limits: [{nodes: 9-1}]}}\n", "ends before it begins"),
        (GOOD + "queues: {a: {limits: [{}]}}\n", "not a list of rules"),
        (GOOD + "queues: {a: {like: b}}\n", "queue a in .* is like 'b', which is not there"),
        (GOOD + "vars: {nodes: {required: true}}\n", "'nodes' in vars is a key of every job file"),
        (GOOD + "queue: b\nqueues: {a: {}}\n", "default queue 'b' is none of its queues"),
        (GOOD + "account: {required: yes}\n", "'yes' is not known"),
        (GOOD.replace("slurm", "torque"), "'torque' is not known"),
        ("{", "is not YAML"),
    ],
)
def test_a_wrong_site_file_is_refused(text, words, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(SiteError, match=words):
        load_site("my", str(path))


def test_an_own_site_is_found_by_name_and_by_path_and_wins_over_a_shipped_one(tmp_path):
    folder = tmp_path / "hpcddp/sites"
    folder.mkdir(parents=True)
    (folder / "abci3.yaml").write_text(GOOD)
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert open_site(SiteChoice("abci3", ""), env).scheduler == "slurm"
    assert open_site(SiteChoice(str(folder / "abci3.yaml"), ""), {}).scheduler == "slurm"
    assert site_files(env)["abci3"] == str(folder / "abci3.yaml")
    assert open_site(SiteChoice("abci3", ""), {}).scheduler == "pbs"


def test_a_centres_folder_is_searched_after_the_users_own_and_before_the_shipped_sites(tmp_path):
    for folder in ("own", "one", "two"):
        (tmp_path / folder / "hpcddp/sites").mkdir(parents=True)
        for name in {"own": ["a"], "one": ["a", "b", "abci3"], "two": ["b", "c"]}[folder]:
            (tmp_path / folder / f"hpcddp/sites/{name}.yaml").write_text(GOOD)
    (tmp_path / "two/hpcddp/config.yaml").write_text("site: c\n")
    env = {"XDG_CONFIG_HOME": f"{tmp_path}/own", "XDG_CONFIG_DIRS": f"{tmp_path}/one:relative:{tmp_path}/two"}
    found = {name: open_site(SiteChoice(name, ""), env).file for name in ("a", "b", "c", "abci3")}
    assert found == {
        name: f"{tmp_path}/{folder}/hpcddp/sites/{name}.yaml"
        for name, folder in (("a", "own"), ("b", "one"), ("c", "two"), ("abci3", "one"))
    }
    assert found.items() <= site_files(env).items()
    default = SiteChoice("c", f"site in {tmp_path}/two/hpcddp/config.yaml")
    assert chosen_site(None, None, "", env) == default
    assert config_folders({"HOME": "/h"}) == ["/h/.config/hpcddp", "/etc/xdg/hpcddp"]


def test_an_unknown_site_names_the_known_ones():
    with pytest.raises(SiteError, match="did you mean 'abci3'") as error:
        open_site(SiteChoice("abci", "--site"), {})
    assert "generic-pbs" in error.value.hint


def test_what_the_user_said_is_taken_in_order(tmp_path):
    (tmp_path / "hpcddp").mkdir()
    (tmp_path / "hpcddp/config.yaml").write_text("site: d\n")
    config = {"XDG_CONFIG_HOME": str(tmp_path)}
    env = {**config, "HPCDDP_SITE": "b"}
    assert chosen_site("a", "c", "job.yaml", env) == SiteChoice("a", "--site")
    assert chosen_site(None, "c", "job.yaml", env) == SiteChoice("b", "$HPCDDP_SITE")
    assert chosen_site(None, "c", "job.yaml", config) == SiteChoice("c", "site in job.yaml")
    assert chosen_site(None, None, "", config) == SiteChoice("d", f"site in {tmp_path}/hpcddp/config.yaml")
    assert chosen_site(None, None, "", {"XDG_CONFIG_HOME": f"{tmp_path}/none"}) is None


@pytest.mark.parametrize("text", ["stie: abci3\n", "site:\n", "site: [abci3]\n"])
def test_a_config_file_that_does_not_choose_a_site_is_refused_and_not_ignored(text, tmp_path):
    (tmp_path / "hpcddp").mkdir()
    (tmp_path / "hpcddp/config.yaml").write_text(text)
    with pytest.raises(SiteError, match="chooses no site\nhint: site: NAME"):
        chosen_site(None, None, "", {"XDG_CONFIG_HOME": str(tmp_path)})


def test_a_site_is_found_by_the_whole_of_the_hosts_name():
    assert site_of_host("hnode042", {}) == SiteChoice("abci3", "this host is hnode042")
    assert site_of_host("xhnode0422", {}) is None


@pytest.mark.parametrize(
    ("programs", "site"),
    [
        ({"qsub": "pbs_version = 23.06.06\n", "sbatch": ""}, "generic-pbs"),
        ({"qsub": "Grid Engine 8.1.9", "sbatch": ""}, "generic-slurm"),
        ({"qsub": "Grid Engine 8.1.9"}, "local"),
        ({"sbatch": ""}, "generic-slurm"),
        ({}, "local"),
    ],
)
def test_a_scheduler_on_path_makes_the_generic_site_and_a_foreign_qsub_does_not(programs, site):
    assert site_of_scheduler(programs.__contains__, programs.__getitem__).site == site
