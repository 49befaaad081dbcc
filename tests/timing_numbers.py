"""Times behind the sentences of the studies' pages: of steps timed in turns, and of steps that runs made for them."""

from study_numbers import of_task, table


def nats_in_equal_time(task="contradiction"):
    """Of packed in padded's GPU time, the most first."""
    return sorted((one["metrics"][f"{task}.nats"] for one in of_task("packed-equal-time", task)), reverse=True)


def seeds_lower(task="mqar"):
    """In how many seeds packed in padded's GPU time has fewer nats an answer than padded, and of how many."""
    arms = ("packed-equal-time", "padded")
    packed, padded = ({one["seed"]: one["metrics"][f"{task}.nats"] for one in of_task(arm, task)} for arm in arms)
    return [sum(packed[seed] < padded[seed] for seed in packed), len(packed)]


def latest(experiment, name, arm, *columns, timing=0):
    """Of the timing that stands first, or of the one after it."""
    found = [one for one in table(experiment, name) if one["arm"] == arm][timing]
    return [float(found[column]) for column in columns]


def millions(arm):
    return latest("parity", "throughput-files", arm, "real_tokens_per_second")[0] / 1e6


def spread(arm):
    median, quartiles = latest("parity", "throughput-files", arm, "seconds_per_step_median", "seconds_per_step_spread")
    return quartiles / median


BESIDE = ("single", "single, eager", "packed-reset, beside single", "padded, beside single")


def clean_times(task, timing=0):
    """How many times as many steps packed with reset makes, by the timing without captures of graphs; 1: by the first."""
    marked = ", contradiction" if task == "contradiction" else ""
    arms = (arm + marked for arm in ("padded", "packed-reset"))
    tokens = "real_tokens_per_second"
    padded, packed = (latest("downstream", f"throughput-{task}", arm, tokens, timing=timing)[0] for arm in arms)
    return packed / padded
