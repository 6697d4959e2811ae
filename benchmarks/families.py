"""The engine beside its peers on eight families, with random weights, in turns.

    python benchmarks/families.py [--only qwen2-vl] [--against transformers,vllm] [--rounds 3]

For each family, benchmarks/family_models.py writes a model of 0.2 to 0.5 billion parameters. 16
requests come at once, each with an image of its own (480 x 360, encoded), or with a clip of speech
for Whisper; greedy, 64 tokens each. Cold: new images, caches empty; warm: the same requests again.
Tokens a second, from the bytes to the last token. Contenders wait while another computes; ratios
are within rounds, medians over the rounds are reported. A peer that does not start, or fails on the
way, is listed with its reason. `--results` keeps what was measured, so that families may be run
one by one. Last line: JSON. How the peers are installed: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from contenders import prepare, report, workloads
from contenders.crew import ContenderError, Settings, Worker, crew
from contenders.rounds import Bench, Measured

ROOT = Path(__file__).parents[1]
OURS = "aioengine"
PEERS = ("transformers", "vllm", "openvino")
FAMILIES = (
    "llava", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3", "smolvlm", "internvl", "whisper"
)  # fmt: skip
SIZE = (480, 360)
OLDER = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "smolvlm")
"""Families that OpenVINO exports under older versions of transformers only."""
PHASES = ("cold", "warm")
AIMS = {"cold": 1.25, "warm": 2.0}
COLD_ALONE = 2.0
"""The aim against transformers where no other peer runs."""


class FamilyBench(Bench):
    """One family's rounds."""

    def __init__(self, family: str, settings: Settings, options: argparse.Namespace) -> None:
        super().__init__(settings, options)
        self.family = family
        self.failures: dict[str, str] = {}

    def measure(self) -> dict[str, Measured]:
        """What each contender answered in each round, cold and warm."""
        kind = "whisper" if self.family == "whisper" else "family"
        found: dict[str, Measured] = {phase: {} for phase in PHASES}
        with crew(self.settings.names, self.settings, kind, self.failures) as workers:
            self._note_versions(workers)
            for number, order in self._rounds(list(workers)):
                job = self._job(number)
                for name in order:
                    if name not in self.failures:
                        self._pair(found, number, workers[name], job)
        return found

    def _job(self, number: int) -> dict[str, Any]:
        """One round's requests."""
        count, tokens = self.options.requests, self.options.tokens
        if self.family == "whisper":
            skip_s = 0.1 * (number + self.options.warm_ups)
            folder, speech = self.options.folder, self.options.speech
            paths = workloads.clips(folder, speech, count, skip_s)
            job = {"command": "clips", "paths": paths, "rate": workloads.RATE, "is_exact": True}
            return {**job, "max_tokens": tokens}
        from family_models import FAMILIES as BUILT

        text = f"user: {BUILT[self.family].place}{workloads.QUESTION}\nassistant:"
        first = 1000 + 100 * number
        requests = [
            {"text": text, "images": [workloads.image(self.images, first + i, SIZE)]}
            for i in range(count)
        ]
        return {"command": "batch", "requests": requests, "max_tokens": tokens}

    def _pair(
        self, found: dict[str, Measured], number: int, worker: Worker, job: dict[str, Any]
    ) -> None:
        """Ask one contender, cold and then warm; one that fails is not asked again."""
        name = worker.name
        try:
            for phase in PHASES:
                if name == "transformers" and phase == "warm":
                    # It keeps nothing: the same again is the same again.
                    if number >= 0:
                        found["warm"].setdefault(name, []).append(found["cold"][name][-1])
                    continue
                is_cold = phase == "cold"
                self._ask(found[phase], number, name, worker, is_cold=is_cold, **job)
        except ContenderError as error:
            self.failures[name] = worker.reason(error)
            print(f"  {name}: failed: {self.failures[name]}", file=sys.stderr)
            for phase in PHASES:
                found[phase].pop(name, None)


def rate_of(answer: dict[str, Any], expected: int) -> float:
    """Tokens a second. Raises ValueError where others than the expected number were made."""
    counts = answer.get("num_tokens") or [len(tokens) for tokens in answer["tokens"]]
    if sum(counts) != expected:
        raise ValueError(f"{sum(counts)} tokens instead of {expected}")
    return expected / float(answer["seconds"])


def condense(bench: FamilyBench, measured: dict[str, Measured]) -> dict[str, Any]:
    """Rates of each round, medians, ratios within rounds and the verdict of one family."""
    expected = bench.options.requests * bench.options.tokens
    found: dict[str, Any] = {"failures": bench.failures}
    for phase, answers in measured.items():
        rates: dict[str, list[float]] = {}
        for name, those in answers.items():
            try:
                rates[name] = [round(rate_of(each, expected), 2) for each in those]
            except ValueError as error:
                bench.failures[name] = str(error)
        medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        over = {
            name: round(
                statistics.median(
                    mine / theirs for mine, theirs in zip(rates[OURS], values, strict=True)
                ),
                2,
            )
            for name, values in rates.items()
            if name != OURS and OURS in rates
        }
        found[phase] = {"rates": rates, "median": medians, "ours_over": over}
        if over:
            found[phase]["over_best"] = min(over.values())
        if OURS in answers:
            found[phase]["stages_s"] = answers[OURS][-1].get("stages_s")
        lengths = {name: those[-1].get("prompt_tokens") for name, those in answers.items()}
        found[phase]["prompt_tokens"] = {
            name: sorted(set(values)) for name, values in lengths.items() if values
        }
    return found | {"verdict": verdict(found)}


def verdict(found: dict[str, Any]) -> str:
    """Whether a family reaches the aims."""
    if OURS in found["failures"]:
        return "ours failed"
    cold, warm = (found[phase].get("over_best") for phase in PHASES)
    if cold is None or warm is None:
        return "no peer ran"
    alone = set(found["cold"]["ours_over"]) == {"transformers"}
    aim = COLD_ALONE if alone else AIMS["cold"]
    if min(cold, warm) < 1:
        return "below 1.0"
    if cold >= aim and (alone or warm >= AIMS["warm"]):
        return "reached"
    return "missed"


def prepare_models(
    family: str, names: list[str], options: argparse.Namespace, failures: dict[str, str]
) -> dict[str, Path]:
    """Contender -> its folder of the family's model; missing ones are made.

    A peer whose files cannot be made is noted in `failures`.
    """
    from family_models import write

    ours = options.folder / family
    if not (ours / "config.json").exists():
        write(family, ours, options.whisper)
    found = dict.fromkeys(names, ours)
    if "vllm" in names and family in ("llava", "gemma3"):
        found["vllm"] = options.folder / f"{family}-vllm"
        if not found["vllm"].exists():
            prepare.rename_tower(ours, found["vllm"])
    if "openvino" in names:
        found["openvino"] = options.folder / f"{family}-openvino"
        try:
            python = options.openvino_python
            if family in OLDER and options.openvino_export_python is not None:
                python = options.openvino_export_python
            export(family, ours, found["openvino"], python)
        except ContenderError as error:
            failures["openvino"] = str(error)
            del found["openvino"]
    return found


def export(family: str, source: Path, target: Path, python: Path) -> None:
    """Write OpenVINO's files of a family, in float16. Raises ContenderError with the reason."""
    log = target.with_name(f"{target.name}.log")
    if not log.exists():
        is_speech = family == "whisper"
        task = "automatic-speech-recognition-with-past" if is_speech else "image-text-to-text"
        older = source.with_name(f"{source.name}-older")
        prepare.write_older(source, older)
        # The program's own file names the environment that it was installed in.
        program = ["-c", "from optimum.commands.optimum_cli import main; main()"]
        command = [python, *program, "export", "openvino", "--model", older, "--task", task]
        command += ["--weight-format", "fp16", target]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONSAFEPATH", None)
        environment.pop("PYTHONPATH", None)
        with log.open("w") as file:
            words = [str(word) for word in command]
            subprocess.run(words, env=environment, stdout=file, stderr=file, check=False)
    if not [*target.glob("*language_model.xml"), *target.glob("*encoder_model.xml")]:
        errors = re.findall(r"^[\w.]*(?:Error|Exception): .+", log.read_text(), re.MULTILINE)
        raise ContenderError(f"export: {errors[-1] if errors else 'failed'}"[:200])
    prepare.write_image_settings(source, target)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = parser.add_argument
    listed("--only", default=",".join(FAMILIES), help="families, by comma; empty: report alone")
    listed("--against", default=",".join(PEERS), help="peers, by comma")
    listed("--rounds", type=int, default=3)
    listed("--warm-ups", type=int, default=1, help="rounds that are not counted")
    listed("--requests", type=int, default=workloads.NUM_REQUESTS)
    listed("--tokens", type=int, default=workloads.MAX_TOKENS)
    listed("--threads", type=int, default=len(os.sched_getaffinity(0)))
    listed("--transformers-python", type=Path, default=Path(sys.executable))
    for peer in ("vllm", "openvino"):
        default = ROOT / ".cache" / "peers" / peer / "bin" / "python"
        path = os.environ.get(f"{peer.upper()}_PYTHON", str(default))
        listed(f"--{peer}-python", type=Path, default=Path(path))
    listed("--openvino-export-python", type=Path, default=None, help="with older transformers")
    listed("--folder", type=Path, default=ROOT / ".cache" / "families", help="models and images")
    listed("--whisper", type=Path, default=ROOT / ".cache" / "real" / "whisper-tiny.en")
    listed("--speech", type=Path, default=ROOT / ".cache" / "real" / "speech")
    listed("--results", type=Path, default=None, help="JSON to add to")
    listed("--lock", type=Path, default=None, help="held while something is measured")
    options = parser.parse_args(arguments)
    for name in options.only.split(","):
        if name and name not in FAMILIES:
            parser.error(f"no family {name}; there are {', '.join(FAMILIES)}")
    return options


def run_family(family: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure one family: its results and the contenders' versions."""
    print(family, file=sys.stderr)
    pythons = {OURS: Path(sys.executable), "transformers": options.transformers_python}
    pythons |= {"vllm": options.vllm_python, "openvino": options.openvino_python}
    failures: dict[str, str] = {}
    names = [OURS, *(name for name in options.against.split(",") if name)]
    for name in names:
        if not pythons[name].exists():
            failures[name] = "not installed"
    names = [name for name in names if name not in failures]
    models = prepare_models(family, names, options, failures)
    threads = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: options.threads])
    settings = Settings(
        names=[name for name in names if name in models],
        pythons=pythons,
        models=models,
        dtype="bfloat16",
        threads=options.threads,
        logs=options.folder,
        environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": threads},
    )
    bench = FamilyBench(family, settings, options)
    bench.failures |= failures
    return condense(bench, bench.measure()), bench.versions


def table(results: dict[str, Any]) -> str:
    """A line for each family and phase; a peer that failed is named below with its reason."""
    lines = [f"{results.get('machine')}", f"{results['versions']}"]
    head = "".join(f"{name:>14}" for name in (OURS, *PEERS))
    lines.append(f"{'tokens/s':<18}{head}{'over best':>12}")
    for family in FAMILIES:
        found = results["families"].get(family)
        if found is None:
            continue
        for phase in PHASES:
            median = found[phase]["median"]
            cells = "".join(f"{median.get(name, '-'):>14}" for name in (OURS, *PEERS))
            lines.append(
                f"{family:<12}{phase:<6}{cells}{found[phase].get('over_best', '-'):>12}"
                f"  {found['verdict'] if phase == 'cold' else ''}"
            )
        lines += [f"    {name} failed: {why}" for name, why in found["failures"].items()]
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the contenders end too
    options = options_of()
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"families": {}, "versions": {}}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    for family in options.only.split(","):
        if not family:
            continue
        found, versions = run_family(family, options)
        results["families"][family] = found
        results["versions"] |= versions
        results["machine"] = report.machine("bfloat16", options.threads)
        results["requests"], results["tokens"] = options.requests, options.tokens
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
