"""The quality benchmark: its statistics, its text, what it reads from caches, and its page."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mjolnir import turning
from mjolnir.bench import heldout, kv_probe, quality, quality_parts, quality_shapes, quality_tables
from mjolnir.layouts import PagedKV
from mjolnir.reference import e2m3, paged_sdpa

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results" / "quality"
SMALL = quality.Plan(characters=40, window=4, windows=2)


def scores(*windows: list[float], top: int = 7) -> list[quality.Scores]:
    return [{"nll": nll, "top": [top] * len(nll)} for nll in windows]


class TestDifference:
    def test_figures(self) -> None:
        """Window means differ by 0.02 and 0.04: mean 0.03, standard error 0.01."""
        found = quality.difference(scores([1.0, 2.0], [3.0, 4.0]), scores([1.01, 2.03], [3.0, 4.08]))
        assert found["tokens"] == 4
        assert found["perplexity"] == pytest.approx(math.exp(2.53), abs=1e-3)
        assert found["change_pct"] == pytest.approx(100 * math.expm1(0.03), abs=1e-3)
        assert found["standard_error_pct"] == pytest.approx(100 * math.exp(0.03) * 0.01, abs=1e-3)
        assert found["top1_pct"] == 100.0

    def test_likeliest_token_is_counted_position_by_position(self) -> None:
        other = scores([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
        other[1]["top"] = [7, 8, 8]
        assert quality.difference(scores([1.0] * 3, [1.0] * 3), other)["top1_pct"] == pytest.approx(66.67)

    def test_windows_that_do_not_match_are_refused(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            quality.difference(scores([1.0, 2.0]), scores([1.0]))


def test_a_loop_is_not_distinct() -> None:
    assert quality.distinct(list(range(10))) == 1.0
    assert quality.distinct([1, 2, 3] * 100) == pytest.approx(3 / 297)


def test_canary_row_keeps_greedy_and_sampled_answers_and_halves_apart() -> None:
    answers = [{"text": [0] * 8}, {"text": list(range(8))}]
    nll = [[2.0] * 4 + [3.0] * 4, [5.0] * 4 + [6.0] * 4]
    row = quality.canary_row(quality.FP8, answers, nll)
    assert row == {
        "case": "fp8",
        "greedy_distinct4": 0.2,
        "greedy_nll_first_half": 2.0,
        "greedy_nll_second_half": 3.0,
        "sampled_distinct4": 1.0,
        "sampled_nll_first_half": 5.0,
        "sampled_nll_second_half": 6.0,
    }


def measured(nll: float, layers: bool = True) -> dict[str, object]:
    figures = {"all": 0.03, "median_channel": 0.02, "worst_channel": 0.1}
    found: dict[str, object] = {part: scores([nll] * 3, [nll] * 3) for part in ("prefill", "decode")}
    found["canary"] = [{"prompt": [1], "text": list(range(8))} for _ in quality.CHATS]
    found["canary_nll"] = [[nll] * 8 for _ in quality.CHATS]
    return found | ({"layers": {"model.layers.0": {"k": figures, "v": figures}}} if layers else {})


def test_document_compares_fp6_with_fp8_too() -> None:
    found = {"bf16": measured(2.0, layers=False), "fp8": measured(2.01), "fp6, max": measured(2.004)}
    found["fp6, turned"] = {"prefill": scores([2.0] * 3, [2.0] * 3)}  # all that was measured of it
    tables = quality.document("tiny", found)
    rows = {(row["case"], row["part"]): row for row in tables["rows"]}
    assert len(rows) == 7
    assert rows["bf16", "decode"]["change_pct"] == 0.0
    assert rows["fp6, max", "decode"]["change_pct"] == pytest.approx(100 * math.expm1(0.004), abs=1e-3)
    assert rows["fp6, max", "decode"]["over_fp8_pct"] == pytest.approx(100 * math.expm1(-0.006), abs=1e-3)
    assert "over_fp8_pct" not in rows["fp8", "decode"]
    assert [row["case"] for row in tables["layers"]] == ["fp8", "fp6, max"]
    assert [row["case"] for row in tables["canary"]] == ["bf16", "fp8", "fp6, max"]


class TestBench:
    def bench(self, folder: Path, scales: str = "{}") -> quality.Bench:
        file = folder / "scales.json"
        file.write_text(scales)
        bench = quality.Bench(folder / "model", SMALL, {"max": file}, folder / "kept")
        bench._windows = [[1, 2, 3, 4]] * 2
        return bench

    def answering(self, bench: quality.Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []

        def run(case: quality.Case, wanted: dict[str, object]) -> dict[str, object]:
            asked.append(case.name)
            if texts := wanted.get("score"):
                return {"score": [{"nll": [0.5] * (len(text) - 1)} for text in texts]}
            return {"canary": [{"prompt": [1, 2], "text": [3, 4, 5]}]}

        monkeypatch.setattr(bench, "_run", run)
        return asked

    def test_scores_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = self.bench(tmp_path)
        asked = self.answering(bench, monkeypatch)
        case = quality.Case("fp8, scales", "fp8", "max")
        first = bench.measure(case)
        assert first["canary_nll"] == [[0.5] * 3]
        assert bench.measure(case) == first
        assert asked == ["fp8, scales", "bf16"]  # measured once, and judged by the model over a bf16 cache
        bench.measure(case, again=True)
        assert len(asked) == 4

    def test_other_scales_or_another_plan_are_measured_anew(self, tmp_path: Path) -> None:
        bench, case = self.bench(tmp_path), quality.Case("fp8, scales", "fp8", "max")
        bench.folder.mkdir()
        bench._path(case).write_text(json.dumps({"key": bench.key(case), "found": {"x": 1}}))
        assert bench.kept(case) == {"x": 1}
        bench.plan = replace(SMALL, windows=3)
        assert bench.kept(case) is None
        assert self.bench(tmp_path, scales='{"layers": {}}').kept(case) is None

    def test_a_case_without_its_scale_file_is_left_out(self, tmp_path: Path) -> None:
        bench = self.bench(tmp_path)
        possible = [case.name for case in quality.CASES if bench.possible(case)]
        assert "fp6, max" in possible
        assert "fp6, percentile" not in possible


class TestHeldOutText:
    TEXT = "Contents\n   :abbrev: n.\n\n   A short   form.\n\n\n\n   ├───┤\n   :ABEND: n.\n   An end.\n"

    def test_prose_has_no_indent_no_tables_and_no_front_matter(self) -> None:
        assert heldout.prose(self.TEXT, 40) == ":abbrev: n.\n\nA short   form.\n\n:ABEND: n.\n"[:40]

    def test_too_short_a_text_is_refused(self) -> None:
        with pytest.raises(heldout.TextError, match="characters of glossary; 5000 wanted"):
            heldout.prose(self.TEXT, 5000)
        with pytest.raises(heldout.TextError, match="has 0 characters"):
            heldout.prose("nothing", 5)

    def test_windows_are_consecutive(self) -> None:
        assert heldout.windows(list(range(10)), 3, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        with pytest.raises(heldout.TextError, match="4 windows of 3 tokens wanted; the text has 10"):
            heldout.windows(list(range(10)), 3, 4)

    def test_another_text_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MJOLNIR_CACHE", str(tmp_path))
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "jargon.txt").write_text("another")
        with pytest.raises(heldout.TextError, match=r"expected SHA-256 40dfb4b9.*, got "):
            heldout.fetch()

    def test_a_machine_without_apt_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MJOLNIR_CACHE", str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(heldout.TextError, match="apt-get is not installed"):
            heldout.fetch()
        assert list((tmp_path / "text").iterdir()) == []


HEADS, HEAD, PAGE, TOKENS = 2, 32, 16, 24


class FakeLayer:
    """An attention layer over a cache of its own, which writes with the oracles."""

    def __init__(self, kv: str, scales: kv_probe.LayerScales | None = None) -> None:
        self.layer_name, self.kv, self.scales = "layer", kv, scales
        self._k_scale, self._v_scale = torch.tensor(1.0), torch.tensor(1.0)
        row = 2 * HEAD if kv != kv_probe.FP6 else 2 * e2m3.row_bytes(HEAD)
        self.cache = torch.zeros(3, HEADS, PAGE, row, dtype=torch.bfloat16 if kv == "auto" else torch.uint8)
        self.impl = SimpleNamespace(do_kv_cache_update=self.update)

    def update(self, layer: object, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots) -> None:
        if self.kv == kv_probe.FP6:
            assert self.scales is not None
            k, v = (half.transpose(1, 2) for half in cache.chunk(2, dim=-1))
            if self.scales.k_turn is not None:
                key, value = (rows @ self.scales.k_turn.bfloat16() for rows in (key, value))
            e2m3.write_kv(key, value, PagedKV(k, v, None), slots, self.scales.k, self.scales.v)
            return
        float8 = torch.float8_e4m3fn if self.kv == "fp8" else None
        paged_sdpa.write_kv(key, value, cache, slots, self._k_scale, self._v_scale, float8)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = torch.randperm(3 * PAGE, generator=torch.Generator().manual_seed(3))[: len(key)]
        self.impl.do_kv_cache_update(self, key, value, self.cache, slots)


def kv_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(TOKENS, HEADS, HEAD, generator=generator).bfloat16() for _ in range(2))
    key[..., 0] *= 40
    return key, value


def channel_scales(key: torch.Tensor, value: torch.Tensor, turn: bool = False) -> kv_probe.LayerScales:
    matrix = turning.matrix(HEAD) if turn else torch.eye(HEAD)
    k, v = ((rows.float() @ matrix).abs().amax(0) / e2m3.MAX for rows in (key, value))
    return kv_probe.LayerScales(k, v, *([matrix, matrix] if turn else []))


class TestProbe:
    def probe(self, layer: FakeLayer, key: torch.Tensor, value: torch.Tensor) -> dict[str, dict[str, float]]:
        scales = {"layer": layer.scales} if layer.scales else None
        update = layer.impl.do_kv_cache_update
        with kv_probe.measured({"layer": layer}, layer.kv, scales) as figures:
            layer.write(key[:20], value[:20])
            layer.write(key[20:], value[20:])
        assert layer.impl.do_kv_cache_update is update
        return figures["layer"]

    def test_bf16_loses_nothing(self) -> None:
        figures = self.probe(FakeLayer("auto"), *kv_rows())
        assert figures["k"] == figures["v"] == {"all": 0.0, "median_channel": 0.0, "worst_channel": 0.0}

    @pytest.mark.parametrize("kv", ["fp8", "fp6_e2m3"])
    def test_error_is_the_formats_own(self, kv: str) -> None:
        key, value = kv_rows()
        scales = channel_scales(key, value)
        figures = self.probe(FakeLayer(kv, scales if kv == kv_probe.FP6 else None), key, value)
        rows = key.float()
        held = kv_probe.through_e4m3(rows) if kv == "fp8" else kv_probe.through_e2m3(rows, scales.k)
        expected = quality_shapes.relative_error(held, key.float())
        assert figures["k"]["all"] == pytest.approx(expected, rel=1e-5)
        assert 0.02 < expected < 0.04
        assert figures["k"]["worst_channel"] > figures["k"]["median_channel"] > 0.01

    def test_fp8_scales_are_undone_on_reading(self) -> None:
        key, value = kv_rows()
        layer = FakeLayer("fp8")
        layer._k_scale.fill_(0.5)
        figures = self.probe(layer, key, value)
        held = kv_probe.through_e4m3(key.float(), 0.5)
        assert figures["k"]["all"] == pytest.approx(quality_shapes.relative_error(held, key.float()), rel=1e-5)

    @pytest.mark.parametrize("turn", [False, True])
    def test_emulation_writes_what_an_e2m3_cache_would_hold(self, turn: bool) -> None:
        key, value = kv_rows()
        scales = channel_scales(key, value, turn)
        layer = FakeLayer("auto")
        kv_probe.emulate_e2m3({"layer": layer}, {"layer": scales})
        emulated = self.probe(layer, key, value)
        real = self.probe(FakeLayer("fp6_e2m3", scales), key, value)
        for part in "kv":  # but for a rounding to bf16
            assert emulated[part]["all"] == pytest.approx(real[part]["all"], rel=0.02)
            assert 0.02 < real[part]["all"] < 0.04

    def test_an_e2m3_cache_is_not_read_without_scales(self) -> None:
        layer = FakeLayer("fp6_e2m3", channel_scales(*kv_rows()))
        with pytest.raises(ValueError, match="read with a scale file"):
            kv_probe.held_rows(layer, layer.cache, torch.tensor([0]), "fp6_e2m3", None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what vLLM imports
def test_forced_tokens_are_the_only_ones_possible() -> None:
    from mjolnir.bench.quality_engine import FORCED, ForcedTokens

    processor = ForcedTokens(None, torch.device("cpu"), False)
    force = processor.new_req_logits_processor(SimpleNamespace(extra_args={FORCED: [2, 0]}))
    logits = torch.zeros(4)
    assert force([], logits).argmax() == 2
    assert force([2], logits).tolist() == [0.0, -torch.inf, -torch.inf, -torch.inf]
    assert processor.new_req_logits_processor(SimpleNamespace(extra_args=None)) is None
    assert logits.tolist() == [0.0] * 4  # log-probabilities are taken from them


def test_large_channels_need_scales_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_shapes, "TOKENS", 4096)
    monkeypatch.setattr(quality_shapes, "CALIBRATION", 4096)
    shape = quality_shapes.Shape("tiny", 4, 2, 64)
    rows = {row["case"]: row for row in quality_shapes.measure(shape, "large channels")}
    assert rows["fp6, max"]["k_error"] == pytest.approx(0.029, abs=0.002)
    assert rows["fp6, max by head"]["k_error"] > 3 * rows["fp6, max"]["k_error"]
    assert rows["fp6, max by head"]["output_error"] > 5 * rows["fp6, max"]["output_error"]
    assert rows["fp8"]["v_error"] == pytest.approx(0.0265, abs=0.001)
    assert rows["fp6, turned"]["v_error"] == pytest.approx(0.029, abs=0.002)
    assert rows["fp6, turned"]["output_error"] > 5 * rows["fp6, max"]["output_error"]  # why such a K is not turned


def test_attention_oracle_by_hand() -> None:
    query = torch.tensor([[[math.log(3.0), 0.0]]])
    keys, values = torch.tensor([[[1.0, 5.0]], [[0.0, 5.0]]]), torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])
    assert quality_shapes.attention(query, keys, values).flatten().tolist() == pytest.approx([3.0, 2.0])


class TestParts:
    """What `scripts/bench quality-parts` does to K and V, on rows with a token that a channel can't hold."""

    def rows(self) -> torch.Tensor:
        rows = torch.randn(1, 2, 600, 64, generator=torch.Generator().manual_seed(5))
        rows[:, :, 7, 3] = 60.0
        return rows

    def error(self, way: quality_parts.Way) -> float:
        rows = self.rows()
        held = quality_parts.rounding([rows], way)(0, rows)
        assert held.shape == rows.shape
        others = [channel for channel in range(64) if channel != 3]
        return quality_shapes.relative_error(held[..., others], rows[..., others])

    def test_arithmetic_is_the_oracles(self) -> None:
        rows, scale = self.rows() * 3, torch.rand(64, generator=torch.Generator().manual_seed(6)) + 0.1
        assert torch.equal(quality_parts.rounded(rows, scale), kv_probe.through_e2m3(rows, scale))

    def test_ways_lose_what_the_format_does(self) -> None:
        plain, turned = self.error(quality_parts.Way()), self.error(quality_parts.Way(turn=True))
        assert plain == pytest.approx(0.028, abs=0.003)
        assert turned == pytest.approx(0.033, abs=0.008)
        assert self.error(quality_parts.Way(clip="percentile")) > plain

    def test_the_least_clip_gives_up_one_token_for_all_others(self) -> None:
        rows = self.rows()
        most, least = (quality_parts.scale_of(rows, clip)[0, 0, 0, 3] for clip in ("max", "least"))
        assert float(most) == 60.0 / e2m3.MAX
        assert float(least) <= float(most)

    def test_a_center_takes_an_offset_away(self) -> None:
        rows = self.rows() + 40.0
        errors = [
            float((quality_parts.rounding([rows], way)(0, rows) - rows).norm())
            for way in (quality_parts.Way(), quality_parts.Way(center=True))
        ]
        assert errors[1] < errors[0] / 5

    def test_row(self) -> None:
        row = quality_parts.row("x", [(0.01, 0.002), (0.03, 0.004)])
        assert row == {"case": "x", "perplexity_pct": 2.02, "standard_error_pct": 1.0, "divergence_millinats": 3.0}


@pytest.mark.parametrize("size", [1, 64, 128, 256])
def test_a_turn_twice_is_a_factor(size: int) -> None:
    matrix = turning.matrix(size, torch.bfloat16)
    assert torch.equal(matrix.float() @ matrix.float(), size * torch.eye(size))
    assert torch.equal(matrix, matrix.T)
    assert set(matrix.flatten().tolist()) <= {1.0, -1.0}


def test_a_turn_wants_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="a Hadamard matrix of 80: accepted: a power of two"):
        turning.matrix(80)


class TestPage:
    def test_is_generated_from_the_files(self) -> None:
        page = (DOCS / "quality.md").read_text()
        assert page == quality_tables.replace_section(page, quality_tables.render(RESULTS)), "run scripts/bench tables"

    def test_verdict_tells_both_parts_of_the_goal(self) -> None:
        row = {"kv": "fp6_e2m3", "case": "fp6, max", "part": "decode", "change_pct": 0.3, "standard_error_pct": 0.05}
        bad = row | {"change_pct": 0.7, "over_fp8_pct": 0.4, "over_fp8_error_pct": 0.1}
        good = row | {"over_fp8_pct": 0.1, "over_fp8_error_pct": 0.1}
        lines = quality_tables.verdicts({"rows": [good, bad, row | {"kv": "fp8"}]})
        assert lines == [
            "- fp6, max, decode: +0.30 ± 0.05 % perplexity, goal 0.5 % met; no worse than unscaled fp8 "
            "(+0.10 ± 0.10 %).",
            "- fp6, max, decode: +0.70 ± 0.05 % perplexity, goal 0.5 % missed; worse than unscaled fp8 "
            "(+0.40 ± 0.10 %).",
        ]
