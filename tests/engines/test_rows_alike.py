"""Passes of any number of rows: where a row's bits do not depend on it, and what follows from that."""

import pytest
import torch
from torch import nn

from rftcli.engines.linears import BLOCK_ROWS, Linears
from rftcli.types import SamplingSettings

VOCAB = 97
CPU = torch.device("cpu")


def product(layer: nn.Linear, rows: torch.Tensor, passes: int) -> torch.Tensor:
    with torch.no_grad(), Linears(nn.Sequential(layer), CPU).taken(passes=passes).applied():
        return layer(rows)


@pytest.mark.parametrize(("words", "width"), [(64, 64), (172, 64), (64, 256), (1000, 320), (576, 1536), (1536, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_among_any_number_of_rows(words: int, width: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(width, words, bias=bias), torch.randn(333, width)
    plain, whole = layer(rows).detach(), product(layer, rows, 1)
    assert torch.allclose(whole, plain, atol=1e-5)
    for count in (1, 3, BLOCK_ROWS, 31, 64, 200):
        for passes in (1, 64):  # packed or not
            assert torch.equal(product(layer, rows[:count], passes), whole[:count])
            assert torch.equal(product(layer, rows[-count:], passes), whole[-count:])
    assert torch.equal(product(layer, rows[:40].view(40, 1, width), 64), whole[:40, None])
    assert torch.equal(product(layer, rows[:, None].transpose(0, 1).repeat(2, 1, 1)[:, -1:], 1), whole[-1:].expand(2, 1, -1))


def test_layers_are_as_they_were_afterwards_and_take_the_weights_of_their_time() -> None:
    layer, rows = nn.Linear(8, 8), torch.ones(8, 8)
    linears = Linears(nn.Sequential(layer), CPU)
    with torch.no_grad():
        before = layer(rows)
        layer.weight.add_(1.0)
        with linears.taken(passes=64).applied():
            assert torch.allclose(layer(rows), before + 8.0)
    assert "forward" not in vars(layer)
    with pytest.raises(ZeroDivisionError), linears.taken(passes=1).applied():
        1 / 0  # noqa: B018
    assert "forward" not in vars(layer)


def test_which_models_have_no_other_matrices(kit) -> None:
    assert Linears(kit.build_llama(VOCAB), CPU).alike
    assert not Linears(kit.build_gpt2(VOCAB), CPU).alike  # its projections are another layer


def test_without_these_operators_passes_are_as_before(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftcli.engines.linears.OPERATORS", ("_of_another_torch",))
    assert not Linears(kit.build_llama(VOCAB), CPU).alike
    assert not Linears(kit.build_llama(VOCAB).bfloat16(), CPU).alike
    assert not Linears(kit.build_llama(VOCAB), torch.device("cuda")).alike
    mixed = kit.build_llama(VOCAB)
    mixed.model.layers[0].experts = nn.ParameterList([nn.Parameter(torch.zeros(2, 2))])
    assert not Linears(mixed, CPU).alike
    assert not Linears(kit.build_llama(VOCAB, intermediate_size=171), CPU).alike  # the last numbers of eight rows fill no vector


def rows_of_passes(model) -> list[int]:
    """Filled while it samples, from the activation of the first layer, which both ways to decode call."""
    passes: list[int] = []
    act = next(part for name, part in model.named_modules() if name.endswith(("mlp.act_fn", "mlp.act")))
    act.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[0]))
    return passes


@pytest.mark.parametrize("own_step", [True, False])
@pytest.mark.parametrize(("family", "rows"), [("build_llama", {3, 16}), ("build_gpt2", {1, 32})])
def test_a_pass_has_the_rows_that_are_there_or_always_as_many(kit, family: str, rows: set[int], own_step: bool) -> None:
    model = getattr(kit, family)(VOCAB)
    sampler = kit.make_sampler(model, VOCAB, batch_rows=64, fixed_rows=32, eos_ids=(), own_step=own_step)
    requests = [kit.make_request(draw, range(5, 8 + draw)) for draw in range(3)]
    assert not list(sampler.generate([], SamplingSettings(max_new_tokens=4, seed=0)))  # the trial of the first call
    passes = rows_of_passes(model)
    assert len(list(sampler.generate(requests, SamplingSettings(max_new_tokens=4, seed=0)))) == 12
    assert set(passes) == rows


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("vocabulary", [97, 512])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_passes_of_8_to_64_rows_give_the_same_bits(kit, continuous: bool, vocabulary: int, attention: str) -> None:
    """One to sixteen groups at once, ends early and late: what `ranks` do to a step."""
    model = kit.build_llama(vocabulary, attn_implementation=attention, hidden_size=128, intermediate_size=640)
    sampler = kit.make_sampler(model, vocabulary, batch_rows=64, continuous=continuous, eos_ids=tuple(range(2, 6)))
    requests = [kit.make_request(draw, range(5, 9 + draw % 7)) for draw in range(16)]
    settings = SamplingSettings(max_new_tokens=24, seed=1, temperature=0.9, top_p=0.95, logprobs=True)
    found = []
    for ranks in (1, 2, 3, 16):
        made = [one for rank in range(ranks) for one in sampler.generate(requests[rank::ranks], settings)]
        found.append({(one.prompt.draw, one.sample): (one.trace.ids, one.trace.logprobs) for one in made})
    assert len(found[0]) == 64 and all(other == found[0] for other in found[1:])
    assert len({len(ids) for ids, _ in found[0].values()}) > 5


SHAPED = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "options": {"no_repeat_ngram_size": 3}, "min_new_tokens": 2}


@pytest.mark.parametrize("own_step", [True, False])
@pytest.mark.parametrize("more", [{}, SHAPED, {"first_token_temperature": 0.3}])
@pytest.mark.parametrize("continuous", [False, True])
def test_finished_rows_leave_the_pass_and_change_no_bit(kit, monkeypatch: pytest.MonkeyPatch, continuous: bool, more, own_step: bool) -> None:
    how = {"batch_rows": 32, "continuous": continuous, "eos_ids": tuple(range(2, 8)), "own_step": own_step}
    requests = [kit.make_request(draw, range(5, 9 + draw % 7), samples=(-1, 0, 1, 2)) for draw in range(16)]
    settings = SamplingSettings(max_new_tokens=40, seed=1, logprobs=True, **more)

    def sampled(share: float):
        monkeypatch.setattr("rftcli.engines.hf.WORTH_LEAVING_OUT", share)
        model = kit.build_llama(VOCAB)
        sampler = kit.make_sampler(model, VOCAB, **how)
        assert sampler.prove().rows_alike and (sampler.found.plain is None) is own_step
        passes = rows_of_passes(model)
        return {(one.prompt.draw, one.sample): (one.trace, one.finish) for one in sampler.generate(requests, settings)}, passes

    (all_the_time, many), (leaving, few) = sampled(0.0), sampled(0.75)
    assert leaving == all_the_time and len(leaving) == 64
    assert min(many[-len(many) // 4 :]) == 32 and few[-1] == 8 and {16, 24} & set(few) and sum(few) < 0.8 * sum(many)


def test_rows_stay_where_their_number_changes_bits(kit) -> None:
    model = kit.build_gpt2(VOCAB)
    sampler = kit.make_sampler(model, VOCAB, batch_rows=32, fixed_rows=32, eos_ids=tuple(range(2, 8)))
    sampler.prove()
    passes = rows_of_passes(model)
    assert len(list(sampler.generate([kit.make_request(draw, range(5, 9)) for draw in range(8)], SamplingSettings(max_new_tokens=40, seed=1)))) == 32
    assert set(passes) == {1, 32}
