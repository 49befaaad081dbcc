"""Numbers in the sentences of the studies' pages are those of the committed tables and records."""

import statistics

import pytest
from study_numbers import (
    N,
    again,
    answers,
    cells,
    contradicted,
    fewer_points,
    interval,
    leaked,
    nats_over,
    next_line,
    of_task,
    rounded_as,
    said,
    solved,
    tasks,
    tried,
    validated,
    worse_at_each_rate,
)
from timing_numbers import clean_times, nats_in_equal_time, seeds_lower

SENTENCES = {
    "downstream": [
        (rf"The difference is {N} nats an answer \[{N}, {N}\], inside", lambda: answers("packed-reset")),
        (rf"with leak lose {N} nats an answer \[{N}, {N}\]", lambda: answers("packed-leak")),
        (rf", and {N} points of accuracy \[{N}, {N}\], each document", fewer_points),
        (rf"with the leak, they lose {N} nats \[{N}, {N}\] more", leaked),
        (rf"eight of eight seeds, {N} \[{N}, {N}\]; the upper end is", lambda: answers("packed-leak")),
        (rf"the upper end is {N}\.", lambda: answers("packed-leak")[2:]),
        (
            rf"examples \((\d+) answers\) no difference is shown: {N} \[{N}, {N}\]",
            lambda: [validated(), *interval("downstream", "differences-mqar", {"arm": "packed-leak"}, "val_loss")],
        ),
        (rf"At each of (\w+) rates leak is worse [^|]*? choose: by at least {N} nats", worse_at_each_rate),
        (rf"and so is leak: {N} nats an answer \[{N}, {N}\]", lambda: answers("packed-leak", "selective_copying")),
        (
            rf"the lowest accuracy is {N} ",
            lambda: [
                min(
                    one["metrics"]["selective_copying.accuracy"]
                    for arm in ("padded", "packed-reset", "packed-leak")
                    for one in of_task(arm, "selective_copying")
                )
            ],
        ),
        (rf"models lose {N} nats an answer \[{N}, {N}\] and", lambda: answers("packed-leak", "contradiction")),
        (rf"\] and {N} points of accuracy \[{N}, {N}\], each document", lambda: fewer_points("contradiction")),
        (r"(\w+) of eight seeds solve the task, against", lambda: solved("packed-leak")),
        (
            r"solve the task, against (\w+) and (\w+)\.",
            lambda: [*solved("padded"), *solved("packed-reset")],
        ),
        (
            rf"Read as trained they have {N} %, where {N} % is the best",
            lambda: contradicted("accuracy_as_trained", "best_as_trained"),
        ),
        (rf"still answer {N} % from zero state", lambda: contradicted("accuracy_intruding")),
        (rf"The difference is {N} nats \[{N}, {N}\]\.", lambda: answers("packed-reset", "contradiction")),
        (rf"Right by the estimate, {N}; open", lambda: answers("packed-leak", "contradiction")[:1]),
        (rf"by the interval, whose lower end is {N}\.", lambda: answers("packed-leak", "contradiction")[1:2]),
        (
            rf"took the end 0\.016 there, at {N} nats",
            lambda: cells("downstream", "answers-selective_copying", {"arm": "padded"}, "nats"),
        ),
        (
            rf"leak has {N} and {N} nats at the rate it took, {N} and {N} at the next",
            lambda: [*tried("contradiction")["packed-leak", 0.02], *tried("contradiction")["packed-leak", 0.01]],
        ),
        (
            rf"{N} and {N} % of padded's slots are padding",
            lambda: [
                100 * statistics.fmean(one["metrics"]["padding_fraction"] for one in of_task("padded", task))
                for task in ("mqar", "contradiction")
            ],
        ),
        (rf"Padded trained so is at {N} nats an answer \[{N}, {N}\] over", lambda: answers("padded-row-means")),
        (
            rf"Packed with reset is at {N} \[{N}, {N}\] over itself",
            lambda: nats_over("packed-row-means", "packed-reset"),
        ),
        (rf"Wrong of padded by the estimate, {N};", lambda: answers("padded-row-means")[:1]),
        (
            rf"It has {N} nats an answer \[{N}, {N}\] less than padded, in (\w+) of (\w+) seeds",
            lambda: [*(-answers("packed-equal-time")[i] for i in (0, 2, 1)), *seeds_lower()],
        ),
        (
            rf"equal tokens it is at {N} \[{N}, {N}\]: that",
            lambda: nats_over("packed-equal-time", "packed-reset"),
        ),
        (
            rf"eight seeds end with {N} and {N} nats and make [^|]*? The other (\w+) have {N} or less",
            lambda: [*nats_in_equal_time()[:2], len(nats_in_equal_time()[2:]), nats_in_equal_time()[2]],
        ),
        (
            rf"It is at {N} \[{N}, {N}\] over padded and at {N} \[{N}, {N}\] over packed",
            lambda: [
                *answers("packed-equal-time", "contradiction"),
                *nats_over("packed-equal-time", "packed-reset", "contradiction"),
            ],
        ),
        (
            rf"Steps: right on `mqar`, {N}; wrong by the estimate on `contradiction`, {N}, [^|]*? by the estimate, {N} less;",
            lambda: [*(clean_times(task) for task in ("mqar", "contradiction")), -answers("packed-equal-time")[0]],
        ),
        (
            rf"It makes {N} times as many steps \(\[times.*?Packing makes only {N} times as many",
            lambda: [clean_times(task) for task in ("mqar", "contradiction")],
        ),
        (
            rf"too many steps: {N} times as many on `mqar` [^|]*? and {N} on .*? packed had {N} and {N} % more time",
            lambda: [
                *(clean_times(task, timing=1) for task in ("mqar", "contradiction")),
                *(100 * (clean_times(task, timing=1) / clean_times(task) - 1) for task in ("mqar", "contradiction")),
            ],
        ),
        (rf"has {N} nats an answer in place of {N}: a difference of {N} ", lambda: again("downstream", "mqar.nats")[0]),
        (
            rf"Seldom: {N} % of its tokens",
            lambda: [100 * tasks("packed-leak")[0]["tokens_behind_another"] / tasks("packed-leak")[0]["real_tokens"]],
        ),
        (rf"as often as padded: {N} points \[{N}, {N}\], five", lambda: next_line("evaluation-next_line-4d5f")),
        (rf"six models have answered: {N} points \[{N}, {N}\]", lambda: next_line("evaluation-next_line-aa54")),
    ],
}


@pytest.mark.parametrize(
    ("page", "pattern", "numbers"),
    [pytest.param(page, *one, id=f"{page}: {one[0][:40]}") for page, some in SENTENCES.items() for one in some],
)
def test_a_sentence_rounds_the_records(page, pattern, numbers):
    assert said(page, pattern) == rounded_as(said(page, pattern), numbers())


@pytest.mark.parametrize("task", ["mqar", "contradiction"])
def test_equal_time_takes_the_steps_of_the_clean_timing(task):
    padded = of_task("padded", task)[0]["metrics"]["steps"]
    steps = {one["metrics"]["steps"] for one in of_task("packed-equal-time", task)}
    assert steps == {round(padded * clean_times(task))}
