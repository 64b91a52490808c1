"""The laws of the code's shape: imports and locations."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from common.repository import ROOT
from tests.syntax_trees import nodes_of, text_of, tree_of

ROLES = ("actor", "envhub", "learner", "scheduler")
ARROWS = {  # A package and the packages that it may import, besides itself.
    "common": (),
    **dict.fromkeys(ROLES, ("common",)),
    "tools": ("common", *ROLES, "benchmarks"),
    "benchmarks": ("common", *ROLES, "tools"),
}
PACKAGES = ("common", *ROLES, "tools")
PRODUCT = [
    *sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")),
    ROOT / "longstride.py",
    ROOT / "run.py",
]
SOURCES = [*PRODUCT, *sorted((ROOT / "benchmarks").rglob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    return _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _imported(path: Path) -> list[str]:
    """Return the dotted names that a file imports, also inside functions."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)} line {node.lineno}: relative import"
            module = node.module or ""
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return found


def _imports(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imported(path)}


def _importers(library: str) -> set[str]:
    return {_name(path) for path in PRODUCT if library in _imports(path)}


@pytest.mark.parametrize("package", ARROWS)
def test_imports_follow_the_arrows(package: str) -> None:
    forbidden = {*ARROWS, "longstride", "run", "tests"} - {package, *ARROWS[package]}
    wrong = {
        _name(path): sorted(forbidden & _imports(path))
        for path in SOURCES
        if path.is_relative_to(ROOT / package) and forbidden & _imports(path)
    }
    assert wrong == {}


def graph_of(files: Sequence[Path]) -> dict[str, set[str]]:
    """Return the modules in these files, with those among them that each module imports."""
    modules = {_module(path): path for path in files if path.name != "__init__.py"}
    return {name: set(_imported(path)) & set(modules) - {name} for name, path in modules.items()}


def _reached(package: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the modules of a package and all modules that they import, directly or not."""
    waiting = [name for name in graph if name.startswith(f"{package}.")]
    reached = set(waiting)
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_two_roles_need_each_module_of_common() -> None:
    graph = graph_of(SOURCES)
    reached = {role: _reached(role, graph) for role in ROLES}
    users = {
        name: [role for role in ROLES if name in reached[role]]
        for name in graph
        if name.startswith("common.")
    }
    lonely = {name: roles for name, roles in users.items() if len(roles) < 2}
    assert lonely == {}, lonely


PLUGINS = {  # Files that load modules by name: environments, adapters, commands, own code of users.
    "common/user_code.py",
    "envhub/catalogue/registry.py",
    "envhub/envs/code/harness.py",
    "envhub/envs/dataset/files.py",
    "common/functions/process.py",
    "envhub/envs/dataset/graders.py",
    "envhub/envs/miniwob/experts/table.py",
    "envhub/interop/yaml_environments.py",
    "tools/cli/command_line.py",  # The files of the commands.
    "tools/exchange/writing.py",
}


def test_modules_are_loaded_by_name_only_as_plugins() -> None:
    """An import by name could step round an arrow."""
    loaders = {path for path in PRODUCT if "importlib" in _imports(path)}
    called = {
        _name(path)
        for path in loaders
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and _called(node) == "import_module"
    }
    assert called == PLUGINS


def test_imports_have_no_cycles() -> None:
    arrows = graph_of(SOURCES)
    while leaves := {module for module, reached in arrows.items() if not reached & set(arrows)}:
        arrows = {module: reached for module, reached in arrows.items() if module not in leaves}
    assert sorted(arrows) == []  # The remaining modules reach a cycle.


def test_vllm_is_imported_only_in_the_engine() -> None:
    places = {Path(name).parent.as_posix() for name in _importers("vllm")}
    assert places <= {"actor/engine", "actor/engine/cpu"}


def test_only_the_codec_packs_messages() -> None:
    assert _importers("msgpack") == set()
    packers = {_name(path) for path in PRODUCT if "msgspec.msgpack" in text_of(path)}
    assert packers == {"common/wire/codec.py"}


def test_chat_templates_are_rendered_in_one_place() -> None:
    """What else renders them would name the date of the wall clock."""
    found = {_name(path) for path in SOURCES if ".apply_chat_template(" in text_of(path)}
    assert found == {"common/formats/chat_template.py"}


def test_pickle_is_imported_only_by_the_restricted_reader() -> None:
    assert _importers("pickle") == {"learner/training/pickled_index.py"}
    assert _importers("cloudpickle") | _importers("dill") == set()


def test_ranks_exchange_no_objects() -> None:
    """torch pickles what its collectives of objects and its own checkpoints send."""
    called = {
        _name(path): node.attr
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr.endswith(("gather_object", "_object_list", "scatter_object"))
    }
    assert called == {}
    library = "torch.distributed.checkpoint"
    assert [p for p in SOURCES if any(n.startswith(library) for n in _imported(p))] == []


HTTP_MODULES = {
    *("http.client", "httpx", "openai", "requests", "urllib.request", "urllib3"),
    *("websocket", "websockets", "xmlrpc.client"),
}
HTTP_CLASSES = {"AsyncClient", "AsyncOpenAI", "ClientSession", "HTTPConnection", "OpenAI"}
HTTP_CLIENTS_ELSEWHERE = {
    # It runs with verifiers' own interpreter, which cannot import the product.
    "envhub/interop/verifiers_process/longstride_chat.py"
}


def _http_clients(path: Path) -> set[str]:
    """Return the HTTP clients that a file imports or makes."""
    imported = {
        m for m in HTTP_MODULES for name in _imported(path) if f"{name}.".startswith(f"{m}.")
    }
    made = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
    names = {each.attr for each in made if isinstance(each, ast.Attribute)}
    names |= {each.id for each in made if isinstance(each, ast.Name)}
    return imported | (names & HTTP_CLASSES)


def test_http_clients_are_made_in_one_package() -> None:
    own = ROOT / "common" / "http"
    others = [path for path in SOURCES if not path.is_relative_to(own)]
    found = {_name(path): clients for path in others if (clients := _http_clients(path))}
    assert found.keys() == HTTP_CLIENTS_ELSEWHERE, found


def test_tests_lie_where_the_code_lies() -> None:
    packages = [ROOT / "tests" / package for package in (*PACKAGES, "benchmarks")]
    folders = {path.parent for package in packages for path in package.rglob("test_*.py")}
    homes = {_name(folder).removeprefix("tests/") for folder in folders}
    assert {home for home in homes if not (ROOT / home).is_dir()} == set()


def test_class_names_are_unique() -> None:
    found = Counter(
        node.name for path in SOURCES for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []


def test_package_markers_are_empty_and_on_top() -> None:
    """Folders below are namespace packages."""
    markers = [path for path in SOURCES if path.name == "__init__.py"]
    assert [_name(path) for path in markers if text_of(path).strip()] == []
    assert {_name(path) for path in markers} == {f"{name}/__init__.py" for name in ARROWS}


def test_module_begins_with_a_docstring() -> None:
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    assert [_name(p) for p in modules if not ast.get_docstring(tree_of(p))] == []


def test_caught_error_has_one_name() -> None:
    other = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and node.name not in (None, "error")
    ]
    assert other == []


TEXT_MODES = {kind + plus for kind in "rwax" for plus in ("", "+", "t")}
OPENERS = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile")
STARTERS = ("run", "Popen", "call", "check_call", "check_output")


def _called(call: ast.Call) -> str:
    """Return the last part of the called name, such as `open` of `path.open`."""
    found = call.func
    if isinstance(found, ast.Attribute):
        return found.attr
    return found.id if isinstance(found, ast.Name) else ""


def _opens_text_in_the_encoding_of_the_locale(call: ast.Call) -> bool:
    named = {each.arg: each.value for each in call.keywords}
    if "encoding" in named or None in named:
        return False
    name, is_method = _called(call), isinstance(call.func, ast.Attribute)
    if name in STARTERS:
        return bool({"text", "universal_newlines"} & named.keys())
    if name in ("read_text", "write_text", "FileHandler"):
        return is_method and not (name == "read_text" and call.args)
    values = [*call.args, *(value for key, value in named.items() if key == "mode")]
    words = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    is_binary = any("b" in each for each in words if len(each) <= 3)
    if name == "open" and not is_method:
        return not is_binary
    return name in OPENERS and bool(TEXT_MODES & {*words})


def test_every_text_stream_names_its_encoding() -> None:
    folders = (*PACKAGES, "benchmarks", "tests", "docs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    unnamed = [
        f"{_name(path)}:{node.lineno}"
        for path in [ROOT / "run.py", *files]
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and _opens_text_in_the_encoding_of_the_locale(node)
    ]
    assert unnamed == []


def test_command_line_keeps_the_environment_variables() -> None:
    code = (
        "import os\nbefore = dict(os.environ)\nimport run\n"
        "try:\n    run.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert {name: os.environ.get(name) for name in before} == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_help_is_fast_without_heavy_libraries() -> None:
    code = (
        "import sys, time, run\n"
        "try:\n    run.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 1.0, time.process_time()\n"  # CPU time of this process
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=30
    )
    assert done.returncode == 0, done.stderr


def _offered(module: str) -> set[str]:
    """Return what a module of the product defines or passes on, and the modules below it."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        return {entry.stem for entry in path.iterdir()}
    names = set[str]()
    for node in ast.parse(text_of(path.with_suffix(".py"))).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def test_example_imports_exist_in_the_product() -> None:
    missing: list[str] = []
    for path in sorted((ROOT / "docs").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(path))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.partition(".")[0] in PACKAGES:
                lacks = {each.name for each in node.names} - _offered(node.module)
                missing += [f"{path.name}: {node.module}.{name}" for name in sorted(lacks)]
    assert missing == []


def test_json_files_name_each_key_once() -> None:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        assert len(names) == len(set(names)), names  # A parser keeps the last value in silence.
        return dict(pairs)

    files = [
        path
        for folder in ("actor", "common", "configs", "envhub", "learner", "scheduler", "tools")
        for path in (ROOT / folder).rglob("*.json")
        if "environment" not in path.parts  # A task repairs its own broken file.
    ]
    assert ROOT / "common/wire/schema.json" in files
    for path in files:
        json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
