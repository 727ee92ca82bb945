"""Cray PALS' layout file, named by `$PALS_APINFO`: the world size and who is where.

With `--pmi=pmix` PALS exports no world size at all; this file has it. Binary, native byte order and alignment,
version 5. Layout: flux-coral2 src/common/libapinfo/apinfo5.h and Slurm src/plugins/mpi/cray_shasta/apinfo.h. Not
tried on a Cray.
"""

from __future__ import annotations

from hpcddp.record import Record

_HEADER = "@iNNNiNNiNNiNNiNNiNNN"  # 160 bytes, 20 fields
_VERSION, _PE_SIZE, _PE_OFFSET, _NPES, _NODE_SIZE, _NODE_OFFSET, _NNODES = 0, 8, 9, 10, 11, 12, 13
_PE = "@iii"  # local index, command index, node index
_NODE = "@i64s"  # nid, host name


class ApInfo(Record):
    """The layout of one PALS launch: host names in node order; for each rank its node's index and its index there."""

    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    local_of: tuple[int, ...]


def read_apinfo(path: str) -> ApInfo | None:
    """The layout in this file; None if it cannot be read here, is not version 5, or is cut short or garbled."""
    import struct  # only a PALS launch pays for it

    try:
        with open(path, "rb") as file:
            data = file.read()
        head = struct.unpack_from(_HEADER, data)
        if head[_VERSION] != 5:
            return None
        nodes = [
            struct.unpack_from(_NODE, data, head[_NODE_OFFSET] + i * head[_NODE_SIZE])[1].split(b"\0")[0].decode()
            for i in range(head[_NNODES])
        ]
        ranks = [struct.unpack_from(_PE, data, head[_PE_OFFSET] + i * head[_PE_SIZE]) for i in range(head[_NPES])]
    except (OSError, struct.error, OverflowError, UnicodeDecodeError):
        return None
    if any(not 0 <= node < len(nodes) or local < 0 for local, _, node in ranks):
        return None
    return ApInfo(tuple(nodes), tuple(r[2] for r in ranks), tuple(r[0] for r in ranks))
