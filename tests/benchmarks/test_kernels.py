"""What benchmarks/kernels.py does without a GPU: rows, lengths, float64, resuming, the file's form, the picture."""

from __future__ import annotations

import gc
import json
import math
import re
import sys
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from gpu.case import Case
from gpu.ceilings import Ceilings
from gpu.measure import Measured, row_of
from gpu.ours import ours
from gpu.peers import CORE, PEERS
from gpu.plain_read import plain_read
from gpu.plot import draw
from gpu.results import Results
from gpu.rows import LEFT_OUT, PAGE_SIZES, ROWS, Shape, zipf

LIMITS = Ceilings(4.3, 4.0, 800.0, {"1 x 16384": 740.0}, 5.0)
DECODE, VERIFY = "decode 64 x 4096 (16)", "verify 64 x 4 drafts, 4096 (16)"


def test_names_say_what_is_measured() -> None:
    """The page size ends each name in brackets; the numbers before it are requests and lengths."""
    for name, shape in ROWS.items():
        assert name.endswith(f"({shape.page_size})")
        requests = len(shape.kv_lens)
        assert len(shape.qo_lens) == requests
        assert all(qo <= kv for qo, kv in zip(shape.qo_lens, shape.kv_lens, strict=True))
        if same := re.match(r"(decode|prefill) (\d+) x (\d+)", name):
            assert shape.kv_lens == (int(same[3]),) * int(same[2])
            assert shape.qo_lens == (shape.kv_lens if same[1] == "prefill" else (1,) * requests)
        elif drawn := re.match(r"(decode|prefill) (\d+), (Zipf, mean (\d+)|U\((\d+), (\d+)\))", name):
            assert requests == int(drawn[2])
            if drawn[4]:
                assert sum(shape.kv_lens) / requests == pytest.approx(int(drawn[4]), rel=1e-3)
            else:
                assert int(drawn[5]) <= min(shape.kv_lens) < max(shape.kv_lens) <= int(drawn[6])
        assert shape.fp8_kv == ("e4m3" in name)
        assert (shape.window is not None) == ("window" in name)
        assert set(shape.peers) <= set(PEERS)


def test_lengths_are_not_sorted_and_the_same_every_time() -> None:
    lengths = zipf(64, 4096)
    assert lengths == zipf(64, 4096)
    assert list(lengths) not in (sorted(lengths), sorted(lengths, reverse=True))
    assert max(lengths) == pytest.approx(2 * sorted(lengths)[-2], abs=1)


def test_every_row_has_a_core_peer_or_says_why() -> None:
    assert all(set(CORE) & set(shape.peers) for shape in ROWS.values())
    assert not set(LEFT_OUT) & set(ROWS)
    assert all({first, second} <= set(ROWS) for first, second, _ in PAGE_SIZES.values())


def test_bytes_and_flops_count_what_is_visible() -> None:
    """Against a count over all pairs."""
    for window in (None, 1, 5, 9, 40):
        shape = Shape((7, 30, 12), (7, 4, 1), 16, 1.0, num_qo_heads=4, num_kv_heads=2, head_dim=64, window=window)
        pairs = slots = 0
        for qo, kv in zip(shape.qo_lens, shape.kv_lens, strict=True):
            seen = [
                {key for key in range(kv) if key <= p and (window is None or key > p - window)}
                for p in range(kv - qo, kv)
            ]
            pairs += sum(map(len, seen))
            slots += len(set.union(*seen))
        assert shape.flops == 4 * pairs * 4 * 64
        assert shape.kv_bytes == slots * 2 * 64 * 2 * 2


@pytest.mark.parametrize("window", [None, 5])
def test_ours_and_the_reference_agree(window: int | None) -> None:
    shape = Shape((7, 90, 33, 12), (7, 4, 1, 12), 16, 1.0, num_qo_heads=4, num_kv_heads=2, head_dim=64, window=window)
    case = Case.create(shape, "cpu")
    runner = ours(case)
    runner.out.fill_(torch.nan)
    assert case.error(runner.out) == math.inf
    runner.run()
    assert case.error(runner.out) < 5e-3
    runner.out[0] *= 1.5  # the first query of a request that is always checked
    assert case.error(runner.out) > 5e-3


def test_scaled_fp8_caches_hold_the_values_they_stand_for() -> None:
    """The reference with a scale is attention over the scaled values."""
    shape = Shape((20, 9), (1, 3), 4, 1.0, num_qo_heads=4, num_kv_heads=2, head_dim=64, fp8_kv=True)
    case = Case.create(shape, "cpu")
    assert case.k.dtype == torch.float8_e4m3fn
    plain = Case(**{**vars(case), "k": case.k.double() * case.k_scale, "v": case.v.double(), "k_scale": 1.0})
    assert torch.allclose(case.reference[1], plain.reference[1])


def test_rows_of_decode_are_held_against_a_plain_read() -> None:
    assert {name for name, shape in ROWS.items() if shape.reads} == {
        name for name in ROWS if name.startswith(("decode", "verify"))
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_plain_read_reads() -> None:
    from gpu.timing import graph_of, median, replay_times

    device = torch.device("cuda")
    graphs = {str(size): graph_of(plain_read(size << 20, device)) for size in (64, 512)}
    times = {name: median(each) for name, each in replay_times(graphs, 5).items()}
    assert 448 * 2**20 / (times["512"] - times["64"]) / 1e6 < 10, "TB/s: it does not read"


def test_a_graph_keeps_what_its_launches_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of torch's knows addresses only: who has that memory when it is replayed is nothing to it."""
    from gpu.timing import graph_of

    for name in ("Stream", "current_stream", "stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    source = torch.zeros(4)
    captured = graph_of(partial(source.add_, 1))
    kept = weakref.ref(source)
    del source
    gc.collect()
    assert kept() is not None
    captured.replay()
    captured.graph.replay.assert_called_once()
    del captured
    gc.collect()
    assert kept() is None


def test_a_plain_read_of_part_of_a_load_is_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes=100"):
        plain_read(100, torch.device("cuda"))


def measured(ours_us: float, **peers: float) -> Measured:
    times = {"ours": [ours_us - 1, ours_us, ours_us + 1], **{name: [us] * 3 for name, us in peers.items()}}
    return Measured(times, dict.fromkeys(times, 2e-3), {"FI fa2": "not built"}, [230.0, 240.0, 250.0])


def results(file: Path, commit: str = "abc", card: str = "NVIDIA H200") -> Results:
    return Results(file, commit, card, more={"driver": "580.1"})


def test_the_file_has_the_form_agreed(tmp_path: Path) -> None:
    kept = results(tmp_path / "kernels.json")
    kept.add(row_of(DECODE, measured(252, FA3=262.0, Triton=290.0), LIMITS))
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert (data["commit"], data["card"], data["driver"]) == ("abc", "NVIDIA H200", "580.1")
    assert {"date", "versions"} <= set(data)
    (row,) = data["rows"]
    assert (row["row"], row["ours_us"], row["peers_us"]) == (DECODE, 252, {"FA3": 262.0, "Triton": 290.0})
    assert row["ratio"] == pytest.approx(252 / 262)
    assert (row["target"], row["met"]) == ("ratio <= 1.01", True)
    detail = row["detail"]
    assert detail["floor_us"] == pytest.approx(5 + 64 * 4096 * 8 * 128 * 4 / 4.0 / 1e6)
    assert detail["share"] == pytest.approx(detail["floor_us"] / 252)
    assert detail["plain_read_us"] == 240 and detail["over_plain_read"] == pytest.approx(252 / 240)
    assert detail["error_over_fa3"] == 1 and detail["error_met"]
    assert detail["peers_absent"] == {"FI fa2": "not built"}


def test_a_later_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    first = results(file)
    assert not first.resume()
    first.add(row_of(VERIFY, measured(270, FA3=265.0), LIMITS))
    first.add(row_of(DECODE, measured(252, FA3=262.0), LIMITS))
    again = results(file)
    assert again.resume()
    assert list(again.rows) == [DECODE, VERIFY]  # in the order of the table, not of time
    assert again.rows == first.rows
    assert again.finished(DECODE, ["FA3", "FI fa2"])  # measured, and known to be absent
    assert not again.finished(DECODE, ["FA3", "Triton"])
    assert not again.finished("decode 16 x 16384 (16)", [])


@pytest.mark.parametrize("other", [{"commit": "def"}, {"card": "NVIDIA H100"}])
def test_another_commit_or_card_begins_anew(tmp_path: Path, other: dict[str, str]) -> None:
    file = tmp_path / "kernels.json"
    results(file).add(row_of(DECODE, measured(252, FA3=262.0), LIMITS))
    assert not results(file, **other).resume()


def test_page_sizes_are_compared_with_each_other(tmp_path: Path) -> None:
    ((first, second, limit),) = PAGE_SIZES.values()
    kept = results(tmp_path / "kernels.json")
    for name, us in ((first, 270.0), (second, 264.0)):
        kept.add(row_of(name, measured(us, FA3=300.0), LIMITS))
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["page_sizes"]
    assert row["ours_x"] == pytest.approx(270 / 264)
    assert row["met"] == (limit >= 270 / 264)


@pytest.mark.filterwarnings("ignore")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    kept = results(tmp_path / "kernels.json")
    kept.add(row_of(DECODE, measured(252, FA3=262.0, Triton=2900.0), LIMITS))
    kept.add(row_of(VERIFY, measured(270), LIMITS))
    draw(tmp_path / "kernels.json", tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="rows"):
        draw(tmp_path / "empty.json", tmp_path / "kernels.png")


def test_the_program_asks_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels

    monkeypatch.setattr(sys, "argv", ["kernels.py", "--core"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="CUDA device"):
        kernels.main()


def test_unknown_peers_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import kernels

    monkeypatch.setattr(sys, "argv", ["kernels.py", "--peers", "FA3,FA9"])
    with pytest.raises(SystemExit):
        kernels.parse()
    assert "FA9" in capsys.readouterr().err
