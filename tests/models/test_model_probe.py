import math

import pytest
import torch

from rftcli.models.policy import CausalPolicy
from rftcli.models.probe import TOLERANCE, agreement


@pytest.mark.parametrize(("family", "head"), [("llama", "chunked"), ("gpt2", "chunked"), ("gemma", "model")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_path_agrees_and_the_head_is_found(zoo, family, head, dtype):
    policy = CausalPolicy(getattr(zoo, family)().to(dtype))
    found = agreement(policy, temperature=0.7)
    assert (found.head, found.positions, found.tolerance) == (head, 64, TOLERANCE[dtype])
    assert found.layouts == ("padded", "packed")
    if dtype is torch.float32:
        assert max(found.padded, found.packed) < 1e-5


def test_a_bare_head_on_capped_scores_would_be_wrong(zoo):
    """What the probe protects from: the same model through the wrong head is off by far more than the tolerance."""
    from rftcli.algo.align import Row, packed

    model = zoo.gemma().eval()
    inputs = packed([Row(torch.arange(5, 45), 1, torch.ones(39, dtype=torch.bool))])
    given = {name: getattr(inputs, name) for name in ("input_ids", "position_ids", "attention_mask", "select", "target_ids")}
    right, wrong = (CausalPolicy(model, head=head)(**given, temperature=1.0)[0] for head in ("model", "chunked"))
    assert (right - wrong).abs().max() > 1.0


@pytest.mark.parametrize("attention", ["rft_varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shared_prompts_are_proved_where_a_run_has_them(zoo, family, attention):
    model = getattr(zoo, family)()
    model.config._attn_implementation = attention
    found = agreement(CausalPolicy(model), temperature=0.7, shares_prompts=True)
    assert found.layouts == ("padded", "packed", "shared") and found.shared < 1e-5 and found.worst == max(found.padded, found.packed, found.shared)
    assert agreement(CausalPolicy(model), temperature=0.7).shared is None


def test_the_policy_is_left_as_it_was(zoo):
    model = zoo.gemma().train()
    model.model.layers[0].eval()
    policy = CausalPolicy(model, head="chunked")
    before = [module.training for module in policy.modules()]
    assert agreement(policy, temperature=1.0).head == "model"
    assert policy.head == "chunked" and [module.training for module in policy.modules()] == before


def test_sequences_of_the_data(zoo):
    found = agreement(CausalPolicy(zoo.llama()), temperature=1.0, sequences=[[5, 6, 7], [8, 9]])
    assert found.positions == 3 and found.layouts == ("padded", "packed")


def test_numbers_that_are_none_agree_with_nothing(zoo):
    model = zoo.llama()
    model.model.norm.weight.data[0] = math.nan
    assert agreement(CausalPolicy(model), temperature=1.0).layouts == ()


def test_a_model_that_ignores_positions_may_not_be_packed(zoo):
    """Attention code of one's own that takes no part in the library's masks: the probe allows the padded layout alone."""
    from transformers import LlamaForCausalLM

    class Unaware(LlamaForCausalLM):
        def get_decoder(self):
            inner = super().get_decoder()

            def decoder(input_ids, attention_mask=None, position_ids=None, use_cache=False):
                if attention_mask is None:
                    attention_mask = torch.ones_like(input_ids)  # a given mask switches the library's detection of borders off
                return inner(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)

            return decoder

    found = agreement(CausalPolicy(Unaware(zoo.llama().config)), temperature=1.0)
    assert found.head == "chunked" and found.layouts == ("padded",) and found.packed > 1e-3


def test_a_model_that_draws_numbers_in_training_is_found_out(zoo):
    """As mixtures whose router samples or that add noise to it: every pass with gradients would be of another model."""
    assert agreement(CausalPolicy(zoo.llama()), temperature=1.0, in_training=True).training < 1e-5
    model = zoo.llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, _, out: out + 0.5 * torch.randn_like(out) if module.training else None)
    found = agreement(CausalPolicy(model), temperature=1.0, in_training=True)
    assert found.layouts == ("padded", "packed") and found.training > found.tolerance
    assert agreement(CausalPolicy(model), temperature=1.0).training is None
