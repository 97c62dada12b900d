"""GRPO from the parts of the library: what `lucidrl grpo` does, without run folder, validation and checkpoints.

python examples/grpo_from_parts.py
python examples/grpo_from_parts.py --steps 100 --model FOLDER --learning-rate 5e-6
"""

import argparse
from collections.abc import Sequence

from own_environment import SortDigits

from lucidrl.algorithms.advantages import compute_advantages
from lucidrl.algorithms.config import AdvantageConfig
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.interfaces import LossFunction
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import load_tokenizer, model_facts
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig
from lucidrl.models.policy.policy import Policy


def train(config: PolicyConfig, loss_fn: LossFunction, num_steps: int) -> None:
    """Train a policy to sort digits, and print the mean reward of each step."""
    tokenizer = load_tokenizer(config.model_name)
    policy = Policy(config, tokenizer, init_reference_model=False)
    env = SortDigits()
    collector = TextCollector(
        policy,
        EnvRunner(env, timeout_s=10, max_concurrency=8, on_error="fail"),
        tokenizer,
        env.prompts(),
        TextCollectorConfig(prompts_per_step=16, samples_per_prompt=8),
        context_length=model_facts(config.model_name).context_length,
    )
    try:
        for step in range(1, num_steps + 1):
            rollouts = collector.collect()
            batch = rollouts.to_batch(tokenizer.pad_token_id)
            batch["advantages"] = compute_advantages(
                AdvantageConfig(), rollouts.rewards, rollouts.group_ids, rollouts.is_valid
            )
            result = policy.train(batch, loss_fn)
            # The policy samples with its own weights; this only sets their version.
            collector.update_policy_weights_(version=step)
            print(f"step {step}: reward {rollouts.metrics['reward']:.3f}, gradient norm {result.grad_norm:.3f}")
    finally:
        collector.shutdown()
        policy.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default="embedded", help="embedded, or a Hugging Face model folder")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args(argv)

    config = PolicyConfig(
        model_name=args.model,
        optimizer=OptimizerConfig(kwargs={"lr": args.learning_rate}),
        generation=GenerationConfig(max_new_tokens=8),
    )
    # One optimizer step per batch: the policy that trains is the one that sampled.
    train(config, ClippedPGLoss(ClippedPGConfig(), on_policy=True), args.steps)


if __name__ == "__main__":
    main()
