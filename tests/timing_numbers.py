"""Times behind the sentences of the studies' pages: of steps timed in turns, and of steps that runs made for them."""

from study_numbers import of_task, table


def times_as_many(task):
    """Steps of packed in padded's GPU time, over padded's."""
    return of_task("packed-equal-time", task)[0]["metrics"]["steps"] / of_task("padded", task)[0]["metrics"]["steps"]


def latest(experiment, name, arm, *columns):
    """Of the timing that stands first."""
    found = next(one for one in table(experiment, name) if one["arm"] == arm)
    return [float(found[column]) for column in columns]


def millions(arm):
    return latest("parity", "throughput-files", arm, "real_tokens_per_second")[0] / 1e6


def spread(arm):
    median, quartiles = latest("parity", "throughput-files", arm, "seconds_per_step_median", "seconds_per_step_spread")
    return quartiles / median


BESIDE = ("single", "single, eager", "packed-reset, beside single", "padded, beside single")


def clean_times(task):
    """How many times as many steps packed with reset makes, by the timing without captures of graphs."""
    marked = ", contradiction" if task == "contradiction" else ""
    arms = (arm + marked for arm in ("padded", "packed-reset"))
    padded, packed = (latest("downstream", f"throughput-{task}", arm, "real_tokens_per_second")[0] for arm in arms)
    return packed / padded
