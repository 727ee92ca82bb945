"""The ids of jobs, as schedulers, attempts' names and people write them, and the indices of arrays: parsed, compared
and spelled here alone."""

from __future__ import annotations

from hpcddp.record import Record

# `12`, `12.pbs1`; one job of an array `12[3].pbs1`, `12_3`, `12.3`, or `12-3` in the names of attempts; a component of
# a heterogeneous job `12+0`, which is no job of its own.
_FORM = r"(\d+)(?:\[(\d*)\]|[_.-](\d+)|[+]\d+)?(?:\.[\w.-]*[A-Za-z][\w.-]*)?"


class JobId(Record):
    """A job, an array, or several jobs of an array that wait together.

    `text`: as its scheduler's commands take it. `number`: the job's, or that of its array; all of the text where there
    is none, as of a job on this machine. `array_index`: in the array, or the scheduler's text of several, `5-9`; "" of
    the whole array, and where there is none. `raw`: the number that Slurm gives to one job of an array beside that.
    """

    text: str
    number: str
    array_index: str = ""
    raw: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The job's part of its attempts' names: `12-3`, `12-3.pbs1`."""
        is_so = not self.array_index or "[" in self.text or "-" in self.text
        return self.text.replace("[", "-").replace("]", "") if is_so else f"{self.number}-{self.array_index}"

    @property
    def is_job(self) -> bool:
        """Whether a job can be called so."""
        return self.number.isdecimal() or self.number.startswith("local-")

    def at(self, index: str, of_index: str) -> JobId:
        """The job of this array with this index. `of_index`: the scheduler's way to write it, `{job}_{index}`."""
        of_array = self.text.replace("[]", f"[{index}]")
        text = of_array if "[]" in self.text else of_index.format(job=self.number, index=index)
        return JobId(text, self.number, index)

    def is_same(self, other: JobId) -> bool:
        """Whether both mean one job, whatever server the ids name."""
        return not self._called.isdisjoint(other._called)

    def matches(self, other: JobId) -> bool:
        """Whether what a scheduler shows as `other` says something of this: it is this job, a job of this array, or
        several of its array that wait together, this one among them."""
        if self.is_same(other) or self.number != other.number:
            return self.is_same(other)
        return not self.array_index or (self.array_index.isdecimal() and is_in(other.array_index, self.array_index))

    @property
    def _called(self) -> set[tuple[str, str]]:
        return {(self.number, self.array_index), (self.raw, "") if self.raw else (self.number, self.array_index)}


def parse_id(text: str) -> JobId:
    """The job that this text means. One that is no id has no other number than itself."""
    import re  # ranks start without it

    found = re.fullmatch(_FORM, text, re.ASCII)
    return JobId(text, text) if found is None else JobId(text, found[1], found[2] or found[3] or "")


# ---- the indices of an array: `5-9999%2`, or `1,3,7-9:2`


def is_in(array: str, index: str | int) -> bool:
    """Whether `1-9%2` has this index."""
    return any(int(index) in span for span in _list_spans(array))


def list_indices(array: str) -> set[int]:
    """List those of `5-9999%2` or `1,3,7-9:2`; none of another text."""
    return {index for span in _list_spans(array) for index in span}


def _list_spans(array: str) -> list[range]:
    import re

    span = r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?"
    parts = (re.fullmatch(span, part, re.ASCII) for part in array.partition("%")[0].split(","))
    return [range(int(one[1]), int(one[2] or one[1]) + 1, int(one[3] or 1)) for one in parts if one is not None]
