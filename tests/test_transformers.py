"""attn_implementation="fastattn": small random models of transformers give what "eager" gives."""

import itertools

import pytest
import torch

import fastattn.integrations.transformers as integration

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

DECODER = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=0.5
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DECODER, sliding_window=6),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **DECODER, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
SEQUENCE_TO_SEQUENCE = {
    "bart": lambda: transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        dropout=0.0, attention_dropout=0.0, eos_token_id=2, forced_eos_token_id=None,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def build(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than a model starts with, so that attention is not uniform.
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=0.3)
    return model


def decoder(name):
    config = DECODERS[name]()
    return build(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def padded(side="left"):
    ids = torch.randint(2, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, n in enumerate((4, 0, 1)):
        mask[row, slice(0, n) if side == "left" else slice(11 - n, 11)] = 0
    return {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def both(model, run):
    results = []
    for implementation in ("eager", "fastattn"):
        model.set_attn_implementation(implementation)
        results.append(run())
    return results


def assert_near(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape
    assert (found - expected).norm() <= tolerance * expected.norm()


GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "growing cache": {"past_key_values": "growing"},
    "growing cache of beams": {"past_key_values": "growing", "num_beams": 3},
}


@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("name", DECODERS)
def test_generates_the_tokens_of_eager(name, how):
    def run():
        options = dict(GENERATION[how])
        if "past_key_values" in options:
            options["past_key_values"] = integration.GrowingCache(model.config)
        return model.generate(
            **padded(), max_new_tokens=10, do_sample=False, output_logits=True, return_dict_in_generate=True,
            **options,
        )  # fmt: skip

    model = decoder(name)
    expected, found = both(model, run)
    assert torch.equal(found.sequences, expected.sequences)
    assert_near(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("beams", (1, 3))
@pytest.mark.parametrize("name", SEQUENCE_TO_SEQUENCE)
def test_generates_the_tokens_of_eager_with_cross_attention(name, beams):
    def run():
        return model.generate(
            **padded("right"), max_new_tokens=10, min_new_tokens=10, num_beams=beams, do_sample=False
        )

    config = SEQUENCE_TO_SEQUENCE[name]()
    model = build(transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)], config)
    expected, found = both(model, run)
    assert found.shape[1] == 11 and torch.equal(found, expected)


def test_encoders_of_text_and_images_give_what_eager_gives():
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = build(transformers.BertModel, config)
    for side in ("left", "right"):
        inputs = padded(side)
        seen = inputs["attention_mask"].bool()
        expected, found = both(model, lambda inputs=inputs: model(**inputs).last_hidden_state)
        assert_near(found[seen], expected[seen])

    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48,
    )  # fmt: skip
    model = build(transformers.ViTModel, config)
    images = torch.randn(2, 3, 16, 16)
    expected, found = both(model, lambda: model(images).last_hidden_state)
    assert_near(found, expected)


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("name", (*DECODERS, *SEQUENCE_TO_SEQUENCE))
def test_training_has_the_loss_and_the_gradients_of_eager(name, side):
    def run():
        model.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    if name in DECODERS:
        model = decoder(name)
    else:
        config = SEQUENCE_TO_SEQUENCE[name]()
        model = build(transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)], config)
    model.train()
    inputs = padded(side)
    seen = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].where(seen, -100)
    if name in DECODERS:
        # What is predicted from a padded token, which sees nothing, means nothing.
        labels[:, 1:][~seen[:, :-1]] = -100
    (loss, grads), (our_loss, our_grads) = both(model, run)
    assert_near(our_loss, loss)
    assert our_grads.keys() == grads.keys() and len(grads) > 10
    for parameter, grad in grads.items():
        # Noise of eager's softmax is all there is where the exact gradient is zero.
        if grad.norm() > 1e-5:
            assert_near(our_grads[parameter], grad, 2e-4), parameter


@pytest.mark.parametrize("name", ("llama", "gpt_oss"))
def test_a_compiled_forward_gives_what_eager_gives(name):
    model = decoder(name)
    inputs = padded()
    expected = model(**inputs).logits
    model.set_attn_implementation("fastattn")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(**inputs, use_cache=False).logits
    seen = inputs["attention_mask"].bool()
    assert_near(found[seen], expected[seen])


def test_a_traced_forward_gives_what_eager_gives():
    def forward(ids, mask):
        return model(ids, attention_mask=mask, use_cache=False).logits

    def attend(query, key):
        return integration.attention_forward(torch.nn.Module(), query, key, key, None, is_causal=True)[0]

    model = decoder("llama").requires_grad_(False)
    model.set_attn_implementation("eager")
    ids, mask = padded().values()
    expected = forward(ids, mask)
    model.set_attn_implementation("fastattn")
    found = torch.jit.trace(forward, (ids, torch.ones_like(mask)))(ids, mask)
    assert_near(found[mask.bool()], expected[mask.bool()])

    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    assert torch.equal(torch.jit.trace(attend, (query, key))(query, key), attend(query, key))


@pytest.mark.parametrize("cache", ("dynamic", "growing", "static"))
@pytest.mark.parametrize("name", ("llama", "mistral"))
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(name, cache):
    def run():
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=16)
        elif cache == "growing":
            past = integration.GrowingCache(model.config)
        else:
            past = transformers.DynamicCache(config=model.config)
        parts, start = [], 0
        for end in (5, 9, 10, 11):
            part = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=past)
            parts.append(part.logits)
            start = end
        return torch.cat(parts, 1)

    model = decoder(name)
    ids, mask = padded().values()
    expected, found = both(model, run)
    seen = mask.bool()
    assert_near(found[seen], expected[seen])


# Layers whose ``is_causal`` contradicts the mask of their model, or that have none.
UNDECIDED = {
    "gemma": lambda: (
        transformers.GemmaModel, transformers.GemmaConfig(**DECODER, use_bidirectional_attention=True)
    ),
    "bigbird_pegasus": lambda: (
        transformers.BigBirdPegasusForCausalLM,
        transformers.BigBirdPegasusConfig(
            vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_position_embeddings=64,
        ),
    ),
    "splinter": lambda: (
        transformers.SplinterModel,
        transformers.SplinterConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("compiled", (False, True), ids=("plain", "compiled"))
@pytest.mark.parametrize("name", UNDECIDED)
def test_masks_decide_about_causality_and_not_the_layer(name, compiled):
    def run():
        return (torch.compile(model, backend="eager") if compiled else model)(ids)[0]

    model = build(*UNDECIDED[name]())
    ids = padded()["input_ids"]
    with torch.no_grad():
        expected, found = both(model, run)
    assert_near(found, expected)


class OwnConfig(transformers.LlamaConfig):
    pass


def test_a_configuration_may_be_derived():
    model = build(transformers.LlamaForCausalLM, OwnConfig(**DECODER))
    expected, found = both(model, lambda: model(padded()["input_ids"]).logits)
    assert_near(found, expected)


def test_a_model_around_another_runs():
    config = transformers.DPRConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = build(transformers.DPRQuestionEncoder, config)
    expected, found = both(model, lambda: model(**padded("right")).pooler_output)
    assert_near(found, expected)


def test_packed_sequences_and_masks_of_the_user_are_respected():
    model = decoder("mistral")
    ids = padded()["input_ids"][1:2]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    prefix = torch.ones(11, 11, dtype=torch.bool).tril() | (torch.arange(11) < 4)
    as_float = torch.zeros(1, 1, 11, 11).masked_fill(~prefix, torch.finfo(torch.float32).min)
    causal = model(ids).logits
    for inputs in ({"position_ids": positions}, {"attention_mask": as_float}):
        expected, found = both(model, lambda inputs=inputs: model(ids, **inputs, use_cache=False).logits)
        assert_near(found, expected)
        assert (found - causal).norm() > 0.1 * causal.norm()
    assert_near(model(ids, attention_mask=prefix[None, None]).logits, expected)


def test_image_tokens_of_gemma3_attend_to_each_other():
    config = DECODERS["gemma3"]()
    config._attn_implementation = "fastattn"
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1]])
    embeds = torch.zeros(1, 8, 32)
    found = masking.create_causal_mask(config, embeds, None, None, block_sequence_ids=blocks)
    same = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, None] >= 0)
    assert torch.equal(found[:, 0], torch.ones(8, 8, dtype=torch.bool).tril() | same)


def test_the_mask_in_its_cheap_form_is_transformers_mask():
    # Every form of lengths, offsets, windows and padding, against the mask that sdpa gets.
    torch.manual_seed(0)
    functions = {
        "causal": masking.causal_mask_function,
        "both ways": masking.bidirectional_mask_function,
        "window": masking.sliding_window_causal_mask_function(3),
        "wide window": masking.sliding_window_causal_mask_function(50),
        "window both ways": masking.sliding_window_bidirectional_mask_function(2),
        "chunks": masking.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
    }
    sizes = {"window": 3, "wide window": 50, "window both ways": 2, "chunks": 3}
    module = torch.nn.Module()
    seen_forms = set()
    lengths = ((5, 5), (1, 7), (4, 7), (3, 9), (1, 1))
    for (kind, function), (L, S), kv_offset, n in itertools.product(
        functions.items(), lengths, (0, 2), ("none", "left", "right", "short", "long")
    ):
        for q_offset in {kv_offset, kv_offset + min(1, S - L), kv_offset + S - L}:
            length = kv_offset + S + {"short": -1, "long": 2}.get(n, 0)
            padding = torch.ones(2, length, dtype=torch.bool)
            if n == "left":
                padding[0, : kv_offset + 1] = False
            elif n == "right":
                padding[1, -1:] = False
            causal = "both ways" not in kind
            arguments = {
                "batch_size": 2, "q_length": L, "kv_length": S, "q_offset": q_offset, "kv_offset": kv_offset,
                "mask_function": function, "attention_mask": None if n == "none" else padding,
                "allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal,
                "local_size": sizes.get(kind),
            }  # fmt: skip
            form = integration.attention_mask(**arguments)
            arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
            dense = masking.sdpa_mask(**arguments)
            module.is_causal = causal
            query, (key, value) = torch.randn(2, 4, L, 8), torch.randn(2, 2, 2, S, 8)
            found, _ = integration.attention_forward(module, query, key, value, form)
            expected, _ = integration.attention_forward(module, query, key, value, dense)
            torch.testing.assert_close(found, expected, msg=lambda m, a=arguments: f"{a}: {m}")
            if form is not None:
                assert form.dtype == torch.bool and form.dim() == 4
                assert torch.equal((form & True).expand(dense.shape), dense)
            seen_forms.add(type(form))
    assert seen_forms == {type(None), torch.Tensor, integration._Band}


@pytest.mark.parametrize("name", ("mistral", "llama"))
def test_prefill_with_padding_writes_no_mask(name):
    config = DECODERS[name]()
    config._attn_implementation = "fastattn"
    create = masking.create_sliding_window_causal_mask if name == "mistral" else masking.create_causal_mask
    mask = create(config, torch.zeros(3, 11, 32), padded()["attention_mask"], None)
    assert isinstance(mask, integration._Band) and mask.shape == (3, 1, 11, 11)
    assert (mask.band.left, mask.band.right) == ((5, 0) if name == "mistral" else (-1, 0))
    part = mask[:, :, 2:, :4]
    assert type(part) is torch.Tensor and part.shape == (3, 1, 9, 4)
    assert "_Band" in repr(mask)


@pytest.mark.parametrize("write", ("part", "whole"))
@pytest.mark.parametrize("inference", (False, True))
def test_masks_that_a_model_writes_to(write, inference):
    """What it wrote counts, as it does for every other mask."""
    with torch.inference_mode(inference):
        mask = integration.attention_mask(1, 5, 5, mask_function=masking.causal_mask_function)
        dense = torch.ones(5, 5, dtype=torch.bool).tril()
        dense[:, 4] = True
        if write == "part":
            mask[..., 4] = True
        else:
            mask |= dense
        query, key, value = torch.randn(3, 1, 2, 5, 8)
        found, _ = integration.attention_forward(torch.nn.Module(), query, key, value, mask)
        expected, _ = integration.attention_forward(torch.nn.Module(), query, key, value, dense)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ("mistral", "gpt_oss", "t5", "gpt2"))
def test_attention_weights_are_those_of_eager(name):
    inputs = padded("right")
    if name == "t5":
        config = SEQUENCE_TO_SEQUENCE["t5"]()
        model = build(transformers.T5EncoderModel, config)
    elif name == "gpt2":  # does not tell its layers that weights are asked for
        config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16)
        model = build(transformers.GPT2Model, config)
    else:
        model = decoder(name)

    def run():
        return model(**inputs, output_attentions=True).attentions

    expected, found = both(model, run)
    assert len(found) == len(expected) == 2
    for weights, theirs in zip(found, expected, strict=True):
        assert_near(weights, theirs)


def test_dropout_depends_on_the_generator():
    module = torch.nn.Module()
    query, (key, value) = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 2, 6, 8)
    torch.manual_seed(3)
    out, _ = integration.attention_forward(module, query, key, value, None, dropout=0.5, is_causal=True)
    torch.manual_seed(3)
    expected = integration.scaled_dot_product_attention(
        query, key, value, dropout_p=0.5, is_causal=True, enable_gqa=True
    )
    assert torch.equal(out, expected.transpose(1, 2)) and out.is_contiguous()
    plain, _ = integration.attention_forward(module, query, key, value, None, is_causal=True)
    assert not torch.allclose(out, plain)


def test_what_would_be_ignored_is_refused():
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="indices of Module"):
        integration.attention_forward(torch.nn.Module(), query, query, query, None, indices=torch.zeros(1))

    config = transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=1, n_head=4, attn_implementation="fastattn"
    )
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(NotImplementedError, match="modeling_bloom"):
        model(padded()["input_ids"])


def bert(**options):
    return transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        **options,
    )  # fmt: skip


def with_own_code(kind):
    if kind == "xlnet":  # makes its own masks, too, so that nothing here is ever called
        return transformers.XLNetModel(
            transformers.XLNetConfig(vocab_size=97, d_model=32, n_layer=2, n_head=4, d_inner=32)
        )
    return transformers.BloomModel(
        transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    )


@pytest.mark.parametrize("kind, attention", (("xlnet", "rel_attn"), ("bloom", "self_attention")))
def test_modules_that_keep_their_own_code_are_told(kind, attention):
    model = with_own_code(kind)
    part = "layer" if kind == "xlnet" else "h"
    names = {f"{part}.{n}.{attention}" for n in range(2)}
    model.config._attn_implementation = "fastattn"  # what from_pretrained makes of the argument
    assert integration.implementations(model) == dict.fromkeys(names)
    with pytest.warns(UserWarning, match=r"2 of 2 .*(XLNetRelativeAttention|BloomAttention)"):
        assert integration.convert(model) == 0


def test_convert_reaches_every_model_within_a_module(recwarn):
    integration.unregister()
    encoder = build(transformers.BertModel, bert())
    whole = torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder("gpt_oss")})
    names = [f"encoder.encoder.layer.{n}.attention.self" for n in range(2)]
    names += [f"decoder.model.layers.{n}.self_attn" for n in range(2)]
    assert integration.implementations(whole)[names[0]] == "sdpa"
    whole["encoder"].set_attn_implementation("eager")
    expected = encoder(**padded("right")).last_hidden_state
    assert integration.convert(whole) == 4
    assert integration.implementations(whole) == dict.fromkeys(names, "fastattn")
    assert not [w for w in recwarn if "attention modules" in str(w.message)]
    assert_near(encoder(**padded("right")).last_hidden_state, expected)
    with pytest.raises(TypeError, match="no model of transformers in this Linear"):
        integration.convert(torch.nn.Linear(2, 2))


def test_parts_of_a_model_may_have_implementations_of_their_own():
    config = transformers.BartConfig(**SEQUENCE_TO_SEQUENCE["bart"]().to_dict(), attn_implementation="eager")
    model = torch.nn.Sequential(transformers.BartModel(config), with_own_code("bloom"))
    with pytest.warns(UserWarning, match="2 of 8 attention modules do not run on fastattn.*: BloomAttention"):
        assert integration.convert(model) == 6
    found = integration.implementations(model)
    assert {name for name, use in found.items() if use is None} == {
        f"1.h.{n}.self_attention" for n in range(2)
    }
    assert list(found.values()).count("fastattn") == 6
    assert integration.implementations(transformers.BloomModel(model[1].config).h[0].self_attention) == {
        "": None
    }


def test_registration_can_be_repeated_and_taken_back(monkeypatch):
    interfaces = (transformers.AttentionInterface(), transformers.AttentionMaskInterface())
    integration.register()
    assert all("fastattn" in interface for interface in interfaces)
    integration.unregister()
    integration.unregister()
    assert not any("fastattn" in interface for interface in interfaces)
    monkeypatch.setattr(integration, "OLDEST", (99, 1))
    with pytest.raises(ImportError, match=r"needs transformers 99\.1 or later, found"):
        integration.register()
