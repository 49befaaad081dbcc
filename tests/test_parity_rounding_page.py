"""Numbers in the sentences of parity's page on rounding, single steps and gradients are those of tables and records."""

import pytest
from parity_numbers import (
    FLOAT32,
    at_places,
    below_zero,
    drift,
    float32_to,
    gradients,
    pairs,
    parity,
    times_less,
)
from study_numbers import N, rounded_as, said, table


def test_float32_keeps_its_margin_for_the_end_on_the_mixture_and_not_that_for_the_first_steps():
    assert all(float32_to(200, seed, "mixture") > 1e-5 for seed in (1, 2, 3))
    assert all(abs(difference) < 0.005 for difference in pairs(*FLOAT32))


def test_at_each_place_mamba_ssm_is_no_farther_from_padded_than_bfloat16():
    rounded, own = (at_places(arm, "bf16-mixed") for arm in ("single-mamba-ssm", "padded"))
    assert all(one < other for one, other in zip(rounded, own))


def test_where_float32_s_runs_part():
    early = [float32_to(100, seed, "mixture") for seed in (2, 3)]
    assert max(float32_to(50, seed, "mixture") for seed in (1, 2, 3)) < 2e-6 < 1e-4 < min(early)
    assert float32_to(150, 1, "mixture") < 1e-5 < 1e-4 < float32_to(200, 1, "mixture")
    assert all(1.5 < float32_to(step + 50) / float32_to(step) < 3 for step in (100, 150, 200)), "files"


CONTROL = ("packed-control-float32", "packed-reset-float32")


def control_in_float32():
    """Of three pairs on the mixture: the largest difference of a step's loss up to step 200, then the validation losses'."""
    early = [float32_to(200, seed, "mixture", CONTROL) for seed in (1, 2, 3)]
    return [*early, *map(abs, pairs(*CONTROL, "mixture"))]


def parting():
    """How many steps between which float32's runs part were looked at, and their largest difference of a gradient."""
    (steps,) = {int(row["steps"]) for row in table("parity", "gradients-seed-2-mixture")}
    return [steps, max(float(row["relative_difference"]) for row in table("parity", "gradients-seed-2-mixture"))]


def test_the_control_in_float32_parts_as_predicted():
    *steps, one, two, three = control_in_float32()
    assert min(steps) > 1e-4 and sorted((one, two, three))[1] > 5e-4


SENTENCES = [
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
    (rf"from float32's: at least {N} times less at each place", lambda: [min(times_less())]),
    (rf"Right in its second: at least {N} times less", lambda: [min(times_less())]),
    (
        rf"Sums in another order move it by up to {N} there",
        lambda: [max(at_places("packed-control", "bf16-mixed"))],
    ),
    (rf"first half: {N} and {N} at two of four places", lambda: [x for x in at_places() if x >= 1e-6]),
    (
        rf"within {N} of padded's with ours and within {N} with mamba-ssm's, [^|]*? ours differs by up to {N}, [^|]*? differs by "
        rf"{N} to {N}\.",
        lambda: [
            *(max(at_places(arm)) for arm in ("single", "single-mamba-ssm")),
            max(at_places("single", "bf16-mixed")),
            *(limit(at_places("single-mamba-ssm", "bf16-mixed")) for limit in (min, max)),
        ],
    ),
    (
        rf"\*\*Right:\*\* {N} with mamba-ssm's and {N} with ours\. In bfloat16 {N} at most, at each place below",
        lambda: [
            *(max(at_places(arm)) for arm in ("single-mamba-ssm", "single")),
            max(at_places("single-mamba-ssm", "bf16-mixed")),
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
        rf"At steps 1 and 50 the losses of padded and packed differ by at most {N}\. [^|]*? by up to {N}, {N} and {N}\. [^|]*? "
        rf"differ by {N}, {N} and {N}: packed minus padded is {N} \[{N}, {N}\], below zero in (\w+) of (\w+)",
        lambda: [
            max(float32_to(50, seed, "mixture") for seed in (1, 2, 3)),
            *(float32_to(200, seed, "mixture") for seed in (1, 2, 3)),
            *map(abs, pairs(*FLOAT32)),
            *parity({"arm": "packed-reset-float32"}, "mixture"),
            below_zero(FLOAT32),
            len(pairs(*FLOAT32)),
        ],
    ),
    (
        rf"In bfloat16 the same seeds end {N}, {N} and {N} apart, packed above",
        lambda: pairs("packed-reset", "padded", "mixture")[:3],
    ),
    (rf"part, too, from {N} at step 50", lambda: [max(float32_to(50, seed, "mixture") for seed in (1, 2, 3))]),
    (rf"\*\*Wrong\*\* in two of three: {N}, {N} and {N}\.", lambda: map(abs, pairs(*FLOAT32))),
    (
        rf"within {N} of padded's norm, one document at a time within {N}, and sums in another order within {N}, at each of four "
        rf"places\. In bfloat16 packed differs by {N} at most, more than on files\. That is at least {N} times less at",
        lambda: [
            *(max(at_places(arm, unit="functions")) for arm in ("packed-reset", "single", "packed-control")),
            max(at_places("packed-reset", "bf16-mixed", "functions")),
            min(times_less("functions")),
        ],
    ),
    (
        rf"\*\*Right\*\* on functions: {N} and {N} at most",
        lambda: [max(at_places(arm, unit="functions")) for arm in ("packed-reset", "single")],
    ),
    (
        rf"In float32 packed is within {N} of padded's norm, one document at a time within {N}, and sums in another "
        rf"order within {N} ",
        lambda: [max(at_places(arm, unit="mixture")) for arm in ("packed-reset", "single", "packed-control")],
    ),
    (
        rf"; and on the mixture, {N} and {N}\.",
        lambda: [max(at_places(arm, unit="mixture")) for arm in ("packed-reset", "single")],
    ),
    (rf"at each of the {N} steps from 50 to 100 the gradients of packed and of its control are within {N} of", parting),
    (rf"no gradient of the steps between differs by more than {N} \(one", lambda: parting()[1:]),
    (rf"in this stretch has another gradient\. \*\*Right:\*\* {N} at most", lambda: parting()[1:]),
    (
        rf"packed and its control differ by up to {N}, {N} and {N} up to step 200\. At the end they differ by {N}, {N} and {N} ",
        control_in_float32,
    ),
    (
        rf"\*\*Right:\*\* {N}, {N} and {N}; {N} and {N}\.",
        lambda: [*control_in_float32()[:3], *control_in_float32()[4:]],
    ),
    (
        rf"bfloat16 itself does \({N} to {N}\)\. In one parameter mamba-ssm's is {N} of its norm away in float32 and {N} in",
        lambda: [
            *(limit(at_places("padded", "bf16-mixed")) for limit in (min, max)),
            *(gradients("single-mamba-ssm", p, "largest_of_a_tensor")[0] for p in ("32-true", "bf16-mixed")),
        ],
    ),
    (
        rf"at the last by {N} % of it\.",
        lambda: [100 * (1 - at_places("single-mamba-ssm", "bf16-mixed")[-1] / at_places("padded", "bf16-mixed")[-1])],
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("parity", pattern) == rounded_as(said("parity", pattern), numbers())
