"""docs/parity.json: every architecture is in it, within the bound; and it can be measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from aioengine.kernels.layer_slot import LayerSlot
from aioengine.models.runtime.registry import _SHIPPED
from tests.parity.measure import BOUND, FILE, KINDS, SAME, measure
from tests.parity.measured_rows import BUDGET, ROWS, UNMEASURED

AGAIN = (
    *("test_families[qwen2.5-vl]", "test_llava[clip]", "test_encdec[bart]", "test_qwen_vl"),
    "test_omni[Qwen2_5Omni]",
)
MODALITIES = {"image": "images", "video": "videos", "audio": "audio"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(FILE.read_text())
    return parsed


def test_every_architecture_was_measured(found: dict[str, Any]) -> None:
    assert sorted([*found, *UNMEASURED]) == sorted(_SHIPPED), "run tests/parity/measure.py"
    swept = map(json.loads, (FILE.parent / "sweep_torchvision.jsonl").read_text().splitlines())
    equal = {row.get("architecture") for row in swept if row.get("verdict") == "equal"}
    assert equal.issuperset(UNMEASURED)
    assert {name: each["same_as"] for name, each in found.items() if "same_as" in each} == SAME
    for name, other in SAME.items():
        module, of_other = (_SHIPPED[each].rpartition(".")[0] for each in (name, other))
        assert module == of_other
        assert "same_as" not in found[other]


def test_errors_are_within_the_bound(found: dict[str, Any]) -> None:
    for name, each in found.items():
        if "same_as" not in each:
            assert 0 < each["error"] <= BOUND * max(1, each["scale"]), name


def test_everything_that_is_taken_was_measured(found: dict[str, Any]) -> None:
    for name, each in found.items():
        for modality in each.get("takes", ()):
            assert MODALITIES[modality] in each["measured"], name
    assert set(MODALITIES.values()) == set(KINDS.values())


def test_the_page_says_how_prompts_were_cut() -> None:
    assert f"in chunks of {BUDGET} tokens" in (FILE.parent / "models.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_measured_again(name: str, found: dict[str, Any]) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    figure = measure(row)
    known = found[figure.architecture]
    assert 0 < figure.share <= BOUND
    # Machines round differently, but not by much.
    assert known["error"] / 10 < figure.error < known["error"] * 10
    assert figure.takes == known["takes"]


@pytest.mark.slow
def test_a_slip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose scale is off by a thousandth is beyond the bound."""
    attend = LayerSlot.attend

    def slip(self: LayerSlot, *rows: Any) -> Any:
        *tensors, args = rows
        return attend(self, *tensors, args._replace(scale=args.scale * 1.001))

    monkeypatch.setattr(LayerSlot, "attend", slip)
    (row,) = (row for row in ROWS if row.name == "test_text_families[llama]")
    # The check would refuse it, and the CPU's own backend takes all layers at once.
    row = replace(row, options={**row.options, "check_model": False, "attention_backend": "gather"})
    assert measure(row).share > 10 * BOUND
