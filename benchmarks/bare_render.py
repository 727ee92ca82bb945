"""The baseline of `hpcddp render`: the same templates and site file through jinja2 and yaml alone.

bare_render.py TEMPLATES SITE.yaml JOB.json: JOB.json holds the planned values, which this program does not work out.
It checks nothing, and compiles the templates each time.
"""

import json
import shlex
import sys
from types import SimpleNamespace

import jinja2
import yaml


def quote_all(words):
    return " ".join(map(shlex.quote, words))


def quote_launch_words(words):
    return " ".join(shlex.quote(word) if isinstance(word, str) else vars(word).get("text", "") for word in words)


templates, site_file, job_file = sys.argv[1:]
with open(site_file, encoding="utf-8") as file:
    site = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
with open(job_file, encoding="utf-8") as file:
    job = json.load(file, object_hook=lambda items: SimpleNamespace(**items))
environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(templates), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
environment.filters = {
    "sh": shlex.quote,
    "words": quote_all,
    "line": quote_launch_words,
    "path": shlex.quote,
    "order": lambda job: shlex.quote(json.dumps(job, default=vars)),
    "command": lambda job: quote_all(job.command),
}
sys.stdout.write(environment.get_template(f"{site['scheduler']}.sh.j2").render(job=job))
