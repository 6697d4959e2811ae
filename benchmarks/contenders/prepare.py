"""The benchmark model in the forms that the contenders read, made once in a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]


def models(folder: Path, names: list[str], dtype: str, openvino_python: Path) -> dict[str, Path]:
    """Contender -> its folder of the model; missing ones are made."""
    ours = folder / f"model-{dtype}"
    if not ours.exists():
        run(sys.executable, BENCHMARKS / "make_model.py", ours, "--dtype", dtype)
    found = dict.fromkeys(names, ours)
    if "vllm" in names:
        found["vllm"] = folder / f"model-{dtype}-vllm"
        if not found["vllm"].exists():
            rename_tower(ours, found["vllm"])
    if "openvino" in names:
        found["openvino"] = folder / f"model-{dtype}-openvino"
        if not found["openvino"].exists():
            export(ours, found["openvino"], dtype, openvino_python)
    return found


def rename_tower(source: Path, target: Path) -> None:
    """vLLM looks for a level `vision_model` in the tower's names that current files lack."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tower = "vision_tower."
    for path in source.glob("*.safetensors"):
        weights = {
            name.replace(tower, f"{tower}vision_model.")
            if tower in name and "vision_model" not in name
            else name: tensor
            for name, tensor in load_file(path).items()
        }
        save_file(weights, target / path.name, metadata={"format": "pt"})


def export(source: Path, target: Path, dtype: str, python: Path) -> None:
    """OpenVINO's own files; float32 stays what it is, else float16 (it has no bfloat16 files)."""
    weights = "fp32" if dtype == "float32" else "fp16"
    program = python.parent / "optimum-cli"
    task = ("--task", "image-text-to-text", "--weight-format", weights)
    run(program, "export", "openvino", "--model", source, *task, target)
    (target / "preprocessor_config.json").unlink(missing_ok=True)  # ours says the size
    write_image_settings(source, target)


def write_image_settings(source: Path, target: Path) -> None:
    """Write the image processor's settings to a file of their own, where they have none."""
    file = target / "preprocessor_config.json"
    settings = json.loads((source / "processor_config.json").read_text()).get("image_processor")
    if settings is None or file.exists():
        return
    if settings["size"].get("shortest_edge"):
        settings["size"] = {"shortest_edge": settings["size"]["shortest_edge"]}
    file.write_text(json.dumps(settings, indent=2))


def write_older(source: Path, target: Path) -> None:
    """Write a checkpoint as transformers 4 reads it; the weights are linked to."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        copy = target / path.name
        copy.unlink(missing_ok=True)
        if path.name not in ("config.json", "tokenizer_config.json"):
            copy.symlink_to(path.resolve())
            continue
        settings = json.loads(path.read_text())
        if "tokenizer_class" in settings:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        for part in (settings, settings.get("text_config", {})):
            rope = part.get("rope_parameters") or {}
            if "rope_theta" in rope:
                part["rope_theta"] = rope["rope_theta"]
            if "mrope_section" in rope:
                part["rope_scaling"] = rope
        copy.write_text(json.dumps(settings, indent=2))


def run(*command: object) -> None:
    """Run a command with its output on standard error, without what our tests set."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    subprocess.run([str(word) for word in command], check=True, env=environment, stdout=sys.stderr)
