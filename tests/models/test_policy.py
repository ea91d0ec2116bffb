import pytest
import torch

from rftcli.algo.align import Row, packed, padded
from rftcli.models import policy as policy_module
from rftcli.models.policy import CausalPolicy

LENGTHS = ((5, 9), (1, 1), (12, 20), (3, 0), (2, 7))
"""(prompt tokens, sampled tokens) of the rows of a micro-batch."""


def rows_of(vocab: int = 97) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for prompt, sampled in LENGTHS:
        mask = torch.rand(sampled, generator=generator) < 0.8
        rows.append(Row(torch.randint(0, vocab, (prompt + sampled,), generator=generator), prompt, mask))
    return rows


def fields(inputs) -> dict:
    return {name: getattr(inputs, name) for name in ("input_ids", "position_ids", "attention_mask", "select", "target_ids")}


def plain(model, rows, temperature):
    """(N,) log-probs and entropies by one plain forward per row."""
    logprobs, entropies = [], []
    for row in rows:
        table = (model(row.token_ids[None]).logits[0, row.prompt_tokens - 1 : -1] / temperature).log_softmax(-1)  # (T, V)
        chosen = table.gather(-1, row.token_ids[row.prompt_tokens :, None]).squeeze(-1)
        logprobs.append(chosen[row.mask])
        entropies.append(-(table.exp() * table).sum(-1)[row.mask])
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model, value) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def weights_for(logprobs):
    return torch.linspace(-1.0, 1.0, len(logprobs))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("family", "head"), [("llama", "chunked"), ("llama", "model"), ("gpt2", "chunked"), ("gpt2", "model"), ("gemma", "model")])
def test_values_and_gradients_are_those_of_a_plain_forward(zoo, family, head, layout, attention, checkpointing):
    model, rows = getattr(zoo, family)(attn_implementation=attention).train(), rows_of()
    expected, entropies = plain(model, rows, temperature=0.7)
    wanted = gradients(model, (expected * weights_for(expected)).sum())
    policy = CausalPolicy(model, head=head, gradient_checkpointing=checkpointing)
    inputs = padded(rows, pad_id=0) if layout == "padded" else packed(rows)
    logprobs, entropy = policy(**fields(inputs), temperature=0.7)
    assert logprobs.shape == expected.shape and logprobs.dtype == torch.float32 and not entropy.requires_grad
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=1e-5)
    found = gradients(model, (logprobs * weights_for(logprobs)).sum())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, name


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_packed_sequences_do_not_see_each_other(zoo, layout):
    """Another first sequence leaves every bit of knowledge about the second as it was."""
    model, rows = zoo.llama().eval(), rows_of()
    policy = CausalPolicy(model)
    other = [Row((rows[0].token_ids + 11) % 97, rows[0].prompt_tokens, rows[0].mask), *rows[1:]]
    made = [packed(case) if layout == "packed" else padded(case, pad_id=0) for case in (rows, other)]
    first, second = (policy(**fields(inputs), temperature=1.0)[0] for inputs in made)
    count = int(rows[0].mask.sum())
    assert not torch.allclose(first[:count], second[:count])
    torch.testing.assert_close(first[count:], second[count:], atol=1e-6, rtol=0)


def test_chunks_change_nothing(zoo, monkeypatch):
    model, rows = zoo.llama().train(), rows_of()
    policy, inputs = CausalPolicy(model), fields(packed(rows))
    whole, _ = policy(**inputs, temperature=0.9)
    wanted = gradients(model, (whole * weights_for(whole)).sum())
    monkeypatch.setattr(policy_module, "HEAD_BYTES", 4 * 97 * 5)  # five positions a chunk
    parts, _ = policy(**inputs, temperature=0.9)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    found = gradients(model, (parts * weights_for(parts)).sum())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["chunked", "model"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_trained_token_still_reaches_every_weight(zoo, family, head):
    model = getattr(zoo, family)().train()
    row = Row(torch.tensor([5, 6, 7]), 2, torch.tensor([False]))
    logprobs, entropy = CausalPolicy(model, head=head)(**fields(packed([row])), temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_policy_takes_a_micro_batch(zoo):
    from rftcli.types import Batch, Denominators

    rows = rows_of()
    inputs = packed(rows)
    empty = {"old_logprobs": None, "reference_logprobs": None, "sampler_logprobs": None, "values": None, "returns": None}
    batch = Batch(
        **fields(inputs),
        sequence=inputs.sequence,
        num_sequences=inputs.num_sequences,
        advantages=torch.zeros(inputs.select.shape),
        denominators=Denominators(tokens=1, sequences=1),
        **empty,
    )
    policy = CausalPolicy(zoo.llama().eval())
    assert torch.equal(policy.logprobs(batch, 0.7)[0], policy(**fields(inputs), temperature=0.7)[0])


def test_the_head_of_a_model_without_logits_to_keep(zoo):
    from transformers import LlamaForCausalLM

    class Older(LlamaForCausalLM):
        """A model of one's own that always scores every position."""

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)

    newer = zoo.llama().eval()
    older = Older(newer.config).eval()
    older.load_state_dict(newer.state_dict())
    inputs = fields(padded(rows_of(), pad_id=0))
    found = [CausalPolicy(model, head="model")(**inputs, temperature=1.0)[0] for model in (newer, older)]
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("head", ["chunked", "model"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_tokens_at_temperatures_of_their_own(zoo, layout, head):
    """Each trained token as a plain forward at its temperature says; none of them trained still reaches the weights."""
    model, rows = zoo.llama().train(), rows_of()
    inputs = padded(rows, pad_id=0) if layout == "padded" else packed(rows)
    temperatures = torch.linspace(0.5, 5.0, len(inputs.select))
    expected = torch.stack([plain(model, rows, float(value))[0][place] for place, value in enumerate(temperatures)])
    logprobs, _ = CausalPolicy(model, head=head)(**fields(inputs), temperature=temperatures)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    empty = packed([Row(torch.tensor([5, 6, 7]), 2, torch.tensor([False]))])
    assert CausalPolicy(model, head=head)(**fields(empty), temperature=torch.zeros(0))[0].shape == (0,)
