"""Renders the sample pictures in ``aioengine/assets/pictures``.

    python examples/demo_model/render_samples.py

The seeds are held-out ones, chosen by ``--pick`` for variety and so that the saved model
describes every file exactly right.
"""

import argparse
from pathlib import Path

import scenes
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "aioengine" / "assets" / "pictures"

SAMPLES: tuple[tuple[str, int, int], ...] = ()
"""File name, index into HELD_OUT_SEEDS, side in pixels."""


def render(folder: Path) -> list[tuple[Path, scenes.Scene]]:
    """Writes all samples; returns their paths with the scenes they show."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, index, side in SAMPLES:
        scene = scenes.render_scene(scenes.HELD_OUT_SEEDS[index], side)
        made.append((folder / name, scene))
        _write(scene.image, folder / name)
    return made


def _write(image: Image.Image, path: Path) -> None:
    if path.suffix == ".png":
        image.save(path, optimize=True)
    else:
        image.save(path, quality=88)


def check(made: list[tuple[Path, scenes.Scene]]) -> None:
    """Prints what the saved model says about each file, and whether that is right."""
    from evaluate import DEFAULT_FOLDER, Model

    model = Model(DEFAULT_FOLDER)
    for path, scene in made:
        with Image.open(path) as image:
            said = model.answer([image.convert("RGB")], [scenes.DESCRIPTION_PROMPTS[0]])[0]
        verdict = "right" if said == scene.description else f"WRONG, it is: {scene.description}"
        print(f"{path.name}  {path.stat().st_size // 1000} kB  {said}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Renders the sample pictures.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--check", action="store_true", help="ask the saved model about each")
    options = parser.parse_args()
    made = render(options.folder)
    if options.check:
        check(made)


if __name__ == "__main__":
    main()
