"""The settings of a run on its ranks: what the script gives, what is recorded, what a checkpoint was trained with.

Loading a checkpoint puts its settings back; those that were accepted since are applied to the objects after it.
Settings are compared as the scripts gave them: a learning rate that a scheduler has moved since is no difference.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpcddp.errors import RequestError
from hpcddp.runs.folder import AttemptFolder
from hpcddp.runs.settings import (
    ACCEPT,
    KEEP,
    OF_SCRIPT,
    OF_VERB,
    RUN_GROUP,
    Decision,
    Recorded,
    check_names,
    check_unchanged,
    compare_settings,
    decide,
    describe_start,
    read_list,
    read_recorded,
    renew,
    settings_at,
    write_settings,
)
from hpcddp.runs.start import has_options
from hpcddp.training.activity import at_files
from hpcddp.training.checkpoint.tracked import list_tensors, name_parameters
from hpcddp.training.parallel.sameness import is_whole, sum_bits
from hpcddp.training.torch_compat import local_part

Settings = dict[str, dict[str, Any]]  # of each object by its name, or "optimizer[1]" for its second parameter group

_OF_SAMPLES = ("seed", "samples", "shuffle")  # what says which samples an epoch has, and in which order
# Not compared: what moves, what `lr` says already, and how an optimizer computes the same.
_LEFT_OUT = {"params", "param_names", "initial_lr", "last_epoch", "base_lrs", "verbose", "foreach", "fused"}
_LEFT_OUT |= {"capturable", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}


def name_setting(name: str, number: int) -> str:
    """The name of a setting of this training loader: those of the second and further ones have its number."""
    return name if number == 1 else f"{name}_{number}"


class RunSettings:
    """Compares and records. `now`: those of this start; `at`: of the checkpoint that it loads; `to`: those that hold
    from here on. Methods are called on every rank alike; rank 0 alone reads and decides."""

    def __init__(
        self,
        share: Callable[[Any], Any],
        attempt: AttemptFolder | None,
        env: Mapping[str, str],
        accept: Sequence[str] = (),
        keep: Sequence[str] = (),
        *,
        is_first: bool,
        can_keep: bool = True,
    ) -> None:
        """A collective, with RequestError as of `read_recorded`. `share` gives rank 0's object to every rank; `accept`
        and `keep` come beside the job's words; `can_keep`: whether this training can take recorded values."""
        self._share, self._is_first = share, is_first
        self._run = None if attempt is None else attempt.run
        self._accept, self._keep = (*accept, *read_list(env, ACCEPT)), (*keep, *read_list(env, KEEP))
        self._hints = OF_VERB if has_options(env) else OF_SCRIPT
        self._can_keep = can_keep
        self._recorded: Recorded | None = None
        self._renewed: Recorded | None = None
        self._decision = Decision()
        self.now: Settings = {RUN_GROUP: {}}
        if attempt is not None:
            main = getattr(sys.modules.get("__main__"), "__file__", None)

            def read() -> tuple[Recorded | None, Settings]:
                return read_recorded(attempt.run), describe_start(attempt, main, env)

            self._recorded, self.now = self._call_on_first(read)
        self.at = self.to = self.now

    def _call_on_first(self, call: Callable[[], Any]) -> Any:
        """Return rank 0's result of the call on every rank, or raise its RequestError there."""
        answer: Any = None, None
        if self._is_first:
            try:
                answer = call(), None
            except RequestError as error:
                answer = None, (error.message, error.hint)
        found, refused = self._share(answer)
        if refused is not None:
            raise RequestError(*refused)
        return found

    def choose(self, name: str, value: Any) -> Any:
        """The value of one of the run's settings: the recorded one, if that is kept."""
        if name in self._keep and self._recorded is not None:
            value = self._recorded.settings.get(RUN_GROUP, {}).get(name, value)
        self.add(name, value)
        return value

    def add(self, name: str, value: Any) -> None:
        """Record one of the run's settings of this start."""
        if value is not None:
            self.now[RUN_GROUP][name] = value

    def compare(self, objects: Settings, step: int | None) -> None:
        """Compare, before the checkpoint of this step is loaded. None: a run without one begins, and is recorded anew;
        of an optimizer's settings the recorded ones can be kept all the same. RequestError, on every rank, for
        differences that nobody has decided."""
        run, self.now = self._run, self.now | objects
        if run is None:
            self.at = self.to = self.now
            return

        def compare_first() -> tuple[Decision, Recorded, Settings, Settings]:
            recorded = self._recorded or Recorded({})
            known = [self.now, recorded.settings, *(one["settings"] for one in recorded.before)]
            for names, word in ((self._accept, "accept"), (self._keep, "keep")):
                check_names(names, known, self._hints.option.format(word, "{}"))
            found = compare_settings(recorded.settings, self.now)
            if self._recorded is None or step is None:
                keepable = [one for one in found if one.group.startswith("optimizer") and one.is_keepable]
                decision = Decision((), tuple(one for one in keepable if not one.names.isdisjoint(self._keep)))
                renewed = renew(Recorded({}), self.now, decision, 0)
                return Decision(), renewed, self.now, renewed.settings
            keep = self._keep if self._can_keep else None
            decision = decide(run, found, self._accept, keep, hints=self._hints)
            renewed = renew(recorded, self.now, decision, step)
            return decision, renewed, settings_at(recorded, step), renewed.settings

        self._decision, self._renewed, self.at, self.to = self._call_on_first(compare_first)

    def begins_again(self, number: int = 1) -> bool:
        """Whether the samples that the checkpoint's epoch of this training loader has left are not those of now."""
        old, new = self.at.get(RUN_GROUP, {}), self.to.get(RUN_GROUP, {})
        names = (one if one == "seed" else name_setting(one, number) for one in _OF_SAMPLES)
        return any(old.get(name, new.get(name)) != new.get(name) for name in names)

    def record(self, *, is_finished: bool = False) -> None:
        """The training begins: write the file on rank 0, if it has to say something new. LaunchError. `is_finished`:
        nothing is left to train; RequestError, on every rank, as of `check_unchanged`."""
        if self._renewed is None or self._run is None:
            return
        if is_finished:
            check_unchanged(self._run, self._decision, self._hints)
        if not self._is_first:
            self._renewed = None
            return
        for one in (*self._decision.accepted, *self._decision.kept):
            which = " (the recorded one is kept)" if one in self._decision.kept else " (accepted)"
            which = "; the run resumes with the new one" if one in self._decision.changed else which
            print(f"hpcddp: {one}{which}", file=sys.stderr, flush=True)
        run = {**self.now[RUN_GROUP], **self._renewed.settings.get(RUN_GROUP, {})}
        renewed = self._renewed._replace(settings={**self._renewed.settings, RUN_GROUP: run})
        if renewed != self._recorded:
            with at_files():
                write_settings(self._run, renewed)
        self._recorded, self._renewed = renewed, None


# ---- the settings of the objects


def describe_settings(objects: Mapping[str, Any]) -> Settings:
    """List each object's class, the settings of optimizers and schedulers, as the script made them, and the names of
    the parameters of models and optimizers: call it before a checkpoint is loaded.

    An optimizer with a parameter of no tracked model has no names.
    """
    found: Settings = {}
    names: dict[int, str] = {}
    for name, tracked in objects.items():
        if isinstance(tracked, nn.Module):
            parameters = name_parameters(tracked)
            names = {id(one): f"{name}.{path}" for path, one in parameters.items()} | names
            listed = [f"{path} {'x'.join(map(str, one.shape))}" for path, one in parameters.items()]
            found[name] = {"parameters": listed}
        elif not isinstance(tracked, Optimizer):
            plain = _read_plain(tracked.state_dict()) if isinstance(tracked, LRScheduler) else {}
            found[name] = {"class": type(tracked).__name__, **plain}
    for name, tracked in objects.items():
        if isinstance(tracked, Optimizer):
            for nth, group in enumerate(tracked.param_groups):
                plain = _read_plain(group | {"lr": group.get("initial_lr", group["lr"])})
                found[_name(name, nth)] = given = {"class": type(tracked).__name__, **plain}
                if all(id(p) in names for p in group["params"]):
                    given["parameters"] = [names[id(p)] for p in group["params"]]
    return found


def _name(name: str, nth: int) -> str:
    return f"{name}[{nth}]" if nth else name


def _read_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the values that JSON can hold; a schedule that is made of several has those of each."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "_schedulers":
            inner = (_read_plain(one) for one in value)
            found |= {f"schedulers[{n}].{key}": one for n, known in enumerate(inner) for key, one in known.items()}
        elif name not in _LEFT_OUT:
            with suppress(TypeError, ValueError):
                found[name.lstrip("_")] = json.loads(json.dumps(value, default=_read_number))
    return found


def _read_number(value: Any) -> Any:
    """The number of a tensor that holds one; TypeError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError


class GivenSettings:
    """The settings of the optimizers and the schedules as the script gave them, before a checkpoint is loaded: what was
    accepted is applied after the checkpoint has brought its own."""

    def __init__(self, objects: Mapping[str, Any], settings: RunSettings) -> None:
        self._settings = settings
        self._optimizers = {name: tracked for name, tracked in objects.items() if isinstance(tracked, Optimizer)}
        self._schedules = {name: tracked for name, tracked in objects.items() if isinstance(tracked, LRScheduler)}
        self._groups = {
            _name(name, nth): {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for name, optimizer in self._optimizers.items()
            for nth, group in enumerate(optimizer.param_groups)
        }
        self.unloaded = {name for name in objects if not self._is_loaded(name)}

    def _is_loaded(self, name: str) -> bool:
        """Whether the object gets the checkpoint's state: not so where the checkpoint has none of its class, nor a
        schedule with other settings, which is built anew."""
        at, to = self._settings.at.get(name), self._settings.to.get(name)
        if at is None or to is None:
            return False
        if name in self._schedules and not isinstance(self._schedules[name], ReduceLROnPlateau):
            return not compare_settings({name: at}, {name: to})
        return at.get("class") == to.get("class")

    def apply(self, states: Mapping[str, Any]) -> None:
        """Give the objects what was accepted, or is kept. `states`: those that the checkpoint has, by name, of what was
        not loaded: an accepted schedule is stepped to where the old one was."""
        at, now, to = self._settings.at, self._settings.now, self._settings.to
        for name, one in self._schedules.items():
            if isinstance(one, ReduceLROnPlateau) and name not in self.unloaded:
                vars(one).update({key: value for key, value in to[name].items() if at[name].get(key, value) != value})
        for name, optimizer in self._optimizers.items():
            its = {key: one for key, one in self._schedules.items() if one.optimizer is optimizer}
            anew = {key: one for key, one in its.items() if key in self.unloaded}
            for nth, group in enumerate(optimizer.param_groups):
                key = _name(name, nth)
                is_given = bool(anew) or name in self.unloaded or key not in at
                for setting, value in self._groups[key].items() if is_given else ():
                    _set(group, setting, value)
                before = (now if is_given else at)[key]
                for setting, value in to.get(key, {}).items():
                    old: Any = before.get(setting, value)
                    if setting == "lr" and old != value:
                        _move_lr(group, nth, old, value, list(its.values()))
                    elif setting in group and old != value:
                        _set(group, setting, tuple(value) if isinstance(group[setting], tuple) else value)
            for key, one in anew.items():
                _step_to(key, one, _count_steps(states.get(key, {})))


def _set(group: dict[str, Any], setting: str, value: Any) -> None:
    """Set a value of a parameter group: a number is put into a tensor where one was, of its own, as torch lets groups
    share one."""
    there = group.get(setting)
    if isinstance(there, Tensor) and there.numel() == 1:
        value = torch.full_like(there, float(value))
    group[setting] = value


def _move_lr(group: dict[str, Any], nth: int, old: float, new: float, schedules: Sequence[Any]) -> None:
    """Move a learning rate, which a schedule has moved from the old start, to where it is from the new one."""
    _set(group, "lr", group["lr"] * (new / old) if old else new)
    if "initial_lr" in group:
        _set(group, "initial_lr", new)
    for schedule in schedules:
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs[nth] = new
        _move_lr({"lr": 0.0}, nth, old, new, getattr(schedule, "_schedulers", ()))


def _count_steps(state: Mapping[str, Any]) -> int:
    """How often the schedule with this state was stepped."""
    inner = state.get("_schedulers", ())
    return int(state["last_epoch"]) if "last_epoch" in state else max(map(_count_steps, inner), default=0)


def _step_to(name: str, schedule: LRScheduler, steps: int) -> None:
    """Step a schedule that the script has made until it was stepped so often. RequestError for one that is shorter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer's steps
        try:
            for _ in range(_count_steps(schedule.state_dict()), steps):
                schedule.step()
        except ValueError as error:
            raise RequestError(
                f"{name} was accepted, and cannot be brought to the run's step: {error}",
                f"a longer one, or keep {name}",
            ) from error


class LoadedState:
    """Sums of this rank's parameters, and of the optimizers' state, right after they were loaded, to be compared when
    the loop begins.

    Buffers are left out: a forward pass may move them. So are learning rates, which a script may set by hand.
    """

    def __init__(self, objects: Mapping[str, Any], step: int) -> None:
        self._objects, self._step = objects, step
        self._sums = self._sum_up()

    def _sum_up(self) -> dict[tuple[str, str], tuple[torch.dtype, int]]:
        found = {}
        for name, tracked in self._objects.items():
            tree: Any = None
            if isinstance(tracked, nn.Module):
                tree, name = dict(tracked.named_parameters()), f"weights of {name}"
            elif isinstance(tracked, Optimizer):
                tree, name = tracked.state_dict()["state"], f"state of {name}"
            for path, tensor in list_tensors(tree).items():
                mine = local_part(tensor).detach()
                if is_whole(mine):
                    found[name, ".".join(map(str, path))] = mine.dtype, int(sum_bits(mine))
        return found

    def check(self) -> None:
        """RequestError if any of it is gone or has other numbers by now. A tensor of another type is not compared."""
        now = self._sum_up()
        for (name, part), (dtype, total) in self._sums.items():
            if (name, part) not in now or (now[name, part][0] == dtype and now[name, part][1] != total):
                raise RequestError(
                    f"the run resumed from step {self._step}, and the {name} changed before the first step: {part} has"
                    " other numbers than the checkpoint",
                    "load pretrained weights and states before rt.prepare, or under `if rt.steps == 0:`",
                )
