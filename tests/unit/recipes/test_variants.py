"""`grpo.variant`: which settings it sets, what overrides it, and what is refused."""

from __future__ import annotations

import pytest

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.variants import VARIANTS, Variant
from lucidrl.errors import ConfigError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.recipes.advice import advice, value_at
from lucidrl.recipes.explain import explained
from lucidrl.recipes.settings import new_settings, resumed_settings


def grpo(*overrides, **options):
    return new_settings("grpo", overrides=overrides, **options)


@pytest.mark.parametrize("variant", Variant)
def test_a_variant_sets_its_bundle_whatever_the_preset_sets(variant):
    config = grpo(f"grpo.variant={variant}")
    assert {key: value_at(config.grpo, key) for key in VARIANTS[variant]} == VARIANTS[variant]
    assert GRPOConfig(variant=variant, max_steps=config.grpo.max_steps) == config.grpo
    sources = {key: source for key, _, source in explained(config)}
    assert sources["grpo.loss.clip_high"] == f"variant {variant}"


def test_all_variants_differ_and_set_the_same_keys():
    assert set(VARIANTS) == set(Variant)
    assert len({tuple(bundle.items()) for bundle in VARIANTS.values()}) == len(Variant)
    assert len({tuple(bundle) for bundle in VARIANTS.values()}) == 1


def test_without_a_variant_nothing_changes():
    assert GRPOConfig().variant is None
    assert grpo().grpo.drop_groups_without_signal  # of the preset
    assert grpo().grpo.loss == ClippedPGConfig()


def test_settings_of_the_user_override_the_variant_wherever_they_are_set(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("grpo: {loss: {clip_high: 0.4}}")
    config = grpo("grpo.variant=dapo", "epsilon=0.1", config_file=file)
    assert (config.grpo.loss.clip_low, config.grpo.loss.clip_high) == (0.1, 0.1)
    config = grpo("grpo.variant=dapo", config_file=file)
    assert (config.grpo.loss.clip_high, config.grpo.mask_truncated) == (0.4, True)
    of_python = new_settings("grpo", {"grpo": {"variant": "dapo", "loss": {"clip_high": 0.5}}})
    assert (of_python.grpo.loss.clip_high, of_python.grpo.mask_truncated) == (0.5, True)
    direct = GRPOConfig(variant="gspo", loss=ClippedPGConfig(clip_low=0.1))
    assert (direct.loss.clip_low, direct.loss.clip_high, direct.loss.ratio_level) == (0.1, 4e-4, "sequence")


def test_a_file_that_beats_a_variant_of_the_command_line_is_reported(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(grpo().to_yaml())
    messages = [warning.message for warning in advice(grpo("grpo.variant=dapo", config_file=file))]
    assert any(
        "grpo.loss.clip_high=0.28 of grpo.variant=dapo has no effect: file" in text and "sets 0.2" in text
        for text in messages
    )
    assert not [text for text in messages if "clip_low" in text]


def test_a_run_keeps_the_settings_of_its_variant_and_a_resume_may_change_the_variant(tmp_path):
    written = grpo("grpo.variant=dapo", "grpo.loss.clip_high=0.3", f"run.root={tmp_path}")
    (tmp_path / "config.yaml").write_text(written.to_yaml())
    assert resumed_settings("grpo", tmp_path).grpo == written.grpo
    changed = resumed_settings("grpo", tmp_path, ["grpo.variant=cispo", "grpo.loss.clip_high=2"]).grpo
    assert changed == GRPOConfig(variant="cispo", max_steps=written.grpo.max_steps, loss={"clip_high": 2})


REFUSED = {
    "an unknown variant": (["grpo.variant=ppo2"], "grpo.variant='ppo2' is not valid", "'gspo', 'cispo'"),
    "cispo and dual_clip": (
        ["grpo.variant=cispo", "grpo.loss.dual_clip=3"],
        "objective=cispo and dual_clip=3 exclude each other",
        "remove dual_clip",
    ),
    "cispo and sequence ratios": (
        ["grpo.variant=cispo", "grpo.loss.ratio_level=sequence"],
        "objective=cispo and ratio_level=sequence exclude each other",
        "set ratio_level=token",
    ),
    "product ratios and token means": (
        ["grpo.variant=rloo", "grpo.loss.normalization=token"],
        "ratio_level=sequence_product and normalization=token exclude each other",
        "set normalization=sequence",
    ),
    "separate rewards without scaling": (
        ["grpo.variant=dr_grpo", "grpo.advantages.rewards=separate"],
        "rewards=separate and estimator=group_centered exclude each other",
        "estimator=group_normalized",
    ),
    "separate rewards and KL of the sequence": (
        ["grpo.advantages.rewards=separate", "grpo.advantages.kl_coefficient=0.1"],
        "kl_coefficient=0.1 with kl_level=sequence and rewards=separate exclude each other",
        "set kl_level=token",
    ),
    "token KL and standardised samples": (
        ["grpo.variant=reinforce_pp", "grpo.advantages.standardize=sample"],
        "kl_level=token and standardize=sample exclude each other",
        "set standardize=token",
    ),
    "KL in loss and reward": (
        ["grpo.variant=rloo", "beta=0.1"],
        "loss.kl_coefficient=0.1 and advantages.kl_coefficient=0.05 exclude each other",
        "set one of them to 0",
    ),
    "a coefficient above its limit": (
        ["grpo.entropy_control.target=1", "grpo.loss.entropy_coefficient=0.2"],
        "loss.entropy_coefficient=0.2 is above entropy_control.max_coefficient=0.1",
        "start with a smaller coefficient",
    ),
}


@pytest.mark.parametrize(("overrides", "problem", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_together_is_refused_in_one_sentence_that_names_both(overrides, problem, remedy):
    with pytest.raises(ConfigError) as error:
        grpo(*overrides)
    [line] = str(error.value).splitlines()
    assert problem in line
    assert remedy in line


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["grpo.loss.constant_length=9"], "grpo.loss.normalization is not constant"),
        (["grpo.advantages.kl_level=token"], "grpo.advantages.kl_coefficient is 0"),
        (["grpo.entropy_control.step_size=0.1"], "grpo.entropy_control.target is null"),
    ],
)
def test_settings_that_another_one_switches_off_are_reported(overrides, reason):
    assert [warning.message for warning in advice(grpo(*overrides)) if reason in warning.message]


def test_the_divisor_of_the_constant_length_is_the_token_limit_unless_it_is_set():
    config = grpo("grpo.variant=dr_grpo").grpo
    assert config.with_constant_length(8).loss.constant_length == 8
    explicit = grpo("grpo.variant=dr_grpo", "grpo.loss.constant_length=32").grpo
    assert explicit.with_constant_length(8).loss.constant_length == 32
