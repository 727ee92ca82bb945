"""Mistakes that would train wrongly: none of them passes without an error that says what is so.

Those that one rank can make are in test_loop_refusals.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RunRanks = Callable[..., Any]

ON_TWO_RANKS = {
    "weights_loaded_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight of Sequential",
    "weights_changed_on_one_rank_in_a_step": "of rank 0: 2.bias of Sequential differs by up to",
    "another_lr_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight",
    "gradients_clipped_on_one_rank": "after step 1 the weights of rank 1",
    "weights_changed_on_one_rank_late": "after step 6 the weights of rank 1 are not those of rank 0: 0.weight",
    "weights_that_are_no_numbers": "after step 6 the weights are no numbers any more: 0.weight of Sequential has NaN",
    "a_first_step_skipped_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0",
    "a_late_step_skipped_on_one_rank": "after step 6 the weights of rank 1 are not those of rank 0",  # at the end
    "an_average_updated_on_one_rank": "module.0.weight of AveragedModel, which is prepared and not trained, differs by",
    "an_average_by_hand_updated_on_one_rank": "after step 1 the weights of rank 1 are not those of rank 0: 0.weight of"
    " Sequential, which is prepared and not trained, differs by",
    "a_teacher_loaded_on_one_rank": "hint: call what changes it on every rank, not under `if rt.is_main:`",
    "an_evaluation_on_one_rank": "by step 3 one rank went 1 time over evaluation data, and another 0\nhint: evaluate",
    "an_evaluation_on_one_rank_after_the_last_checkpoint": "an evaluation ran on some ranks only, and each rank sees",
    "accumulation_by_hand": "went by without optimizer.step()",
    "the_old_model_called": "reached the Sequential, but not through the model that rt.prepare returned",
    "the_module_inside_called": "reached the Sequential, but not through the model that rt.prepare returned",
    "the_bare_model_called_with_accumulation": "but not through the model that rt.prepare returned",
    "the_bare_model_called_in_an_exact_run": "but not through the model that rt.prepare returned",
    "the_model_pickled": "which cannot be pickled\nhint: rt.save_model(path, model), or torch.save(rt.unwrap(model)",
    "two_forwards_then_two_backwards": "rt.backward(loss) reached the Sequential again since its last call",
    "an_unused_layer": "did not reach all parameters of the TwoHeads: second.weight has no gradient",
    "an_unused_layer_with_accumulation": "did not reach all parameters of the TwoHeads: second.weight has no gradient",
    "an_unused_layer_in_an_exact_run": "did not reach all parameters of the TwoHeads: second.weight has no gradient",
    "a_layer_replaced_after_prepare": "2.weight of the Sequential was replaced after rt.prepare",
    "a_layer_replaced_where_some_may_be_unused": "2.weight of the Sequential was replaced after rt.prepare",
    "gradients_with_other_memory": "p.grad.data = … came between rt.backward(loss) and optimizer.step()",
    "a_backward_pass_without_exchange": "was called in model.no_sync(), or rt.backward(loss) came in it: the ranks'",
    "a_forward_pass_without_exchange": "was called in model.no_sync(), or rt.backward(loss) came in it: the ranks'",
    "a_layer_unfrozen_after_prepare": "0.weight of Sequential requires a gradient, and did not at rt.prepare",
    "a_layer_frozen_after_prepare": "0.weight of Sequential requires no gradient, and did at rt.prepare",
    "a_layer_frozen_after_prepare_in_an_exact_run": "0.weight of Sequential requires no gradient, and did at",
    "a_group_added_after_prepare": "1 of the parameters of a SGD were in no prepared model at rt.prepare",
    "a_layer_added_after_prepare": "2 of the parameters of a SGD were in no prepared model at rt.prepare",
    "a_stream_that_splits_itself_by_rank": "rank 1 gets another stream of this Numbers: its first sample is not that",
    "a_data_set_that_is_cut_by_rank": "rank 1 gets 12 samples of this TensorDataset: rank 0 gets 11",
    "a_data_set_of_other_samples_by_rank": "rank 1 gets other samples of this Subset than rank 0",
    "a_compiled_copy_of_the_bare_model_called": "but not through the model that rt.prepare returned",
    "a_seed_of_its_own_on_each_rank": (
        "different options: seed=42 on rank 0, seed=43 on rank 1\nhint: hpcddp.runtime(…, seed=42) on every rank"
    ),
    "another_global_batch_on_one_rank": "global_batch=4 on rank 0, global_batch=5 on rank 1",
    "another_micro_batch_on_one_rank": "max_micro_batch=2 on rank 0, max_micro_batch=None on rank 1",
    "exact_on_one_rank": "exact='tree' on rank 0, exact=False on rank 1",
    "other_slices_on_one_rank": "slices=8 on rank 0, slices=4 on rank 1",
    "another_save_every_on_one_rank": "save_every=2 on rank 0, save_every=None on rank 1",
    "a_run_folder_on_one_rank": "run_dir=None on rank 1",
    "shuffled_on_one_rank": (
        "different options: shuffle=True on rank 0, shuffle=False on rank 1\nhint: DataLoader(…, shuffle=True) on every"
    ),
    "cut_on_one_rank": "drop_last=False on rank 0, drop_last=True on rank 1",
    "another_batch_size_on_one_rank": "batch_size=4 on rank 0, batch_size=6 on rank 1",
    "another_batch_size_of_evaluation_on_one_rank": (
        "batch_size=4 on rank 0, batch_size=6 on rank 1\nhint: evaluation data: the same DataLoader(…, batch_size=4)"
    ),
    "evaluation_data_that_are_cut_by_rank": "samples=7 on rank 0, samples=8 on rank 1",
    "evaluation_data_of_other_samples_by_rank": "different options: subset='",
    "another_batch_size_of_a_stream_on_one_rank": "batch_size=4 on rank 0, batch_size=6 on rank 1",
}


def test_no_mistake_of_two_ranks_goes_unsaid(run_ranks: RunRanks, tmp_path: Path) -> None:
    right = (
        "right_loops",
        "request_of_one_rank",
        "a_queue_in_a_buffer",
        "passes_without_exchange_that_are_right",
        "options_that_one_rank_may_have_otherwise",
    )
    names = [*ON_TWO_RANKS, *right]
    outputs = run_ranks("mistake_bodies:make_mistakes", 2, [str(tmp_path), names]).check().outputs
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [said.pop(name) for name in right] == ["nothing was said"] * len(right)
        for name, words in ON_TWO_RANKS.items():
            assert words in said[name], (rank, name, said[name])
    said_of_buffers = [output.count("hpcddp: warning: the buffer") for output in outputs]
    assert said_of_buffers == [1, 0]
    assert "the buffer queue of Queue is not the same on all ranks" in outputs[0]
