"""`generate` in every way the library offers: each gives what the model gives without a cache."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from tests.shippo_ssm.integrations.tiny import batch, generate, make_model

HYBRID: dict[str, Any] = {"layer_types": ["sliding_attention", "shippo", "full_attention"], "num_hidden_layers": 3}
HYBRID |= {"sliding_window": 4}
VARIANTS = [
    {},
    HYBRID,
    {"right": "split"},
    {"right": "dense"},
    {"right": "none"},
    {"controller_conv": 3, "write_rank": 2, "learnable_initial_state": False, "read_norm": True},
]
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.5},
}
NEW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}


def seeded(*args, **how):
    torch.manual_seed(3)
    return generate(*args, **how)


@pytest.mark.works_with("Generation")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_left_padded_batches_with_a_cache_as_without(options, way):
    model = make_model(**options)
    ids, mask = batch()
    expected = seeded(model, ids, mask, use_cache=False, **WAYS[way], **NEW)
    assert torch.equal(seeded(model, ids, mask, **WAYS[way], **NEW), expected)
    assert len({tuple(row) for row in expected[:, 7:].tolist()}) > 1


@pytest.mark.works_with("Static cache")
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("way", WAYS)
def test_a_static_cache_gives_what_no_cache_gives(way, options):
    model = make_model(**options)
    ids, mask = batch()
    expected = seeded(model, ids, mask, use_cache=False, **WAYS[way], **NEW)
    for _ in range(2):
        assert torch.equal(seeded(model, ids, mask, cache_implementation="static", **WAYS[way], **NEW), expected)


@pytest.mark.works_with("Static cache")
def test_a_static_cache_stays_where_it_is():
    model = make_model()
    ids, mask = batch()
    cache: Any = StaticCache(config=model.config, max_cache_len=8)
    assert cache.is_compileable
    logits, places = [], []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 7)):
            part = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
            logits.append(part.logits)
            places.append([tensor.data_ptr() for tensor in cache.layers[1].state.tensors()])
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    assert cache.get_seq_length() == 7
    assert places[0] == places[1] == places[2]
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], whole[mask.bool()], atol=1e-3, rtol=1e-3)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.works_with("Generation")
def test_rows_of_a_batch_decode_as_if_alone():
    model = make_model()
    ids, mask = batch()
    together = generate(model, ids, mask, do_sample=False, **NEW)[:, 7:]
    for row, new in enumerate(together):
        start = int((1 - mask[row]).sum())
        alone = generate(model, ids[row : row + 1, start:], mask[row : row + 1, start:], do_sample=False, **NEW)
        assert torch.equal(alone[0, 7 - start :], new)


@pytest.mark.works_with("Generation")
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
def test_several_turns_on_one_cache(make_cache, options):
    model = make_model(**options)
    ids, mask = batch()
    room: dict[str, Any] = {"max_cache_len": 40} if make_cache is StaticCache else {}
    cache = make_cache(config=model.config, **room)
    plain = ids
    for turn in range(3):
        if turn:
            said = torch.randint(3, 23, (3, 2 + turn))
            ids, plain = torch.cat([ids, said], 1), torch.cat([plain, said], 1)
            mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], 1)
        ids = generate(model, ids, mask, do_sample=False, past_key_values=cache, **NEW)
        plain = generate(model, plain, mask, do_sample=False, use_cache=False, **NEW)
        assert torch.equal(ids, plain), turn
        # The last token has been chosen, not read.
        assert cache.get_seq_length() == ids.shape[1] - 1


@pytest.mark.works_with("Generation")
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_prompt_read_in_chunks(size, options):
    model = make_model(**options)
    ids, mask = batch()
    expected = generate(model, ids, mask, do_sample=False, use_cache=False, **NEW)
    assert torch.equal(generate(model, ids, mask, do_sample=False, prefill_chunk_size=size, **NEW), expected)


@pytest.mark.works_with("Generation")
# Transformers' own: it passes on options that it says are deprecated.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prompt", [slice(2, 3), slice(0, 1)], ids=["whole", "padded"])
def test_assistants_propose_what_a_hybrid_checks(prompt):
    """Rejected tokens leave neither states nor keys behind, with an assistant that is right, one that is not, and n-grams."""
    model, other = make_model(**HYBRID), make_model()
    ids, mask = (part[prompt] for part in batch())
    expected = generate(model, ids, mask, do_sample=False, use_cache=False, **NEW)
    for helper in ({"assistant_model": model}, {"assistant_model": other}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(generate(model, ids, mask, do_sample=False, **helper, **NEW), expected)


@pytest.mark.works_with("Generation")
@pytest.mark.parametrize("options", [{}, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_times_of_the_prompt_and_of_what_follows(options):
    """Tokens without a time are one apart; every way to read and cache the prompt gives the same."""
    model: Any = make_model(**options)
    ids, mask = batch()
    for known in (7, 10):
        times = torch.rand(3, known) * 3
        every = torch.cat([times, torch.ones(3, 13 - known)], 1)
        found = generate(model, ids, mask, time_deltas=times, do_sample=False, **NEW)
        for step in range(6):
            seen, at = found[:, : 7 + step], torch.cat([mask, mask.new_ones(3, step)], 1)
            with torch.no_grad():
                logits = model(seen, attention_mask=at, time_deltas=every[:, : 7 + step], use_cache=False).logits[:, -1]
            logits[:, model.config.eos_token_id] = -torch.inf
            assert torch.equal(logits.argmax(-1), found[:, 7 + step])
        for way in ({"use_cache": False}, {"prefill_chunk_size": 3}, {"cache_implementation": "static"}):
            assert torch.equal(generate(model, ids, mask, time_deltas=times, do_sample=False, **way, **NEW), found), way
        one = {"time_deltas": times[2:], "do_sample": False, **NEW}
        assert torch.equal(generate(model, ids[2:], mask[2:], prompt_lookup_num_tokens=2, **one), found[2:])
        embedded = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
        assert torch.equal(model.generate(**embedded, time_deltas=times, do_sample=False, **NEW), found[:, 7:])
    assert not torch.equal(generate(model, ids, mask, do_sample=False, **NEW), found)
    for wrong, came in ((torch.ones(3), r"torch.Size\(\[3\]\)"), ([1.0] * 7, "list"), (1.0, "float")):
        with pytest.raises(ValueError, match=f"`time_deltas` is {came}; expected a tensor"):
            generate(model, ids, mask, time_deltas=wrong, do_sample=False, **NEW)


@pytest.mark.works_with("Generation")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_hybrid_ignores_padding_and_continues_its_cache(implementation):
    model = make_model(attention_every=2)
    model.set_attn_implementation(implementation)
    ids, _ = batch()
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1]] * 3).bool()
    cache = DynamicCache(config=model.config)
    parts = [
        model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        for start, stop in ((0, 3), (3, 4), (4, 7))
    ]
    alone = model(ids[mask].view(3, 5), use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1)[mask].view_as(alone), alone, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(3, 1\); expected \[B, T\] = \(3, 8\)"):
        model(ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="`past_key_values` is not empty"):
        model(ids[:1, :4], position_ids=torch.tensor([[0, 1, 0, 1]]), past_key_values=cache)


@pytest.mark.works_with("Generation")
def test_a_prompt_of_embeddings():
    model: Any = make_model()
    ids, mask = batch()
    expected = generate(model, ids, mask, do_sample=False, use_cache=False, **NEW)[:, 7:]
    embedded = model.get_input_embeddings()(ids)
    for use_cache in (True, False):
        new = model.generate(inputs_embeds=embedded, attention_mask=mask, do_sample=False, use_cache=use_cache, **NEW)
        assert torch.equal(new, expected)
    soft = embedded + 0.3 * torch.randn_like(embedded)
    both = [model.generate(inputs_embeds=soft, attention_mask=mask, use_cache=use, **NEW) for use in (True, False)]
    assert torch.equal(*both)


@pytest.mark.works_with("Generation")
def test_scores_and_cache_come_back_on_request():
    model: Any = make_model()
    ids, mask = batch()
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    output = model.generate(ids, attention_mask=mask, do_sample=False, **asked, **NEW)
    assert output.past_key_values.get_seq_length() == 12
    whole = model(output.sequences, attention_mask=torch.cat([mask, mask.new_ones(3, 6)], 1), use_cache=False).logits
    torch.testing.assert_close(torch.stack(output.logits, 1), whole[:, 6:-1], atol=1e-3, rtol=1e-3)
    assert len(output.hidden_states) == 6
