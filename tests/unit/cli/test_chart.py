"""Curves as text."""

from __future__ import annotations

from hpcddp.cli.watch_screen import dots_across, draw_curve


def test_the_largest_value_is_at_the_top_and_each_character_shows_two_values():
    assert draw_curve([3.0, 3.0, 0.0, 0.0], 2, 1) == ["⠉⣆"]
    assert dots_across(7) == 14
    assert draw_curve([1.0, 0.5, 0.0], 3, 3, plain=True) == ["*", " *", "  *"]


def test_a_gap_is_left_out_and_what_is_steep_is_joined():
    assert draw_curve([1.0, None, 0.0], 3, 2, plain=True) == ["*", "  *"]
    assert draw_curve([1.0, 0.0], 2, 4, plain=True) == ["*", " *", " *", " *"]


def test_a_curve_that_is_level_or_has_nothing_or_no_room_is_drawn_without_a_fault():
    assert draw_curve([2.0, 2.0], 2, 1, plain=True) == ["**"]
    assert draw_curve([], 5, 5) == draw_curve([None], 5, 5) == draw_curve([1.0], 0, 5) == draw_curve([1.0], 5, 0) == []
