"""Makes the pages of the reference that follow from the code: `make reference`.

    docs/reference/configuration.md   the tables between `<!-- generated: Section -->` and `<!-- end -->`, of the models
                                      in walmere.config: their types and defaults, and the docstrings of their fields
    docs/reference/options.md         of the commands of walmere.cli
    docs/reference/errors.md          of the classes in walmere.errors and their docstrings
    docs/reference/metrics.md         of the constants in walmere.metrics.names
    docs/reference/snippets.md        of the marked blocks in README, tutorial and guides

`tests/test_reference.py` fails if a page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperArgument, TyperGroup

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # snippets is there

from snippets import blocks, pages  # noqa: E402
from walmere import errors  # noqa: E402
from walmere.cli.app import app  # noqa: E402
from walmere.config import Config  # noqa: E402
from walmere.metrics import names  # noqa: E402

REFERENCE: Final = ROOT / "docs" / "reference"
_MADE: Final = "<!-- This page is made by scripts/reference.py: run `make reference`. -->\n\n"
_TABLE: Final = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered() -> dict[Path, str]:
    """Every generated page, as it should be."""
    return {
        REFERENCE / "configuration.md": configuration((REFERENCE / "configuration.md").read_text(encoding="utf-8")),
        REFERENCE / "options.md": options(),
        REFERENCE / "errors.md": error_classes(),
        REFERENCE / "metrics.md": metrics(),
        REFERENCE / "snippets.md": snippets(),
    }


# walmere.toml


def sections() -> dict[str, type[BaseModel]]:
    """The models of the sections of walmere.toml, by their names."""
    found: dict[str, type[BaseModel]] = {}

    def visit(annotation: object) -> None:
        known = isinstance(annotation, type) and annotation.__name__ in found
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not known:
            found[annotation.__name__] = annotation
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for inner in get_args(annotation):
            visit(inner)

    for field in Config.model_fields.values():
        visit(field.annotation)
    return found


def configuration(page: str) -> str:
    """The page with new tables."""
    models = sections()
    if missing := models.keys() - {name for _, name, _ in _TABLE.findall(page)}:
        raise SystemExit(f"docs/reference/configuration.md has no place for {', '.join(sorted(missing))}")
    return _TABLE.sub(lambda found: f"{found[1]}\n{_keys(models[found[2]])}\n{found[3]}", page)


def _keys(model: type[BaseModel]) -> str:
    described = _docstrings(model)
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = described.get(name)
        if meaning is None:
            raise SystemExit(f"{model.__name__}.{name} has no docstring, which is its text in the reference")
        row = (f"`{field.alias or name}`", _value(field), _default(field), meaning)
        rows.append(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |")
    return "\n".join(rows) + "\n"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The texts below the fields of a class, which Python does not keep."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[statement.target.id] = " ".join(text.split())
    return found


def _value(field: FieldInfo) -> str:
    """Which values a key takes, in a few words."""
    kind, *others = [each for each in _alternatives(field.annotation) if each is not NoneType]
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{each}"`' for each in get_args(kind))
    if get_origin(kind) in (tuple, list) or kind in (tuple, list):
        return "list of text" if str in get_args(kind) else "list"
    if isinstance(get_origin(kind), type) and issubclass(get_origin(kind) or object, Mapping):
        return "table"
    names = {bool: "`true`, `false`", int: "integer", float: "number", str: "text", SecretStr: "text", Path: "path"}
    words = [names[each] for each in (kind, *others) if each in names]
    limits = {type(each).__name__: each for each in (*_metadata(field.annotation), *field.metadata)}
    least = next((getattr(limits[each], each.lower()) for each in ("Ge", "Gt") if each in limits), None)
    most = limits["Le"].le if "Le" in limits else None
    text = "path or URL" if words == ["path", "text"] else " or ".join(words) or "section"
    if least is not None and most is not None:
        return f"{text}, {'above ' if 'Gt' in limits else ''}{_size(least)} to {_size(most)}"
    return text if least in (None, 0) else f"{text}, {_size(least)} or more"


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types of a union; an annotation without its metadata."""
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each)
    else:
        yield annotation


def _metadata(annotation: Any) -> Iterator[Any]:
    """The limits that are inside of an annotation, such as those of Seconds."""
    for inner in get_args(annotation):
        if isinstance(inner, FieldInfo):
            yield from inner.metadata
        else:
            yield from _metadata(inner)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None or default is PydanticUndefined or isinstance(default, BaseModel) or default == ():
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    return f"`{_number(default)}`" + (f" ({_size(default)})" if _size(default) != _number(default) else "")


def _size(value: float) -> str:
    """A number; a large power of two as a number of bytes."""
    for unit, bits in (("GB", 30), ("MB", 20), ("kB", 10)):
        if isinstance(value, int) and value >= 1 << bits and value % (1 << bits) == 0:
            return f"{value >> bits} {unit}"
    return _number(value)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


# commands


def options() -> str:
    """The page of all options."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = [
        "# Options of the commands\n",
        f"{_MADE}What `walmere COMMAND --help` prints. [Commands](commands.md) has what they do, their exit codes and"
        " their output.\n",
    ]
    for name, command in group.commands.items():
        if getattr(command, "hidden", False):
            continue
        lines += [f"## `walmere {name}`\n", f"{_paragraphs(command.help or '')}\n"]
        rows = [_option(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            lines += ["| option | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _option(parameter: Any) -> str:
    spelled = [
        ", ".join(f"`{each}`" for each in names) for names in (parameter.opts, parameter.secondary_opts) if names
    ]
    if isinstance(parameter, TyperArgument):
        shown = f"`{parameter.metavar or str(parameter.name).upper()}`"
    elif parameter.is_flag:
        shown = " or ".join(spelled)
    else:
        shown = f"{spelled[0]} {parameter.metavar or _takes(parameter.type_descriptor.annotation)}"
    default = parameter.default
    value = "required" if parameter.required else "" if default in (None, False) else f"`{_plain(default)}`"
    value = spelled[not default] if len(spelled) > 1 and parameter.is_flag else value
    return f"| {shown} | {value} | {(parameter.help or '').replace('|', chr(92) + '|')} |"


def _takes(annotation: Any) -> str:
    """What the value of an option is, in a word."""
    kind = next(each for each in _alternatives(annotation) if each is not NoneType)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    return {Path: "FILE", int: "N", float: "NUMBER"}.get(kind, "TEXT")


def _plain(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) else str(value)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(text).split("\n\n"))


# errors


def error_classes() -> str:
    """The page of all errors."""
    lines = [
        "# Errors\n",
        f"{_MADE}Every error is a `WalmereError`. Its text says what was being done, what went wrong, and after `hint:`"
        " what to do. In Python, these are the attributes `doing`, `wrong` and `hint`. `except` a class of this tree to"
        " catch all below it.\n",
        "A *transient* error may go away without action: Walmere tries again by itself. `receiver-error.json` and logs"
        " name the class.\n",
        "Exit codes: a `ConfigError` ends a command with 2. Any other error ends `walmere verify` with 3, and other"
        " commands with 1.\n",
    ]
    for depth, kind in _tree(errors.WalmereError, 0):
        if kind is errors.WalmereError:
            continue
        meaning, _, what_to_do = inspect.cleandoc(kind.__doc__ or "").partition("What to do:")
        children = [each.__name__ for each in kind.__subclasses__()]
        own = kind.transient and not getattr(kind.__bases__[0], "transient", False)
        lines.append(f"{'#' * min(depth + 1, 4)} {kind.__name__}\n")
        lines.append(" ".join(meaning.split()) + (" *Transient.*" if own else "") + "\n")
        if what_to_do:
            lines.append(f"What to do: {' '.join(what_to_do.split())}\n")
        elif children:
            links = ", ".join(f"[{each}](#{each.lower()})" for each in children)
            lines.append(f"One of: {links}\n")
        else:
            raise SystemExit(f"the docstring of {kind.__name__} does not say what to do")
    return "\n".join(lines).rstrip("\n") + "\n"


def _tree(kind: type[errors.WalmereError], depth: int) -> Iterator[tuple[int, type[errors.WalmereError]]]:
    yield depth, kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _tree(each, depth + 1)


# metrics

_ABOUT_METRICS: Final = """\
The guide [Monitor a subscription](../guides/monitor.md) says how to get them into Prometheus and Grafana.

- `walmere run --metrics` and `walmere run --dashboard` have all of them, and `walmere dashboard` all but the last
  four, which a run counts itself. `walmere receive --metrics` has those of the receiver, and the positions.
- An LSN is a byte position in the WAL, so that differences are bytes.
- A value that is not known has no sample: there is no lag while the source does not answer.
- Counters start at 0 with the process that counts, and so does the histogram.
- A histogram has samples with the suffixes `_bucket` (label `le`), `_sum` and `_count`. The mean time of a batch:
  `rate(walmere_batch_duration_seconds_sum[5m]) / rate(walmere_batch_duration_seconds_count[5m])`.
- The `process_` metrics of Prometheus's client library (CPU, memory, open files) are there, too.
"""


def metrics() -> str:
    """The page of the metrics."""
    lines = [f"# Metrics\n\n{_MADE}{_ABOUT_METRICS}", "| metric | type | labels | what it is |", "|---|---|---|---|"]
    for each in names.EVERY:
        labels = ", ".join(f"`{label}`" for label in each.all_labels)
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(lines) + "\n"


# snippets


def snippets() -> str:
    """The page of the blocks that no test runs."""
    lines = [
        "# Snippets that no test runs\n",
        f"{_MADE}Every command and snippet of the README, the tutorial and the guides is run by"
        " `tests/test_snippets.py`, from top to bottom, on real servers, except these:\n",
        "| page | block | why it is not run |",
        "|---|---|---|",
    ]
    for page in pages():
        for block in blocks(page):
            if block.not_run is not None:
                first = next(line for line in block.text.splitlines() if line.strip())
                link = f"[{page.name}]({_address(page)})"
                lines.append(f"| {link} | `{first.strip().replace('|', chr(92) + '|')}` … | {block.not_run} |")
    return "\n".join(lines) + "\n"


def _address(page: Path) -> str:
    if page.parent == ROOT:
        return f"https://github.com/walmere/walmere/blob/main/{page.name}"
    return "../" + page.relative_to(ROOT / "docs").as_posix()


def main() -> None:
    """Write the pages that have changed."""
    for path, text in rendered().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
