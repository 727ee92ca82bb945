"""torch's warning about an address without a name is taken out, and nothing else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcddp.ranks.lookup_warning import split_output

# as torch 2.15 prints it on a machine without a name server
WARNING = (
    b"[W1122 03:52:32.318813958 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
)
LINES = st.lists(
    st.sampled_from(
        [WARNING, b"[W1122 socket.cpp:755] [c10d] The client socket has failed\n", b"step 1\n", b"\r[##", b"\n"]
    )
)


@given(LINES, st.lists(st.integers(1, 40)))
def test_a_stream_in_any_pieces_comes_out_whole_without_the_warning(lines: list[bytes], sizes: list[int]) -> None:
    text = b"".join(lines)
    printed, begun, rest = b"", b"", text
    for size in [*sizes, len(text) + 1]:
        ready, begun = split_output(begun + rest[:size])
        printed, rest = printed + ready, rest[size:]
    expected = b"".join(line for line in text.splitlines(keepends=True) if b"[c10d] The hostname" not in line)
    # a progress bar's begun line may hold the warning behind it; then the warning's own line is all that goes
    if b"\r[##[W" not in text:
        assert printed + begun == expected


def test_a_begun_line_is_printed_at_once_unless_it_may_be_the_warning() -> None:
    assert split_output(b"a\n10%") == (b"a\n10%", b"")
    assert split_output(b"a\n[W1122") == (b"a\n", b"[W1122")
