"""Each mistake is found where it is made, and nothing is found in a script as it should be."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.cli.main import main
from hpcddp.lint.rules import PYTHON_RULES, RULES, lint_script
from hpcddp.lint.script import read_script
from hpcddp.lint.shell import read_commands
from hpcddp.script.site_file import SiteChoice, open_site

from .lint_cases import CASES, SITE_CASES


def lint(text: str, site: str | None = None) -> list[tuple[str, int]]:
    profile = open_site(SiteChoice(site, "test"), {}) if site else None
    script = read_script(text, profile, lambda path: path in {"there", "/"})
    return [(finding.rule, finding.line) for finding in lint_script("x.sh", script)]


@pytest.mark.parametrize(("rule", "number"), [(rule, i) for rule in CASES for i in range(len(CASES[rule][0]))])
def test_the_mistake_is_found_at_its_line(rule, number):
    bad, _, line = CASES[rule]
    found = lint(bad[number])
    assert rule in {name for name, _ in found}, found
    assert not line or (rule, line) in found, found


@pytest.mark.parametrize(("rule", "number"), [(rule, i) for rule in CASES for i in range(len(CASES[rule][1]))])
def test_a_script_as_it_should_be_is_not_blamed(rule, number):
    found = lint(CASES[rule][1][number])
    assert rule not in {name for name, _ in found}, found


@pytest.mark.parametrize("rule", SITE_CASES)
def test_a_sites_facts_decide(rule):
    site, text, line = SITE_CASES[rule]
    assert (rule, line) in lint(text, site)


@pytest.mark.parametrize(("queue", "blamed"), [("R1234", False), ("R1234x", True), ("workq", True)])
def test_a_pbs_reservation_is_a_queue_that_no_profile_lists(queue, blamed):
    header = f"#!/bin/bash\n#PBS -N x\n#PBS -P g\n#PBS -q {queue}\n#PBS -v RTYPE=rt_HF\n"
    found = lint(f"{header}#PBS -l select=4:mpiprocs=8:ompthreads=12\ntrue\n", "abci3")
    assert ("M5" in {rule for rule, _ in found}) == blamed


@pytest.mark.parametrize("prefix", ["#BSUB", "#$", "#flux:"])
def test_a_script_of_a_scheduler_without_rules_is_refused_and_not_praised(prefix, tmp_path, capsys):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{prefix} --nodes=2\ntrue\n")
    assert main(["lint", str(script)]) == main(["lint", "--site", "abci3", str(script)]) == 2
    said, hint = capsys.readouterr().err.splitlines()[:2]
    assert said == f"hpcddp: {script}:2: lint has no rules for {prefix} lines, only for #PBS #SBATCH"
    assert hint == "hint: give it a script for PBS or Slurm, or a .py file"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=1:00:00\n{prefix} --nodes=2\ntrue\n")
    assert main(["lint", str(script)]) != 2
    script.write_text("#!/bin/bash\n# TODO - more\n#NOTE: this one\ntrue\n")
    assert main(["lint", str(script)]) != 2


def test_every_rule_has_its_cases():
    assert {rule.id for rule in RULES} == {*CASES, *SITE_CASES, "M23"}  # M23 has a test of its own below


def test_options_that_the_site_refuses_are_found(tmp_path, repo):
    text = (repo / "templates/sites/generic-slurm.yaml").read_text() + "rejects: [--gres, --mem=0, -w]\n"
    (tmp_path / "my.yaml").write_text(text)
    found = lint(
        "#!/bin/bash\n#SBATCH --gres=gpu:4\n#SBATCH --mem=0\n#SBATCH --nodelist=a\n", str(tmp_path / "my.yaml")
    )
    assert [(rule, line) for rule, line in found if rule == "M23"] == [("M23", 2), ("M23", 3), ("M23", 4)]


def test_the_projects_own_scripts_are_clean_with_their_site_and_without(repo):
    goldens = sorted((repo / "tests/golden").glob("*.sh"))
    assert len(goldens) > 10
    for golden in goldens:
        text = golden.read_text()
        if "\n#$ " in text:
            continue  # of a scheduler without rules
        site = re.findall(r" --site (\S+)", text)[-1]
        assert (golden.name, lint(text, site)) == (golden.name, [])
        assert (golden.name, lint(text)) == (golden.name, [])


def test_right_scripts_and_the_manuals_are_not_blamed(repo):
    files = [
        *(repo / "tests/unit/lint/scripts").glob("*right*.sh"),
        *(repo / "tests/captures").glob("runs*/**/script.sh"),
    ]
    texts = {str(file): file.read_text() for file in files}
    for page in [*repo.glob("docs/**/*.md"), *repo.glob("jobs/**/*.md"), repo / "README.md"]:
        blocks = re.findall(r"^```\w+\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        lines = (re.sub(r"^(> ?|\$ )", "", block, flags=re.MULTILINE) for block in blocks if page.name != "lint.md")
        texts |= {
            f"{page}:{i}": f"#!/bin/bash\n{text}"
            for i, text in enumerate(lines)
            if re.search("srun|mpirun|#SBATCH|#PBS", text)
        }
    assert len(texts) >= 50
    new = {"D4", "M15", *(f"A{number}" for number in range(26, 33))}  # of others, a page's excerpt has some
    found = {(name, rule) for name, text in texts.items() for rule, _ in lint(text) if rule in new}
    assert not found
    assert all(lint(texts[str(file)]) == [] for file in files if "right" in file.name)


def test_the_starting_articles_script_is_taken_apart():
    text = """#!/bin/bash
#PBS -q rt_HF
#PBS -l select=4:mpiprocs=192
#PBS -l walltime=1:00:00
#PBS -P gabc12345
cd $PBS_O_WORKDIR
MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)
MASTER_PORT=29500
mpirun -np 32 --hostfile $PBS_NODEFILE python train.py
mpirun -np $NUM_PROCESSES --map-by ppr:8:node python train.py
"""
    found = lint(text, "abci3")
    assert {"M3", "M29", "A1", "A2", "A4", "A5"} == {rule for rule, _ in found}


def test_commands_are_found_through_quotes_substitutions_and_here_documents():
    text = """a=1 b="x $(inner one)" prog 'two words' \\
  three # python not.py
cat << 'END'
python not.py
END
if true; then srun bash -c 'x=1
python deep.py'; fi
"""
    words = [(c.line, c.words) for c in read_commands(text)]
    assert (1, ("prog", "two words", "three")) in words
    assert (1, ("inner", "one")) in words
    assert (7, ("python", "deep.py")) in words
    assert not any("not.py" in w for _, w in words)


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # a file with \0 is refused as binary


@given(st.text(st.sampled_from("ab $(){}'\"`\\\n#<>|&;=-") | TEXT))
def test_no_text_stops_the_reader(text):
    lint(f"#!/bin/bash\n{text}")


@pytest.fixture
def hpcddp(tmp_path, monkeypatch, capsys):
    """Run it in this process, with these bytes on standard input: status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return main([*words]), *capsys.readouterr()

    return call


def test_findings_are_told_with_file_and_line_and_are_the_exit_status(hpcddp, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#PBS -N x -r n\n#PBS -l walltime=1day\n")
    (tmp_path / "good.sh").write_text("#!/bin/bash\n#PBS -N x -r n\n")
    status, out, _ = hpcddp("lint", "good.sh", "job.sh")
    assert status == 1
    assert out.startswith("job.sh:3: M33 mistake: ")
    assert "    hpcddp writes: " in out
    assert hpcddp("lint", "good.sh") == (0, "", "")
    found = json.loads(hpcddp("lint", "--json", "job.sh")[1])["findings"]
    assert [(f["file"], f["line"], f["rule"]) for f in found] == [("job.sh", 3, "M33")]


def test_a_script_may_come_from_standard_input_and_line_ends_are_seen(hpcddp):
    text = "#!/bin/bash\n#PBS -N x\n#PBS -q rt_HF -l select=4:mpiprocs=8\nmpirun -np 32 python train.py\n"
    out = hpcddp("lint", "-", stdin=text.replace("\n", "\r\n").encode())[1]
    assert "-:1: D1 mistake: qsub refuses the script: script contains cr, lf" in out


def test_what_cannot_be_read_is_the_users_error(hpcddp, tmp_path):
    (tmp_path / "bad.py").write_text("def")
    for words in (["missing.sh"], ["bad.py"], [".", "--json"]):
        status, _, err = hpcddp("lint", *words)
        assert status == 2
        assert re.match(r"hpcddp: .*\nhint: .*\n$", err)


def test_the_manual_has_a_row_for_every_rule_and_its_level(repo):
    manual = (repo / "docs/lint.md").read_text(encoding="utf-8")
    script, training = manual.split("## In a training script")
    assert re.findall(r"^\| ([DMA]\d+) \|", script, re.MULTILINE) == list(dict.fromkeys(rule.id for rule in RULES))
    rows = re.findall(r"^\| (A\d+) \| (mistake|warning) \|", training, re.MULTILINE)
    assert rows == [(rule, "mistake" if certain else "warning") for rule, certain, _ in PYTHON_RULES]


@pytest.mark.parametrize(
    ("value", "kind"), [("10:00", "warning"), ("30:30", "warning"), ("02:00", "warning"), ("24h", "mistake")]
)
def test_a_run_time_that_the_scheduler_takes_is_a_warning(value, kind):
    text = f"#!/bin/bash\n#SBATCH --no-requeue --time={value}\n"
    found = lint_script("job.sh", read_script(text, None, lambda _: True))
    assert [f.kind for f in found if f.rule == "M33"] == [kind]
