import pytest
import torch

from lucidrl.data.messages import (
    collate,
    flatten_message_log,
    render_next_turn,
    render_prompt,
    sampled_message,
    supervised_example,
    with_tokens,
)
from lucidrl.errors import DataError

QUESTION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
HINT = [{"role": "user", "content": "higher"}]
PROMPT_TEXT = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
HINT_TEXT = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def completed(tokenizer, text, **changes):
    """A log of the question and a completion whose sampled ids are those of `text`."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    log = with_tokens(QUESTION, render_prompt(tokenizer, QUESTION))
    return [*log, sampled_message(text, ids, torch.full((len(ids),), -0.5), 3) | changes]


def all_ids(log):
    return torch.cat([message["token_ids"] for message in log]).tolist()


def test_a_prompt_is_rendered_by_the_chat_template_with_the_generation_prompt(chat_tokenizer):
    assert text_of(chat_tokenizer, render_prompt(chat_tokenizer, QUESTION)) == PROMPT_TEXT


def test_a_tokenizer_without_template_joins_the_contents(plain_tokenizer):
    assert text_of(plain_tokenizer, render_prompt(plain_tokenizer, QUESTION)) == "Add.1+2="


@pytest.mark.parametrize("messages", [[], [*QUESTION, {"role": "assistant", "content": "3"}]])
def test_a_prompt_that_awaits_no_completion_is_refused(chat_tokenizer, messages):
    with pytest.raises(DataError, match=r"no messages to complete|the assistant replies to"):
        render_prompt(chat_tokenizer, messages)


def test_a_template_that_refuses_messages_raises_a_data_error_with_its_message(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(DataError, match=r"system, user.*no system role here"):
        render_prompt(chat_tokenizer, QUESTION)


def test_a_turn_does_not_repeat_the_end_of_turn_that_was_sampled(chat_tokenizer):
    ids = render_next_turn(chat_tokenizer, completed(chat_tokenizer, "3<|im_end|>"), HINT)
    assert text_of(chat_tokenizer, ids) == HINT_TEXT


@pytest.mark.parametrize("cut_text", ["3", "3\n", ""])
def test_a_turn_closes_one_that_was_cut_short(chat_tokenizer, cut_text):
    ids = render_next_turn(chat_tokenizer, completed(chat_tokenizer, cut_text), HINT)
    assert text_of(chat_tokenizer, ids) == "<|im_end|>" + HINT_TEXT


def test_an_eos_other_than_the_templates_marker_ends_the_turn_too(chat_tokenizer):
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat_tokenizer.eos_token = "<|endoftext|>"
    ids = render_next_turn(chat_tokenizer, completed(chat_tokenizer, "3<|endoftext|>"), HINT)
    assert text_of(chat_tokenizer, ids) == HINT_TEXT


def test_a_space_before_the_end_of_turn_is_dropped_with_it(chat_tokenizer):
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }} <|im_end|>"
        "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    ids = render_next_turn(chat_tokenizer, completed(chat_tokenizer, "3<|im_end|>"), HINT)
    assert text_of(chat_tokenizer, ids) == "[higher]"


def test_the_sampled_text_itself_does_not_change_the_next_turn(chat_tokenizer):
    log = completed(chat_tokenizer, "3<|im_end|>", content="<|im_start|>user\n anything at all ")
    assert text_of(chat_tokenizer, render_next_turn(chat_tokenizer, log, HINT)) == HINT_TEXT


def test_turns_equal_the_template_of_all_messages(chat_tokenizer):
    log = completed(chat_tokenizer, "3<|im_end|>", content="3")
    log += with_tokens(HINT, render_next_turn(chat_tokenizer, log, HINT))
    whole = [*QUESTION, {"role": "assistant", "content": "3"}, *HINT]
    assert all_ids(log) == render_prompt(chat_tokenizer, whole)


def test_a_turn_without_template_is_the_text_alone(plain_tokenizer):
    assert (
        text_of(plain_tokenizer, render_next_turn(plain_tokenizer, completed(plain_tokenizer, "3"), HINT)) == "higher"
    )


def test_a_turn_needs_a_completion_before_it(chat_tokenizer):
    with pytest.raises(DataError, match="follow an assistant message"):
        render_next_turn(chat_tokenizer, completed(chat_tokenizer, "3")[:-1], HINT)


def test_a_template_that_hides_old_completions_is_refused_for_turns(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(DataError, match="0 times"):
        render_next_turn(chat_tokenizer, completed(chat_tokenizer, "3"), HINT)


def test_a_supervised_prompt_has_the_tokens_of_the_rendered_prompt(chat_tokenizer):
    *prompt, completion = supervised_example(chat_tokenizer, [*QUESTION, {"role": "assistant", "content": "3"}])
    assert all_ids(prompt) == render_prompt(chat_tokenizer, QUESTION)
    assert text_of(chat_tokenizer, completion["token_ids"]) == "3<|im_end|>"


def test_a_supervised_example_teaches_every_assistant_message_and_nothing_else(chat_tokenizer):
    turns = [*QUESTION, {"role": "assistant", "content": "2"}, *HINT, {"role": "assistant", "content": "3"}]
    flat = flatten_message_log(supervised_example(chat_tokenizer, turns), supervised=True)
    learned = flat["input_ids"][flat["token_mask"].bool()]
    assert text_of(chat_tokenizer, learned) == "2<|im_end|>3<|im_end|>"
    assert text_of(chat_tokenizer, flat["input_ids"]) == PROMPT_TEXT + "2<|im_end|>" + HINT_TEXT + "3<|im_end|>"


def test_template_text_before_an_assistant_message_is_learned_with_it(chat_tokenizer):
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A:(think){{ m['content'] }}<|im_end|>"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    completion = supervised_example(chat_tokenizer, [*QUESTION, {"role": "assistant", "content": "3"}])[-1]
    assert text_of(chat_tokenizer, completion["token_ids"]) == "(think)3<|im_end|>"


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "1,2"}}]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
CALL_TEXT = "call add(1,2)<|call|><|im_end|>"


def test_tool_calls_are_learned_as_the_template_writes_them(tool_tokenizer):
    talk = [*QUESTION, CALL, RESULT, {"role": "assistant", "content": "It is 3."}]
    flat = flatten_message_log(supervised_example(tool_tokenizer, talk), supervised=True)
    learned = flat["input_ids"][flat["token_mask"].bool()]
    assert text_of(tool_tokenizer, learned) == f"{CALL_TEXT}It is 3.<|im_end|>"
    whole = tool_tokenizer.apply_chat_template(talk, tokenize=False)
    assert text_of(tool_tokenizer, flat["input_ids"]) + "\n" == whole
    assert "<|im_start|>add\n3<|im_end|>" in whole  # the name reached the template


def test_a_prompt_is_rendered_with_the_tool_calls_before_it(tool_tokenizer):
    ids = render_prompt(tool_tokenizer, [*QUESTION, CALL, RESULT])
    assert f"assistant\n{CALL_TEXT}\n<|im_start|>add\n3<|im_end|>" in text_of(tool_tokenizer, ids)


def test_keys_that_the_template_ignores_change_no_token(chat_tokenizer):
    plain = [*QUESTION, {"role": "assistant", "content": "2"}, *HINT, {"role": "assistant", "content": "3"}]
    weighted = [{**message, "weight": 1} for message in plain]
    assert all_ids(supervised_example(chat_tokenizer, weighted)) == all_ids(supervised_example(chat_tokenizer, plain))


def test_tool_calls_that_no_template_can_write_are_refused(plain_tokenizer, tool_tokenizer):
    with pytest.raises(DataError, match="has tool_calls, but the tokenizer has no chat template"):
        supervised_example(plain_tokenizer, [*QUESTION, CALL])
    tool_tokenizer.chat_template = "{{ 'a:' if add_generation_prompt else messages[-1].tool_calls }}"
    with pytest.raises(DataError, match="does not write an assistant message with tool_calls after its generation"):
        supervised_example(tool_tokenizer, [*QUESTION, CALL])


def test_without_template_a_supervised_message_ends_with_eos(plain_tokenizer):
    log = supervised_example(plain_tokenizer, [*QUESTION, {"role": "assistant", "content": "3"}])
    assert text_of(plain_tokenizer, all_ids(log)) == "Add.1+2=3<|im_end|>"


def test_a_supervised_example_without_an_assistant_message_is_refused(chat_tokenizer):
    with pytest.raises(DataError, match="end with an assistant message"):
        supervised_example(chat_tokenizer, QUESTION)


def test_only_sampled_tokens_count_and_keep_their_logprobs(plain_tokenizer):
    log = completed(plain_tokenizer, "34", generation_logprobs=torch.tensor([-0.25, -1.5]))
    log += with_tokens(HINT, render_next_turn(plain_tokenizer, log, HINT))
    flat = flatten_message_log(log)
    assert flat["token_mask"].tolist() == [0] * 8 + [1, 1] + [0] * 6
    assert flat["generation_logprobs"].tolist() == [0] * 8 + [-0.25, -1.5] + [0] * 6


@pytest.mark.parametrize(
    ("logprobs", "complaint"),
    [
        (None, "without generation_logprobs"),
        (torch.zeros(3), "2 tokens but generation_logprobs of shape"),
        (torch.tensor([-1.0, float("nan")]), "not finite"),
    ],
)
def test_unusable_logprobs_of_sampled_tokens_are_an_error(plain_tokenizer, logprobs, complaint):
    with pytest.raises(DataError, match=f"message 2 .*{complaint}"):
        flatten_message_log(completed(plain_tokenizer, "34", generation_logprobs=logprobs))


def test_assistant_messages_inside_a_prompt_are_not_taken_for_sampled(chat_tokenizer):
    shots = [QUESTION[1], {"role": "assistant", "content": "3"}, {"role": "user", "content": "2+2="}]
    flat = flatten_message_log(with_tokens(shots, render_prompt(chat_tokenizer, shots)))
    assert flat["token_mask"].sum() == 0


def test_a_log_without_tokens_is_refused():
    with pytest.raises(DataError, match="no tokens"):
        flatten_message_log(with_tokens(QUESTION, []))


def test_collate_pads_on_the_right(plain_tokenizer):
    logs = [completed(plain_tokenizer, "3"), completed(plain_tokenizer, "345")]
    batch = collate(logs, pad_id=99, loss_multipliers=[1.0, 0.0])
    assert batch["input_ids"].shape == (2, 11)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"][0, 9:].tolist() == [99, 99]
    assert batch["input_lengths"].tolist() == [9, 11]
    assert batch["token_mask"].sum(dim=1).tolist() == [1, 3]
    assert batch["generation_logprobs"].sum(dim=1).tolist() == [-0.5, -1.5]
    assert batch["sample_mask"].tolist() == [1, 0]


def test_a_supervised_batch_has_no_generation_logprobs(plain_tokenizer):
    log = supervised_example(plain_tokenizer, [*QUESTION, {"role": "assistant", "content": "3"}])
    assert set(collate([log], pad_id=0, supervised=True)) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}


def test_collate_refuses_no_logs_and_a_wrong_number_of_multipliers(plain_tokenizer):
    with pytest.raises(DataError, match="at least one"):
        collate([], pad_id=0)
    with pytest.raises(DataError, match="2 loss multipliers for 1"):
        collate([completed(plain_tokenizer, "3")], pad_id=0, loss_multipliers=[1.0, 1.0])
