"""Numbers in the sentences of the studies' pages are those of the committed tables and records."""

import statistics

import pytest
from study_numbers import (
    CONTROL,
    LAST,
    OURS,
    N,
    above_zero,
    again,
    answers,
    at_higher_rate,
    at_places,
    behind_another,
    by_place,
    cells,
    contradicted,
    drift,
    elsewhere_by_place,
    equal_time,
    fewer_points,
    files,
    float32_to,
    gradients,
    interval,
    interval_of_sd,
    leaked,
    loss_at_rate,
    nats_over,
    next_line,
    of_task,
    parity,
    rounded_as,
    runs,
    said,
    solved,
    spread_of_pairs,
    tasks,
    times_less,
    tried,
    tuned_pairs,
    validated,
    worse_at_each_rate,
    worse_means,
)
from timing_numbers import BESIDE, clean_times, millions, nats_in_equal_time, seeds_lower, spread

SENTENCES = {
    "parity": [
        (
            rf"trains {N} million tokens a second, [^|]*? has {N} million with CUDA graphs, and {N} million without\. "
            rf"That is {N} and {N} times",
            lambda: [
                *(millions(arm) for arm in ("packed-reset, beside single", "single", "single, eager")),
                *(millions("packed-reset, beside single") / millions(arm) for arm in ("single", "single, eager")),
            ],
        ),
        (rf"quartiles lie at most {N} % of a median apart", lambda: [100 * max(map(spread, BESIDE))]),
        (rf"The difference is {N} nats \[{N}, {N}\]", lambda: parity(OURS)),
        (rf"tests give p = {N};", lambda: cells("parity", "parity-files", OURS, "p")),
        (rf"what the order of sums does, {N} \[{N}, {N}\]", lambda: parity(CONTROL)),
        (
            rf"deviation of the paired differences is {N}, the largest of eight {N}\.",
            lambda: cells("parity", "calibration-files", LAST, "sd", "largest"),
        ),
        (r"Of (\d+) intervals by place [^|]*? (none) excludes zero", by_place),
        (
            rf"by {N} to {N} in all (\d+) runs",
            lambda: [min(worse_means(runs())), max(worse_means(runs())), len(worse_means(runs()))],
        ),
        (r"mixture (\d+) of (\d+) exclude zero", elsewhere_by_place),
        (
            rf"{N} % of tokens stand behind another document\. It is {N} % on functions, [^|]*?, and {N} % on the mixture",
            lambda: [behind_another(unit) for unit in ("files", "functions", "mixture")],
        ),
        (
            rf"Right by the estimates, {N} and {N}; open by their intervals, \[{N}, {N}\] and \[{N}, {N}\]",
            lambda: [
                parity(CONTROL)[0],
                *cells("parity", "calibration-files", LAST, "sd"),
                *parity(CONTROL)[1:],
                *interval_of_sd(),
            ],
        ),
        (
            rf"they differ by {N} to {N} of the gradient's norm",
            lambda: [limit(at_places()) for limit in (min, max)],
        ),
        (
            rf"order do as much: {N}\. In bfloat16 they differ by about {N} at most, where [^|]*? is up to {N} from",
            lambda: [
                max(at_places("packed-control")),
                *(gradients(arm, "bf16-mixed", "relative_difference")[0] for arm in ("packed-reset", "padded")),
            ],
        ),
        (rf"at least {N} times less at each place", lambda: [min(times_less())]),
        (rf"Right in its second: at least {N} times less", lambda: [min(times_less())]),
        (
            rf"Sums in another order move it by up to {N} there",
            lambda: [max(at_places("packed-control", "bf16-mixed"))],
        ),
        (rf"first half: {N} and {N} at two of four places", lambda: [x for x in at_places() if x >= 1e-6]),
        (
            rf"packed minus padded is {N} \[{N}, {N}\], and its control minus itself {N} \[{N}, {N}\]\.",
            lambda: [*at_higher_rate("packed-reset"), *at_higher_rate("packed-control")],
        ),
        (rf"There the difference is {N} nats \[{N}, {N}\], eight pairs", lambda: parity(OURS, "functions")),
        (
            rf"over seeds give p = {N}, Holm's {N}\.",
            lambda: [cells("parity", "parity-functions", OURS, "p")[0] * times for times in (1, 2)],
        ),
        (rf"order do as little there: {N} \[{N}, {N}\], five", lambda: parity(CONTROL, "functions")),
        (rf"Equivalence is not shown: {N} \[{N}, {N}\], eight seeds", lambda: parity(OURS, "mixture")),
        (r"(\w+) seeds, (\w+) of them above zero", lambda: above_zero("mixture")),
        (r"On the mixture (\w+) of (\w+) seeds have one sign", lambda: above_zero("mixture")[::-1]),
        (
            rf"pairs as far there, by up to {N}, with a mean of {N} \[{N}, {N}\] \(five",
            lambda: [*cells("parity", "calibration-mixture", LAST, "largest"), *parity(CONTROL, "mixture")],
        ),
        (
            rf"deviation of {N}, as on files\. On the mixture it is {N} for the control, and {N} for packed",
            lambda: [
                *cells("parity", "calibration-files", LAST, "sd"),
                *cells("parity", "calibration-mixture", LAST, "sd"),
                spread_of_pairs("mixture"),
            ],
        ),
        (
            rf"differ by {N} nats \(median over steps and seeds\)\. [^|]*? order differ by {N}\.",
            lambda: [*drift("packed-reset", "later"), *drift("packed-control", "later")],
        ),
        (
            rf"Functions \({N} and {N}\) and the mixture \({N} and {N}\) are alike",
            lambda: [
                drift(arm, "later", unit=unit)[0]
                for unit in ("functions", "mixture")
                for arm in ("packed-reset", "packed-control")
            ],
        ),
        (
            rf"farther on files, once {N} \(seed 1\) against {N}\.",
            lambda: [*drift("packed-reset", "largest"), *drift("packed-control", "largest")],
        ),
        (
            rf"at most {N}, later by up to {N}, and their validation losses by {N} at the end",
            lambda: drift("packed-reset-float32", "early", "largest", "validation"),
        ),
        (
            rf"with one pair: {N} up to step 150, and {N} at step 200",
            lambda: [float32_to(150), float32_to(200)],
        ),
        (
            rf"Padded has {N} at 0\.004, and packed with reset {N}\. [^|]*? they have {N} and {N}\.",
            lambda: [loss_at_rate(arm, rate) for rate in (0.004, 0.002) for arm in ("padded", "packed-reset")],
        ),
        (
            rf"worse in both seeds, by {N} and {N}\. Two seeds decide nothing: {N} \[{N}, {N}\]",
            lambda: tuned_pairs(0.004),
        ),
        (rf"seeds have packed worse, by {N} and {N}\.", lambda: tuned_pairs(0.004)[:2]),
        (rf"Single minus padded is {N} nats \[{N}, {N}\], five seeds", lambda: parity({"arm": "single"})),
        (rf"as CUDA graphs \(p = {N}; exploratory", lambda: cells("parity", "parity-files", {"arm": "single"}, "p")),
        (
            rf"as many steps on functions and {N} times as many on the mixture\.",
            lambda: equal_time("mixture")[:1],
        ),
        (
            rf"It ends {N} nats \[{N}, {N}\] and {N} \[{N}, {N}\] lower",
            lambda: [*equal_time("functions")[1:], *equal_time("mixture")[1:]],
        ),
        (rf"more steps and ends {N} \[{N}, {N}\] lower", lambda: equal_time("files")[1:]),
        (rf"makes {N} % more steps", lambda: [100 * (equal_time("files")[0] - 1)]),
        (
            rf"has {N} in place of {N}: a difference of {N}, where the control's largest is {N}",
            lambda: [*again("parity")[0], *cells("parity", "calibration-files", LAST, "largest")],
        ),
        (
            rf"Wrong on files \({N}x by forty rounds, and by ten beside single\) and on the mixture \({N}x\), "
            rf"right on functions \({N}x\)",
            lambda: [
                equal_time("files")[0],
                *(equal_time(unit)[0] for unit in ("mixture", "functions")),
            ],
        ),
        (
            rf"Not shown: {N} against {N} for paired differences, {N} against {N} over seeds",
            lambda: [
                cells("parity", "calibration-files", CONTROL | {"weights": weights}, column)[0]
                for column in ("sd", "sd_of_seeds")
                for weights in ("mean of the last, by the trainer", "last, by the trainer")
            ],
        ),
        (
            rf"differ by {N} to {N} nats",
            lambda: [
                limit(abs(one["metrics"]["perplexity.loss"] - one["metrics"]["val_loss"]) for one in files()[:6])
                for limit in (min, max)
            ],
        ),
        (rf"better by {N} to {N} in all six", lambda: [min(worse_means()[:6]), max(worse_means()[:6])]),
    ],
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
