"""Renders the sample images in ``aioengine/assets/images``.

    python examples/demo_model/render_samples.py

The seeds are held-out ones, chosen for variety among those that the saved model describes
exactly right (so they are no evidence of how good it is; ``evaluation.json`` is).
"""

import argparse
from pathlib import Path

import scenes
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "aioengine" / "assets" / "images"

SAMPLES: tuple[tuple[str, int, int], ...] = (
    ("scene_1.jpg", 80_009, 640),
    ("scene_2.png", 80_026, 600),
    ("scene_3.webp", 80_040, 560),
    ("scene_4.png", 80_047, 800),
    ("scene_5.jpg", 80_032, 512),
    ("scene_6.webp", 80_017, 720),
    ("scene_7.png", 80_036, 480),
    ("scene_8.jpg", 80_035, 680),
)
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
