"""The first failure of a run: the rank that failed writes it to the store, the others name that rank."""

from __future__ import annotations

import json
from typing import NamedTuple

from torch.distributed import DistNetworkError, DistStoreError

from hpcddp.errors import PEER_FAILED, HpcddpError
from hpcddp.training.torch_compat import Store


class Failure(NamedTuple):
    """The first failure of a run, as the rank that had it wrote it to the store."""

    rank: int
    host: str
    what: str  # empty: rank 0, which hosts the store, has ended: it may have failed first, or not

    def __str__(self) -> str:
        how = f"failed: {self.what}" if self.what else "ended before it could say which rank failed first"
        return f"rank {self.rank} on {self.host} {how}"


def claim_first(store: Store, mine: Failure, store_host: str) -> Failure:
    """Put this rank's failure into the store; returns the first failure of the run, which may be another rank's.
    `store_host`: rank 0's."""
    try:
        # one request: rank 0, which has the store, may be gone before a second one
        return Failure(*json.loads(store.compare_set("failure", "", json.dumps(mine))))
    except (DistNetworkError, DistStoreError):
        return Failure(0, store_host, "") if mine.rank else mine


class PeerFailedError(HpcddpError):
    """The error of a rank that is well, when another one failed and took the process group with it."""

    exit_code = PEER_FAILED

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure), f"the log of rank {failure.rank} has the whole story")
