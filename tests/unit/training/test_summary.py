"""What rank 0 prints at the start and at the end of a run."""

from __future__ import annotations

from hpcddp.training.report import Summary, format_first_line, format_summary

PLAN, RANKS = "256 = 2 ranks x 128 x 1", "2 ranks on 1 node (n1), launcher openmpi, gloo on cpu"


def test_the_start_is_one_line_with_plan_ranks_and_step() -> None:
    assert format_first_line(PLAN, RANKS, None, saves=True) == f"global batch: {PLAN}; {RANKS}"
    assert format_first_line(PLAN, RANKS, 0, saves=True) == f"global batch: {PLAN}; {RANKS}; resumed from step 0"


def test_a_start_without_a_run_folder_says_that_nothing_is_saved() -> None:
    assert format_first_line(PLAN, RANKS, None, saves=False).endswith("; no run folder: nothing is saved")


def test_a_finished_run_has_no_way_to_go_on() -> None:
    text = format_summary(
        Summary(
            70,
            "train",
            epochs=10,
            loss=0.123456789,
            samples_per_s=5123.4,
            seconds=3661,
            weights_sha256="ab12",
            checkpoint="runs/train/checkpoints/step-00000070",
            run="runs/train",
            resume_with="the same command again",
        ),
        (("accuracy", "91%"),),
    )
    assert text.splitlines() == [
        "train: finished after step 70, epoch 10",
        "  loss      0.123457 in the last step",
        "  accuracy  91%",
        "  speed     5,123 samples/s, 1:01:01 in all",
        "  weights   sha256 ab12",
        "  saved     runs/train/checkpoints/step-00000070",
        "  files     runs/train",
    ]


def test_an_unfinished_run_says_why_and_how_it_goes_on() -> None:
    text = format_summary(Summary(3, "train", stop_reason="deadline", resume_with="the same command again"))
    assert text.splitlines() == [
        "train: unfinished (deadline) after step 3",
        "  resume    the same command again",
    ]


def test_a_run_that_a_signal_stopped_does_not_say_which_since_the_launcher_may_have_changed_it() -> None:
    text = format_summary(Summary(3, "train", stop_reason="SIGUSR1"))
    assert text == "train: unfinished (a signal) after step 3"


def test_a_run_that_finished_early_says_why() -> None:
    assert (
        format_summary(Summary(3, "train", finish_reason="no gain")) == "train: finished early (no gain) after step 3"
    )


def test_weights_of_an_exact_run_are_those_of_any_number_of_ranks() -> None:
    text = format_summary(Summary(3, "train", weights_sha256="ab12", is_exact=True))
    assert "sha256 ab12, the same on any number of ranks" in text
