"""The tree of errors: drawn as it is, exported whole."""

from __future__ import annotations

import inspect

from aioengine import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__
}


def drawn() -> dict[str, str]:
    """Error -> its parent, as in the drawing at the top of the module."""
    parents: dict[str, str] = {}
    above = ["AioEngineError"]
    for line in (errors.__doc__ or "").splitlines():
        branch = max(line.find("├── "), line.find("└── "))
        if branch < 0:
            continue
        name = line[branch + 4 :].split()[0]
        depth = branch // 4 + 1
        parents[name] = above[depth - 1]
        above[depth:] = [name]
    return parents


def test_every_class_is_exported() -> None:
    assert set(errors.__all__) == set(CLASSES)


def test_the_drawing_is_the_tree() -> None:
    tree = {name: value.__base__.__name__ for name, value in CLASSES.items()}
    assert tree.pop("AioEngineError") == "Exception"
    assert drawn() == tree


def test_every_class_says_what_it_means() -> None:
    for name, value in CLASSES.items():
        assert value.__doc__, name
