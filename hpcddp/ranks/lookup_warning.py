"""torch's warning that it found no name for an address: `[c10d] The hostname of the client socket cannot be retrieved`.

torch's store looks up the name of the other end of a connection, only to have it for its log. Where a node has no name
server in reach (`err=-3`), each process warns once, also of its own loopback address. Nothing depends on the name, and
no setting of torch or of the resolver leaves the lookup out; so this one line is taken out of what is printed.
`hpcddp exec` does so without torch, so the text is here; a test looks for it in each supported torch.
"""

from __future__ import annotations

LOOKUP_WARNING = b"[c10d] The hostname of the client socket cannot be retrieved. err="


def split_output(text: bytes) -> tuple[bytes, bytes]:
    """Split a stream's text into what may be printed now, without the warning, and an open line that may become it."""
    lines, end, rest = text.rpartition(b"\n")
    ready = lines + end
    if LOOKUP_WARNING in ready:
        ready = b"".join(line for line in ready.splitlines(keepends=True) if LOOKUP_WARNING not in line)
    return (ready, rest) if rest.startswith(b"[") else (ready + rest, b"")
