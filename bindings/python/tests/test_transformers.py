"""Models of Hugging Face transformers: tiny models with random weights, compared with transformers' eager attention.
Needs torch and transformers; what needs a GPU is skipped without one.
"""

import copy
import inspect
import logging
import math
import os
import re

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")
# Nothing may be downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="skipped: transformers 5.17 or newer is not installed"
)

from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    BartConfig,
    ContinuousBatchingConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPTBigCodeConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PaliGemmaConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)

import fa3
from fa3.transformers import NAME, register

register()

IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :7] = 0
MASKS = dict(none=torch.ones_like(IDS), left=LEFT, right=LEFT.flip(1))
# Two packed sequences in one row.
ENDS = 0, 12, 20
POSITIONS = torch.tensor([[*range(12), *range(8)]])
GREEDY = dict(max_new_tokens=8, do_sample=False)
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attention_dropout=0.0,
)
WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": LlamaConfig(**SIZES, head_dim=64),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
    "gemma2": Gemma2Config(**SIZES, **WINDOWS, head_dim=256, query_pre_attn_scalar=256),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS, head_dim=256, query_pre_attn_scalar=256),
    # Each row uses all experts: if a router chose some, a rounding error could change the choice.
    "gpt-oss": GptOssConfig(**SIZES, **WINDOWS, head_dim=64, num_local_experts=2, num_experts_per_tok=2),
}
# Roundings of attention in two layers: P and O in the forward pass; P, dS, dO, dQ, dK and dV in the backward pass.
ROUNDINGS = 2 * (2 + 6)
# Before 5.23, transformers had separate functions for continuous batching.
OLDER = tuple(int(x) for x in transformers.__version__.split(".")[:2]) < (5, 23)
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(params=MODELS)
def models(request, device):
    return Models(request.param, device)


class Models:
    """A model with our attention and with eager attention, in float32. In bfloat16, ours may be as far from eager
    float32 as eager bfloat16 is.
    """

    def __init__(self, name, device, dtype=None):
        self.device = device
        self.right = make(name, "eager").to(device)
        self.ours = make(name, NAME).to(device)
        self.rounded = None
        # Terms of a router's gradients cancel: without AVX-512 eager float32 itself is 1.8e-5 from float64.
        self.relative = 5e-5 if name == "gpt-oss" else 1e-5
        if device == "cuda" or dtype == torch.bfloat16:
            self.ours, self.rounded = self.ours.bfloat16(), make(name, "eager").to(device, torch.bfloat16)
        implementations = [m.config._attn_implementation for m in (self.right, self.ours, self.rounded or self.right)]
        assert implementations == ["eager", NAME, "eager"]

    def check(self, compute, given=None, rows=slice(None)):
        """Compares what `compute` returns for our model and for the eager model. If `given` is passed, it returns the
        eager model's results instead.
        """
        right = [x.float()[rows] for x in (given or compute)(self.right)]
        ours = [x.float()[rows] for x in compute(self.ours)]
        rounded = right if self.rounded is None else [x.float()[rows] for x in (given or compute)(self.rounded)]
        for x, of_eager, expected in zip(ours, rounded, right, strict=True):
            if self.rounded is None:
                error, bound = (x - expected).abs().max(), self.relative * expected.abs().max()
            else:
                # Norms are compared, since the largest of many errors is random. Both models' errors are samples of one
                # size, whose norms over m numbers differ by exp(4 / sqrt(m)) at four standard deviations. A rounding to
                # bfloat16 changes a number by up to 2^-8, or 2^-9 in norm, and roundings add up by squares.
                spread = math.exp(4 / math.sqrt(max(x.numel(), 1)))
                of_attention = math.sqrt(ROUNDINGS) * 2**-9 * expected.norm()
                error, bound = (x - expected).norm(), spread * (of_eager - expected).norm() + of_attention
            assert error <= bound, (error, bound)

    def check_tokens(self, generate, mask):
        """Compares generated tokens: in float32 they are equal, and in 16 bits they are as likely."""
        tokens = generate(self.ours)
        if self.rounded is None:
            assert torch.equal(tokens, generate(self.right))
        else:
            self.check_likely(tokens, IDS.shape[1], mask)

    @torch.no_grad()
    def check_likely(self, tokens, start, mask):
        """Checks that each token from `start` on is a most likely one, except for rounding."""
        mask = torch.cat([mask, mask.new_ones(len(mask), tokens.shape[1] - start)], 1)
        given = dict(input_ids=tokens, attention_mask=mask.to(self.device))
        logits = self.right(**given).logits[:, start - 1 : -1]
        slack = 1e-5 * logits.abs().max()
        if self.rounded is not None:
            slack = 4 * (self.rounded(**given).logits[:, start - 1 : -1] - logits).abs().max()
        chosen = logits.gather(2, tokens[:, start:, None])[..., 0]
        # After the end of a text there is padding.
        ended = (tokens[:, start:] == 0).cummax(1).values
        assert ((chosen >= logits.max(2).values - slack) | ended).all()


def make(name, attention):
    config = MODELS[name]
    torch.manual_seed(0)
    # from_config writes the attention implementation into the config, so each model gets its own copy.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger weights make scores differ more.
            if parameter.dim() > 1:
                parameter.mul_(3)
            if "sink" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("rows", [20, 12, 1])
def test_an_encoder_and_a_decoder(device, padding, rows):
    """The rows of the decoder see the encoder's rows that are not padding. The decoder has no padding."""
    sizes = dict(d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
    config = BartConfig(vocab_size=64, **sizes, encoder_ffn_dim=96, decoder_ffn_dim=96, dropout=0.0)
    ids, mask = on(device, IDS, MASKS[padding])
    logits = []
    for attention, dtype in (("eager", torch.float32), (NAME, torch.float32 if device == "cpu" else torch.bfloat16)):
        torch.manual_seed(0)
        model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
            given = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :rows])
            logits.append(model.to(device, dtype)(**given).logits.float())
    assert (logits[1] - logits[0]).abs().max() < (1e-5 if device == "cpu" else 2**-4) * logits[0].abs().max()


def on(device, *tensors):
    return [x.to(device) for x in tensors]


@torch.no_grad()
@pytest.mark.parametrize("padding", MASKS)
def test_a_batch(models, padding):
    ids, mask = on(models.device, IDS, MASKS[padding])
    models.check(lambda m: [m(ids, attention_mask=mask).logits], rows=mask.bool())


@torch.no_grad()
def test_packed_sequences(models):
    ids, positions = on(models.device, IDS[:1], POSITIONS)
    one_by_one = documents_of(ids, positions)
    models.check(lambda m: [m(ids, position_ids=positions).logits], one_by_one)
    # A collator that flattens batches gives these lists.
    ends = torch.tensor(ENDS, dtype=torch.int32, device=models.device)
    lists = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=12, max_length_k=12)
    models.check(lambda m: [m(ids, position_ids=positions, use_cache=False, **lists).logits], one_by_one)


# Positions of two rows. The second row has the same documents; other documents; the second half of a document before
# another one; or, beside one document, two that begin late.
ROWS = [
    [POSITIONS[0].tolist()],
    [POSITIONS[0].tolist(), [*range(5), 0, *range(14)]],
    [[*range(7, 16), *range(11)]] * 2,
    [list(range(20)), [*range(3, 13), *range(9, 19)]],
]


def documents_of(ids, positions):
    """A function that computes a model's logits for each document alone, as the positions tell the documents apart."""
    rows = positions.expand(len(ids), -1).tolist()
    cuts = [[0, *(i for i in range(1, 20) if row[i] != row[i - 1] + 1), 20] for row in rows]

    def compute(m):
        def document(n, a, b):
            return m(ids[n : n + 1, a:b], position_ids=torch.tensor([rows[n][a:b]], device=ids.device)).logits

        return [torch.cat([torch.cat([document(n, a, b) for a, b in zip(cut, cut[1:])], 1) for n, cut in enumerate(cuts)])]

    return compute


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_packed_rows_of_a_batch(models, rows, use_cache):
    ids, positions = on(models.device, IDS, torch.tensor(rows))
    models.check(lambda m: [m(ids, position_ids=positions, use_cache=use_cache).logits], documents_of(ids, positions))


@torch.no_grad()
def test_a_packed_row_that_begins_late(models):
    ids, positions = on(models.device, IDS[:1], torch.tensor(ROWS[2][:1]))
    models.check(lambda m: [m(ids, position_ids=positions).logits], documents_of(ids, positions))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_that_gets_no_positions(device, rows):
    """This model passes no positions to attention, so the mask tells the sequences apart."""
    config = GPTBigCodeConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    ids, positions = on(device, IDS[:rows], POSITIONS.expand(rows, -1))
    packed = model(ids, position_ids=positions, use_cache=False).logits
    [expected] = documents_of(ids, positions)(model)
    assert (packed - expected).abs().max() <= (1e-6 if device == "cpu" else 2**-6)
    # The next call has no packed sequences.
    plain = model(ids, use_cache=False).logits
    assert (plain - packed)[:, :12].abs().max() <= (1e-6 if device == "cpu" else 2**-6)
    assert (plain - packed)[:, 13:].abs().max() > 0.01


@torch.no_grad()
def test_positions_that_change_in_place_are_read_again():
    model, positions = make("llama", NAME), torch.arange(20)[None].repeat(2, 1)
    plain = model(IDS, position_ids=positions).logits
    positions.copy_(POSITIONS)
    packed = model(IDS, position_ids=positions).logits
    assert torch.equal(packed, model(IDS, position_ids=POSITIONS).logits)
    with torch.inference_mode():
        positions = torch.arange(20)[None].repeat(2, 1)
        assert torch.equal(plain, model(IDS, position_ids=positions).logits)
        positions.copy_(POSITIONS)
        assert torch.equal(packed, model(IDS, position_ids=positions).logits)


@torch.no_grad()
def test_a_static_cache_without_a_mask(models):
    """The cache's memory behind the last key is ignored."""
    ids = IDS.to(models.device)

    def parts(m):
        cache = transformers.StaticCache(config=m.config, max_cache_len=32)
        return [torch.cat([m(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 11), (11, 20))], 1)]

    models.check(parts, lambda m: [m(ids, use_cache=False).logits])


@torch.no_grad()
@pytest.mark.parametrize("padding", [*MASKS, "packed"])
def test_a_bidirectional_model(device, padding):
    """EmbeddingGemma is Gemma 3 without a causal mask. Its windows reach to both sides."""
    ids, mask = on(device, IDS, MASKS.get(padding, MASKS["none"]))
    given = dict(attention_mask=mask) if padding in MASKS else dict(position_ids=POSITIONS.to(device), use_cache=False)
    outs = []
    for attention, dtype in (("eager", torch.float32), (NAME, torch.float32 if device == "cpu" else torch.bfloat16)):
        model = bidirectional(attention).to(device, dtype)
        outs.append(model(ids, **given).last_hidden_state.float()[mask.bool()])
    assert (outs[1] - outs[0]).abs().max() < (1e-5 if device == "cpu" else 2**-4) * outs[0].abs().max()


@torch.no_grad()
def test_a_compiled_bidirectional_model():
    torch._dynamo.reset()
    model = bidirectional(NAME).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (m(IDS, use_cache=False).last_hidden_state for m in (compiled, model))
    assert torch.equal(found, expected)


# Two images of five and four tokens in the first text and one of twelve in the second, which is longer than the window.
IMAGES = torch.zeros_like(IDS)
IMAGES[0, 8:13] = IMAGES[0, 14:18] = IMAGES[1, 3:15] = 1


def with_images(name, attention):
    """A tiny Gemma 3 or PaliGemma, whose masks follow token_type_ids."""
    tower = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    if name == "gemma3":
        text = MODELS["gemma3"].to_dict()
        config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=63)
    else:
        text = dict(**SIZES, model_type="gemma2" if name == "paligemma 2" else "gemma", head_dim=64)
        text |= dict(WINDOWS, query_pre_attn_scalar=64) if name == "paligemma 2" else {}
        tower |= dict(model_type="siglip_vision_model", projection_dim=64)
        config = PaliGemmaConfig(text_config=text, vision_config=tower, projection_dim=64, image_token_index=63, vocab_size=64)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", ["gemma3", "paligemma", "paligemma 2"])
def test_images_and_prefixes(device, name, padding, calls):
    """Tokens of an image see each other, as all tokens of PaliGemma's prefix do. Decoding goes on from there."""
    ids, mask, images = on(device, IDS, MASKS[padding], IMAGES)
    # PaliGemma's prefix has type 0, and its suffix type 1.
    types = images if name == "gemma3" else (torch.arange(20, device=device) >= 11).long().expand(2, -1)
    given = dict(input_ids=ids, attention_mask=None if padding == "none" else mask, token_type_ids=types)
    outs = []
    for attention, dtype in (("eager", torch.float32), (NAME, torch.float32 if device == "cpu" else torch.bfloat16)):
        model = with_images(name, attention).to(device, dtype)
        with torch.no_grad():
            outs.append([model(**given, use_cache=use_cache).logits.float()[mask.bool()] for use_cache in (False, True)])
            if device == "cpu":
                # Transformers itself fails to decode PaliGemma 2 with a static cache.
                for cache in ("dynamic", "static")[: 1 if name == "paligemma 2" else 2]:
                    outs[-1].append(model.generate(**given, cache_implementation=cache, **GREEDY).float())
    assert any("intervals" in x for _, x in calls)
    for ours, right in zip(*outs[::-1]):
        assert (ours - right).abs().max() <= (1e-5 if device == "cpu" else 2**-4) * right.abs().max()


def test_compiled_images():
    torch._dynamo.reset()
    model = with_images("gemma3", NAME).bfloat16()
    given = dict(input_ids=IDS, attention_mask=LEFT, token_type_ids=IMAGES, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        found, expected = (m(**given).logits[LEFT.bool()] for m in (compiled, model))
        assert torch.equal(found, expected)
        with pytest.raises(RuntimeError, match="token_type_ids without attention_mask are not supported by fa3-rs"):
            compiled(**(given | dict(attention_mask=None)))


def test_a_training_step_with_images():
    gradients = []
    for attention in ("eager", NAME):
        model = with_images("gemma3", attention).train()
        labels = IDS.masked_fill(IMAGES == 1, -100)
        model(input_ids=IDS, attention_mask=MASKS["none"], token_type_ids=IMAGES, labels=labels, use_cache=False).loss.backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    for right, ours in zip(*gradients, strict=True):
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


def bidirectional(attention):
    torch.manual_seed(0)
    options = dict(head_dim=128, query_pre_attn_scalar=128, use_bidirectional_attention=True)
    model = AutoModel.from_config(Gemma3TextConfig(**SIZES, **WINDOWS, **options), attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


@torch.no_grad()
def test_padding_between_keys(device):
    """Padding between keys is supported only without a window, which would count the padding as keys."""
    mask = torch.ones_like(IDS)
    mask[0, 4:7] = 0
    models = Models("llama", device)
    ids, mask = on(device, IDS, mask)
    models.check(lambda m: [m(ids, attention_mask=mask).logits], rows=mask.bool())
    with pytest.raises(NotImplementedError, match="^padding between keys beside a sliding window is not supported by"):
        Models("gemma3", device).ours(ids, attention_mask=mask)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens(models, padding, cache):
    ids, mask = on(models.device, IDS, MASKS[padding])
    with torch.no_grad():
        models.check_tokens(
            lambda m: m.generate(ids, attention_mask=mask, cache_implementation=cache, **GREEDY), MASKS[padding]
        )


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padding", ["packed", "left"])
def test_a_training_step(models, padding, rows):
    ids, positions, mask = on(models.device, IDS[:rows], POSITIONS.expand(rows, -1), LEFT[:rows])
    # Padding has no labels, nor has the first token behind it.
    labels = ids.masked_fill(mask.roll(1, 1) * mask == 0, -100)

    def gradients(m, losses):
        m.train()
        m.zero_grad()
        sum(losses).backward()
        return [x.grad for x in m.parameters() if x.grad is not None]

    def step(m):
        if padding == "left":
            return gradients(m, [m(ids, attention_mask=mask, labels=labels, use_cache=False).loss])
        # A row has 19 next tokens. The one behind the last token of the first sequence does not count.
        target = ids.clone()
        target[:, 12] = -100
        return gradients(m, [m(ids, position_ids=positions, labels=target, use_cache=False).loss])

    def one_by_one(m):
        # The sequences have 11 and 7 next tokens.
        each = [(row[None, a:b], b - a - 1) for row in ids for a, b in zip(ENDS, ENDS[1:])]
        return gradients(m, [m(x, labels=x, use_cache=False).loss * count / (18 * rows) for x, count in each])

    models.check(step, step if padding == "left" else one_by_one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pages", [False, True], ids=["packed", "pages"])
def test_continuous_batching(name, pages, device, monkeypatch, calls, caplog):
    pytest.importorskip("psutil", reason="skipped: psutil is not installed")
    from transformers.generation.continuous_batching import initialization

    caplog.set_level(logging.CRITICAL)
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("skipped: where there is a GPU, transformers asks its memory of models on the CPU, too")
    if device == "cpu" and pages:
        # Transformers decodes over pages only on a GPU. This check of it is skipped.
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None)
    # Rows that are appended to pages have 16 bits.
    models = Models(name, device, torch.bfloat16 if pages else None)
    if name == "gemma2" and OLDER:
        with pytest.raises(NotImplementedError, match="^a softcap is lost in the continuous batching"):
            AttentionInterface()[f"paged|{NAME}"](models.ours, *[torch.empty(1, 2, 3, 64)] * 3, softcap=50.0)
        return
    prompts = [IDS[:1, :5], IDS[:1, :13], IDS[1:]]
    options = dict(num_blocks=64, max_batch_tokens=64, max_blocks_per_request=4 if pages else 0)
    options["block_size" if OLDER else "page_size"] = 32
    result = models.ours.generate_batch(
        inputs=[x[0].tolist() for x in prompts],
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    )
    assert [x.error for x in result.values()] == [None] * 3
    # For models with windows transformers packs keys, and uses no pages.
    assert any("page_table" in given for _, given in calls) == (pages and name in ("llama", "qwen3"))
    for prompt, each in zip(prompts, result.values(), strict=True):
        assert len(each.generated_tokens) == 6
        tokens = torch.cat([prompt, torch.tensor([each.generated_tokens])], 1).to(device)
        models.check_likely(tokens, prompt.shape[1], torch.ones_like(prompt))


def test_windows_caps_and_sinks_reach_the_kernels(device, calls):
    windows = [(7, 0), (-1, 0)]
    expected = dict(llama=([(-1, 0)] * 2, None, False), gemma2=(windows, 50.0, False), gemma3=(windows, None, False))
    expected["gpt-oss"] = windows, None, True
    for name, (windows, cap, has_sinks) in expected.items():
        calls.clear()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        with torch.no_grad():
            make(name, NAME).to(device, dtype)(IDS.to(device))
        assert [name for name, _ in calls] == ["forward"] * 2
        given = [(x["window"], x["softcap"], x.get("sink") is not None) for _, x in calls]
        assert given == [((*window, 0), cap, has_sinks) for window in windows]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_16_bits(device, dtype):
    """Results differ from float32 results only by rounding."""
    ids, mask = on(device, IDS, LEFT)
    with torch.no_grad():
        right = make("qwen3", "eager").to(device)(ids, attention_mask=mask).logits
        ours = make("qwen3", NAME).to(device, dtype)(ids, attention_mask=mask).logits
    assert ours.dtype == dtype
    error = (ours - right)[mask.bool()].abs().max() / right.abs().max()
    assert error < (2**-5 if dtype == torch.bfloat16 else 2**-8)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.hopper)])
def test_compiled_models(device, backend):
    """One graph gives the results of plain calls. In float32 transformers itself breaks the graph, with a warning."""
    torch._dynamo.reset()
    model = make("qwen3", NAME).to(device, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids, positions = on(device, IDS, POSITIONS.expand(2, -1))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        difference = (compiled(ids, use_cache=False).logits - expected).abs().max()
        assert difference <= (0 if backend == "aot_eager" else 2**-4 * expected.abs().max())
        if device == "cpu":
            with pytest.raises(RuntimeError, match="packed sequences in 2 rows are not supported"):
                compiled(ids, position_ids=positions, use_cache=False)
            # Transformers would not compute the rows before the smallest position.
            late = torch.tensor(ROWS[2][:1])
            with pytest.raises(RuntimeError, match="the first packed sequence does not begin at the least position"):
                torch.compile(model, backend=backend)(ids[:1], position_ids=late, use_cache=False)


def test_registering_twice_changes_nothing():
    utils = transformers.modeling_flash_attention_utils
    before = utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert register() == NAME == "fa3-rs/flash-attn3"
    assert (utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation) == before
    # Imports of other implementations still go to transformers' own function.
    with pytest.raises(ImportError):
        utils._lazy_imports("flash_attention_4")


def test_versions_that_do_not_fit_are_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("transformers.__version__", "5.9.1")
        with pytest.raises(ImportError, match="^transformers is 5.9.1, expected 5.17 or newer$"):
            register()
    monkeypatch.delattr(transformers.modeling_flash_attention_utils, "_lazy_imports")
    with pytest.raises(ImportError, match="^transformers .* has no _lazy_imports: this version of fa3 does not fit it$"):
        register()


def test_models_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="^T5ForConditionalGeneration does not support FlashAttention"):
        sizes = dict(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        T5ForConditionalGeneration._from_config(T5Config(**sizes), attn_implementation=NAME)

    class Other(LlamaForCausalLM):
        _compatible_flash_implementations = ["flash_attention_4"]

    with pytest.raises(ValueError, match="^Other runs with flash_attention_4 alone: fa3-rs/flash-attn3 cannot run it$"):
        Other._from_config(MODELS["llama"], attn_implementation=NAME)


def test_what_flash_attention_has_not_is_refused():
    model = make("llama", NAME)

    def refuses(sentence, **options):
        with pytest.raises(NotImplementedError, match=f"^{re.escape(sentence)}"):
            model(IDS, **options)

    refuses("attention_mask is (2, 1, 20, 20), and fa3-rs/flash-attn3 takes masks of", attention_mask=torch.ones(2, 1, 20, 20))
    refuses("position_bias is not supported by fa3-rs/flash-attn3", position_bias=torch.zeros(1))
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :5], **{CACHE: cache})
    refuses("packed sequences of 20 rows with 25 keys are not supported", position_ids=POSITIONS, **{CACHE: cache})
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    model(IDS)
    model.train()
    refuses("dropout is 0.25, and fa3-rs/flash-attn3 has none: set attention_dropout to 0")


@pytest.mark.parametrize("padding", MASKS)
def test_masks_that_flash_attention_has_not_are_intervals(padding):
    """Images, functions of users, chunks, and windows that are not the layer's."""
    config, eager = make("gemma3", NAME).config, make("gemma3", "eager").config
    is_key = None if padding == "none" else MASKS[padding]
    causal, window = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    zeros = torch.zeros(2, dtype=torch.int64)
    chunks = lambda width: dict(and_mask_function=masking_utils.chunked_overlay(width, zeros))

    # The names of arguments change with versions.
    mask = lambda config, make, options: make(config, torch.zeros(2, 20, 8), is_key, None, **options)
    for make_mask in (causal, window):
        assert (mask(config, make_mask, {}) is None) == (padding == "none")
        for options, is_plain in [
            (dict(block_sequence_ids=IMAGES - 1), False),
            (dict(or_mask_function=masking_utils.blockwise_overlay(IMAGES - 1)), False),
            (dict(and_mask_function=lambda batch, head, query, key: key != 3 + batch), False),
            (dict(and_mask_function=masking_utils.sliding_window_overlay(7)), False),
            (chunks(19), False),
            (chunks(20), True),
        ]:
            found = mask(config, make_mask, options)
            if is_plain:
                assert found is None or found.dim() == 2
                continue
            seen = mask(eager, make_mask, options) == 0
            assert torch.equal(fa3.masks.to_dense(found.as_subclass(torch.Tensor), 20).expand_as(seen), seen)
    every_third = dict(and_mask_function=lambda batch, head, query, key: key % 3 == 0)
    with pytest.raises(ValueError, match=r"^row \d+( of entry 0 of the batch)? sees 3 intervals of keys, "):
        mask(config, causal, every_third)


def test_functions_are_our_own():
    """Transformers calls our functions, whatever other packages are installed."""
    functions, _ = transformers.modeling_flash_attention_utils.lazy_import_flash_attention(NAME)
    # Transformers wraps some of them, to hide them from compilers.
    functions = [inspect.unwrap(x) for x in functions[:3]]
    assert functions == [fa3.flash_attn_func, fa3.flash_attn_varlen_func, fa3.flash_attn_with_kvcache]
