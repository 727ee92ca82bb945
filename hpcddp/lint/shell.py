"""The commands of a bash script, as far as one can know them without running it: words, assignments, lines, and which
variables the shell that reads a command expands in it.

Quotes are removed from words, `$` stays as it is written. The lines of here-documents are no commands; substitutions
and the text of `bash -c`, `eval`, `trap` and ssh are read as well. What bash would refuse is read as far as it goes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.ranks.launch_commands import PROGRAMS

#: Programs that start processes on other nodes or one per rank: where one stands, it is not known what runs where.
REACHES = (PROGRAMS - {"torchrun", "deepspeed"}) | {
    *("ssh", "rsh", "pdsh", "clush", "pbsdsh", "pbs_tmrsh", "parallel", "ray", "dask", "horovodrun", "accelerate"),
    *("colossalai", "flux", "blaunch", "charmrun", "deepspeed"),
}
_RESERVED = {"if", "then", "elif", "else", "fi", "do", "done", "while", "until", "!", "{", "}", "time", "exec", "nohup"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(?:\+?=)(.*)", re.DOTALL)
_DECLARES = {"export", "declare", "local", "readonly", "typeset"}
_SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
_SSH_VALUES = "bcDEeFIiJLlmOopQRSWw"  # options of ssh with a value
# Before an expansion that the shell which reads the text carries out: behind it, nothing is left of the `$`.
_MARK = "\ue000"


class Command(NamedTuple):
    """A simple command; `text` is as it stands. `expands`: the variables that its shell expands in it, its redirections
    and its here-documents. `launched`: it stands in the text that a launcher or ssh hands to a shell. `captured`: in a
    substitution. `function`: the function that it is in. `into`: the programs behind its pipe, `output` its file.
    `background`: an & ends it. `early`: the expansions in it that the shell around its text has carried out.
    `document`: the script that it stands in, which the job writes by a here-document."""

    line: int
    words: tuple[str, ...]
    sets: tuple[tuple[str, str], ...]
    text: str
    launched: bool = False
    into: tuple[str, ...] = ()
    expands: tuple[str, ...] = ()
    captured: bool = False
    function: str = ""
    output: str = ""
    background: bool = False
    early: tuple[str, ...] = ()
    document: str = ""

    @property
    def program(self) -> str:
        """The first word without its folder; empty for a bare assignment."""
        return self.words[0].rsplit("/", 1)[-1] if self.words else ""


def read_commands(text: str) -> list[Command]:
    """Every command, in the order in which its end is read; then those of the scripts that the job writes itself and
    starts elsewhere."""
    reader = _ScriptReader(text.replace(_MARK, ""), Command(1, (), (), ""))
    found = reader.read()
    names = [[word.rsplit("/", 1)[-1] for word in command.words] for command in found]
    started = {name for each in names if REACHES.intersection(each) for name in each}
    for at, line, body in reader.bodies:
        writes = found[at]
        file = (writes.output or (writes.words[-1] if writes.program == "tee" else "")).rsplit("/", 1)[-1]
        is_script = file.endswith(".sh") or re.match(r"#!.*sh\b", body)
        if (file in started and is_script) or (REACHES.intersection(names[at]) and _SHELLS.intersection(names[at])):
            found += _ScriptReader(body, Command(line, (), (), "", launched=True, document=file or writes.text)).read()
    return found


class OpenDocument(NamedTuple):
    """A here-document: where it begins, the word that ends it, whether that is quoted, and what may stand before it."""

    line: int
    end: str
    quoted: bool = False
    before: str = ""


def find_open_document(text: str) -> OpenDocument | None:
    """The here-document that takes the rest of the script; None where each has its end."""
    reader = _ScriptReader(text, Command(1, (), (), ""))
    reader.read()
    return reader.open_document


class _ScriptReader:
    """A pass over the text."""

    def __init__(self, text: str, around: Command) -> None:
        self.text = text
        self.at = 0
        self.around = around  # where the text stands: its line, and whether it is launched or captured
        self.found: list[Command] = []
        self.words: list[str] = []
        self.word: str | None = None
        self.start = 0
        self.expands: list[str] = []
        self.output = ""
        self.documents: list[OpenDocument] = []
        self.readers: list[int] = []  # of each here-document, the command that reads it; -1 while that is being read
        self.open_document: OpenDocument | None = None
        self.bodies: list[tuple[int, int, str]] = []  # of each here-document: its reader, its first line, its text
        self.early: list[str] = []
        self.pipeline: list[int] = []  # the commands whose output goes into the one that is being read
        self.elements = False  # the words of an array, which start nothing
        self.function = around.function
        self.braces: list[str] = []  # the function around each open brace

    def read(self) -> list[Command]:
        text = self.text
        while self.at < len(text):
            c = text[self.at]
            if c == "#" and self.word is None:
                self.at = self._find("\n")
            elif c == "\\":
                if text[self.at + 1 : self.at + 2] != "\n":
                    self._add(text[self.at + 1 : self.at + 2])
                self.at += 2
            elif c in "'\"":
                self._quoted(c)
            elif c in "$`":
                self._expansion()
            elif c in "<>":
                self._redirection()
            elif c in " \t":
                self._end_word()
                self.at += 1
            elif text.startswith("((", self.at) and (end := _arithmetic_end(text, self.at)):
                self._add(text[self.at : end])
                self._record_names(text[self.at : end])
                self.at = end
            elif c == "(" and self.word and _ASSIGNMENT.fullmatch(self.word) and self.word.endswith("="):
                self._array()
            elif c == "(" and (name := self._opened_function()):
                self.at = text.index(")", self.at) + 1
                self.words, self.word, self.function = [], None, name
            elif c == _MARK:
                self._expanded_before()
            elif c in "\n;&|()":
                self._end_command()
                if (
                    c == "|"
                    and "|" not in (text[self.at - 1 : self.at], text[self.at + 1 : self.at + 2])
                    and self.found
                ):
                    self.pipeline.append(len(self.found) - 1)
                self.at += 1
                if c == "\n":
                    self._skip_documents()
            else:
                self._add(c)
                self.at += 1
        self._end_command()
        return self.found

    def _add(self, text: str) -> None:
        if self.word is None and not self.words:
            self.start = self.at
        self.word = (self.word or "") + text

    def _find(self, wanted: str) -> int:
        at = self.text.find(wanted, self.at)
        return len(self.text) if at < 0 else at

    def _line(self, at: int) -> int:
        return self.around.line + self.text.count("\n", 0, at)

    def _quoted(self, quote: str) -> None:
        self._add("")
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            c = self.text[self.at]
            if c == _MARK:
                self._expanded_before()
                continue
            if quote == '"' and c in "$`":
                self._expansion()
                continue
            if quote == '"' and c == "\\" and self.text[self.at + 1 : self.at + 2] in {'"', "\\", "$", "`"}:
                self.at += 1
                c = self.text[self.at]
            self._add(c)
            self.at += 1
        self.at += 1

    def _expansion(self) -> None:
        """`$x`, `${…}`, `$(…)`, `$((…))`, backquotes: kept as written; the commands of a substitution are read, too."""
        text, start = self.text, self.at
        if text.startswith("$'", start):
            self.at += 1
            self._quoted("'")
            return
        end = _expansion_end(text, start)
        whole = text[start:end]
        if whole[:1] == "`" or (whole.startswith("$(") and not whole.startswith("$((")):
            inner = whole[1:-1] if whole[0] == "`" else whole[2:-1]
            around = self.around._replace(line=self._line(start), captured=True, function=self.function)
            self.found += _ScriptReader(inner, around).read()
        else:
            self._record_names(whole)
        self._add((_MARK if len(whole) > 1 else "") + whole)
        self.at = max(end, start + 1)

    def _expanded_before(self) -> None:
        """An expansion that the shell around this text has carried out already."""
        end = _expansion_end(self.text, self.at + 1)
        self.early.append(self.text[self.at + 1 : end])
        self._add(self.text[self.at + 1 : end])
        self.at = max(end, self.at + 1)

    def _record_names(self, text: str) -> None:
        """The words in an expansion that may be variables: arithmetic names them without a `$`."""
        names = re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", text))
        self.expands += [name for name in names if name not in self.expands]

    def _array(self) -> None:
        """The elements of `a=(…)` as the rest of the word."""
        end = _closing(self.text, self.at)
        around = self.around._replace(line=self._line(self.at), function=self.function)
        reader = _ScriptReader(self.text[self.at + 1 : end - 1], around)
        reader.elements = True
        for command in reader.read():
            self.expands += [name for name in command.expands if name not in self.expands]
            self.found += [command] if command.captured and not self.around.captured else []
        self._add(self.text[self.at : end])
        self.at = end

    def _opened_function(self) -> str:
        """The name before `()`; "" where no function begins."""
        words = [*self.words, *([self.word] if self.word else [])]
        named = words[-1:] if len(words) == 1 or words[:1] == ["function"] or words[-2:-1] == [";"] else []
        opens = re.compile(r"\(\s*\)\s*\{\s").match(self.text, self.at)
        return named[0] if named and opens and re.fullmatch(r"[\w:.-]+", named[0]) else ""

    def _redirection(self) -> None:
        """An operator and the word behind it. `<(…)` is read like a substitution."""
        if (self.word or "").isdecimal():
            self.word = None
        self._end_word()
        operator = re.compile(r"<<<|<<-?|<&|<>|<|>>|>&|>\||>").match(self.text, self.at)
        assert operator is not None  # the caller saw < or >
        self.at = operator.end()
        if self.text.startswith("(", self.at):
            end = _closing(self.text, self.at)
            inner = self.around._replace(line=self._line(self.at), captured=operator[0] == "<", function=self.function)
            self.found += _ScriptReader(self.text[self.at + 1 : end - 1], inner).read()
            self.at = end
            return
        target = re.compile(r"[ \t]*('[^'\n]*'|\"[^\"\n]*\"|(?:\$\{[^}\n]*\}|\$\([^)\n]*\)|[^\s;&|<>()])+)").match(
            self.text, self.at
        )
        if target:
            self.at = target.end()
            word = re.sub(rf"['\"\\{_MARK}]", "", target[1])
            if operator[0] in {"<<", "<<-"}:
                before = r"\t*" if operator[0] == "<<-" else ""
                self.documents.append(OpenDocument(self._line(self.at), word, word != target[1], before))
                self.readers.append(-1)
                return
            for found in re.finditer(rf"({_MARK}?)(\$(?:\w+|\{{[^}}]*\}}))", "" if target[1][0] == "'" else target[1]):
                if found[1]:
                    self.early.append(found[2])
                else:
                    self._record_names(found[2])
            self.output = word if operator[0][0] == ">" and operator[0] != ">&" else self.output

    def _skip_documents(self) -> None:
        for document, reader in zip(self.documents, self.readers, strict=True):
            pattern = rf"^{document.before}{re.escape(document.end)}$"
            closing = re.compile(pattern, re.MULTILINE).search(self.text, self.at)
            self.open_document = self.open_document or (None if closing else document)
            end = closing.start() if closing else len(self.text)
            body = self.text[self.at : end]
            if reader >= 0:
                marked = re.sub(r"\\([$`\\])|\$", lambda found: found[1] or f"{_MARK}$", body)
                self.bodies.append((reader, self._line(self.at), body if document.quoted else marked))
            if not document.quoted and reader >= 0:
                self.expands = list(self.found[reader].expands)
                body = re.sub(r"\\.", "", body, flags=re.DOTALL)
                for found in re.finditer(r"\$(\w+|\{[^}]*\}|\(.*?\))|`.*?`", body):
                    self._record_names(found[0])
                self.found[reader] = self.found[reader]._replace(expands=tuple(self.expands))
                self.expands = []
            self.at = closing.end() if closing else len(self.text)
        self.documents, self.readers = [], []

    def _end_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
        self.word = None

    def _end_command(self) -> None:
        self._end_word()
        marked, self.words = self.words, []
        expands, self.expands = tuple(self.expands), []
        output, self.output = self.output, ""
        early, self.early = tuple(self.early), []
        while marked and marked[0] in _RESERVED:
            self._record_brace(marked.pop(0))
        if marked[:1] == ["function"] and len(marked) > 1:
            self.function = marked[1]
            marked = marked[2:]
            while marked and marked[0] == "{":
                self._record_brace(marked.pop(0))
        words = [word.replace(_MARK, "") for word in marked]
        sets: list[tuple[str, str]] = []
        declares = bool(words) and words[0] in _DECLARES
        for word in words[1:] if declares else list(words):
            assignment = _ASSIGNMENT.fullmatch(word)
            if assignment:
                sets.append((assignment[1], assignment[2]))
            elif not declares:
                break
        if not declares:
            words, marked = words[len(sets) :], marked[len(sets) :]
        if not words and not sets:
            return
        if words[:1] in (["let"], ["printenv"]):  # which read variables by their names
            expands += tuple(name for word in words[1:] for name in re.findall(r"[A-Za-z_]\w*", word))
        text = self.text[self.start : self.at].strip().replace(_MARK, "")
        line = self._line(self.start)
        background = self.text[self.at : self.at + 1] == "&" and "&" not in (
            self.text[self.at - 1 : self.at],
            self.text[self.at + 1 : self.at + 2],
        )
        command = self.around._replace(line=line, words=tuple(words), sets=tuple(sets), text=text, expands=expands)
        self.found.append(command._replace(function=self.function, output=output, background=background, early=early))
        self.readers = [len(self.found) - 1 if reader < 0 else reader for reader in self.readers]
        for at in self.pipeline:
            self.found[at] = self.found[at]._replace(into=(*self.found[at].into, self.found[-1].program))
        if self.text[self.at : self.at + 1] != "|":
            self.pipeline = []
        for script, launched in () if self.elements else _handed_text(marked):
            around = self.found[-1]._replace(launched=launched or self.around.launched, into=())
            self.found += _ScriptReader(script, around).read()

    def _record_brace(self, word: str) -> None:
        """A reserved word that opens or closes a function."""
        if word == "{":
            self.braces.append(self.function)
        elif word == "}" and self.braces:
            self.braces.pop()
            self.function = self.braces[-1] if self.braces else self.around.function


def _handed_text(words: list[str]) -> list[tuple[str, bool]]:
    """Find the text that a command hands to a shell, and whether that shell runs in the ranks or on another host."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    if names[:1] in (["eval"], ["trap"]):
        return [(" ".join(words[1:]) if names[0] == "eval" else "".join(words[1:2]), False)]
    for i, name in enumerate(names):
        elsewhere = any(n in REACHES or n.startswith(_MARK) for n in names[:i])
        if name in _SHELLS:
            at = next((k for k in range(i + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[k])), 0)
            return [(words[at + 1], elsewhere)] if at else []
        if name in {"ssh", "rsh"}:
            rest = words[i + 1 :]
            while rest and rest[0].startswith("-"):
                takes = len(rest[0]) == 2 and rest[0][1] in _SSH_VALUES
                rest = rest[2 if takes else 1 :]
            return [(" ".join(rest[1:]), True)] if rest[1:] else []
    return []


def _expansion_end(text: str, start: int) -> int:
    """Behind the expansion that begins here."""
    if text.startswith(("$(", "${", "$["), start):
        return _closing(text, start + 1)
    if text[start : start + 1] == "`":
        end = re.compile(r"(?:\\.|[^`\\])*`", re.DOTALL).match(text, start + 1)
        return end.end() if end else len(text)
    named = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, start)
    return named.end() if named else start + 1


def _arithmetic_end(text: str, at: int) -> int:
    """Behind `((…))`, in which << is no here-document; 0 where two subshells begin."""
    end = _closing(text, at)
    return end if text.startswith("))", end - 2) else 0


def _closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`; quotes within are skipped."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth, opening, closing = 0, text[at], pairs[text[at]]
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c in "'\"" and (c == '"' or opening == "("):
            end = text.find(c, at + 1)
            at = len(text) if end < 0 else end
        depth += (c == opening) - (c == closing)
        at += 1
        if depth == 0:
            break
    return min(at, len(text))
