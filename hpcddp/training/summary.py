"""What rank 0 says at the end of a run."""

from __future__ import annotations

from hpcddp.training.bringup.group import Group
from hpcddp.training.bringup.roll_call import local_rank_of
from hpcddp.training.gradient.noise import describe_noise
from hpcddp.training.runtime import Runtime

_SHOWN_RANKS = 16


def format_places(group: Group) -> list[str]:
    """One line per rank: where it was. Many ranks are cut short."""
    lines = [
        f"  rank {rank:<4} {member.host}  local rank {local_rank_of(group.members, rank)}  {group.device_name(rank)}"
        for rank, member in enumerate(group.members[:_SHOWN_RANKS])
    ]
    more = group.world_size - len(lines)
    return lines + ([f"  … and {more} more: versions.json has them all"] if more else [])


def format_summary(rt: Runtime, what: str, samples_per_s: float | None, accuracy: float | None, seconds: float) -> str:
    """The whole closing text. None: nothing was trained, or no epoch was tested, in this attempt."""
    status = f"to be continued ({rt.stop_reason})" if rt.stop_reason else "finished"
    speed = f"{samples_per_s:,.0f} samples/s in training, " if samples_per_s else "nothing was left to train, "
    lines = [
        "",
        f"{what}: {status} after step {rt.steps}",
        f"  batch     {rt.plan}",
        f"  ranks     {rt.group.describe()}",
        *format_places(rt.group),
        f"  speed     {speed}{seconds:.1f} s in all",
        f"  accuracy  {accuracy:.2%} on the test images" if accuracy is not None else "  accuracy  not tested",
    ]
    if rt.exact:
        lines.append(f"  weights   sha256 {rt.weights_sha256}, the same on any number of ranks")
    if noise := describe_noise(rt.noise.scale, rt.plan.global_batch):
        lines.append(f"  noise     {noise}")
    if rt.folder is not None:
        files = f"state.json, checkpoints/, attempts/{rt.folder.attempt}/metrics.jsonl"
        lines += [f"  files     {rt.folder.path}", f"            {files}"]
    return "\n".join(lines)
