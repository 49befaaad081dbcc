"""The kinds of faults that the campaign tries, by the names that its record has."""

from __future__ import annotations

from functools import partial

import beside
import damage
import kills
import places
import sweeps

KINDS = {
    **{f"SIGKILL of a run, {where}": partial(kills.killed_run, where=where) for where in kills.IN_A_RUN},
    "SIGKILL of a run of two ranks": partial(kills.killed_run, where="at a random time", ranks=2),
    "SIGKILL, and the clock set back": partial(kills.killed_run, where="at a random time", clock=True),
    "SIGKILL in writing the token store": kills.killed_store,
    "SIGKILL in building kernels": kills.killed_build,
    "SIGKILL of an evaluation": beside.killed_evaluation,
    "SIGTERM to a run": kills.told_run,
    "SIGKILL of a sweep's launcher or worker": sweeps.killed_sweep,
    "SIGKILL of one of two launchers at once": partial(sweeps.killed_sweep, launchers=2),
    "damage to a checkpoint": damage.a_checkpoint,
    "damage to the newest checkpoint of a run": damage.a_run_s_checkpoint,
    "damage to the token store": damage.the_token_store,
    "damage to compiled kernels": damage.a_library,
    "damage to a record": damage.a_record,
    "damage to a trained model": beside.a_model,
    "damage to an evaluation's items": beside.items,
    "damage to what a sweep says": beside.what_a_sweep_says,
    "damage to the rest of a run's folder": beside.the_rest_of_a_run,
    "full disk under a run": places.full_disk_under_a_run,
    "full disk under the token store": places.full_disk_under_a_corpus,
    "full disk under the kernel cache": places.full_disk_under_kernels,
    "read-only folder": places.read_only_folder,
    "two commands for one run at once": places.two_commands,
    "eight processes building kernels at once": places.eight_builds,
    "four processes preparing a corpus at once": places.four_preparations,
}
