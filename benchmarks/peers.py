"""The engine beside its peers, on the same model, images and clips, in one run and in turns.

    python benchmarks/peers.py [--only W1,W2] [--against transformers,vllm,openvino] [--rounds 3]

Each contender is a process in its own environment's Python; it loads once and waits while another
computes. The model is benchmarks/make_model.py's. Everybody gets the same encoded images, and all
requests at once; times are from the bytes to the last token, greedy, 64 tokens for each request.

W1  16 images of 640 x 480, cold: tokens per second
W2  the same requests again, caches warm
W3  a fresh process, files in the page cache: import to ready
W4  one prompt with eight images of 1920 x 1080, cold: time to first token
W5  how late the event loop wakes while 32 images of 3840 x 2160 arrive beside four streams
W6  Whisper tiny.en on 16 clips (`make real-test` fetches the weights): clips per second

Images are new in every round. Ratios are within rounds, and their medians are reported. `--results`
is a file that keeps what was measured, so that workloads may be run one by one. Last line: JSON.
docs/benchmarks.md says how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from contenders import prepare, report
from contenders.crew import Settings
from contenders.rounds import Bench

ROOT = Path(__file__).parents[1]
WORKLOADS = ("W1", "W2", "W3", "W4", "W5", "W6")
PEERS = ("transformers", "vllm", "openvino")


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = parser.add_argument
    listed("--only", default=",".join(WORKLOADS), help="workloads, by comma; empty: report alone")
    listed("--against", default=None, help="peers, by comma; default: those whose Python is there")
    listed("--rounds", type=int, default=3)
    listed("--warm-ups", type=int, default=1, help="rounds that are not counted")
    listed("--dtype", default=None, help="bfloat16 where the CPU computes in it, else float32")
    listed("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for peer in ("vllm", "openvino"):
        default = ROOT / ".cache" / "peers" / peer / "bin" / "python"
        path = os.environ.get(f"{peer.upper()}_PYTHON", str(default))
        listed(f"--{peer}-python", type=Path, default=Path(path))
    listed("--folder", type=Path, default=ROOT / ".cache" / "peers", help="models and images")
    listed("--whisper", type=Path, default=ROOT / ".cache" / "real" / "whisper-tiny.en")
    listed("--speech", type=Path, default=ROOT / ".cache" / "real" / "speech")
    listed("--results", type=Path, default=None, help="JSON to add to")
    listed("--plot", type=Path, default=None)
    listed("--lock", type=Path, default=None, help="held while something is measured")
    options = parser.parse_args(arguments)
    if options.dtype is None:
        options.dtype = "bfloat16" if "avx512_bf16" in cpu_flags() else "float32"
        if options.dtype == "float32":
            print("this CPU has no bfloat16 arithmetic: float32 for everybody", file=sys.stderr)
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    pythons = {"aioengine": Path(sys.executable), "transformers": Path(sys.executable)}
    pythons |= {"vllm": options.vllm_python, "openvino": options.openvino_python}
    if options.against is None:
        peers = [name for name in PEERS if pythons[name].exists()]
    else:
        peers = [name for name in options.against.split(",") if name]
    names = ["aioengine", *peers]
    options.folder.mkdir(parents=True, exist_ok=True)
    models = prepare.models(options.folder, names, options.dtype, options.openvino_python)
    threads = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: options.threads])
    return Settings(
        names=names,
        pythons=pythons,
        models={**models, "whisper": options.whisper},
        dtype=options.dtype,
        threads=options.threads,
        logs=options.folder,
        # vLLM would leave one core to its front end; of two, it is quicker with both.
        environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": threads},
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the contenders end too
    options = options_of()
    results: dict[str, Any] = {"workloads": {}, "versions": {}}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    chosen = [name for name in options.only.split(",") if name]
    if chosen:
        bench = Bench(settings_of(options), options)
        for name, measured in bench.run(chosen):
            results["workloads"][name] = report.condense(name, measured)
            results["versions"] |= bench.versions
            results["machine"] = report.machine(options.dtype, options.threads)
            if options.results is not None:
                options.results.write_text(json.dumps(results, indent=1) + "\n")
    summary = report.summarize(results)
    if options.plot is not None:
        from contenders.plot import draw

        draw(summary, options.plot)
    print(report.table(summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
