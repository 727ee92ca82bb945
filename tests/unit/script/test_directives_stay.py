"""What a scheduler reads from a script is what was planned, whatever a user wrote: by the schedulers' own rules."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcddp.errors import RequestError
from hpcddp.lint.directives import read_pbs, read_slurm
from hpcddp.runs.command import nearest_name

from .conftest import ENOUGH, script
from .gridengine import read_gridengine
from .test_nothing_becomes_code import quickly, texts

briefly = settings(quickly, max_examples=settings.default.max_examples // 5)  # each example is two renders

ASKED = {"gpus_per_node": "2", "cpus_per_rank": "8", "walltime": "1:00:00"}
READERS = {
    "generic-pbs": (read_pbs, ASKED),
    "generic-torque": (read_pbs, ASKED),
    "generic-slurm": (read_slurm, ASKED),
    "generic-gridengine": (read_gridengine, {**ASKED, "pe": "mpi"}),
    "abci3": (read_pbs, ENOUGH["abci3"]),
}
sites = pytest.mark.parametrize("site", READERS)
filled = texts.filter(bool)
VALUES = ["queue", "account", "output", "constraint", "mail_to", "reservation", "array", "dependency"]
# near misses find more than arbitrary text does: words with one character that a directive gives a meaning to
marks = st.sampled_from(list(" \n\t#\\'\"=,:@%/-.[]$`~é"))
words = st.builds("{}{}{}".format, st.text("ab1", max_size=3), marks, st.text("ab1"))


def directives(site: str, **asked: object) -> dict[str, str]:
    """What the scheduler reads. It must not refuse the script, nor leave a directive unread, nor see one twice."""
    read, enough = READERS[site]
    found = read(script(site, **{**enough, **asked}))
    assert not found.refusals
    assert not found.unread
    options = {option.name: option.value for option in found.options}
    assert len(options) == len(found.options), "an option stands twice"
    return options


@functools.cache
def plain_directives(site: str, **asked: str) -> dict[str, str]:
    """The same, of a request that is compared with many."""
    return directives(site, **asked)


@functools.cache
def with_texts(site: str, word: str, value: str, name: str, folder: str) -> str:
    paths = {"pythonpath": [folder], "workdir": folder, "run_dir": folder, "venv": f"/{folder}"}
    paths["modules"] = [f"m{folder}".replace(",", "")]  # a comma separates names, and `use` alone is none
    return script(site, command=["prog", word], env={"ODD": value}, name=name, **paths)


@pytest.mark.parametrize("site", ["local", *READERS])
@briefly
@example(word="word", value="value", name="name", folder="-use")
@given(word=texts, value=texts, name=texts.map(nearest_name), folder=filled)
def test_no_text_adds_a_line_or_changes_what_the_scheduler_reads(site, word, value, name, folder):
    plain = with_texts(site, "word", "value", "name", "folder")
    try:
        odd = with_texts.__wrapped__(site, word, value, name, folder)
    except RequestError:
        # a module's name has none; nothing else is refused: all of it can be carried
        assert "\n" in folder or "," in folder
        return
    assert len(odd.split("\n")) == len(plain.split("\n"))
    assert "\r" not in odd
    if site == "local":
        assert not re.search(r"^\s*#(PBS|SBATCH|\$)", odd, re.MULTILINE)
        return
    before, after = (READERS[site][0](text) for text in (plain, odd))
    assert (after.refusals, after.unread) == ((), ())
    names = {"--job-name", "-N"}
    assert [one for one in after.options if one.name not in names] == [
        one for one in before.options if one.name not in names
    ]
    assert len(after.options) == len(before.options)


@sites
@quickly
@given(key=st.sampled_from(VALUES), value=st.one_of(words, filled))
@example(key="reservation", value="1-")
def test_a_directives_value_is_read_as_it_was_written_or_refused(site, key, value):
    """Nothing else changes with it, no option is added, and the scheduler reads it letter by letter."""
    more = {"mail": "end"} if key == "mail_to" else {}
    plain = plain_directives(site, **more)
    try:
        odd = directives(site, **more, **{key: [value] if key == "dependency" else value})
    except RequestError:
        return
    changed = {name: odd[name] for name in odd if odd[name] != plain.get(name)}
    if key == "reservation" and site == "abci3" and changed:  # a reserved queue's jobs say which queue they would be in
        assert changed.pop("-v") == f"RTYPE={plain['-q']}"
    assert set(plain) - set(odd) <= {"-q"}  # a reservation may stand in for the queue
    assert len(changed) <= 1 or key in {"array", "account"}, changed  # PBS takes an array only with -r y
    read = [part for name, text in changed.items() for part in (text, f"{name.removeprefix('-l ')}={text}")]
    written = (
        value.partition(".")[0] if key == "reservation" and READERS[site][0] is read_pbs else value
    )  # R1.pbs1 is queue R1
    assert not changed or any(written in part for part in read), (value, changed)


@sites
@briefly
@given(option=st.sampled_from(["-l x=", "-v A=", "-m ", "-W a="]), word=words)
@example(option="-W a=", word="=")
def test_a_raw_directive_is_one_option_or_refused(site, option, word):
    value = f"--comment={word}" if site == "generic-slurm" else option + word
    plain = plain_directives(site)
    try:
        text = script(site, **{**READERS[site][1], "directives": [value]})
    except RequestError:
        return
    refusals = READERS[site][0](text).refusals
    if refusals:  # by the scheduler's own parser, which then queues nothing
        assert all(value in refusal.why for refusal in refusals)
        return
    odd = directives(site, directives=[value])
    assert {name: odd[name] for name in plain} == plain
    assert len(odd) <= len(plain) + 1 + value.count(",")  # -l a=1,b=2 are two resources
