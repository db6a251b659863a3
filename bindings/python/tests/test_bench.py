"""The benchmarks of the folder bench, as far as they run without a GPU. Needs torch."""

import argparse
import contextlib
import dataclasses
import itertools
import math
import pathlib
import sys
import types
import xml.etree.ElementTree

import pytest

torch = pytest.importorskip("torch", reason="skipped: torch is not installed")

sys.path.append(str(pathlib.Path(__file__).parents[3] / "bench"))

import activation
import backward
import blocks
import chart
import decode
import distributions
import flex
import fp8
import gpt
import gradients
import implementations
import latent
import masks
import measure
import packed
import ratios
import settings
import sparse
import sustained
import svg
import timing
import train_gpt
from reference import as_products_read, quantized, quantized_channels, standard

SHAPE = (1, 2048, 2, 128)


def drawn(kind, shape=SHAPE, dtype=torch.float32, seed=1):
    return distributions.draw(kind, shape, dtype, device="cpu", seed=seed)


def scores(kind, shape=SHAPE):
    """The scores of a kind of distribution, (batch, heads, rows, keys) in float64."""
    q, k, _ = (x.double().transpose(1, 2) for x in drawn(kind, shape))
    return q @ k.transpose(-1, -2) / math.sqrt(shape[-1])


@pytest.mark.parametrize("kind", distributions.KINDS)
def test_a_kind_has_its_shape_and_its_seed(kind):
    qkv = drawn(kind, dtype=torch.bfloat16)
    assert all(x.shape == SHAPE and x.dtype == torch.bfloat16 and x.isfinite().all() for x in qkv)
    again, other = drawn(kind, dtype=torch.bfloat16), drawn(kind, dtype=torch.bfloat16, seed=2)
    for x, same, different in zip(qkv, again, other):
        assert torch.equal(x, same) and not torch.equal(x, different)
    # `shrink` has the largest numbers of all kinds at 16k keys, and float16 can hold them.
    q, k, _ = drawn(kind, (1, 16384, 1, 256), torch.float16)
    assert q.isfinite().all() and k.isfinite().all()


@pytest.mark.parametrize("kind, deviation", [("normal", 1), ("hot", 3), ("outlier", 1.1)])
def test_scores_are_as_wide_as_they_say(kind, deviation):
    assert scores(kind).mean().abs() < 0.01
    assert scores(kind).std().item() == pytest.approx(deviation, rel=0.01)


def test_outliers_have_the_papers_moments():
    for x in drawn("outlier"):
        assert x.square().mean().item() == pytest.approx(1.1, rel=0.05)
        # 55 % of the outliers lie beyond 6, and 2e-9 of the other numbers.
        assert (x.abs() > 6).double().mean().item() == pytest.approx(0.00055, rel=0.2)


def test_shrink_falls_by_4_every_64_keys():
    by_block = scores("shrink").unflatten(-1, (-1, 64)).mean((0, 1, 2, 4))
    falls = by_block[:-1] - by_block[1:]
    assert torch.allclose(falls, torch.full_like(falls, 4), atol=0.1)


def test_one_key_in_500_is_a_spike_of_12():
    by_key = scores("spike").mean((0, 1, 2))
    spikes = torch.arange(SHAPE[1]) % 500 == 250
    assert spikes.sum() == 4
    assert by_key[spikes].mean().item() == pytest.approx(12, abs=0.2)
    assert by_key[~spikes].mean().abs() < 0.01


def test_recency_falls_with_distance():
    of_kind = scores("recency", (4, 1024, 8, 128))
    means = [of_kind.diagonal(-distance, -2, -1).mean().item() for distance in (0, 16, 128, 1000)]
    assert means == sorted(means, reverse=True)
    assert means[0] == pytest.approx(2.25 * math.sqrt(128), rel=0.1)


def test_real_scores_are_the_models_own():
    tensors = distributions._safetensors(distributions.REAL_DATA)
    q, k = (tensors[name].double().transpose(1, 2) for name in "qk")
    model = q @ k.transpose(-1, -2) / math.sqrt(32)

    def of(scores):
        """Mean, standard deviation and maximum of scores, and the mean distance of a row's maximum from its mean."""
        above = (scores.amax(-1) - scores.mean(-1)).mean()
        return [x.item() for x in (scores.mean(), scores.std(), scores.amax(), above)]

    assert of(model) == pytest.approx([-1.08, 1.52, 6.99, 4.82], abs=0.01)
    for head_dim in (32, 64, 128, 256):
        assert of(scores("real", (1, 2048, 3, head_dim))) == pytest.approx(of(model), abs=0.25)
    with pytest.raises(ValueError, match="heads of 32 channels, which do not fill 80"):
        drawn("real", (1, 64, 1, 80))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_in_float64_are_attention(causal):
    q, k, v = drawn("normal", (2, 300, 3, 16))
    rows = measure.sampled_rows(300)
    assert rows[0] == 0 and rows[-1] == 299 and measure.sampled_rows(2) == [0, 1]
    expected, _ = standard(q, k, v, causal=causal)
    assert torch.allclose(measure.exact(q, k, v, causal, rows), expected[:, rows], atol=1e-12)


def test_the_power_is_that_between_updates_of_the_counter():
    # The power is 500 W. The counter of energy is updated every 100 ms and read every 30 ms.
    readings = [(t / 1000, 1000 + 500 * (t // 100) / 10) for t in range(0, 1000, 30)]
    assert timing.watts(readings) == pytest.approx(500, rel=0.05)
    assert timing.watts(readings[:5]) is None and timing.watts([]) is None


def test_cells_are_the_ones_that_options_name():
    default = settings.product([64, 128], [512, 1024], [False, True])
    assert [str(cell) for cell in default[:3]] == [
        "d 64   seqlen 512    dense ",
        "d 64   seqlen 1024   dense ",
        "d 64   seqlen 512    causal",
    ]

    def chosen(*words):
        return settings.chosen(settings.common_options("", rounds=1).parse_args(words), default)

    assert chosen() == default
    assert chosen("--causal", "1") == [cell for cell in default if cell.causal]
    cells = chosen("--head-dim", "256", "--seqlen", "2048", "--causal", "0", "1")
    assert cells == [settings.Cell(256, 2048, causal) for causal in (False, True)]
    # 16k tokens, hidden size 2048. Operations are 4 * seqlen^2 * head_dim * heads * batch, or half of it if causal.
    assert cells[0].shape == (8, 2048, 8, 256)
    rates = [4 * 2048**2 * 256 * 64 / 1e9, 2 * 2048**2 * 256 * 64 / 1e9]
    assert [cell.tflops(1) for cell in cells] == pytest.approx(rates)
    with pytest.raises(argparse.ArgumentTypeError, match="no whole number of heads with head_dim 96"):
        settings._head_dim("96")


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.1])
def test_a_wrong_result_is_named(error, capsys):
    measured = measure.Measured({"ours": 1.0, "fa3": 1.0}, {"ours": error, "fa3": 0.003}, 1.0)
    assert list(measured.wrong()) == ["ours"] and not measured.print_wrong()
    assert capsys.readouterr().out.startswith("WRONG: ours has")


def test_a_summary_is_of_the_cells_that_an_implementation_takes(capsys):
    first, second = settings.product([64, 256], [2048], [True])
    others = [
        ratios.report(first, "bf16", {"ours": 1.0, "fa3": 2.0, "cudnn": 4.0}, work=2.5),
        ratios.report(second, "bf16", {"ours": 1.0, "cudnn": 1.0}, work=2.5),
    ]
    assert others == [{"fa3": 2, "cudnn": 4}, {"cudnn": 1}]
    ratios.summarise(list(zip((first, second), others)))
    said = capsys.readouterr().out
    assert f"ours {2.5 * first.tflops(1):5.0f}  fa3 {1.25 * first.tflops(1):5.0f}" in said
    assert "mean to the best: 1.414" in said and "mean to fa3: 2.000 (1 cells)" in said
    assert "mean to cudnn: 2.000 (2 cells)" in said and f"worst cell, to the best: 1.000 ({second})" in said
    ratios.summarise([(first, {})])
    assert not capsys.readouterr().out


def test_cells_of_flex():
    cells = flex.chosen(flex.parse([]))
    assert len(cells) == 9 * 9 + 2 * 6 and str(cells[0]) == "soft cap d128 8k"
    assert [str(cell) for cell in flex.chosen(flex.parse(["--quick", "--cells", "bias", "images d128"]))] == [
        "bias d128 8k",
        "learned bias d128 8k",
        "images d128 8k",
    ]
    # The table of a bias has 8 GiB at most.
    assert flex.Cell("bias", 64, 32768).heads == (2, 1) and flex.Cell("bias", 128, 8192).heads == (16, 4)


@pytest.mark.parametrize("case", flex.CASES)
def test_cases_of_flex_are_computed(case):
    cell = flex.Cell(case, 256, 1280)
    heads, heads_kv = cell.heads
    q, k, v = (torch.randn(1, 1280, of, 256)[..., :32].contiguous() for of in (heads, heads_kv, heads_kv))
    drawn_case = flex.CASES[case](heads, cell.seqlen, "cpu")
    functions, visible = flex.passes(drawn_case, cell, q, k, v)
    assert 1280 <= visible <= 1280**2
    for by in functions.keys() & {"ours", "flag"}:
        assert flex.error(functions[by](), drawn_case, q, k, v) < 1e-4


def test_what_raises_in_a_cell_of_flex_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *given, **named: 1 / 0)
    monkeypatch.setattr(timing, "in_turns", lambda functions, *given: dict.fromkeys(functions, 2.0))
    monkeypatch.setattr(settings, "TOKENS", 128)
    forward, backward = flex.measure(flex.Cell("alibi", 512, 128), flex.parse([]))
    assert set(forward["ms"]) == set(backward["ms"]) == {"ours", "flag", "plain"} and forward["errors"]["ours"] < 0.02
    assert forward["raised"] == {"flex": "ZeroDivisionError: division by zero"}
    assert "flex raised ZeroDivisionError" in capsys.readouterr().out
    flex.summarise([forward, backward])


def test_options_of_fp8(capsys):
    options = fp8.parse([])
    assert options.forms == [form for form in fp8.FORMS if form != "fa3"] and "chain" in options.forms
    assert options.kind == ["normal"] and options.sustained is None
    assert len(settings.chosen(options, settings.PAPER)) == 36
    assert fp8.parse(["--fa3", "fa3_C.so"]).forms == fp8.FORMS
    options = fp8.parse("--fa3 fa3_C.so --forms ours fa3 --sustained 0.5".split())
    assert options.forms == ["ours", "fa3"] and options.sustained == 0.5
    with pytest.raises(SystemExit):
        fp8.parse(["--forms", "ours", "fa3"])
    assert "the form fa3 needs --fa3" in capsys.readouterr().err


def spread(scales, seqlen):
    """Scales per head, or per block of 128 rows, as factors that broadcast to (batch, seqlen, heads, head_dim)."""
    if scales.dim() == 2:
        return scales[:, None, :, None]
    return scales.transpose(1, 2).repeat_interleave(128, 1)[:, :seqlen, :, None]


def in_rows(codes, seqlen):
    """The inverse of `as_products_read`: (batch, heads, head_dim, keys) as (batch, seqlen, heads, head_dim)."""
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]).argsort()
    keys = codes.view(torch.uint8).unflatten(-1, (-1, 16))[..., order].flatten(-2)
    return keys.permute(0, 3, 1, 2)[:, :seqlen].contiguous().view(codes.dtype)


class Package:
    """A stand-in for fa3, by the definitions, which notes the arguments of each call of `flash_attn_func`."""

    quantize = staticmethod(quantized)
    quantize_channels = staticmethod(quantized_channels)

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, causal, **named):
        self.calls.append((q, k, v, named))
        if named:
            seqlen = q.shape[1]
            v = in_rows(v, seqlen) if named.get("v_transposed") else v
            q, k = (x.float() * spread(named[f"{name}_descale"], seqlen) for name, x in (("q", q), ("k", k)))
            if "v_mean" in named:
                v = v.float() * named["v_descale"][:, None] + named["v_mean"][:, None]
            else:
                v = v.float() * spread(named["v_descale"], seqlen)
        return standard(q, k, v, causal=causal)[0]

    def flash_attn_fp8_func(self, q, k, v, causal, v_channels=False):
        named = {}
        (q, named["q_descale"]), (k, named["k_descale"]) = map(quantized, (q, k))
        if v_channels:
            v, named["v_descale"], named["v_mean"] = quantized_channels(v)
        else:
            v, named["v_descale"] = quantized(v)
        return self.flash_attn_func(q, k, v, causal, **named)


def test_heads_have_scales_of_their_own(monkeypatch):
    package = Package()
    monkeypatch.setitem(sys.modules, "fa3", package)
    x, y, z = drawn("normal", (2, 70, 3, 16), torch.bfloat16)
    x[1, :, 2] *= 100
    fp8.bind(["ours"], {"ours": package.flash_attn_func}, x, y, z, False)["ours"]()
    ((codes, _, _, named),) = package.calls
    scales = named["q_descale"]
    expected_codes, expected_scales = quantized(x, scales_of="heads")
    assert scales.shape == (2, 3) and torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert (codes.float().abs().amax((1, 3)) == 448).all() and scales[1, 2] > 50 * scales[1, 1]
    for name, tensor in (("k_descale", y), ("v_descale", z)):
        assert torch.equal(named[name], quantized(tensor, scales_of="heads")[1])


@pytest.mark.parametrize("causal", [False, True])
def test_forms_of_fp8_are_of_the_same_inputs(causal, monkeypatch):
    package = Package()
    monkeypatch.setitem(sys.modules, "fa3", package)
    # Heads and blocks have different magnitudes, and channels have means.
    q, k, v = drawn("normal", (2, 300, 3, 32), torch.bfloat16)
    v = v * torch.tensor([0.1, 1.0, 10.0])[:, None].bfloat16() + torch.arange(32).bfloat16() / 2
    v[:, 128:] *= 2
    functions = {"ours": package.flash_attn_func, "fa3": package.flash_attn_func}
    bound = fp8.bind(fp8.FORMS, functions, q, k, v, causal)
    assert list(bound) == fp8.FORMS and list(fp8.bind(["bf16"], functions, q, k, v, causal)) == ["bf16"]
    rmse, size = measure.errors(bound, q, k, v, causal)
    error = measure.Measured({}, rmse, size).relative()
    assert error["bf16"] < 1e-12 and all(1e-3 < error[form] < 0.1 for form in fp8.FORMS if form != "bf16")
    assert error["ours"] == error["fa3"] == pytest.approx(error["transposed"], abs=1e-15)
    by_blocks = [error[form] for form in ("blocks", "blocks-rows", "chain")]
    assert by_blocks == pytest.approx([by_blocks[0]] * 3, abs=1e-15)
    assert error["channels"] == pytest.approx(error["chain-channels"], abs=1e-15)
    assert error["channels"] < error["blocks"]
    # Each form is what its name says: V in rows or transposed with the same codes, and scales per head or per block.
    of_ours, of_fa3, of_transposed, of_blocks, of_rows, of_channels, of_bf16, _, _ = package.calls
    assert of_ours[:3] == of_fa3[:3] and "v_transposed" not in of_ours[3]
    same = as_products_read(of_ours[2]).view(torch.uint8)
    assert torch.equal(of_transposed[2].view(torch.uint8), same) and of_transposed[3]["v_transposed"]
    assert all(of_transposed[3][name] is scales for name, scales in of_ours[3].items())
    assert of_blocks[3]["v_transposed"] and "v_transposed" not in of_rows[3]
    assert of_blocks[3]["v_descale"].shape == of_channels[3]["k_descale"].shape == (2, 3, 3)
    assert of_channels[3]["v_descale"].shape == of_channels[3]["v_mean"].shape == (2, 3, 32)
    assert of_bf16[2] is v and not of_bf16[3]


def test_flash_attention_3_takes_the_scales(monkeypatch):
    given = {}

    def fwd(q, k, v, **named):
        given.update(named)
        return q, k

    monkeypatch.setattr(torch, "ops", types.SimpleNamespace(flash_attn_3=types.SimpleNamespace(fwd=fwd)))
    x = torch.ones(1, 2, 3, 16)
    assert implementations._flash_attention_3(x, x, x, causal=True, q_descale=1, v_descale=3) is x
    assert given == {"is_causal": True, "softmax_scale": 0.25, "q_descale": 1, "v_descale": 3}


def test_errors_of_fp8_are_held_to_their_bounds(capsys):
    assert set(fp8.BOUNDS) == set(fp8.FORMS) - {"fa3"}
    rmse = dict.fromkeys(fp8.FORMS, 0.1) | {"bf16": 0.002, "fa3": 0.7}
    assert measure.Measured({}, rmse, 1.0).print_wrong(fp8.BOUNDS)
    # Bounds are relative to the magnitude of O.
    assert set(measure.Measured({}, rmse, 0.21).wrong(fp8.BOUNDS)) == set(fp8.BOUNDS) - {"bf16"}
    rmse |= {"bf16": 0.1, "chain": math.nan, "ours": 0.5}
    assert not measure.Measured({}, rmse, 1.0).print_wrong(fp8.BOUNDS)
    wrong = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert wrong == ["ours", "bf16", "chain"]


def test_a_summary_of_fp8_has_the_ratios_that_were_measured(capsys):
    cell = settings.Cell(128, 1024, True)
    measured = measure.Measured({"ours": 1.0, "transposed": 0.5}, {"ours": 0.1, "transposed": 0.2}, 2.0)
    fp8.report("hot", cell, measured)
    rates, errors = capsys.readouterr().out.splitlines()
    assert str(cell) in rates and f"ours {cell.tflops(1):4.0f}  transposed {cell.tflops(0.5):4.0f}" in rates
    assert errors.endswith("ours 0.05  transposed 0.1")
    first = {"ours": 1.0, "fa3": 2.0, "transposed": 0.5, "bf16": 3.0, "chain": 2.0}
    second = {"ours": 4.0, "fa3": 2.0, "transposed": 0.5, "bf16": 3.0, "chain": 1.5}
    larger = settings.Cell(256, 1024, True)
    fp8.summarise([("hot", cell, first), ("hot", larger, second)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    of_ours = [line for line in lines if line.startswith("fa3 / ours")]
    assert [line.split(" (")[0] for line in of_ours] == [
        "fa3 / ours all geometric mean 1.000 worst 0.500",
        "fa3 / ours d 128 geometric mean 2.000 worst 2.000",
        "fa3 / ours d 256 geometric mean 0.500 worst 0.500",
    ]
    assert "d 256" in of_ours[0].split(" (")[1]
    assert any(line.startswith("fa3 / transposed all geometric mean 4.000") for line in lines)
    assert any(line.startswith("bf16 / chain all geometric mean 1.732 worst 1.500") for line in lines)
    assert len(lines) == 9
    # If all cells have one head_dim, the summary has no lines for each head_dim.
    fp8.summarise([("hot", cell, first)])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_fp8_runs_in_turns_or_alone(monkeypatch, capsys):
    monkeypatch.setattr(timing, "in_turns", lambda *given: given)
    bound = {"ours": None}
    assert fp8.times(bound, fp8.parse(["--rounds", "2"]), None) == ((bound, 2, 25.0), {})

    def sustain(function, warm_up, seconds, meter):
        assert (warm_up, seconds, meter) == (sustained.WARM_UP, 1.5, "meter")
        ran.append(function)
        return timing.Sustained(function(), 500.0, None)

    monkeypatch.setattr(timing, "sustain", sustain)
    # The time is the median of three rounds, in which the forms take turns to begin.
    ran = []
    times = {"ours": iter([1.0, 9.0, 2.0]), "transposed": iter([3.0, 4.0, 5.0])}
    bound = {form: times[form].__next__ for form in times}
    ms, taken = fp8.times(bound, fp8.parse("--sustained 1.5 --rounds 3".split()), "meter")
    assert ms == {"ours": 2.0, "transposed": 4.0}
    ours, transposed = bound.values()
    assert ran == [ours, transposed, transposed, ours, ours, transposed]
    cell = settings.Cell(64, 512, False)
    sustained.print_taken(cell, taken)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"    ours        {cell.tflops(2):4.0f} TFLOP/s  500 W  - MHz  1000 mJ"
    assert second.startswith("    transposed  ") and second.endswith("2000 mJ")


def sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_held_to_float64(causal, capsys):
    shape = (2, 150, 3, 16)
    (q, k, v), (dout, _, _) = drawn("normal", shape), drawn("normal", shape, seed=2)
    makers = {
        "backward": lambda *inputs: gradients._autograd_backward(sdpa, *inputs),
        "step": lambda *inputs: gradients._autograd_step(sdpa, *inputs),
    }
    functions = backward.takers(makers, "cell", dout, q, k, v, causal, False)
    functions["other mask"] = gradients._autograd_step(sdpa, dout, q, k, v, not causal)
    relative = backward.errors(functions, dout, q, k, v, causal)
    for name in makers:
        assert max(relative[name].values()) < 1e-5
    assert not backward.print_wrong(relative)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all(line.startswith("WRONG: other mask has") for line in said)
    # If another library refuses the deterministic form, this is printed and it is not measured. Ours must not refuse.
    assert not backward.takers(makers, "cell", dout, q, k, v, causal, True)
    assert "cell  step refuses: it is not measured" in capsys.readouterr().out
    with pytest.raises(NotImplementedError):
        backward.takers({"ours": makers["step"]}, "cell", dout, q, k, v, causal, True)


def test_options_of_the_backward_pass():
    options = backward.parse([])
    assert options.peers == ["cudnn"] and options.data == "normal" and options.dtype == ["bf16"]
    assert len(settings.chosen(options, settings.PAPER)) == 36
    options = backward.parse("--deterministic --step --data recency".split())
    assert options.peers == [] and options.deterministic and options.step and options.data == "recency"
    assert backward.parse(["--peers", "fa2", "cudnn"]).peers == ["fa2", "cudnn"]


def test_batches_are_of_the_text_and_of_the_seed():
    text = train_gpt.corpus()
    assert text.min() >= 0 and text.max() < train_gpt.SIZES.vocabulary
    places = torch.arange(len(text))
    taken = list(train_gpt.batches(places, 3, 1))
    assert len(taken) == 3
    for inputs, targets in taken:
        assert inputs.shape == (train_gpt.BATCH, train_gpt.CONTEXT) and torch.equal(inputs + 1, targets)
    again, other = next(train_gpt.batches(places, 3, 1)), next(train_gpt.batches(places, 3, 2))
    assert torch.equal(again[0], taken[0][0]) and not torch.equal(other[0], taken[0][0])


def test_a_gpt_trains_and_its_runs_begin_alike(monkeypatch):
    monkeypatch.setattr(train_gpt, "BATCH", 2)
    monkeypatch.setattr(train_gpt, "SIZES", dataclasses.replace(train_gpt.SIZES, blocks=1))
    # The text repeats itself, so that training on one part of it teaches all others.
    text = torch.arange(4 * train_gpt.CONTEXT) % 8
    low, full = (train_gpt.train(*train_gpt.RUNS[name], text, 2, 1) for name in ("sdpa", "f32"))
    # A model that has learnt nothing has a loss of log 256.
    assert full[0] == pytest.approx(math.log(256), abs=0.3) and full[1] < full[0]
    assert low == pytest.approx(full, abs=0.01) and low != full


def test_a_gpt_sees_no_later_token():
    torch.manual_seed(1)
    model = gpt.Gpt(train_gpt.SIZES, train_gpt.sdpa)
    assert 2e6 < sum(x.numel() for x in model.parameters()) < 9e6
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % 256
    differs = (model(tokens) - model(changed)).abs().amax(-1)[0] > 1e-6
    assert differs.tolist() == [False] * 10 + [True] * 10


@pytest.mark.parametrize("loss, alike", [(2.05, True), (2.07, False), (1.9, False), (math.nan, False)])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_training_is_judged_by_the_smoothed_losses_of_all_steps(loss, alike, step, capsys):
    curves = {"ours": [2.0] * 3, "sdpa": [2.0, 2.02, 2.0], "f32": [2.0] * 3}
    curves["ours"][step] = loss
    assert train_gpt.trains_alike(curves) == alike
    assert ("WRONG" in capsys.readouterr().out) != alike
    apart = train_gpt.largest_difference(curves["ours"], curves["f32"])
    assert apart == pytest.approx(abs(loss - 2), nan_ok=True)
    assert train_gpt.smoothed([4.0, 2.0] + [1.0] * 19)[::20] == [4.0, 1.05]


def parts(text, tag):
    """The elements of a chart with this tag, but for the background and the legend's marks."""
    root = xml.etree.ElementTree.fromstring(text)
    found = [x for x in root.iter() if x.tag.endswith(f"}}{tag}")]
    return [x for x in found if tag != "rect" or len(x) == 1]


def test_a_chart_has_the_curves():
    text = train_gpt.chart({name: [5.5, 3.0, math.nan, 2.5] for name in train_gpt.RUNS})
    assert [len(x.get("points").split()) for x in parts(text, "polyline")] == [3] * 3
    assert {x.text for x in parts(text, "text")} >= {"ours", "sdpa", "f32", "by step: loss", "1", "3", "4"}


def test_bars_stand_on_zero_below_the_legend_and_one_unit_has_one_scale():
    numbers = {"one": [1, 2.0, None], "two": [4.0, math.inf, 3]}
    panels = [
        svg.Panel(name, unit, dict(enumerate("abc")), [svg.Series(name, "#123456", numbers[name])])
        for name, unit in (("one", "m"), ("two", "m"), ("one", "s"))
    ]
    text = svg.bars(panels, 3)
    bars = [{key: float(x.get(key)) for key in ("y", "height", "width")} for x in parts(text, "rect")]
    assert len(bars) == 2 + 2 + 2
    assert {round(bar["y"] + bar["height"]) for bar in bars} == {svg.LEGEND + svg.BARS[1] - svg.BOTTOM}
    assert min(bar["y"] for bar in bars) > svg.LEGEND + svg.TOP - 1
    high, low = bars[2]["height"], bars[0]["height"]
    assert high == pytest.approx(4 * low, abs=0.2) and bars[4]["height"] > 1.5 * low
    assert "prefers-color-scheme: dark" in text
    # Each name is once in the legend, as wide as its letters are at most.
    names = [x for x in parts(text, "text") if x.text in numbers]
    assert len(names) == 2 and float(names[1].get("x")) - float(names[0].get("x")) >= 3 * svg.CHARACTER + 18


TICKS = [(0, 1, 0, 1), (0, 825, 0, 1000), (2.5, 5.5, 2, 6), (0, 0, 0, 0.2)]


@pytest.mark.parametrize("least, most, first, last", TICKS)
def test_ticks_are_round_and_few(least, most, first, last):
    ticks = svg._ticks(least, most)
    assert ticks[0] == first and ticks[-1] == pytest.approx(last, abs=1e-9) and 2 <= len(ticks) <= 7
    assert ticks[0] <= least and ticks[-1] >= most


def test_a_chart_has_every_setting_once():
    cells = list(settings.PAPER)
    ms = {"ours": 1.0, "fa3": 2.0, "fa2": 4.0}
    measured = [{**dataclasses.asdict(cell), "ms": ms} for cell in cells]
    rates = chart.rates_of_paper(measured)
    assert len(rates) == 6
    for cell in cells:
        of_names = rates[cell.causal, cell.head_dim]
        seqlen = chart.size(cell.seqlen)
        assert of_names["ours"][seqlen] == cell.tflops(1.0) == 2 * of_names["fa3"][seqlen]
    assert len(parts(chart.chart(measured), "rect")) == 2 * 36


def test_charts_of_decoding_have_a_panel_for_each_batch_and_number_of_heads():
    ms = {"ours": 0.5, "fa3": 1.0, "16 bits": 2.0}
    more = {"table": "speculative", "layout": "64", "head_dim": 128, "e4m3": False, "ms": ms}
    measured = [dataclasses.asdict(row) | more for row in decode.TABLES["speculative"][0]]
    prefill = dataclasses.asdict(decode.TABLES["prefill"][0][0]) | more | {"table": "prefill"}
    text = chart.chart([*measured, measured[0] | {"lengths": (5, 7)}, prefill])
    assert len(parts(text, "rect")) == 2 * 16
    titles = [x.text for x in parts(text, "text") if x.text.endswith("TB/s")]
    assert titles == [f"batch {batch}, 4 new, 64: TB/s" for batch in (1, 4, 16, 64)]
    measured = [{"heads": heads, "lengths": lengths, "ms": ms} for heads, lengths in latent.DECODING.values()]
    text = chart.chart([*measured, {"setting": "prefill", "ms": ms}])
    assert len(parts(text, "rect")) == 2 * (3 + 5)
    assert {"128 heads: TFLOP/s", "16 heads: TB/s"} <= {x.text for x in parts(text, "text")}


def test_figures_have_the_numbers_of_their_tables():
    docs = pathlib.Path(chart.__file__).parents[1] / "docs"
    for name, text in chart.figures(docs).items():
        assert (docs / "figures" / name).read_text() == text, f"{name}: python3 bench/chart.py docs"
    assert "825 TFLOP/s" in chart.figures(docs)["forward.svg"]
    with pytest.raises(ValueError, match="no table"):
        chart.table("| a |", "| b |")


def test_cells_of_packed_sequences_are_the_ones_that_options_name(tmp_path, capsys):
    every = packed.cells(packed.parse([]))
    assert len(every) == 4 * 7 * 2 and {cell.causal for cell in every} == {False, True}
    assert all(15_000 < sum(cell.lengths) < 30_000 for cell in every)
    lengths = tmp_path / "mine.txt"
    lengths.write_text("3 5\n4\n")
    words = ["--lengths", str(lengths), "--head-dim", "64", "--heads", "4", "2", "--causal", "1"]
    (cell,) = packed.cells(packed.parse(words))
    assert (cell.lengths, cell.heads, cell.heads_kv, cell.mix) == ((3, 5, 4), 4, 2, "mine.txt")
    # Two products of 2 * 64 operations for each visible score of four heads, in a millisecond.
    assert cell.tflops(1.0, 1) == pytest.approx(4 * 64 * 4 * (9 + 25 + 16) / 2 / 1e9)
    for words in (["--heads", "4", "2"], ["--lengths", str(lengths), "--mix", "odd"]):
        with pytest.raises(SystemExit):
            packed.parse(words)
    assert "give both" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_packed_sequences_are_those_of_the_longest_and_the_shortest(causal):
    cell = packed.Cell(16, 4, 2, "mine", (30, 0, 7, 50), causal)
    q, k, v = (torch.randn(87, heads, 16) for heads in (4, 2, 2))
    right = torch.zeros(87, 4, 16)
    begin = 0
    for length in cell.lengths:
        rows = slice(begin, begin + length)
        for head in range(4 if length else 0):
            right[rows, head] = packed.exact(q[rows, head], k[rows, head // 2], v[rows, head // 2], causal)
        begin += length
    wrong = right.clone()
    wrong[30:37, 3] *= 2
    nan = right.clone()
    nan[30, 3, 0] = float("nan")
    functions = {"right": lambda: [right], "wrong": lambda: [wrong], "nan": lambda: [nan]}
    found = packed.errors(cell, functions, q, k, v)
    assert found["right"] < 1e-6 and found["wrong"] == pytest.approx(1) and not found["nan"] < packed.WRONG


def test_errors_of_packed_gradients_are_those_of_heads_that_share_keys():
    cell = packed.Cell(16, 4, 2, "mine", (30, 1, 7), True)
    dout, q, k, v = (torch.randn(38, heads, 16, dtype=torch.float64) for heads in (4, 4, 2, 2))
    right = [torch.zeros_like(x) for x in (q, k, v)]
    begin = 0
    for length in cell.lengths:
        rows = slice(begin, begin + length)
        for head in range(4):
            of_head = gradients.exact(dout[rows, head], q[rows, head], k[rows, head // 2], v[rows, head // 2], True)
            for sum_of, x, at in zip(right, of_head, (head, head // 2, head // 2)):
                sum_of[rows, at] += x
        begin += length
    dq, dk, dv = right
    functions = {"right": lambda: right, "wrong": lambda: [dq, dk * 2, dv]}
    found = packed.errors(cell, functions, q, k, v, dout)
    assert found["right"] < 1e-12 and found["wrong"] == pytest.approx(1)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "seqused", "16", "48"])
def test_attention_over_a_cache_is_held_to_float64(monkeypatch, layout, append, e4m3):
    """A wrong result is found, too."""
    lengths = (50, 50, 50) if layout == "contiguous" else (50, 70, 3)
    setting = decode.Setting("small", 4, 2, 3, lengths)
    options = decode.parse(["--append"] * append + ["--e4m3"] * e4m3)
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setattr(decode, "ROTATED", 1)
    if append and layout == "contiguous":
        monkeypatch.setattr(decode, "TABLES", {"small": ([setting], [layout])})
        options.table = ["small"]
        assert list(decode.cells(options)) == []
        return
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    caches = decode.Caches.draw(setting, 64, layout, dtype)
    assert len(caches) == 2 and caches.k[0].dtype == dtype
    new = decode.New.draw(setting, 64) if append else None
    q = torch.randn(3, 3, 4, 64, dtype=torch.bfloat16)
    bound = decode.implementations(options, q, caches, new)
    assert list(bound) == (["ours", "16 bits"] if e4m3 else ["ours"])
    if e4m3 and not append:
        torch.testing.assert_close(bound["ours"](1), bound["16 bits"](1), rtol=2e-2, atol=1e-3)
    ours = bound["ours"]
    assert decode.error(setting, q, caches, new, ours) < decode.WRONG
    assert decode.error(setting, q, caches, new, lambda number: ours(number) * 1.1) > decode.WRONG
    assert math.isnan(decode.error(setting, q, caches, new, lambda number: ours(number) * math.nan))


def test_rates_of_attention_over_a_cache():
    setting = decode.Setting("small", 32, 8, 1, (1024,) * 16)
    # The cache has 67 MB, which are read in 0.1 ms.
    assert decode.rate("decode", setting, 128, torch.bfloat16, 0.1).split() == ["0.67", "TB/s"]
    assert decode.rate("decode", setting, 128, torch.float8_e4m3fn, 0.1).split() == ["0.34", "TB/s"]
    # All pairs of a query and a key on the diagonal or below it.
    setting = decode.Setting("small", 32, 8, 1024, (1024,))
    operations = 4 * 32 * 128 * sum(range(1, 1025))
    assert decode.rate("prefill", setting, 128, torch.bfloat16, 0.1).split() == [f"{operations / 1e8:.0f}", "TFLOP/s"]
    names = [(table, setting.name) for table, setting, _ in decode.cells(decode.parse(["--layout", "seqused"]))]
    assert len(set(names)) == len(names) == 8 + 16 + 3
    assert [len(list(decode.cells(decode.parse(["--table", table])))) for table in decode.TABLES] == [8, 16, 18]


def cells_of_activation(*words):
    return list(activation.cells(activation.parse(words)))


def test_cells_of_activation_are_the_ones_that_options_name(capsys):
    cells = cells_of_activation()
    assert [(cell.kind, cell.batch, cell.seqlen) for cell in cells if cell.work == "train"] == [
        ("sdpa", 4, 4096),
        ("sdpa", 1, 16384),
        *((kind, 1, 16384) for kind in activation.KINDS if kind != "sdpa"),
    ]
    assert [(cell.kind, cell.batch, cell.seqlen) for cell in cells if cell.work == "prefill"] == [
        (kind, 1, seqlen) for kind in activation.KINDS for seqlen in (8192, 32768)
    ]
    assert str(cells[0]) == "train    sdpa                  4 x 4096   d 128"
    chosen = cells_of_activation(*"--only documents --work prefill --head-dim 64 128 --prefill 100".split())
    assert chosen == [activation.Cell("prefill", "flex documents", 1, 100, head_dim) for head_dim in (64, 128)]
    for words in (["--head-dim", "100"], ["--context", "5000"], ["--prefill", "100000"], ["--compile", "yes"]):
        with pytest.raises(SystemExit):
            activation.parse(words)
    said = capsys.readouterr().err
    assert "1536 is no whole number of heads of 100" in said and "16384 is no whole number of sequences of 5000" in said


@pytest.fixture
def small_models(monkeypatch):
    """Small models on the CPU, where our kernels take the place of torch's, and activation itself does nothing. Gives
    the options, a list of the entered contexts, and a list of the compiled graphs.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("skipped: torch has no place for another flash attention")
    import fa3
    from torch._dynamo.backends.debugging import aot_eager

    entered, graphs = [], []

    def activate():
        entered.append("activate")
        return contextlib.nullcontext()

    def compiles(graph, inputs, **options):
        graphs.append(graph)
        return aot_eager(graph, inputs, **options)

    def in_turns(functions, rounds, slice_ms, contexts):
        for by, function in functions.items():
            with contexts.get(by, contextlib.nullcontext)():
                function()
        return {"before": 3.0, "after": 2.0}

    monkeypatch.setattr(fa3, "activate", activate)
    monkeypatch.setattr(fa3.activation, "_has_kernels", lambda device: True)
    monkeypatch.setattr(activation, "DEVICE", "cpu")
    monkeypatch.setattr(activation, "BACKEND", compiles)
    monkeypatch.setattr(timing, "in_turns", in_turns)
    library = fa3.activation._put("CPU", dict.fromkeys(fa3.activation._Kernels({}).by_name()))
    words = "--width 128 --head-dim 64 --blocks 2 --tokens 256 --context 128 --prefill 256"
    yield activation.parse(words.split()), entered, graphs
    library._destroy()


CELLS = ("train", "sdpa"), ("train", "varlen_attn"), *(("prefill", kind) for kind in activation.KINDS)
# Each cell without a compiler, and compiled by blocks or as a whole in turns.
COMPILED = [(*cell, how, 1) for cell, how in zip(CELLS, itertools.cycle(("blocks", "model")))]


@pytest.mark.parametrize("work, kind, how, of_each", [*((*cell, "no", 0) for cell in CELLS), *COMPILED])
def test_a_small_gpt_before_and_after(small_models, capsys, work, kind, how, of_each):
    """FlexAttention has no gradients on the CPU."""
    options, entered, graphs = small_models
    options.compile = [how]
    (cell,) = (cell for cell in activation.cells(options) if (cell.work, cell.kind) == (work, kind))
    (result,) = activation.measure(cell, options)
    assert not activation.wrong(result) and set(result["errors"]) == {"attention", work}
    is_flex = kind.startswith("flex")
    assert result["after"] == ("intervals" if is_flex else "activate()") and bool(entered) != is_flex
    # FlexAttention is also compiled alone. One graph serves all blocks of a model. The models before and after have a
    # graph each, unless both call the same attention function.
    assert len(graphs) == is_flex + of_each * (1 if kind == "varlen_attn" else 2)
    said = capsys.readouterr().out
    # The model has two blocks, so attention takes twice the time of one call.
    assert "before     3.00 ms" in said and "2.00 ms  ratio 1.500  attention     6.00      4.00 ms" in said
    assert "200 % of before" in said and "WRONG" not in said


def test_all_functions_have_the_same_documents(small_models):
    tokens, shape = 300, (1, 300, 2, 64)
    q, k, v = drawn("normal", shape, torch.bfloat16)
    ends, longest = activation.document_ends(tokens)
    assert ends[0] == 0 and ends[-1] == tokens and longest == ends.diff().max() > 3 * tokens / activation.DOCUMENTS
    of_flex = activation.flex_documents(tokens)
    outputs = [attend(q, k, v) for attend in (activation.varlen(tokens).before, of_flex.before, of_flex.after)]
    for begin, end in zip(ends, ends[1:]):
        if begin < end:
            expected = standard(*(x[:, begin:end] for x in (q, k, v)), causal=True)[0]
            for o in outputs:
                assert masks.distance(o[:, begin:end], expected) < activation.WRONG["attention"]


def test_a_wrong_result_after_activation_is_named(small_models, capsys, monkeypatch):
    options, _, _ = small_models
    cell = activation.Cell("train", "sdpa", 2, 128, 64)

    def fails(after):
        monkeypatch.setitem(activation.KINDS, "sdpa", lambda tokens: activation.Pair(train_gpt.sdpa, after, True))
        options.compile = ["no"]
        (result,) = activation.measure(cell, options)
        return list(activation.wrong(result))

    assert fails(train_gpt.sdpa) == []
    without_mask = torch.nn.functional.scaled_dot_product_attention
    assert "attention" in fails(lambda *x: without_mask(*(y.transpose(1, 2) for y in x)).transpose(1, 2))
    # A model whose O is right, but whose gradients are wrong.
    assert "attention" in fails(lambda q, k, v: train_gpt.sdpa(q, k.detach() + 0 * k, v))
    assert fails(lambda q, k, v: train_gpt.sdpa(q, k, v) * math.nan) == ["attention", "train"]
    assert "WRONG: train after differs from before by nan" in capsys.readouterr().out


def test_activation_ends_with_its_summary_and_its_code(monkeypatch, capsys):
    ms, attention = {"before": 3.0, "after": 2.0}, {"before": 1.0, "after": 0.5}

    def measured(cell, options):
        pair = activation.Pair(None, None, not cell.kind.startswith("flex"))
        yield activation.report(cell, pair, "no", ms, attention, {"attention": error, cell.work: 0.0})

    monkeypatch.setattr(activation, "measure", measured)
    monkeypatch.setattr(settings, "print_machine", lambda: None)
    for error, code in ((0.001, 0), (0.1, 1), (math.nan, 1)):
        assert activation.main([]) == code
        said = capsys.readouterr().out
        assert said.count("WRONG: attention") == code * 13
        assert "train, activate(): geometric mean 1.500" in said and "prefill, intervals: geometric mean" in said


def test_a_context_is_entered_for_each_slice(monkeypatch):
    running, seen = [], []

    @contextlib.contextmanager
    def active():
        running.append(True)
        yield
        running.clear()

    def milliseconds(function, calls):
        seen.append((function, bool(running)))
        return 1.0

    monkeypatch.setattr(timing, "_milliseconds", milliseconds)
    assert timing.in_turns({"before": "b", "after": "a"}, 3, 10.0, {"after": active}) == {"before": 1.0, "after": 1.0}
    # Two calls of each function measure how long it takes.
    assert seen[:4] == [("b", False)] * 2 + [("a", True)] * 2
    assert [x for x, _ in seen[4:]] == ["b", "a", "a", "b", "b", "a"] and all(on == (x == "a") for x, on in seen)
    assert not running


@pytest.mark.parametrize("row_bytes", [1152, sparse.ROW_BYTES])
def test_lists_are_judged_beside_float64(row_bytes, monkeypatch):
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    inputs = sparse.Inputs(sparse.Setting("small", 1, 2, 2, 4096), 1, row_bytes)
    for bind in (sparse.decoding, sparse.prefill):
        ours, rows = bind(inputs, None)["ours"]
        o = ours(0)
        assert inputs.error(o, rows) < decode.WRONG < inputs.error(o.flip(-1), rows)


@pytest.mark.parametrize("size", [64, 128])
def test_lists_of_blocks_are_judged_beside_float64(size, monkeypatch):
    monkeypatch.setattr(timing, "in_turns", lambda functions, *_: dict.fromkeys(functions, 1.0))
    words = ["--block-size", str(size), "--heads", "2", "--part", "0.25", "--deterministic", "0"]
    for kind in blocks.KINDS:
        _, backward = blocks.measure(kind, 500, 64, blocks.parse(words), "cpu")
        assert set(backward["errors"]) == {f"{name} of 0.25" for name in ("O", "dQ", "dK", "dV")}
        assert all(error < blocks.WRONG for error in backward["errors"].values())
    q, k, v, dout = torch.randn(4, 1, 500, 2, 64)
    sees = torch.ones(-(-500 // size), -(-500 // size), dtype=torch.bool)
    errors = blocks.errors(sees, size, dout, [q, k, v], [q, q, k, v])
    assert all(error > blocks.WRONG for error in errors.values())
